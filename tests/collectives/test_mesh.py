"""Messages between processes, without TensorFlow, under sanitizers."""

import shutil
import subprocess
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent
FLAGS = ["-std=c++17", "-g1", "-O1", "-Wall", "-Werror", "-lpthread"]

pytestmark = pytest.mark.skipif(
    shutil.which("g++") is None, reason="There is no g++ in PATH."
)


@pytest.mark.slow
@pytest.mark.parametrize("sanitizer", ["address,undefined", "thread"])
def test_messages_arrive_in_any_order_and_an_end_is_told(sanitizer, tmp_path):
    program = tmp_path / "mesh"
    flags = [f"-fsanitize={sanitizer}", "-fno-sanitize-recover=all"]
    command = ["g++", FOLDER / "mesh.cc", "-o", program, *FLAGS, *flags]
    built = subprocess.run(command, capture_output=True, text=True)
    if "cannot find" in built.stderr:
        pytest.skip("This g++ has no such sanitizer.")
    assert built.returncode == 0, built.stderr[:3000]
    # The kernel draws addresses from a range too wide for ThreadSanitizer.
    prefix = ["setarch", "-R"] if sanitizer == "thread" else []
    done = subprocess.run(
        [*prefix, program], capture_output=True, text=True, timeout=250
    )
    assert done.returncode == 0, done.stdout + done.stderr[-5000:]


def test_the_receive_window_follows_the_rate_of_the_link(tmp_path):
    program = tmp_path / "receive_window"
    source = FOLDER / "receive_window.cc"
    subprocess.run(["g++", source, "-o", program, *FLAGS], check=True)

    def limits(packet):
        """Returns the limits at 8 MB/s, and at the rate of the machine's memory."""
        command = [program, str(packet)]
        done = subprocess.run(
            command, capture_output=True, text=True, check=True, timeout=60
        )
        return map(int, done.stdout.split())

    slow, quick = limits(1448)
    # What takes 5 ms and a round trip, 40 kB; less if the sender waits for a core, and
    # not the least window.
    assert 16_384 < slow <= 60_000
    assert quick == 2**30
    # Windows hold some packets, be they as large as those inside a machine.
    slow, quick = limits(65483)
    assert slow > 40_000
    assert quick > 40_000
