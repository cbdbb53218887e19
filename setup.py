"""Compiles the op libraries ahead, into the wheel, where the build sees an installed torch; pyproject.toml declares everything else.

`python -m build --wheel --no-isolation` gives one wheel for every Python and torch. An isolated build sees no torch: its wheel is pure and
builds at first use, as does one made under FXFUSE_BUILD=0.
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


@functools.cache
def recipes():
    """What is compiled ahead: the CPU library, and the CUDA one where an nvcc is. Prints what is left out, and why."""
    if os.environ.get("FXFUSE_BUILD") == "0" or not importlib.util.find_spec("torch"):
        print("fxfuse: a pure wheel, which builds at first use (torch is not installed where this build looks, or FXFUSE_BUILD=0)")
        return ()
    _builder()
    from fxfuse.recipe import AHEAD_ARCHITECTURES, recipe
    from fxfuse.toolchain import BuildError

    made = []
    for kind, architectures in (("cpu", ()), ("cuda", AHEAD_ARCHITECTURES)):
        try:
            made.append(recipe(kind, architectures, ROOT / "csrc"))
        except BuildError as error:
            print(f"fxfuse: the wheel gets no {kind} library: {error}")
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
