# `spack repo add packaging/spack/spack_repo/gems`, then `spack install py-gems-hires +mpi`.
#
# tests/test_packaging.py compares the dependencies with pyproject.toml. Until the project is on a
# registry, its owner replaces `git` by where it is kept; a release adds a `version` with its hash.

from spack.package import *
from spack_repo.builtin.build_systems.python import PythonPackage


class PyGemsHires(PythonPackage):
    """Train any PyTorch or Keras model on images too large for one device, with the numbers of one
    device."""

    license("Apache-2.0")

    version("main", branch="main")

    variant("torch", default=True, description="PyTorch, which most commands need")
    variant("data", default=False, description="Slides, pictures and volumes")
    variant(
        "mpi", default=True, description="Ranks that talk over MPI; needed where torch is ~gloo"
    )
    variant("keras", default=False, description="Keras models on TensorFlow")

    depends_on("python@3.10:", type=("build", "run"))
    depends_on("py-hatchling@1.26:", type="build")
    depends_on("py-rich@13:", type=("build", "run"))
    depends_on("py-pyyaml@6:", type=("build", "run"))
    depends_on("py-tomli@2:", type=("build", "run"), when="^python@:3.10")

    with when("+torch"):
        depends_on("py-torch@2.6:", type=("build", "run"))
        depends_on("py-numpy@1.24:", type=("build", "run"))
        depends_on("py-safetensors@0.4.3:", type=("build", "run"))

    with when("+data"):
        depends_on("py-scikit-image@0.24:", type=("build", "run"))
        depends_on("py-tifffile@2024.1:", type=("build", "run"))
        depends_on("py-imagecodecs@2024.1:", type=("build", "run"))
        depends_on("py-openslide-python@1.4:", type=("build", "run"))
        depends_on("openslide@4.0:", type="run")  # openslide-bin of PyPI is this library
        depends_on("py-h5py@3.10:", type=("build", "run"))
        depends_on("py-zarr@2.18:", type=("build", "run"))

    with when("+mpi"):
        depends_on("py-mpi4py@4:", type=("build", "run"))
        depends_on("py-numpy@1.24:", type=("build", "run"))

    with when("+keras"):
        depends_on("py-keras@3.15:", type=("build", "run"))
        depends_on("py-tensorflow@2.21:", type=("build", "run"))
        depends_on("py-numpy@1.24:", type=("build", "run"))
        depends_on("py-safetensors@0.4.3:", type=("build", "run"))
        depends_on("py-mpi4py@4:", type=("build", "run"))

    conflicts("~torch~keras", msg="a framework is needed to run: +torch or +keras")
