"""A fixture of benchmarks that make clusters of network namespaces."""

import pytest

from tests.benchmarks.scripts import import_script


@pytest.fixture(scope="session")
def permitted():
    """Skips where no cluster can be made."""
    cluster = import_script("cluster")
    try:
        with cluster.virtual_cluster(1, "1gbit"):
            pass
    except cluster.Unavailable as error:
        pytest.skip(str(error))
