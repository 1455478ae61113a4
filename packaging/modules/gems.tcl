#%Module1.0
## Environment Modules. Put it into a folder of MODULEPATH as gems/0.2.0; GEMS_PREFIX is the virtual
## environment in which `pip install gems-hires[...]` was run.
proc ModulesHelp { } {
    puts stderr "GEMS trains networks on images too large for one device, with the numbers of one device."
    puts stderr "    gems --help"
}
module-whatis "train networks on images too large for one device"
conflict gems
set prefix /opt/gems
if { [info exists ::env(GEMS_PREFIX)] } { set prefix $::env(GEMS_PREFIX) }
# module load openmpi    ;# the MPI that mpi4py was built for, if ranks are to talk over MPI
prepend-path PATH $prefix/bin
setenv GEMS_HOME $prefix
