"""Workers and parameter servers with a chief."""

import json
import re

import pytest

from tests.launch.processes import assert_gone, run

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def folder(tmp_path):
    """A folder in which each task writes its starts."""
    path = tmp_path / "started"
    path.mkdir()
    return path


SERVING = """
TASK = CONFIG["task"]["type"]
print("got", json.dumps(CONFIG), "pid", os.getpid(), flush=True)
if TASK != "chief":
    with open(f"{sys.argv[1]}/{TASK} {INDEX}", "a") as file:
        file.write(f"started {ATTEMPT}\\n")
"""


def test_end_of_the_chief_ends_all(script, folder):
    path = script(f"""{SERVING}
if TASK != "chief":
    time.sleep(600)
while len(os.listdir(sys.argv[1])) < 3:
    time.sleep(0.02)
""")
    done = run("--workers", "2", "--ps", "1", path, str(folder))
    assert done.returncode == 0, done.stderr
    got = re.findall(r"^\[(.*)\] got (.*) pid (\d+)$", done.stdout, re.M)
    configs = {label: json.loads(config) for label, config, _ in got}
    assert configs.keys() == {"chief", "worker 0", "worker 1", "ps 0"}
    for label, config in configs.items():
        task = config["task"]
        assert f"{task['type']} {task['index']}".startswith(label)
    clusters = [config["cluster"] for config in configs.values()]
    assert all(cluster == clusters[0] for cluster in clusters)
    sizes = {job: len(addresses) for job, addresses in clusters[0].items()}
    assert sizes == {"chief": 1, "worker": 2, "ps": 1}
    assert_gone([int(pid) for _, _, pid in got])


def test_worker_that_dies_is_restarted_alone(script, folder):
    path = script(f"""{SERVING}
name = f"{{sys.argv[1]}}/worker 1"
if TASK == "worker" and INDEX == 1:
    if len(open(name).readlines()) < 2:
        os.kill(os.getpid(), signal.SIGKILL)
if TASK == "ps":
    sys.exit(3)
while TASK != "chief":
    time.sleep(600)
while len(os.listdir(sys.argv[1])) < 3 or len(open(name).readlines()) < 2:
    time.sleep(0.02)
sys.exit(7)
""")
    options = "--workers", "2", "--ps", "1", "--max-restarts", "1"
    done = run(*options, path, str(folder))
    # The exit code is the chief's, although a parameter server failed.
    assert done.returncode == 7, done.stderr
    assert re.search(r"worker 1 \(pid \d+\) died: SIGKILL; restarting it", done.stderr)
    assert (folder / "worker 0").read_text() == "started 0\n"
    assert (folder / "worker 1").read_text() == "started 0\nstarted 1\n"
