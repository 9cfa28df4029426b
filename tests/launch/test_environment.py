"""Environment of the workers, and clusters that it describes already."""

import json
import os
import re

import pytest

from tests.launch.processes import clean_env, run
from tfgradcomp.launch.environment import worker_env

pytestmark = pytest.mark.timeout(120)


def test_each_worker_gets_its_own_tf_config(script):
    path = script("print('got', json.dumps([CONFIG, ATTEMPT, sys.argv[1:]]))")
    done = run("--workers", "3", path, "--lr", "0.1", "-m", "--workers", "9")
    assert done.returncode == 0, done.stderr
    got = {}
    for index, text in re.findall(r"^\[(\d)\] got (.*)$", done.stdout, re.M):
        config, attempt, args = json.loads(text)
        got[int(index)] = config
        assert config["task"] == {"type": "worker", "index": int(index)}
        assert attempt == "0"
        assert args == ["--lr", "0.1", "-m", "--workers", "9"]
    assert sorted(got) == [0, 1, 2]
    clusters = [config["cluster"] for config in got.values()]
    assert clusters[0] == clusters[1] == clusters[2]
    addresses = clusters[0]["worker"]
    assert len(set(addresses)) == 3
    assert all(re.fullmatch(r"127\.0\.0\.1:\d+", address) for address in addresses)


SLURM = {"SLURM_PROCID": "1", "SLURM_NTASKS": "4"}


@pytest.mark.parametrize(
    "env, message",
    [
        ({"TF_CONFIG": '{"task": {"index": 5}}'}, "TF_CONFIG is set"),
        (SLURM, "Slurm started this as task 1 of 4"),
    ],
)
@pytest.mark.parametrize("workers", [("--workers", "3"), ()])
def test_cluster_described_in_the_environment_is_left_alone(
    script, env, message, workers
):
    path = script("print(sorted(os.environ.items()))\nsys.exit(3)")
    done = run(*workers, path, env=env)
    assert done.returncode == 3
    assert done.stdout == f"{sorted(clean_env(**env).items())}\n"
    assert message in done.stderr and len(done.stderr.splitlines()) == 1
    assert ("--workers ignored" in done.stderr) == bool(workers)


def test_slurm_job_of_one_task_is_no_cluster(script):
    env = {"SLURM_PROCID": "0", "SLURM_NTASKS": "1"}
    done = run("--workers", "2", script("print(INDEX)"), env=env)
    assert sorted(done.stdout.splitlines()) == ["[0] 0", "[1] 1"]


def test_threads_are_divided_unless_the_user_sets_them(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(32))
    env = worker_env({"OMP_NUM_THREADS": "7"}, {}, {}, tasks_on_this_host=2, attempt=0)
    assert env["TF_NUM_INTRAOP_THREADS"] == env["TF_NUM_INTEROP_THREADS"] == "16"
    assert env["OMP_NUM_THREADS"] == "7" and env["TF_CPP_MIN_LOG_LEVEL"] == "2"
    env = worker_env({"TF_CPP_MIN_LOG_LEVEL": "0"}, {}, {}, 64, attempt=0)
    assert env["TF_NUM_INTRAOP_THREADS"] == "1" and env["TF_CPP_MIN_LOG_LEVEL"] == "0"
    assert int(env["TF_NUM_INTEROP_THREADS"]) >= 4
