-- Lmod. Put it into a folder of MODULEPATH as gems/0.2.0.lua; GEMS_PREFIX is the virtual environment
-- in which `pip install gems-hires[...]` was run.
help([[
GEMS trains networks on images too large for one device, with the numbers of one device.

    gems --help
    mpirun -np 4 gems train --backend mpi ...
]])
whatis("Name: gems")
whatis("Version: 0.2.0")
whatis("Description: train networks on images too large for one device")
conflict("gems")
local prefix = os.getenv("GEMS_PREFIX") or "/opt/gems"
-- load("openmpi")    -- the MPI that mpi4py was built for, if ranks are to talk over MPI
prepend_path("PATH", pathJoin(prefix, "bin"))
setenv("GEMS_HOME", prefix)
