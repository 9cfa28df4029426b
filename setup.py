"""Build script: the metadata stands in pyproject.toml."""

import re
from pathlib import Path

from setuptools import find_packages, setup

version_file = Path(__file__).parent / "tfgradcomp" / "version.py"
version = re.search(r'__version__ = "(.+)"', version_file.read_text()).group(1)

setup(version=version, packages=find_packages(include=["tfgradcomp*"]))
