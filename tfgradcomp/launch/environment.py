"""Environment variables that describe a cluster to its workers."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping

_RESTARTS = "TFGRADCOMP_RESTART_COUNT"


def described_cluster(env: Mapping[str, str]) -> str:
    """Returns a sentence on the cluster that the environment describes; else ""."""
    if env.get("TF_CONFIG"):
        return "TF_CONFIG is set"
    tasks = env.get("SLURM_NTASKS", "")
    if "SLURM_PROCID" in env and tasks.isdecimal() and int(tasks) > 1:
        return f"Slurm started this as task {env['SLURM_PROCID']} of {tasks}"
    return ""


def share_of_cores(tasks_on_this_host: int) -> int:
    """Returns the number of cores of each task on this machine, at least one."""
    return max(1, len(os.sched_getaffinity(0)) // tasks_on_this_host)


def worker_env(
    base: Mapping[str, str],
    cluster: dict[str, list[str]],
    task: dict[str, object],
    tasks_on_this_host: int,
    attempt: int,
) -> dict[str, str]:
    """Returns the environment of a task.

    Args:
        base: The launcher's environment. Its thread counts and log level, if set, take
            precedence over the defaults.
        cluster: The addresses of all tasks by job.
        task: Type and index of the task.
        tasks_on_this_host: Number of tasks that share the cores of this machine.
        attempt: Number of restarts so far.
    """
    share = share_of_cores(tasks_on_this_host)
    defaults = {
        "OMP_NUM_THREADS": share,
        "TF_NUM_INTRAOP_THREADS": share,
        # An operation that waits for other workers may hold its thread. With the share
        # alone, all threads could be held and the workers would deadlock. A waiting
        # thread uses no core.
        "TF_NUM_INTEROP_THREADS": max(4, share),
        "TF_CPP_MIN_LOG_LEVEL": 2,
    }
    return {
        **{name: str(value) for name, value in defaults.items()},
        **base,
        "TF_CONFIG": json.dumps({"cluster": cluster, "task": task}),
        _RESTARTS: str(attempt),
        "PYTHONUNBUFFERED": "1",
    }


def restarted(env: Mapping[str, str]) -> dict[str, str]:
    """Returns the environment of a task for its next start."""
    return {**env, _RESTARTS: str(int(env[_RESTARTS]) + 1)}
