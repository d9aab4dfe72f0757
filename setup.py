"""Build the optional C++ extension. Everything else is declared in pyproject.toml.

The extension includes no torch, CUDA or CANN header, so one build serves every torch the user brings. Without
a compiler the package still installs; `memferry doctor` then says what it falls back to.
"""

from pathlib import Path

from pybind11.setup_helpers import ParallelCompile, Pybind11Extension
from setuptools import setup

HERE = Path(__file__).parent
SOURCES = sorted(str(p.relative_to(HERE)) for p in (HERE / "ops").glob("*.cpp"))
HEADERS = sorted(str(p.relative_to(HERE)) for p in (HERE / "ops").glob("*.h"))

extensions = []
if SOURCES:
    extension = Pybind11Extension(
        "memferry_ascend._ops",
        SOURCES,
        cxx_std=17,
        # -fno-math-errno lets sqrt vectorise; never -ffast-math: a vector body and its tail would differ.
        extra_compile_args=["-O3", "-fno-math-errno", "-ffp-contract=off", "-pthread"],
        extra_link_args=["-pthread"],
        libraries=["dl"],
        depends=HEADERS,
    )
    extension.optional = True
    extensions.append(extension)

ParallelCompile().install()  # a file a core
setup(ext_modules=extensions)
