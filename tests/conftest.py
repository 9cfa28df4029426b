"""Makes TensorFlow quiet, before anything imports it; orders tests in two processes."""

import os

import pytest

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("KERAS_BACKEND", "tensorflow")

CLUSTERS = (
    "tests/benchmarks/test_exchange.py",
    "tests/benchmarks/test_virtual_cluster.py",
    "tests/launch/",
    "tests/examples/test_fashion_mnist.py",
    "tests/examples/test_variance_based.py",
    "tests/callbacks/test_backup.py",
    "tests/parameter_server/",
    "tests/compat/test_multi_worker_fit.py",
)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Runs the files that start clusters one after the other, from the beginning.

    Two clusters at once on two cores wait for each other most of the time.
    """
    from xdist.scheduler import LoadFileScheduling

    if config.getvalue("dist") != "loadfile":
        return None
    config.option.loadscopereorder = False

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid):
            is_cluster = nodeid.startswith(CLUSTERS)
            return "clusters" if is_cluster else super()._split_scope(nodeid)

    return Scheduling(config, log)
