"""The launcher, run as users run it: as a process of its own."""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
import time

import pytest

from tfgradcomp.launch import launcher as launch as module
from tfgradcomp.launch.launcher import LineCutter, reserve_ports, worker_env

LAUNCH = [sys.executable, "-m", "tfgradcomp.launch"]
TIMEOUT = 60
OURS = re.compile("TF_|SLURM_|OMP_|TFGRADCOMP_|PYTHONUNBUFFERED")
SLEEPER = "import os, time\nprint('pid', os.getpid())\ntime.sleep(600)"

pytestmark = pytest.mark.timeout(120)


def clean_env(**extra):
    env = {name: value for name, value in os.environ.items() if not OURS.match(name)}
    return {**env, **extra}


@pytest.fixture
def script(tmp_path):
    """Write a worker script; INDEX and ATTEMPT are there for it."""

    def write(body, name="worker.py"):
        head = """\
            import json, os, signal, subprocess, sys, time
            CONFIG = json.loads(os.environ.get("TF_CONFIG") or "{}")
            INDEX = CONFIG.get("task", {}).get("index")
            ATTEMPT = os.environ.get("TFGRADCOMP_RESTART_COUNT")
        """
        path = tmp_path / name
        path.write_text(textwrap.dedent(head) + textwrap.dedent(body))
        return str(path)

    return write


@pytest.fixture
def launch():
    """Start a launcher; whatever it printed as `pid N` is killed at the end."""
    started = []

    def start(*args, env=None, **options):
        process = subprocess.Popen(
            [*LAUNCH, *args],
            env=clean_env(**(env or {})),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            **options,
        )
        process.pids = []
        started.append(process)
        return process

    yield start
    for process in started:
        if process.poll() is None:
            # Takes the workers with it: see test_workers_do_not_outlive_...
            process.kill()
        process.communicate()
        for pid in process.pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def run(*args, env=None):
    return subprocess.run(
        [*LAUNCH, *args],
        env=clean_env(**(env or {})),
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
    )


def pids(process, count):
    """Read output until `count` processes have printed their ids."""
    while len(process.pids) < count:
        line = process.stdout.readline()
        assert line, process.stderr.read()
        process.pids += [int(pid) for pid in re.findall(r"pid (\d+)", line)]
    return process.pids


