#!/bin/sh
# A Slurm on this machine alone, all of whose files are in the folder FOLDER: Debian's packages
# (slurmctld slurmd slurm-client munge, and libpmix-dev for srun --mpi=pmix), as root. Needs no
# systemd, and changes nothing in /etc.
#
#     slurm.sh start FOLDER PORT PORT     # two free ones; then SLURM_CONF=FOLDER/slurm.conf sinfo
#     slurm.sh stop FOLDER
#
# Two partitions: jobs of `high` preempt those of `low`, which are requeued.
set -eu
folder=$2
stop() {
    for name in slurmd slurmctld munged; do
        if [ -s "$folder/$name.pid" ]; then
            pid=$(cat "$folder/$name.pid")
            kill "$pid" 2>/dev/null || true
            for _ in $(seq 50); do
                if kill -0 "$pid" 2>/dev/null; then sleep 0.1; fi
            done
            kill -9 "$pid" 2>/dev/null || true
        fi
    done
}
if [ "$1" = stop ]; then stop; exit 0; fi
host=$(hostname -s)
mkdir -p "$folder/state" "$folder/spool"
chmod 755 "$folder"
dd if=/dev/urandom bs=1 count=1024 of="$folder/munge.key" 2>/dev/null
chmod 400 "$folder/munge.key"
cat > "$folder/slurm.conf" <<C
ClusterName=here
SlurmctldHost=$host(127.0.0.1)
SlurmctldPort=$3
SlurmdPort=$4
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket=$folder/munge.socket,cred_expire=5
CredType=cred/munge
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
MpiDefault=none
ReturnToService=2
KillWait=30
MinJobAge=600
SchedulerParameters=requeue_delay=1,bf_interval=5,sched_interval=2
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmdParameters=config_overrides
StateSaveLocation=$folder/state
SlurmdSpoolDir=$folder/spool
SlurmctldPidFile=$folder/slurmctld.pid
SlurmdPidFile=$folder/slurmd.pid
SlurmctldLogFile=$folder/slurmctld.log
SlurmdLogFile=$folder/slurmd.log
NodeName=$host NodeAddr=127.0.0.1 CPUs=2 State=UNKNOWN
PartitionName=low Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=1
PartitionName=high Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=9
C
printf 'CgroupPlugin=cgroup/v1\nIgnoreSystemd=yes\n' > "$folder/cgroup.conf"
export SLURM_CONF="$folder/slurm.conf"
munged --force --key-file="$folder/munge.key" --socket="$folder/munge.socket" \
    --pid-file="$folder/munged.pid" --log-file="$folder/munged.log" --seed-file="$folder/seed"
slurmctld
slurmd -N "$host"
for _ in $(seq 120); do
    if sinfo -h -o %T 2>/dev/null | grep -q idle; then exit 0; fi
    sleep 0.5
done
tail -n 20 "$folder"/*.log >&2
stop
exit 1
