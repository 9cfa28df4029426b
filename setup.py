"""Build script: the metadata stands in pyproject.toml."""

import importlib.util
import os
import re
import shutil
import sys
from pathlib import Path

from setuptools import Extension, find_packages, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

here = Path(__file__).resolve().parent


class BuildOps(build_ext):
    """Builds the native ops for the TensorFlow that is installed, where there is one.

    An install never fails for them: their first use builds them, too. A wheel takes the
    ready-made libraries of the folder that `TFGRADCOMP_READY_MADE` names instead
    (tools/wheels.py).
    """

    def run(self):
        """Puts the library, and the sources for a later build, into the package."""
        in_place = self.inplace or self.editable_mode
        package = (here if in_place else Path(self.build_lib)) / "tfgradcomp"
        if not in_place:
            target = package / "custom_ops"
            shutil.rmtree(target, ignore_errors=True)
            shutil.copytree(here / "custom_ops", target)
            for outdated in (package / "ops").glob("*.so"):
                outdated.unlink()
        if os.environ.get("TFGRADCOMP_READY_MADE"):
            for library in Path(os.environ["TFGRADCOMP_READY_MADE"]).glob("*.so"):
                shutil.copy2(library, package / "ops")
            return
        try:
            build = _load_build()
            tensorflow = build.ask_tensorflow()
            library = build.build_library(package / "ops", tensorflow, _say)
            _say(f"built {library.name}")
        except Exception as error:  # Whatever it is, pure TensorFlow does the work.
            _say(f"no native ops yet, their first use will build them: {error}")

    def get_outputs(self):
        """Names what `run` made."""
        package = Path(self.build_lib) / "tfgradcomp"
        made = [*package.glob("ops/*.so"), *package.glob("custom_ops/**/*")]
        return [str(path) for path in made if path.is_file()]

    def get_output_mapping(self):
        """An editable install has the library in its folder already."""
        return {}


class Wheel(bdist_wheel):
    """Names a wheel by its platform only: the libraries use nothing of Python."""

    def get_tag(self):
        """Returns the tags of Python, its binary interface and the platform."""
        return "py3", "none", super().get_tag()[2]


def _load_build():
    """Loads tfgradcomp/ops/build.py without the package, which needs TensorFlow."""
    path = here / "tfgradcomp" / "ops" / "build.py"
    spec = importlib.util.spec_from_file_location("tfgradcomp_build", path)
    module = importlib.util.module_from_spec(spec)
    # Its NamedTuple looks its module up.
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def _say(line):
    print(f"tfgradcomp: {line}", file=sys.stderr, flush=True)


version_file = here / "tfgradcomp" / "version.py"
version = re.search(r'__version__ = "(.+)"', version_file.read_text()).group(1)

setup(
    version=version,
    packages=find_packages(include=["tfgradcomp*"]),
    # Stands for the library, whose name depends on the version of TensorFlow.
    ext_modules=[Extension("tfgradcomp.ops.custom_ops", sources=[], optional=True)],
    cmdclass={"build_ext": BuildOps, "bdist_wheel": Wheel},
)