def alive(pid):
    """Say whether a process still runs; a zombie does not."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def assert_gone(pids):
    deadline = time.monotonic() + TIMEOUT
    while left := [pid for pid in pids if alive(pid)]:
        assert time.monotonic() < deadline, f"still running: {left}"
        time.sleep(0.02)


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


def test_runs_a_module(tmp_path, script):
    script("print('module', __name__, sys.argv[1:])", name="a_module.py")
    done = run("--workers", "2", "-m", "a_module", "x", env={"PYTHONPATH": tmp_path})
    assert done.returncode == 0, done.stderr
    lines = sorted(done.stdout.splitlines())
    assert lines == [f"[{i}] module __main__ ['x']" for i in (0, 1)]


def test_every_line_has_a_prefix_and_is_whole(script):
    path = script("""
        for i in range(200):
            print("out", "x" * i, end=""); print("", i)
            print("err", "y" * i, i, file=sys.stderr)
        print("unfinished", end="")
    """)
    done = run("--workers", "3", path)
    out, err = done.stdout.splitlines(), done.stderr.splitlines()
    assert len(out) == 3 * 201 and len(err) == 3 * 200
    assert all(re.fullmatch(r"\[\d\] (out x* \d+|unfinished)", line) for line in out)
    assert all(re.fullmatch(r"\[\d\] err y* \d+", line) for line in err)


def test_output_comes_without_buffering(script, launch):
    process = launch("--workers", "1", script(SLEEPER))
    assert alive(pids(process, 1)[0])


@pytest.mark.parametrize("size", [1, 2, 3, 1000])
@pytest.mark.parametrize(
    "data, lines",
    [
        (b"a\nb\n\nc", [b"a", b"b", b"", b"c"]),
        (b"a\r\n\r\nb\r\n", [b"a", b"", b"b"]),
        (b"\r1/2\r2/2\nend\n", [b"1/2", b"2/2", b"end"]),
        # What Keras writes: it goes back over the old text, then writes the new.
        (b"\r1/2 ..\x08\x08\x08\x08\x08\x08\r2/2 --\n", [b"1/2 ..", b"2/2 --"]),
        (b"ab\x08\x08\x08   \x08\x08\x08cd\x08\x08\n", [b"ab", b"cd"]),
    ],
)
def test_lines_are_cut_where_they_end(data, lines, size):
    cutter, got = LineCutter(), []
    for start in range(0, len(data), size):
        got += cutter.feed(data[start : start + size])
    assert got + cutter.close() == lines


@pytest.mark.parametrize(
    "end, code, how",
    [
        ("sys.exit(7)", 7, "exit code 7"),
        ("raise ValueError('boom')", 1, "exit code 1"),
        ("os.kill(os.getpid(), signal.SIGSEGV)", 128 + signal.SIGSEGV, "SIGSEGV"),
        ("os.kill(os.getpid(), 40)", 128 + 40, "signal 40"),
    ],
)
def test_a_failure_ends_all_and_names_the_culprit(script, end, code, how):
    path = script(f"""
        if INDEX == 1:
            for i in range(50): print("line", i)
            {end}
        print("pid", os.getpid())
        time.sleep(600)
    """)
    done = run("--workers", "3", path)
    assert done.returncode == code
    last = done.stderr[done.stderr.index("its last lines") :]
    assert "[1] line 49\n" in last and "[1] line 29\n" not in last
    assert len(last.splitlines()) == 21
    assert re.search(rf"worker 1 \(pid \d+\) died: {how}; its last", done.stderr)
    assert_gone(map(int, re.findall(r"pid (\d+)", done.stdout)))


def test_a_worker_that_ignores_sigterm_is_killed_with_all_it_started(script, tmp_path):
    path = script(f"""
        if INDEX == 1:
            while len(os.listdir({str(tmp_path / "ready")!r})) < 2: time.sleep(0.01)
            sys.exit(3)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        print("pid", os.getpid(), "pid", child.pid)
        open({str(tmp_path / "ready")!r} + f"/{{INDEX}}", "w").close()
        time.sleep(600)
    """)
    (tmp_path / "ready").mkdir()
    done = run("--workers", "3", "--grace", "0.3", path)
    assert done.returncode == 3
    left = [int(pid) for pid in re.findall(r"pid (\d+)", done.stdout)]
    assert len(left) == 4
    assert_gone(left)


def test_the_first_to_fail_is_the_culprit(script, tmp_path):
    flag = str(tmp_path / "flag")
    path = script(f"""
        if INDEX == 2:
            while not all(map(os.path.exists, [{flag!r} + "0", {flag!r} + "1"])):
                time.sleep(0.01)
            sys.exit(5)
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(9))
        open({flag!r} + str(INDEX), "w").close()
        time.sleep(600)
    """)
    done = run("--workers", "3", "--grace", "50", path)
    assert done.returncode == 5 and "worker 2" in done.stderr


def test_a_death_before_the_first_look_is_a_failure(monkeypatch, capfd):
    watch = module._Group._watch

    def look_late(group):
        for worker in group.workers:
            os.waitid(os.P_PID, worker.process.pid, os.WEXITED | os.WNOWAIT)
        watch(group)

    monkeypatch.setattr(module._Group, "_watch", look_late)
    with module._signal_socket() as signals:
        group = module._Group(5, signals)
        assert group.run(["-c", "raise SystemExit(3)"], {0: clean_env()}) == 3
    assert "worker 0" in capfd.readouterr().err


def test_workers_may_end_at_different_times(script):
    path = script("time.sleep(0.3 * INDEX)\nprint('done')")
    done = run("--workers", "3", path)
    assert done.returncode == 0 and done.stdout.count("done") == 3


def test_what_a_worker_left_behind_is_ended(script):
    path = script("""
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        print("pid", child.pid)
    """)
    done = run("--workers", "1", path)
    assert done.returncode == 0
    assert_gone(map(int, re.findall(r"pid (\d+)", done.stdout)))


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signals_reach_the_workers(script, launch, signum):
    path = script(f"""
        def note(signum, frame):
            print("got", signum)
            sys.exit(0)
        signal.signal({int(signum)}, note)
        print("pid", os.getpid())
        time.sleep(600)
    """)
    process = launch("--workers", "2", "--max-restarts", "3", "--grace", "50", path)
    workers = pids(process, 2)
    process.send_signal(signum)
    out, err = process.communicate(timeout=TIMEOUT)
    assert process.returncode == 128 + signum
    assert out.count(f"got {int(signum)}") == 2 and "restart" not in err
    assert_gone(workers)


@pytest.mark.parametrize("grace, presses", [("0.3", 1), ("500", 2)])
def test_workers_that_ignore_signals_are_killed(script, launch, grace, presses):
    path = script(f"""
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        {SLEEPER.replace(chr(10), "; ")}
    """)
    process = launch("--workers", "2", "--grace", grace, path)
    workers = pids(process, 2)
    process.send_signal(signal.SIGINT)
    if presses == 2:
        assert "SIGINT" in process.stderr.readline()
        process.send_signal(signal.SIGINT)
    process.communicate(timeout=TIMEOUT)
    assert process.returncode == 128 + signal.SIGINT
    assert_gone(workers)


def test_workers_do_not_outlive_a_launcher_that_was_killed(script, launch):
    process = launch("--workers", "2", script(SLEEPER))
    workers = pids(process, 2)
    process.kill()
    assert_gone(workers)


def test_the_run_ends_when_nobody_reads_its_output(script, launch):
    path = script(SLEEPER.replace("time.sleep(600)", "while True: print('more')"))
    process = launch("--workers", "2", path)
    workers = pids(process, 2)
    process.stdout.close()
    assert process.wait(TIMEOUT) == 128 + signal.SIGPIPE
    process.stdout = None
    assert_gone(workers)


def test_a_restart_starts_all_anew_on_fresh_ports(script):
    path = script("""
        print("attempt", ATTEMPT, *CONFIG["cluster"]["worker"])
        if ATTEMPT == "0":
            time.sleep(600 if INDEX else 0.5)
            sys.exit(4)
    """)
    done = run("--workers", "2", "--max-restarts", "2", path)
    assert done.returncode == 0
    first, second = (
        set(re.findall(rf"\[.\] attempt {n} (.*)", done.stdout)) for n in "01"
    )
    assert len(first) == len(second) == 1
    assert set(first.pop().split()).isdisjoint(second.pop().split())
    assert done.stderr.count("launch: restart") == 1
    assert "restart 1 of 2" in done.stderr


def test_restarts_run_out(script):
    done = run("--workers", "2", "--max-restarts", "2", script("sys.exit(8)"))
    assert done.returncode == 8
    assert done.stderr.count("launch: restart") == 2


def test_a_cluster_over_several_hosts_starts_one_worker_here(script):
    path = script("print(json.dumps(CONFIG))")
    done = run("--cluster", "a:1, 10.0.0.2:65535,[::1]:4000", "--index", "1", path)
    assert done.returncode == 0, done.stderr
    prefix, _, config = done.stdout.partition(" ")
    assert prefix == "[1]" and json.loads(config) == {
        "cluster": {"worker": ["a:1", "10.0.0.2:65535", "[::1]:4000"]},
        "task": {"type": "worker", "index": 1},
    }


SLURM = {"SLURM_PROCID": "1", "SLURM_NTASKS": "4"}


@pytest.mark.parametrize(
    "env, says",
    [
        ({"TF_CONFIG": '{"task": {"index": 5}}'}, "TF_CONFIG is set"),
        (SLURM, "Slurm started this as task 1 of 4"),
    ],
)
@pytest.mark.parametrize("workers", [("--workers", "3"), ()])
def test_a_cluster_described_elsewhere_is_left_alone(script, env, says, workers):
    path = script("print(sorted(os.environ.items()))\nsys.exit(3)")
    done = run(*workers, path, env=env)
    assert done.returncode == 3
    assert done.stdout == f"{sorted(clean_env(**env).items())}\n"
    assert says in done.stderr and len(done.stderr.splitlines()) == 1
    assert ("--workers ignored" in done.stderr) == bool(workers)


SERVING = """
TASK = CONFIG["task"]["type"]
print("got", json.dumps(CONFIG), "pid", os.getpid(), flush=True)
if TASK != "chief":
    with open(f"{sys.argv[1]}/{TASK} {INDEX}", "a") as file:
        file.write("started\\n")
