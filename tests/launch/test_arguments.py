"""Command line of the launcher."""

import pytest

from tests.launch.processes import run

pytestmark = pytest.mark.timeout(120)


@pytest.mark.sample(5)
@pytest.mark.parametrize(
    "args, message",
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
        ("--cluster a:1,a:1 --index 0 SCRIPT", "a:1 is given twice"),
        ("--workers 2 --max-restarts -1 SCRIPT", "--max-restarts is -1"),
        ("--workers 2 --grace nan SCRIPT", "--grace is nan"),
        ("--workers 2 --network none SCRIPT", "'none'"),
        ("--cluster a:1 --index 0 --network private SCRIPT", "goes with --workers"),
        ("--workers 2 --tls x SCRIPT", "--tls goes with --cluster"),
        ("--cluster a:1 --index 0 --tls x --network host SCRIPT", "leave out --netw"),
        ("--tls x SCRIPT", "give --cluster, or set TF_CONFIG"),
    ],
)
def test_bad_input_is_an_error(script, args, message):
    path = script("print('ran')")
    done = run(*[path if arg == "SCRIPT" else arg for arg in args.split()])
    assert done.returncode == 2 and message in done.stderr and not done.stdout


def test_help_has_an_example_and_names_the_variables_it_sets():
    text = run("--help").stdout
    assert "--workers 4 train.py" in text and "TF_CPP_MIN_LOG_LEVEL=2" in text
