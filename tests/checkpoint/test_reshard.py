"""Conversion of the backups of N workers into those of M, and resuming from them.

The workers are threads that write the files of real workers.
"""

import json
import shutil

import h5py
import keras
import numpy as np
import pytest

import tfgradcomp
from tests.harness import Saved, Worker, digest
from tests.pairwise import parametrize_pairwise
from tfgradcomp.checkpoint import backups
from tfgradcomp.checkpoint.backups import Origin, Point
from tfgradcomp.checkpoint.reshard import main, reshard
from tfgradcomp.transports import AllGather, AllReduce, Loopback, Sharded

SHAPES = [(40, 30), (30,), (30, 50)]
SIZE = 2730
SMALL, LARGE = 4096, 2**20
GROUP = "optimizer/vars"
INNER_GROUP = "optimizer/inner_optimizer/vars"


def dist_ef(**arguments):
    return tfgradcomp.DistEFBlockSGDM(
        keras.optimizers.SGD(0.1), block_size=256, min_size=1, **arguments
    )


def signum(**arguments):
    return tfgradcomp.Signum(keras.optimizers.SGD(0.1), min_size=1, **arguments)


TRANSPORTS = {dist_ef: (AllGather, Sharded), signum: (AllGather, Sharded, AllReduce)}
WAYS = [
    (make, transport, bucket_bytes)
    for make, transports in TRANSPORTS.items()
    for transport in transports
    for bucket_bytes in (SMALL, LARGE)
]


def weights_of(directory, rank):
    """The file of a worker."""
    return backups.weights_file(backups.worker_folder(directory, rank), Point(1))


def on_workers(workers, way, steps, function, load=lambda rank: None):
    """Takes steps on threads; returns `function(rank, worker)` of each.

    Args:
        workers: The number of threads.
        way: One of `WAYS`.
        steps: Numbers of the steps.
        function: Function of a rank and its `Worker`.
        load: Function that returns the state from which a rank starts.
    """
    make, transport, bucket_bytes = way

    def run(rank, collectives):
        optimizer = make(transport=transport(collectives), bucket_bytes=bucket_bytes)
        worker = Worker(optimizer, SHAPES, load(rank))
        for step in steps:
            rng = np.random.default_rng([step, rank])
            worker.step([rng.normal(size=s).astype(np.float32) for s in SHAPES])
        return function(rank, worker)

    return Loopback(workers, timeout=60).run(run)


def save(directory, *way):
    """Writes the backup of three workers after three steps."""

    def back_up(rank, worker):
        saved = worker.save()

        def write(folder):
            with h5py.File(folder / backups.WEIGHTS, "w") as file:
                for name, value in saved.state.items():
                    file[f"{GROUP}/{name}"] = value
                for name, value in saved.inner.items():
                    file[f"{INNER_GROUP}/{name}"] = value
                for index, value in enumerate(saved.weights):
                    file[f"layers/layer/vars/{index}"] = value
                # A statistic, which differs between workers.
                file["layers/layer/vars/3"] = np.float32(rank)
            (folder / backups.DIGEST).write_text(digest(saved.weights))

        folder = backups.worker_folder(directory, rank)
        backups.write(folder, Point(1), Origin(rank, 3), write)

    on_workers(3, way, range(3), back_up)


def all_of(directory, rank):
    """Returns all datasets of a file."""
    found = {}

    def visit(name, item):
        if isinstance(item, h5py.Dataset):
            found[name] = item[()]

    with h5py.File(weights_of(directory, rank)) as file:
        file.visititems(visit)
    return found


def read(directory, rank, group=GROUP):
    """Returns the datasets of a group in a file, by default the wrapper's state."""
    with h5py.File(weights_of(directory, rank)) as file:
        return {name: item[()] for name, item in file[group].items()}


def resume(directory, workers, *way):
    """Returns each worker's weights after two more steps."""

    def load(rank):
        weights = read(directory, rank, "layers/layer/vars")
        state, inner = read(directory, rank), read(directory, rank, INNER_GROUP)
        return Saved([weights[str(index)] for index in range(3)], state, inner)

    return on_workers(workers, way, range(3, 5), lambda _, w: w.weights(), load)


