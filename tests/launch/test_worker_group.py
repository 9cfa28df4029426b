"""Ends of workers, signals and restarts."""

import os
import re
import signal

import pytest

from tests.launch.processes import (
    SLEEPER,
    TIMEOUT,
    assert_gone,
    clean_env,
    pids,
    pids_in,
    run,
)
from tfgradcomp.launch.signals import signal_socket
from tfgradcomp.launch.worker_group import WorkerGroup

pytestmark = pytest.mark.timeout(120)


@pytest.mark.parametrize(
    "end, code, how",
    [
        ("sys.exit(7)", 7, "exit code 7"),
        ("raise ValueError('boom')", 1, "exit code 1"),
        ("os.kill(os.getpid(), signal.SIGSEGV)", 128 + signal.SIGSEGV, "SIGSEGV"),
        ("os.kill(os.getpid(), 40)", 128 + 40, "signal 40"),
    ],
)
def test_failure_ends_all_workers_and_is_reported(script, end, code, how):
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
    assert_gone(pids_in(done.stdout))


def test_worker_that_ignores_sigterm_is_killed_with_its_children(script, tmp_path):
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
    left = pids_in(done.stdout)
    assert len(left) == 4
    assert_gone(left)


def test_exit_code_is_that_of_the_first_failure(script, tmp_path):
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


def test_worker_that_dies_before_the_loop_begins_is_a_failure(monkeypatch, capfd):
    watch = WorkerGroup._watch

    def look_late(group):
        for worker in group.workers:
            os.waitid(os.P_PID, worker.process.pid, os.WEXITED | os.WNOWAIT)
        watch(group)

    monkeypatch.setattr(WorkerGroup, "_watch", look_late)
    with signal_socket() as signals:
        group = WorkerGroup(["-c", "raise SystemExit(3)"], 5, signals)
        assert group.run({"0": clean_env()}) == 3
    assert "worker 0" in capfd.readouterr().err


def test_workers_may_end_at_different_times(script):
    path = script("time.sleep(0.3 * INDEX)\nprint('done')")
    done = run("--workers", "3", path)
    assert done.returncode == 0 and done.stdout.count("done") == 3


def test_children_of_a_worker_that_ended_are_killed(script):
    path = script("""
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        print("pid", child.pid)
    """)
    done = run("--workers", "1", path)
    assert done.returncode == 0
    assert_gone(pids_in(done.stdout))


@pytest.mark.parametrize(
    ("signum", "codes", "expected"),
    [
        (signal.SIGINT, (0, 0), 128 + signal.SIGINT),
        (signal.SIGTERM, (0, 0), 128 + signal.SIGTERM),
        (signal.SIGHUP, (0, 0), 128 + signal.SIGHUP),
        # Workers that have saved.
        (signal.SIGTERM, (79, 79), 79),
        (signal.SIGTERM, (79, 0), 128 + signal.SIGTERM),
    ],
)
def test_signals_reach_the_workers(signum, codes, expected, script, launch):
    path = script(f"""
        def note(signum, frame):
            print("got", signum)
            sys.exit({codes}[INDEX])
        signal.signal({int(signum)}, note)
        print("pid", os.getpid())
        time.sleep(600)
    """)
    process = launch("--workers", "2", "--max-restarts", "3", "--grace", "50", path)
    workers = pids(process, 2)
    process.send_signal(signum)
    out, err = process.communicate(timeout=TIMEOUT)
    assert process.returncode == expected
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
        # The warning about reachable workers comes before.
        while "SIGINT" not in process.stderr.readline():
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
    process.communicate(timeout=TIMEOUT)
    assert process.returncode == 128 + signal.SIGINT
    assert_gone(workers)


def test_workers_do_not_outlive_a_killed_launcher(script, launch):
    process = launch("--workers", "2", script(SLEEPER))
    workers = pids(process, 2)
    process.kill()
    assert_gone(workers)


def test_the_run_goes_on_when_nobody_reads_its_output(script, launch, tmp_path):
    path = script(f"""
        print("pid", os.getpid())
        while not os.path.exists({str(tmp_path / "closed")!r}): time.sleep(0.01)
        for i in range(1000): print("more", i)
        open({str(tmp_path)!r} + f"/done {{INDEX}}", "w").close()
    """)
    process = launch("--workers", "2", path)
    pids(process, 2)
    process.stdout.close()
    (tmp_path / "closed").touch()
    assert process.wait(TIMEOUT) == 0
    process.stdout = None
    assert process.stderr.read().count("stdout cannot be written (Broken pipe)") == 1
    assert (tmp_path / "done 0").exists() and (tmp_path / "done 1").exists()


def test_a_full_disk_for_the_output_does_not_end_the_run(script):
    path = script("for i in range(5): print('line', i, flush=True)")
    with open("/dev/full", "w") as full:
        done = run("--workers", "2", path, stdout=full)
    assert done.returncode == 0
    assert done.stderr.count("stdout cannot be written (No space left on device)") == 1


def test_restart_starts_all_workers_on_fresh_ports(script):
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
