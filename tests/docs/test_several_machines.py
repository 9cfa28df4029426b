"""What docs/several-machines.md says of Slurm, Kubernetes and Ray.

Slurm and Kubernetes are played by small scripts in front of the path; Ray is real.
"""

import json
import os
import re
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from tests.docs.test_code_blocks import blocks_of
from tfgradcomp.launch.arguments import parse

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs/several-machines.md").read_text()
CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
SCONTROL = """
case "$1" in
  show) printf 'alpha\\nbeta\\n' ;;
  requeue) echo "requeued $2" ;;
esac
"""
# Starts the command once for each of four tasks, as srun does.
SRUN = """
shift
for rank in 0 1 2 3; do SLURM_PROCID=$rank "$@" || code=$?; done
exit ${code:-0}
"""


@pytest.fixture
def play(tmp_path):
    """Returns a function that runs a script with commands that are played."""

    def run(script, commands, **environment):
        for name, body in commands.items():
            path = tmp_path / name
            path.write_text(f"#!/bin/bash\n{body}\n")
            path.chmod(0o755)
        path = f"{tmp_path}:{os.environ['PATH']}"
        return subprocess.run(
            ["bash", "-c", script],
            env={**os.environ, "PATH": path, **environment},
            capture_output=True,
            text=True,
            timeout=60,
        )

    return run


@pytest.mark.parametrize("code", [0, 1, 79])
def test_the_batch_script_tells_each_task_its_place(play, code):
    script = re.search(r"```sh\n(#!/bin/bash\n.*?)```", TEXT, re.S)[1]
    commands = {"scontrol": SCONTROL, "srun": SRUN}
    commands["python"] = f'echo "$1 $TF_CONFIG"; exit {code}'
    job = {"SLURM_JOB_ID": "70007", "SLURM_NTASKS_PER_NODE": "2"}
    done = play(script, commands, SLURM_JOB_NODELIST="?", **job)
    assert done.returncode == code and done.stderr == ""
    *tasks, last = done.stdout.splitlines()
    assert (last == "requeued 70007") == (code == 79)
    if code != 79:
        tasks.append(last)
    hosts = ["alpha:20007", "alpha:20008", "beta:20009", "beta:20010"]
    assert len(tasks) == len(hosts)
    for rank, line in enumerate(tasks):
        program, _, config = line.partition(" ")
        assert program == "train.py"
        assert json.loads(config) == {
            "cluster": {"worker": hosts},
            "task": {"type": "worker", "index": rank},
        }


def test_the_pods_command_starts_the_launcher_of_its_place(play, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    command = re.search(r"    args:\n      - \|\n(.*?)```", TEXT, re.S)[1]
    pod = {"JOB": "digits", "WORKERS": "4", "JOB_COMPLETION_INDEX": "2"}
    done = play(command, {"tfgradcomp-launch": 'printf "%s\\n" "$@"'}, **pod)
    assert done.returncode == 0 and done.stderr == ""
    options = parse(done.stdout.splitlines())
    assert options.cluster == [f"digits-node-0-{pod}.digits:4000" for pod in range(4)]
    assert options.index == 2 and options.command == ["train.py"]
    assert options.max_restarts == 10
    grace = re.search(r"mlPolicy.*?terminationGracePeriodSeconds: (\d+)", TEXT, re.S)
    assert options.grace < int(grace[1])


@pytest.fixture(scope="module")
def ray_python():
    """The Python of an environment that has Ray, and the packages of this one."""
    folder = CACHE / "tfgradcomp/ray"
    python = folder / "bin/python"
    if not (folder / "complete").exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
        pip = [python, "-m", "pip", "install", "-q", "ray[train]>=2.60,<3"]
        done = subprocess.run(pip, capture_output=True, text=True, timeout=280)
        if done.returncode:
            pytest.skip(f"pip cannot install Ray from PyPI: {done.stderr[-200:]}")
        packages = sysconfig.get_path("purelib", vars={"base": str(folder)})
        Path(packages, "zz_project.pth").write_text(sysconfig.get_path("purelib"))
        (folder / "complete").touch()
    return python


@pytest.mark.slow
def test_rays_trainer_trains_as_the_document_says(ray_python, tmp_path):
    (code,) = [block for _, block in blocks_of(TEXT) if "TensorflowTrainer" in block]
    start = "import ray\nray.init(num_cpus=2, include_dashboard=False)\n"
    (tmp_path / "train.py").write_text(start + code)
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "HOME": str(tmp_path),  # Ray's results.
        "XDG_CACHE_HOME": str(CACHE),
        "RAY_DEDUP_LOGS": "0",
    }
    done = subprocess.run(
        [ray_python, "train.py"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    weights = re.findall(r"worker ([01]): weights (\S+)", done.stdout)
    assert sorted(rank for rank, _ in weights) == ["0", "1"]
    assert len({value for _, value in weights}) == 1
    accuracy, folder = re.search(
        r"^(0\.\d+) Checkpoint\(.*path=(.*)\)$", done.stdout, re.M
    ).groups()
    assert float(accuracy) > 0.85
    assert Path(folder, "model.keras").exists()