def check_same(states, expected):
    assert states.keys() == expected.keys()
    for name, value in states.items():
        np.testing.assert_array_equal(value, expected[name], err_msg=name)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A function that returns the backup of three workers, made once."""
    made = {}

    def backup(*way):
        if way not in made:
            made[way] = tmp_path_factory.mktemp("saved") / "backup"
            save(made[way], *way)
        return made[way]

    return backup


@pytest.fixture
def backup(saved, tmp_path):
    """A copy of a backup whose files have parts of the server's state."""
    shutil.copytree(saved(dist_ef, Sharded, LARGE), tmp_path / "old")
    return tmp_path / "old"


@pytest.mark.sample(1)
@pytest.mark.parametrize(("make", "transport", "bucket_bytes"), WAYS)
def test_reshard_gives_the_same_files_whatever_wrote_the_old_ones(
    make, transport, bucket_bytes, saved, tmp_path
):
    old = saved(make, transport, bucket_bytes)
    assert reshard(old, 2, tmp_path / "new") == Point(1)
    reshard(saved(make, AllGather, LARGE), 2, tmp_path / "expected")
    for rank in range(2):
        state, expected = read(tmp_path / "new", rank), read(tmp_path / "expected", 0)
        assert tuple(state.pop("place")) == (rank, 2)
        check_same(state, {n: v for n, v in expected.items() if n != "place"})


@pytest.mark.sample(1)
@pytest.mark.parametrize(("make", "transport", "bucket_bytes"), WAYS)
def test_backup_of_every_transport_resumes_under_every_other(
    make, transport, bucket_bytes, saved
):
    directory = saved(make, transport, bucket_bytes)
    expected = resume(saved(make, AllGather, LARGE), 3, make, AllGather, LARGE)
    for way in WAYS:
        if way[0] is make:
            for weights in resume(directory, 3, *way):
                np.testing.assert_array_equal(weights, expected[0])


@pytest.mark.parametrize("workers", [1, 2, 5])
def test_reshard_conserves_the_mean_residual(workers, backup, tmp_path):
    reshard(backup, workers, tmp_path / "new")
    old = [read(backup, rank) for rank in range(3)]
    for name in ("compressed.worker.residual", "compressed.worker.momentum"):
        rows = np.concatenate([state[name] for state in old]).astype(np.float64)
        assert (rows[0] != rows[1]).any()
        for rank in range(workers):
            new = read(tmp_path / "new", rank)[name]
            np.testing.assert_array_equal(new, [rows.mean(0).astype(np.float32)])
    for state in old:
        assert 0 < sum(np.ravel(np.diff(state["compressed.server_owned"]))) < SIZE
    whole = sum(state["compressed.server.residual"] for state in old)
    assert np.count_nonzero(whole) > 0.9 * SIZE
    for rank in range(workers):
        new = read(tmp_path / "new", rank)
        np.testing.assert_array_equal(new["compressed.server.residual"], whole)
        assert new["compressed.server_owned"].tolist() == [[0, SIZE]]


def forget_sizes(folder):
    """Makes the files' sizes irrelevant, as in version 0.1."""
    metadata = folder / "metadata.json"
    known = json.loads(metadata.read_text())
    del known["sizes"]
    metadata.write_text(json.dumps(known))


def test_each_local_replica_has_the_same_weight(backup, tmp_path):
    name = f"{GROUP}/compressed.worker.residual"
    for rank, rows in enumerate(([[1.0], [2.0]], [[6.0], [7.0]], [[9.0], [11.0]])):
        path = weights_of(backup, rank)
        with h5py.File(path, "r+") as file:
            del file[name]
            file[name] = np.repeat(np.float32(rows), SIZE, 1)
        forget_sizes(path.parent)
    reshard(backup, 1, tmp_path / "new")
    state = read(tmp_path / "new", 0)
    np.testing.assert_array_equal(state["compressed.worker.residual"], [[6.0] * SIZE])


@pytest.mark.sample(1)
@pytest.mark.parametrize("workers", [2, 4])
def test_resharded_backup_resumes_under_every_transport(workers, backup, tmp_path):
    reshard(backup, workers, tmp_path / "new")
    expected = None
    for way in WAYS:
        if way[0] is dist_ef:
            answers = resume(tmp_path / "new", workers, *way)
            expected = answers[0] if expected is None else expected
            for weights in answers:
                np.testing.assert_array_equal(weights, expected)


