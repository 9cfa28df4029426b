"""Command line that builds the native ops or shows which are in use."""

from __future__ import annotations

import argparse
import os
import sys

# TensorFlow reads these when it is imported. Only the tool's own lines are printed.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")

import tensorflow as tf  # noqa: E402

from tfgradcomp.ops import build, library  # noqa: E402


def main(argv: list[str] | None = None) -> int:
    """Runs the command line tool and returns its exit status."""
    parser = argparse.ArgumentParser(prog="python -m tfgradcomp.ops", description=_HELP)
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument(
        "--info", action="store_true", help="show which library is in use, or why none"
    )
    action.add_argument(
        "--build", action="store_true", help="build the library into the cache, now"
    )
    arguments = parser.parse_args(argv)
    if arguments.build:
        try:
            print(library.build_library())
        except (build.BuildError, OSError, ImportError) as error:
            print(f"The native ops could not be built: {error}", file=sys.stderr)
            return 1
        return 0
    for name, value in _facts():
        print(f"{name + ':':<17}{value}")
    return 0


_HELP = """Builds or shows the native ops of tfgradcomp. Without a library that fits the
installed TensorFlow, the first use of an operation builds one; this tool builds it at a
time of your choice. CXX names the C++ compiler, CUDA_HOME the folder of CUDA, and
TFGRADCOMP_CUDA=0 leaves CUDA out. Where there is no driver of a GPU, CUDA is compiled
only with TFGRADCOMP_CUDA=1."""


def _facts():
    yield "TensorFlow", tf.__version__
    yield "TFGRADCOMP_OPS", os.environ.get("TFGRADCOMP_OPS", "auto (not set)")
    yield "Cache", library.cache_folder()
    path = library.find_library()
    if path is None:
        yield "Library", "none yet: the first use builds it, or --build does now"
        return
    try:
        loaded = library.library()
    except library.UnavailableError as error:
        yield "Library", f"none: {error}"
        return
    yield "Library", loaded.path
    yield "Built with", loaded.built_with
    yield "Instruction set", loaded.instruction_set


if __name__ == "__main__":
    sys.exit(main())
