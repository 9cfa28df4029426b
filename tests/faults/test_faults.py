"""Workers that die or stop in any phase of a training that starts again."""

import pytest

from tests.faults import program, runs

SIGNALS = ("SIGKILL", "SIGSTOP")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def check(run, whole, phase):
    """The worker was named, and what came of the second attempt is the same."""
    assert run.attempts == 2, run.output
    assert run.said[0], run.output
    for answer, expected in zip(run.answers, whole.answers, strict=True):
        assert answer["digest"] == expected["digest"]
        assert answer["residuals"] == expected["residuals"]
        first = 0 if phase == "trace" else program.EPOCH
        assert answer["epochs"] == [*range(first, program.EPOCHS)]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return runs.run(tmp_path_factory.mktemp("whole"))


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("phase", program.PHASES)
@pytest.mark.parametrize("name", SIGNALS)
def test_training_goes_on_after_a_restart(name, phase, rank, whole, tmp_path):
    check(runs.run(tmp_path, name, phase, rank), whole, phase)
