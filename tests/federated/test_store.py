"""A folder holds the newest whole state, for one program."""

import numpy as np
import pytest

from tfgradcomp.federated.store import Store

ARRAYS = {"weights": np.arange(5, dtype=np.float32), "none": np.zeros(0, np.uint8)}


def test_the_newest_state_comes_back(tmp_path):
    store = Store(tmp_path / "new" / "folder")
    assert store.load() is None
    for count in range(5):
        store.save({"count": count}, ARRAYS)
    store.close()
    values, arrays = Store(tmp_path / "new" / "folder").load()
    assert values == {"count": 4}
    assert arrays.keys() == ARRAYS.keys()
    for name, array in ARRAYS.items():
        np.testing.assert_array_equal(arrays[name], array)
        assert arrays[name].dtype == array.dtype


@pytest.mark.parametrize("name", ["state.npz", "state.json"])
def test_a_torn_state_gives_way_to_the_one_before(tmp_path, name):
    store = Store(tmp_path)
    for count in range(3):
        store.save({"count": count}, ARRAYS)
    newest = max(tmp_path.glob(f"*/{name}"))
    newest.write_bytes(newest.read_bytes()[:-3])
    assert store.load()[0] == {"count": 1}
    # A state that is saved later counts as newer than the torn one.
    store.close()
    store = Store(tmp_path)
    store.save({"count": 9}, ARRAYS)
    assert store.load()[0] == {"count": 9}


def test_two_programs_cannot_use_a_folder(tmp_path):
    store = Store(tmp_path)
    with pytest.raises(BlockingIOError, match="a folder of its own"):
        Store(tmp_path)
    store.close()
    Store(tmp_path).close()
