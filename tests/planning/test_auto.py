"""`Auto` in `fit` and in loops of one's own, on virtual workers and real processes."""

import functools
import re

import keras
import numpy as np
import pytest

import tfgradcomp
from tests.planning import auto_cases
from tfgradcomp.planning import Decision

pytestmark = pytest.mark.timeout(600)
VIRTUAL = 2, "virtual"
CHOICES = [
    ("Adam", "low", "QSGD"),
    ("momentum", "high", "DistEFBlockSGDM"),
    pytest.param("Adam", "high", "OneBitAdam", marks=pytest.mark.slow),
    pytest.param("SGD", "high", "DistEFBlockSGD", marks=pytest.mark.slow),
]


@pytest.fixture(scope="module")
def fitted(pools):
    """Function that trains on virtual workers; returns the answer and the output."""

    @functools.cache
    def run(inner, risk):
        (answer,), output = pools(*VIRTUAL).run(auto_cases.case_fit, inner, risk)
        return answer, output

    return run


@pytest.mark.slow
@pytest.mark.parametrize("inner, risk, wrapper", CHOICES)
def test_fit_goes_on_as_with_a_new_wrapper(pools, fitted, inner, risk, wrapper):
    answer, output = fitted(inner, risk)
    decision = answer["decision"]
    by_hand = pools(*VIRTUAL).run(auto_cases.case_by_hand, inner, decision).answers
    assert [answer["digest"]] == by_hand
    assert decision["candidate"]["wrapper"] == wrapper
    assert f"tfgradcomp.{wrapper}(keras.optimizers." in output
    assert all(line in output for line in answer["explained"])
    assert answer["bits"] < 4
    if inner == "momentum":
        # The momentum has moved: a step counter and a rate are left.
        assert (answer["momentum"], answer["slots"]) == (0, 2)


def test_processes_have_the_bits_of_virtual_workers(pools, fitted):
    # Each process measures its own gradients; worker 0 decides.
    answers, output = pools(2).run(auto_cases.case_fit, "Adam", "low")
    virtual, _ = fitted("Adam", "low")
    assert answers[0]["digest"] == answers[1]["digest"] == virtual["digest"]
    assert answers[0]["decision"] == answers[1]["decision"]
    errors = [
        [row["error"] for row in answer["decision"]["rows"]]
        for answer in (answers[0], virtual)
    ]
    assert errors[0] == errors[1]
    # One of two processes logs the choice.
    assert output.count("Auto has chosen after 5 steps") == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "carrier, taken", [("auto", "TcpCollectives"), ("grpc", "Hosts")]
)
def test_a_measured_link_decides_the_same_on_all_workers(pools, carrier, taken):
    answers, _ = pools(2).run(auto_cases.case_measured, carrier)
    assert answers[0] == answers[1]
    decision, measured, trained, by_hand = answers[0]
    # Those by which the chosen method's messages travel.
    assert measured == taken
    assert decision["link"] == "measured links"
    assert 0 < decision["compute_seconds"] < 60
    # The exchanges that were timed leave no trace in the training.
    assert trained == by_hand
    timed = [row for row in decision["rows"] if row["seconds"] and not row["mark"]]
    assert decision["candidate"]["wrapper"] in {r["name"].split("(")[0] for r in timed}


@pytest.mark.slow
def test_training_goes_on_from_files_with_the_decision(pools, tmp_path):
    (answer,), _ = pools(*VIRTUAL).run(auto_cases.case_files, str(tmp_path))
    first, second, third, _ = answer["digests"]
    # The last one has taken five other steps first.
    assert first == second == third
    decision, *others = answer["decisions"]
    assert others == [decision] * 3
    assert decision["candidate"]["wrapper"] == "DistEFBlockSGDM"


def test_a_decision_from_a_file_is_taken_from_the_first_step(pools, fitted, tmp_path):
    decision = fitted("Adam", "low")[0]["decision"]
    (answer,), _ = pools(*VIRTUAL).run(auto_cases.case_pinned, str(tmp_path), decision)
    pinned, plain, is_equal = answer
    assert pinned == plain and is_equal


def test_an_own_loop_asks_for_the_decision(pools, fitted):
    (answer,), _ = pools(*VIRTUAL).run(auto_cases.case_own_loop)
    own, decision, switches = answer
    in_fit, _ = fitted("Adam", "low")
    assert own == in_fit["digest"]
    # Where link and computing time are given, runs decide the same.
    assert decision == in_fit["decision"]
    assert switches == [False] * 4 + [True] + [False] * 5


@pytest.mark.slow
def test_larger_errors_later_are_a_warning(pools):
    _, output = pools(*VIRTUAL).run(auto_cases.case_errors_later, 0.01)
    (found,) = re.findall(r"Step 10: the gradient of (\S+) has ([\d.]+) times", output)
    assert found[0] == "sequential/first/kernel" and float(found[1]) > 10
    _, output = pools(*VIRTUAL).run(auto_cases.case_errors_later, 10.0)
    assert "times the error" not in output


@pytest.mark.slow
def test_one_process_has_no_network_and_another_number_is_a_warning(pools):
    (answer,), output = pools(*VIRTUAL).run(auto_cases.case_errors)
    error, workers = answer
    assert error.startswith("The workers of one process have no network")
    assert error.endswith("Received: link=None, workers=2")
    assert workers == 3
    assert "The decision was made for 3 workers, and there are 2" in output


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"risk": "some"}, "Received: risk='some'"),
        ({"link": "fast"}, "Received: 'fast'"),
        ({"link": "1gbit 3"}, "Received: '3'"),
        ({"after": 0}, "Received: after=0"),
        ({"compute": 0.0}, "Received: compute=0.0"),
        ({"carrier": "mail"}, "Received: carrier='mail'"),
        ({"decision": "no.json"}, "Received: decision='no.json', FileNotFoundError"),
        ({"learning_rate": 0.1}, "Auto does not take"),
    ],
)
def test_wrong_arguments_raise(arguments, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        tfgradcomp.Auto("adam", **arguments)


def test_one_worker_has_nothing_to_choose():
    optimizer = tfgradcomp.Auto(keras.optimizers.SGD(0.5))
    lines = []
    optimizer.explain(lines.append)
    variable = keras.Variable(np.ones([40, 40], np.float32))
    for _ in range(3):
        optimizer.apply([np.ones([40, 40], np.float32)], [variable])
        assert not optimizer.decide()
    optimizer.explain(lines.append)
    assert [line.split(":")[0] for line in lines] == [
        "Auto chooses after 150 steps, which travel as bfloat16.",
        "One worker exchanges nothing",
    ]
    np.testing.assert_array_equal(variable.numpy(), -0.5)


def test_the_configuration_has_the_decision():
    inner = keras.optimizers.SGD(0.1)
    decision = auto_cases.tuned(workers=4, risk="medium")
    assert decision.workers == 4 and decision.link == "links of 10mbit"
    optimizer = tfgradcomp.Auto(inner, decision=decision, exclude="last", seed=3)
    again = keras.optimizers.deserialize(keras.optimizers.serialize(optimizer))
    assert again.get_config() == optimizer.get_config()
    assert again.decision == decision and isinstance(again.decision, Decision)
    # Attributes are those of the wrapper that exchanges, then of the inner optimizer.
    assert again.current.seed == 3 and again.method == again.current.method
    again.learning_rate = 0.3
    assert float(again.inner_optimizer.learning_rate) == pytest.approx(0.3)