"""


def test_with_servers_the_chief_decides_when_all_end(script, tmp_path):
    path = script(f"""{SERVING}
if TASK != "chief":
    time.sleep(600)
while len(os.listdir(sys.argv[1])) < 3:
    time.sleep(0.02)
""")
    folder = tmp_path / "started"
    folder.mkdir()
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


def test_with_servers_a_worker_is_started_anew_alone(script, tmp_path):
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
    folder = tmp_path / "started"
    folder.mkdir()
    done = run(
        *("--workers", "2", "--ps", "1", "--max-restarts", "1", path, str(folder))
    )
    # The code is the chief's, whatever befell the others.
    assert done.returncode == 7, done.stderr
    assert re.search(
        r"worker 1 \(pid \d+\) died: SIGKILL; starting it anew", done.stderr
    )
    assert (folder / "worker 0").read_text() == "started\n"


def test_a_slurm_job_of_one_task_is_no_cluster(script):
    env = {"SLURM_PROCID": "0", "SLURM_NTASKS": "1"}
    done = run("--workers", "2", script("print(INDEX)"), env=env)
    assert sorted(done.stdout.splitlines()) == ["[0] 0", "[1] 1"]


def test_threads_are_shared_out_and_the_user_has_the_last_word(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(32))
    env = worker_env({"OMP_NUM_THREADS": "7"}, {}, {}, on_this_host=2, attempt=0)
    assert env["TF_NUM_INTRAOP_THREADS"] == env["TF_NUM_INTEROP_THREADS"] == "16"
    assert env["OMP_NUM_THREADS"] == "7" and env["TF_CPP_MIN_LOG_LEVEL"] == "2"
    env = worker_env({"TF_CPP_MIN_LOG_LEVEL": "0"}, {}, {}, 64, attempt=0)
    assert env["TF_NUM_INTRAOP_THREADS"] == "1" and env["TF_CPP_MIN_LOG_LEVEL"] == "0"
    assert int(env["TF_NUM_INTEROP_THREADS"]) >= 4


def test_launchers_at_once_get_different_ports(script, launch):
    path = script("""
        print(*CONFIG["cluster"]["worker"], "pid", os.getpid())
        time.sleep(600)
    """)
    seen = []
    for process in [launch("--workers", "1", path) for _ in range(4)]:
        line = process.stdout.readline()
        process.pids += [int(line.split()[-1])]
        seen.append(line.split()[1])
    assert len(set(seen)) == 4


def test_a_reserved_port_is_given_once_and_a_served_one_never(monkeypatch):
    monkeypatch.setattr("random.sample", lambda ports, count: ports[:3])
    first = reserve_ports(1)
    port = first[0].getsockname()[1]
    second = reserve_ports(1)
    assert second[0].getsockname()[1] != port
    first[0].close()
    with socket.create_server(("", port)):
        third = reserve_ports(1)
        assert third[0].getsockname()[1] not in (port, second[0].getsockname()[1])
        with pytest.raises(RuntimeError, match="3 workers need 3: end other"):
            reserve_ports(3)
    second[0].close()
    third[0].close()


@pytest.mark.parametrize(
    "args, says",
    [
        ("--workers 2", "no script given"),
        ("--workers 2 -m", "no script given"),
        ("--workers 2 not/there.py", "'not/there.py' does not exist"),
        ("--workers 0 SCRIPT", "--workers is 0: give 1 or more"),
        ("--workers two SCRIPT", "'two'"),
        ("SCRIPT", "no workers given"),
        ("--workers 2 --cluster a:1 --index 0 SCRIPT", "exclude each other"),
        ("--cluster a:1,b:2 SCRIPT", "--cluster and --index belong together"),
        ("--workers 2 --index 0 SCRIPT", "--cluster and --index belong together"),
        ("--cluster a:1,b:2 --index 2 SCRIPT", "give 0 to 1"),
        ("--cluster a:1,b:2 --index -1 SCRIPT", "give 0 to 1"),
        ("--cluster a:1,b --index 0 SCRIPT", "'b' is not HOST:PORT"),
        ("--cluster a:1,b:0 --index 0 SCRIPT", "'b:0' is not HOST:PORT"),
        ("--cluster a:1,b:65536 --index 0 SCRIPT", "'b:65536' is not HOST:PORT"),
        ("--cluster ::1:4 --index 0 SCRIPT", "'::1:4' is not HOST:PORT"),
        ("--cluster a:1,a:1 --index 0 SCRIPT", "a:1 is there twice"),
        ("--workers 2 --max-restarts -1 SCRIPT", "--max-restarts is -1"),
        ("--workers 2 --grace nan SCRIPT", "--grace is nan"),
    ],
)
def test_bad_input_is_refused(script, args, says):
    path = script("print('ran')")
    done = run(*[path if arg == "SCRIPT" else arg for arg in args.split()])
    assert done.returncode == 2 and says in done.stderr and not done.stdout


def test_help_has_an_example_and_names_what_is_set():
    text = run("--help").stdout
    assert "--workers 4 train.py" in text and "TF_CPP_MIN_LOG_LEVEL=2" in text


@pytest.mark.parametrize("tool", ["launch", "reshard"])
def test_the_tools_do_not_import_tensorflow(tool):
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", f"tfgradcomp.{tool}", "--help"],
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
    )
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert f"tfgradcomp.distribute.{tool}" in imported
    assert not {"tensorflow", "keras"} & imported


REAL = """
    import tensorflow as tf
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    def replica():
        value = tf.constant([1.0, 10.0]) * (INDEX + 1)
        return tf.distribute.get_replica_context().all_reduce("SUM", value)
    reduced = tf.function(lambda: strategy.run(replica))
    print("sum", reduced().numpy().tolist())
"""


@pytest.mark.timeout(300)
def test_tensorflow_workers_meet_and_sum(script, launch):
    process = launch("--workers", "2", script(REAL), env={"CUDA_VISIBLE_DEVICES": ""})
    out, err = process.communicate(timeout=240)
    assert process.returncode == 0, err
    assert sorted(re.findall(r"\[.\] sum .*", out)) == [
        "[0] sum [3.0, 30.0]",
        "[1] sum [3.0, 30.0]",
    ]
