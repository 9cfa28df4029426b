"""State saved by real workers: restored completely, or refused by all of them."""

import shutil

import h5py
import numpy as np
import pytest

from tests.checkpoint import restore_cases as cases
from tfgradcomp.checkpoint import backups
from tfgradcomp.checkpoint.backups import Point

pytestmark = pytest.mark.timeout(600)
# Two blocks in each bucket, and all blocks in one.
SMALL, LARGE = 2048, 2**20


@pytest.fixture(scope="module")
def straight(pools, tmp_path_factory):
    """The results of a training without interruption, by workers."""
    folder = tmp_path_factory.mktemp("straight")
    answers, _ = pools(3).run(cases.train, folder, "sharded", LARGE)
    return answers


@pytest.fixture(scope="module")
def backup_of(pools, tmp_path_factory):
    """A function that returns a backup of half a training, made only once."""
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


def check_same(answers, expected):
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


@pytest.mark.parametrize(
    ("saved", "resumed"),
    [
        (("sharded", LARGE), ("all_gather", SMALL)),
        # In one process `tests/engine/test_buckets.py` has these, too.
        pytest.param(
            *(("all_gather", SMALL), ("sharded", LARGE)), marks=pytest.mark.slow
        ),
        pytest.param(*(("sharded", LARGE), ("sharded", SMALL)), marks=pytest.mark.slow),
        pytest.param(
            *(("sharded", SMALL), ("all_gather", LARGE)), marks=pytest.mark.slow
        ),
    ],
)
def test_resuming_under_another_transport_gives_the_same_bits(
    saved, resumed, pools, backup_of, straight, tmp_path
):
    folder = tmp_path / "backup"
    shutil.copytree(backup_of(*saved), folder)
    answers, _ = pools(3).run(cases.train, folder, *resumed)
    assert not any("error" in answer for answer in answers), answers
    check_same(answers, straight)
    assert whole_server(answers).any()


def test_each_worker_saves_another_part_of_the_server(straight):
    assert all(answer["owned"] for answer in straight)
    assert sum(end - begin for (begin, end), _ in owners(straight)) == 2723
    residuals = {answer["state"]["compressed.worker.residual"] for answer in straight}
    assert len(residuals) == 3


def test_missing_folder_raises_on_all_workers(pools, sharded):
    shutil.rmtree(sharded / "worker-1")
    answers, _ = pools(3).run(cases.train, sharded, "all_gather", SMALL)
    for answer in answers:
        assert "No backup is whole on every worker" in answer["error"]
        assert "1: [], 2: ['epoch 1', 'epoch 2']}" in answer["error"]


def test_exchanged_folder_raises_on_all_workers(pools, sharded):
    shutil.rmtree(sharded / "worker-1")
    shutil.copytree(sharded / "worker-0", sharded / "worker-1")
    answers, _ = pools(3).run(cases.train, sharded, "all_gather", SMALL)
    for answer in answers:
        assert "were exchanged" in answer["error"]
        assert "worker={0: [0], 1: [0], 2: [2]}" in answer["error"]


def test_damaged_epoch_makes_all_go_back_to_the_one_before(pools, sharded, straight):
    folder = backups.point_folder(sharded / "worker-2", Point(cases.SAVED))
    weights = folder / backups.WEIGHTS
    # As long as it was, as after a loss of power.
    weights.write_bytes(bytes(weights.stat().st_size))
    answers, output = pools(3).run(cases.train, sharded, "all_gather", SMALL)
    assert not any("error" in answer for answer in answers), answers
    check_same(answers, straight)
    assert "epoch-000002 cannot be read and is left out" in output


@pytest.mark.parametrize(
    "has_begun", [pytest.param(False, marks=pytest.mark.slow), True]
)
def test_loading_each_workers_file_gives_the_same_bits(
    has_begun, pools, sharded, straight
):
    answers, _ = pools(3).run(
        cases.load, sharded, [0, 1, 2], "all_gather", SMALL, has_begun
    )
    assert not any("error" in answer for answer in answers), answers
    check_same(answers, straight)


@pytest.mark.parametrize(
    "has_begun", [False, pytest.param(True, marks=pytest.mark.slow)]
)
def test_missing_part_of_the_server_raises_on_all_workers(has_begun, pools, sharded):
    answers, _ = pools(3).run(
        cases.load, sharded, [0, 1, 0], "all_gather", SMALL, has_begun
    )
    for answer in answers:
        assert answer["raised_by"] == ("load_weights" if has_begun else "fit")
        assert (
            "files that were restored are those of workers [0, 1, 0] of 3; "
            in (answer["error"])
        )
        assert "missing are those of workers [2]." in answer["error"]
        assert "elements [[2048, 2723]] of compressed.server" in answer["error"]


@pytest.mark.parametrize(
    "has_begun", [pytest.param(False, marks=pytest.mark.slow), True]
)
def test_file_without_a_vector_raises_on_all_workers(has_begun, pools, sharded):
    folder = backups.point_folder(sharded / "worker-1", Point(cases.SAVED))
    with h5py.File(folder / backups.WEIGHTS, "r+") as file:
        del file["optimizer/vars/compressed.worker.residual"]
    answers, _ = pools(3).run(
        cases.load, sharded, [0, 1, 2], "all_gather", SMALL, has_begun
    )
    for rank, answer in enumerate(answers):
        assert answer["raised_by"] == ("load_weights" if has_begun else "fit")
        assert "is not restored as a whole on workers [1]." in answer["error"]
        missing = "['compressed.worker.residual']" if rank == 1 else "[]"
        assert f"missing on this worker={missing}" in answer["error"]


def test_parts_raise_on_all_workers_where_one_restores_nothing(pools, sharded):
    answers, _ = pools(3).run(
        cases.load, sharded, [0, None, 2], "all_gather", SMALL, False
    )
    for answer in answers:
        assert "Workers [0, 2] have restored a part of the state" in answer["error"]
        assert "workers [1] nothing" in answer["error"]


@pytest.mark.slow  # One after the other, the tests above have parts and wholes.
def test_parts_and_a_whole_state_make_a_whole(pools, backup_of, sharded, straight):
    shutil.rmtree(sharded / "worker-1")
    shutil.copytree(backup_of("all_gather", SMALL) / "worker-1", sharded / "worker-1")
    answers, _ = pools(3).run(
        cases.load, sharded, [0, 1, 2], "all_gather", SMALL, False
    )
    check_same(answers, straight)


def test_devices_of_one_process_do_not_wait_for_lost_parts(pools, sharded):
    answers, _ = pools(2, "mirrored").run(
        cases.load, sharded, [0], "sharded", LARGE, False
    )
    for answer in answers:
        assert "missing are those of workers [1, 2]." in answer["error"]


def test_one_worker_alone_raises_for_lost_parts(sharded):
    model = cases.compiled("all_gather", LARGE)
    model.optimizer.build(model.trainable_variables)
    folder = backups.point_folder(sharded / "worker-1", Point(cases.SAVED))
    model.load_weights(folder / backups.WEIGHTS)
    for _ in range(2):
        with pytest.raises(ValueError, match=r"missing are those of workers \[0, 2\]"):
            cases.fit(model)
    with pytest.raises(ValueError, match="take a step before saving"):
        model.save_weights(sharded / "again.weights.h5")
