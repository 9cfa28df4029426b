"""No bit of any method may change: weights after 20 steps, against recorded digests.

`python -m tests.test_digests` records them anew, after a change of a rule that is meant
and stands in CHANGELOG.md.
"""

import json
from pathlib import Path

import pytest

from tests import digest_cases
from tests.pool import Pools

RECORDED = Path(__file__).with_suffix(".json")


def measure(pools):
    """All digests, by the names of cases."""
    (virtual,), _ = pools(3, "virtual").run(digest_cases.digests, "all", timeout=900)
    (devices,), _ = pools(4, "mirrored").run(
        digest_cases.digests, "devices", timeout=300
    )
    return virtual | devices


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_no_bit_has_changed(pools):
    found = measure(pools)
    expected = json.loads(RECORDED.read_text())
    changed = [name for name in expected if found.get(name) != expected[name]]
    assert changed == []
    assert found.keys() == expected.keys()


if __name__ == "__main__":
    every_pool = Pools()
    try:
        RECORDED.write_text(json.dumps(measure(every_pool), indent=1) + "\n")
    finally:
        every_pool.close()
