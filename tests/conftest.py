"""Makes TensorFlow quiet, before anything imports it; shares workers; orders tests."""

import functools
import gc
import os
import re
import sys
import zlib
from pathlib import Path

import pytest

from tests import sample, slow_runs

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("KERAS_BACKEND", "tensorflow")

ROOT = Path(__file__).resolve().parents[1]
# Tests that start processes of their own run one after the other, and so do those that
# use the fixture `pools`: more clusters at once on two cores wait for each other.
LAUNCHES = (
    "tests/benchmarks/test_embeddings.py",
    "tests/benchmarks/test_exchange.py",
    "tests/benchmarks/test_virtual_cluster.py",
    "tests/examples/test_fashion_mnist.py",
    "tests/examples/test_variance_based.py",
    "tests/federated/test_processes.py",
    "tests/launch/",
    "tests/parameter_server/",
    "tests/ops/test_build.py",
    "tests/test_pool",
    "tests/test_release.py",
)
# These share a library that takes long to compile, and what the reference gives.
KERNELS = (
    "tests/ops/test_cuda",
    "tests/ops/test_native.py",
    "tests/ops/test_split_vector.py",
)
# Files whose tests share nothing that is dear go to either process in small units.
DIVISIBLE = (
    "tests/assignment/",
    "tests/compressors/",
    "tests/engine/",
    "tests/optimizers/",
    "tests/per_example/",
    "tests/servers/",
    "tests/testing/",
    "tests/transports/",
)
# Of the parametrized tests in them.
UNITS_OF_A_TEST = 4


def pytest_addoption(parser):
    sample.add_options(parser)
    slow_runs.add_options(parser)


def pytest_configure(config):
    config.pluginmanager.register(slow_runs.SlowRuns(config))
    config.addinivalue_line("markers", sample.MARKER)
    config.addinivalue_line(
        "markers",
        "python_ops(**parameters): runs the test a second time, with the operations "
        "in pure TensorFlow; of the parameters named, if there, with these values",
    )


@pytest.fixture(scope="session")
def pools():
    """Living workers of this session: `pools(2).run(function, *args)`."""
    # Not above: before the environment is set, nothing may import TensorFlow.
    from tests.pool import Pools

    pools = Pools()
    yield pools
    pools.close()


@pytest.fixture(autouse=True)
def operations(request):
    """Takes the operations that the marker `python_ops` asks for."""
    if getattr(request, "param", None) == "python":
        request.getfixturevalue("monkeypatch").setenv("TFGRADCOMP_OPS", "python")


def pytest_generate_tests(metafunc):
    if metafunc.definition.get_closest_marker("python_ops"):
        # Slow: `tests/ops` compares both kinds of operations bit for bit.
        python = pytest.param("python", marks=pytest.mark.slow)
        metafunc.parametrize("operations", ["auto", python], indirect=True)


def pytest_collection_modifyitems(config, items):
    removed = [item for item in items if not _is_wanted(item)]
    if config.getoption("sample"):
        removed += sample.left_out(items)
    if removed:
        config.hook.pytest_deselected(items=removed)
        gone = {item.nodeid for item in removed}
        items[:] = [item for item in items if item.nodeid not in gone]
    # These are the longest units: whoever starts with them ends with the others.
    items.sort(
        key=lambda item: (
            _cluster_of(item.nodeid) is None and not item.nodeid.startswith(KERNELS)
        ),
    )


def pytest_collection_finish():
    # What the imports have made stays; each collection of garbage would visit it. And a
    # graph makes so many objects that collections are a twentieth of the time.
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)
    if "tensorflow" in sys.modules:
        from tests import autotune

        autotune.disable()


def _cluster_of(nodeid):
    """The kind of clusters that a test uses, or None."""
    path = nodeid.partition("::")[0]
    return "launches" if nodeid.startswith(LAUNCHES) else _cluster_in(path)


@functools.cache
def _cluster_in(path):
    # The process that schedules knows the names of tests, not their fixtures.
    text = (ROOT / path).read_text()
    if re.search(r"^def \w+\([^)]*\bpools\b", text, re.M):
        return "pools"
    return "launches" if "run_workers(" in text else None


def _is_wanted(item):
    marker = item.get_closest_marker("python_ops")
    if marker is None or item.callspec.params["operations"] != "python":
        return True
    values = item.callspec.params
    return all(
        name not in values or values[name] in chosen
        for name, chosen in marker.kwargs.items()
    )


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Shares the tests out: the clusters as one unit, other files whole or divided."""
    from xdist.scheduler import LoadFileScheduling

    if config.getvalue("dist") != "loadfile":
        return None
    # In the order of the tests, not of the units' lengths.
    config.option.loadscopereorder = False

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid):
            if cluster := _cluster_of(nodeid):
                return cluster
            if nodeid.startswith(KERNELS):
                return "kernels"
            if not nodeid.startswith(DIVISIBLE):
                return super()._split_scope(nodeid)
            test, _, parameters = nodeid.partition("[")
            return f"{test}/{zlib.crc32(parameters.encode()) % UNITS_OF_A_TEST}"

    return Scheduling(config, log)
