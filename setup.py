"""Compiles the op libraries ahead, into the wheel, where the build sees an installed torch; pyproject.toml declares everything else.

`python -m build --wheel --no-isolation` gives one wheel for every Python and torch. An isolated build, pip's default, sees no torch: its
wheel is pure and builds at first use. FXFUSE_BUILD says what is compiled: unset or 1, the CPU library (under a minute on a few cores); 0,
nothing; cuda, the CUDA library too, for every generation of GPUs (minutes on many cores), as release wheels are made. Beside the default,
what was asked for and cannot be built is an error. pip shows what is said here with -v, and where the build fails.
"""

import functools
import importlib.util
import os
import shutil
import sys
import types
from pathlib import Path

import setuptools
from setuptools import setup
from setuptools.command.build_py import build_py

try:
    from setuptools.command.bdist_wheel import bdist_wheel
except ImportError:
    sys.exit(f"fxfuse: setuptools {setuptools.__version__} is too old for a build without isolation; run: pip install 'setuptools>=77'")

ROOT = Path(__file__).resolve().parent
# The libraries that are compiled ahead, by FXFUSE_BUILD.
KINDS = {"0": (), "1": ("cpu",), "cuda": ("cpu", "cuda")}


@functools.cache
def recipes():
    """What is compiled ahead, as FXFUSE_BUILD asks. Says what that is, and how to have it otherwise."""
    asked = os.environ.get("FXFUSE_BUILD") or "1"
    if asked not in KINDS:
        sys.exit(f"fxfuse: FXFUSE_BUILD is {asked!r}, but a build takes 0 (compile nothing), 1 (the CPU library) and cuda (the CUDA library too)")
    if asked == "0" or not importlib.util.find_spec("torch"):
        if asked == "cuda":
            sys.exit("fxfuse: FXFUSE_BUILD=cuda needs torch where the build looks; run: pip install torch, then pip install --no-build-isolation .")
        print("fxfuse: a pure wheel, which builds at first use (torch is not installed where this build looks, or FXFUSE_BUILD=0)")
        return ()
    _builder()
    from fxfuse.recipe import AHEAD_ARCHITECTURES, recipe
    from fxfuse.toolchain import BuildError

    made = []
    for kind in KINDS[asked]:
        try:
            made.append(recipe(kind, AHEAD_ARCHITECTURES if kind == "cuda" else (), ROOT / "csrc"))
        except BuildError as error:
            if asked == "cuda":
                sys.exit(f"fxfuse: FXFUSE_BUILD=cuda, but the {kind} library cannot be built: {error}")
            print(f"fxfuse: the wheel gets no {kind} library, which is built at first use: {error}")
    for ahead in made:
        print(f"fxfuse: compiling the {ahead.kind} kernels for {', '.join(ahead.architectures)} into the wheel; FXFUSE_BUILD=0 leaves it to first use")
    if asked != "cuda":
        print("fxfuse: the CUDA kernels are compiled at first use; FXFUSE_BUILD=cuda compiles them into the wheel")
    return tuple(made)


@functools.cache
def _builder():
    """Makes fxfuse.build importable without fxfuse/__init__.py, which needs the installed package."""
    package = types.ModuleType("fxfuse")
    package.__path__ = [str(ROOT / "fxfuse")]
    sys.modules["fxfuse"] = package
    return importlib.import_module("fxfuse.build")


class BuildPackage(build_py):
    def run(self):
        package = Path(self.build_lib) / "fxfuse"
        if not self.editable_mode:
            shutil.rmtree(package, ignore_errors=True)  # an earlier build's files would go into this wheel
        super().run()
        if not self.editable_mode:
            for made in recipes():
                builder = _builder()
                builder.copy(builder.ensure(made, Path(self.build_lib).parent / "fxfuse-libraries"), made.kind, package / "lib")


class Wheel(bdist_wheel):
    def run(self):
        if recipes():
            self.root_is_pure = False
            self.distribution.has_ext_modules = lambda: True  # installs into platlib
        super().run()

    def get_tag(self):
        # The libraries use torch's stable ABI and nothing of Python's.
        return ("py3", "none", super().get_tag()[2]) if recipes() else super().get_tag()


setup(cmdclass={"build_py": BuildPackage, "bdist_wheel": Wheel})
