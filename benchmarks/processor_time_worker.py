"""One worker of `processor_time.py`: takes steps while perf looks at this process.

    TF_CONFIG=... python benchmarks/processor_time_worker.py FOLDER

Reads FOLDER/task.json and writes FOLDER/answer-RANK.json.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from worker import WARM_UP, Bench, make_strategy, prepare

# Looks a second. A prime: nothing that comes back each millisecond is always seen.
FREQUENCY = 499


def samples_of(data: Path) -> dict[str, int]:
    """Returns the number of samples of a recording by the file that they were in."""
    command = ["perf", "report", "--input", str(data), "--stdio", "--sort", "dso"]
    command += ["--fields", "sample,dso", "--field-separator", ";"]
    # No symbols: to read those of TensorFlow takes half a minute.
    command += ["--symfs", str(data.parent), "--kallsyms", "/dev/null"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    lines = (line.strip() for line in done.stdout.splitlines())
    pairs = (line.split(";") for line in lines if line and not line.startswith("#"))
    return {file.strip(): int(number) for number, file in pairs}


def main(folder: Path) -> None:
    """Measures what the task asks for."""
    task = json.loads((folder / "task.json").read_text())
    strategy = make_strategy()
    rank = strategy.cluster_resolver.task_id
    bench = Bench(strategy, task["workload"])
    transport = None if task["method"] == "float32" else "auto"
    variant = {"name": task["method"], "transport": transport}
    answer, step = prepare(bench, variant)
    if step is None:
        raise SystemExit(answer["error"])
    for _ in range(WARM_UP):
        step()
    data = folder / f"perf-{rank}.data"
    command = ["perf", "record", "--freq", str(FREQUENCY), "--output", str(data)]
    recorder = subprocess.Popen(
        [*command, "--pid", str(os.getpid())],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    # It attaches to a hundred threads.
    time.sleep(2)
    seconds, busy = [], []
    for _ in range(task["rounds"]):
        bench.barrier()
        begin, began_busy = time.perf_counter(), time.process_time()
        step()
        seconds.append(time.perf_counter() - begin)
        bench.barrier()
        busy.append(time.process_time() - began_busy)
    recorder.send_signal(signal.SIGINT)
    recorder.wait(60)
    answer = {"seconds": seconds, "busy": busy, "samples": samples_of(data)}
    (folder / f"answer-{rank}.json").write_text(json.dumps(answer))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
