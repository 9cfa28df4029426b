"""State saved by real workers is restored completely, or all workers raise."""

import shutil

import h5py
import numpy as np
import pytest

from tests.checkpoint import restore_cases as cases
from tfgradcomp.checkpoint import backups
from tfgradcomp.checkpoint.backups import Point

pytestmark = pytest.mark.timeout(600)
# Bytes of a bucket: two blocks in each bucket, or all blocks in one.
SMALL, LARGE = 2048, 2**20
SLOW = pytest.mark.slow


@pytest.fixture(scope="module")
def straight(pools, tmp_path_factory):
    """The results of a training without interruption, by workers."""
    folder = tmp_path_factory.mktemp("straight")
    return pools(3).run(cases.train, folder, "sharded", LARGE).answers


@pytest.fixture(scope="module")
def backup_of(pools, tmp_path_factory):
    """A function that returns a backup of half a training, made once."""
    folders = {}

    def backup(transport, bucket_bytes):
        key = transport, bucket_bytes
        if key not in folders:
            folders[key] = tmp_path_factory.mktemp(transport)
            answers, _ = pools(3).run(cases.train, folders[key], *key, cases.SAVED)
            assert all("error" not in answer for answer in answers)
        return folders[key]

    return backup


@pytest.fixture
def sharded(backup_of, tmp_path):
    """A copy of a backup whose files have parts of the server's state."""
    shutil.copytree(backup_of("sharded", LARGE), tmp_path / "backup")
    return tmp_path / "backup"


@pytest.fixture
def train(pools, sharded):
    """Resumes from the backup under another transport."""

    def run():
        return pools(3).run(cases.train, sharded, "all_gather", SMALL)

    return run


@pytest.fixture
def load(pools, sharded):
    """Trains after each worker has loaded the file of a worker; returns the answers."""

    def run(sources, has_begun=False):
        arguments = sharded, sources, "all_gather", SMALL, has_begun
        return pools(3).run(cases.load, *arguments).answers

    return run


def weights_of(folder, rank):
    """The file of a worker."""
    point = Point(cases.SAVED)
    return backups.weights_file(backups.worker_folder(folder, rank), point)


def check_same(answers, expected):
    assert not any("error" in answer for answer in answers), answers
    whole = 0
    for answer, other in zip(answers, expected, strict=True):
        assert answer["weights"] == other["weights"]
        assert answer["state"] == other["state"]
    for (begin, end), rank in owners(answers):
        part = answers[rank]["server"][begin:end]
        np.testing.assert_array_equal(part, whole_server(expected)[begin:end])
        whole += end - begin
    assert whole >= len(answers[0]["server"])


def owners(answers):
    return [(span, r) for r, answer in enumerate(answers) for span in answer["owned"]]


def whole_server(answers):
    whole = np.zeros_like(answers[0]["server"])
    for (begin, end), rank in owners(answers):
        whole[begin:end] = answers[rank]["server"][begin:end]
    return whole


@pytest.mark.slow
@pytest.mark.parametrize(
    ("saved", "resumed"),
    [
        (("sharded", LARGE), ("all_gather", SMALL)),
        # In one process `tests/engine/test_buckets.py` has these, too.
        pytest.param(("all_gather", SMALL), ("sharded", LARGE), marks=SLOW),
        pytest.param(("sharded", LARGE), ("sharded", SMALL), marks=SLOW),
        pytest.param(("sharded", SMALL), ("all_gather", LARGE), marks=SLOW),
    ],
)
def test_resuming_under_another_transport_gives_the_same_bits(
    saved, resumed, pools, backup_of, straight, tmp_path
):
    folder = tmp_path / "backup"
    shutil.copytree(backup_of(*saved), folder)
    answers = pools(3).run(cases.train, folder, *resumed).answers
    check_same(answers, straight)
    assert whole_server(answers).any()


def test_each_worker_saves_another_part_of_the_server(straight):
    assert all(answer["owned"] for answer in straight)
    assert sum(end - begin for (begin, end), _ in owners(straight)) == 2723
    residuals = {answer["state"]["compressed.worker.residual"] for answer in straight}
    assert len(residuals) == 3


