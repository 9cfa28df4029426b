"""Runs a script on real workers, through the launcher; brings back their answers."""

import functools
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

# Processes with this folder in PYTHONPATH import TensorFlow sooner.
LIGHT = Path(__file__).parent / "light"


def light_environment(**variables: str) -> dict[str, str]:
    """Returns the environment of a process that imports what this one can, but faster.

    Keras then finds neither matplotlib nor scikit-learn.
    """
    path = os.pathsep.join([str(LIGHT), *sys.path])
    return {**os.environ, "PYTHONPATH": path, **variables}


def run_workers(
    script: Path,
    workers: int,
    folder: Path,
    *arguments,
    timeout=240,
    servers=0,
    options=(),
    prefix=(),
):
    """Runs `script folder *arguments` on N workers; returns a dict from each.

    A worker answers with `report(folder, rank, ...)`; with parameter servers the chief
    alone does, as rank 0. A run that hangs is killed.

    Args:
        script: What all processes run.
        workers: N.
        folder: Where answers are written.
        *arguments: The script's.
        timeout: Seconds after which the run has failed.
        servers: Number of parameter servers; 0: workers alone.
        options: More options of the launcher.
        prefix: A command that runs the launcher.
    """
    options = [*options, *(("--ps", str(servers)) if servers else ())]
    folder.mkdir(parents=True, exist_ok=True)
    process = subprocess.Popen(
        [
            *(*prefix, sys.executable, "-m", "tfgradcomp.launch"),
            *("--workers", str(workers), *options),
            *(str(script), str(folder), *arguments),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=light_environment(),
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        # The launcher ends its workers.
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=30)
        raise AssertionError(f"hung for {timeout} s:\n{output}") from None
    finally:
        process.kill()
    if process.returncode:
        raise AssertionError(f"exit code {process.returncode}:\n{output}")
    answers = [
        json.loads((folder / f"answer-{rank}.json").read_text())
        for rank in range(1 if servers else workers)
    ]
    return answers, output


def report(folder: str, rank: int, answer: dict) -> None:
    """Writes a worker's answer where `run_workers` reads it."""
    (Path(folder) / f"answer-{rank}.json").write_text(json.dumps(answer))


@functools.cache
def strategy_and_rank():
    """A process' one strategy, and its rank.

    Without TF_CONFIG it is one of several devices of this process, of which
    TESTS_DEVICES says the number.
    """
    # What starts workers does without TensorFlow.
    import tensorflow as tf

    import tfgradcomp

    if "TF_CONFIG" in os.environ:
        strategy = tf.distribute.MultiWorkerMirroredStrategy()
        return strategy, strategy.cluster_resolver.task_id
    devices = int(os.environ.get("TESTS_DEVICES", "2"))
    if os.environ.get("TESTS_POOL_KIND") == "virtual":
        return tfgradcomp.virtual_workers(devices), 0
    # Collectives between logical CPUs starve in a small pool.
    tf.config.threading.set_inter_op_parallelism_threads(16)
    tf.config.set_logical_device_configuration(
        tf.config.list_physical_devices("CPU")[0],
        [tf.config.LogicalDeviceConfiguration()] * devices,
    )
    names = [f"CPU:{index}" for index in range(devices)]
    return tf.distribute.MirroredStrategy(names), 0