@pytest.mark.sample(4)
@parametrize_pairwise(
    way={f"{way[0].__name__}-{way[1].__name__}-{way[2]}": way for way in WAYS},
    workers=[1, 2, 5],
)
def test_there_and_back_gives_the_files_of_the_same_number(
    way, workers, saved, tmp_path
):
    old = saved(*way)
    reshard(old, workers, tmp_path / "there")
    reshard(tmp_path / "there", 3, tmp_path / "back")
    reshard(old, 3, tmp_path / "same")
    for rank in range(3):
        back, same = (all_of(tmp_path / name, rank) for name in ("back", "same"))
        # The weights, the inner optimizer and the statistics are among them.
        assert len(back) > len(read(old, rank)) + 4
        check_same(back, same)


def test_resharding_to_the_same_number_keeps_the_mean_alone(backup, tmp_path):
    reshard(backup, 3, tmp_path / "new")
    reshard(tmp_path / "new", 3, tmp_path / "again")
    for rank in range(3):
        check_same(read(tmp_path / "new", rank), read(tmp_path / "again", rank))


@pytest.fixture
def error_of(capsys, tmp_path):
    """A function that runs the command line, which fails, and returns the error."""

    def run(old, workers=2, out=tmp_path / "new"):
        with pytest.raises(SystemExit) as end:
            main([str(old), "--workers", str(workers), "--out", str(out)])
        assert end.value.code == 2
        return capsys.readouterr().err

    return run


def test_command_line_names_the_epoch(backup, tmp_path, capsys):
    main([str(backup), "--workers", "2", "--out", str(tmp_path / "new")])
    assert capsys.readouterr().out == f"{tmp_path / 'new'}: epoch 1 for 2 workers\n"


def test_wrong_arguments_raise(backup, tmp_path, error_of):
    assert "No backup found" in error_of(tmp_path / "nowhere")
    assert "at least 1" in error_of(backup, workers=0)
    assert "must not exist" in error_of(backup, out=backup)


@pytest.mark.parametrize("rank", range(3))
def test_lost_folder_raises(rank, backup, tmp_path, error_of):
    shutil.rmtree(backup / f"worker-{rank}")
    error = error_of(backup)
    assert "is of 3 workers, which have no epoch in common" in error
    assert f"'worker-{rank}': []" in error
    assert not (tmp_path / "new").exists()


def test_exchanged_folder_raises(backup, error_of):
    shutil.rmtree(backup / "worker-2")
    shutil.copytree(backup / "worker-0", backup / "worker-2")
    error = error_of(backup)
    assert "folders are mixed up" in error
    assert "'worker-2': (0, 3)" in error


def test_missing_part_of_the_server_raises(backup, error_of):
    shutil.copy(weights_of(backup, 0), weights_of(backup, 1))
    error = error_of(backup)
    assert "Expected: the files of workers [0, 1, 2]." in error
    assert "files of workers [0, 0, 2], without elements [[1024, 2048]]" in error


@pytest.mark.parametrize(
    ("dataset", "changed", "message"),
    [
        (f"{INNER_GROUP}/0", lambda x: x + 1, "weights differ"),
        (f"{GROUP}/compressed.worker.residual", lambda x: x[:, 1:], "optimizers"),
        (f"{GROUP}/fallback", lambda x: 1 - x, "optimizers differ"),
    ],
    ids=["step count", "size", "fallback"],
)
def test_backups_of_two_trainings_raise(dataset, changed, message, backup, error_of):
    with h5py.File(weights_of(backup, 1), "r+") as file:
        value = changed(file[dataset][()])
        del file[dataset]
        file[dataset] = value
    assert message in error_of(backup)


@pytest.mark.parametrize("has_digests", [True, False])
def test_backups_of_other_weights_raise(has_digests, backup, error_of):
    for rank in range(3):
        digest = weights_of(backup, rank).with_name(backups.DIGEST)
        if not has_digests:
            digest.unlink()
        elif rank == 1:
            digest.write_text("0")
        forget_sizes(digest.parent)
    error = error_of(backup)
    assert "weights differ" in error
    named = "lie between two exchanges" if has_digests else "layers/layer/vars/3"
    assert named in error


def test_a_point_between_two_exchanges_of_local_steps_is_passed_over(backup, tmp_path):
    for rank in range(3):
        folder = backups.worker_folder(backup, rank)
        newer = backups.point_folder(folder, Point(1, 5))
        shutil.copytree(backups.point_folder(folder, Point(1)), newer)
        (newer / backups.DIGEST).write_text(str(rank))
        forget_sizes(newer)
    assert reshard(backup, 2, tmp_path / "new") == Point(1)


def test_unreadable_file_raises(backup, error_of):
    file = weights_of(backup, 1)
    file.write_bytes(bytes(file.stat().st_size))
    assert "unable to" in error_of(backup).lower()