def test_missing_folder_raises_on_all_workers(train, sharded):
    shutil.rmtree(sharded / "worker-1")
    for answer in train().answers:
        assert "No backup is whole on every worker" in answer["error"]
        assert "1: [], 2: ['epoch 1', 'epoch 2']}" in answer["error"]


def test_exchanged_folder_raises_on_all_workers(train, sharded):
    shutil.rmtree(sharded / "worker-1")
    shutil.copytree(sharded / "worker-0", sharded / "worker-1")
    for answer in train().answers:
        assert "were exchanged" in answer["error"]
        assert "worker={0: [0], 1: [0], 2: [2]}" in answer["error"]


def test_damaged_epoch_makes_all_go_back_to_the_epoch_before(train, sharded, straight):
    weights = weights_of(sharded, 2)
    # Zeros of the same length, as after a loss of power.
    weights.write_bytes(bytes(weights.stat().st_size))
    answers, output = train()
    check_same(answers, straight)
    assert "epoch-000002 cannot be read and is left out" in output


@pytest.mark.parametrize("has_begun", [pytest.param(False, marks=SLOW), True])
def test_loading_each_workers_file_gives_the_same_bits(has_begun, load, straight):
    check_same(load([0, 1, 2], has_begun), straight)


@pytest.mark.parametrize("has_begun", [False, pytest.param(True, marks=SLOW)])
def test_missing_part_of_the_server_raises_on_all_workers(has_begun, load):
    for answer in load([0, 1, 0], has_begun):
        assert answer["raised_by"] == ("load_weights" if has_begun else "fit")
        assert (
            "files that were restored are those of workers [0, 1, 0] of 3; "
            in (answer["error"])
        )
        assert "missing are those of workers [2]." in answer["error"]
        assert "elements [[2048, 2723]] of compressed.server" in answer["error"]


@pytest.mark.parametrize("has_begun", [pytest.param(False, marks=SLOW), True])
def test_file_without_a_vector_raises_on_all_workers(has_begun, load, sharded):
    with h5py.File(weights_of(sharded, 1), "r+") as file:
        del file["optimizer/vars/compressed.worker.residual"]
    for rank, answer in enumerate(load([0, 1, 2], has_begun)):
        assert answer["raised_by"] == ("load_weights" if has_begun else "fit")
        assert "is not restored as a whole on workers [1]." in answer["error"]
        missing = "['compressed.worker.residual']" if rank == 1 else "[]"
        assert f"missing on this worker={missing}" in answer["error"]


def test_parts_raise_on_all_workers_if_one_restores_nothing(load):
    for answer in load([0, None, 2]):
        assert "Workers [0, 2] have restored a part of the state" in answer["error"]
        assert "workers [1] nothing" in answer["error"]


@pytest.mark.slow  # The tests above have either parts or wholes.
def test_parts_and_a_whole_state_make_a_whole(load, backup_of, sharded, straight):
    shutil.rmtree(sharded / "worker-1")
    shutil.copytree(backup_of("all_gather", SMALL) / "worker-1", sharded / "worker-1")
    check_same(load([0, 1, 2]), straight)


def test_devices_of_one_process_do_not_wait_for_lost_parts(pools, sharded):
    arguments = sharded, [0], "sharded", LARGE, False
    for answer in pools(2, "mirrored").run(cases.load, *arguments).answers:
        assert "missing are those of workers [1, 2]." in answer["error"]


def test_one_worker_alone_raises_for_lost_parts(sharded):
    model = cases.compiled("all_gather", LARGE)
    model.optimizer.build(model.trainable_variables)
    model.load_weights(weights_of(sharded, 1))
    for _ in range(2):
        with pytest.raises(ValueError, match=r"missing are those of workers \[0, 2\]"):
            cases.fit(model)
    with pytest.raises(ValueError, match="take a step before saving"):
        model.save_weights(sharded / "again.weights.h5")
