"""Steps that travel as float32, beside NumPy."""

import numpy as np
import pytest

import tfgradcomp
from tests import reference
from tests.methods import ROWS
from tests.optimizers.trajectories import MIXED, RATES, SEED, Run, sgd
from tfgradcomp.transports.all_gather import AllGather
from tfgradcomp.transports.all_reduce import AllReduce
from tfgradcomp.transports.sharded import Sharded

# The first three steps, then the 4th, the 8th and the 12th.
FLOAT = {"warmup_steps": 3, "dense_every": 4}
SPLITS = np.cumsum([0, *(int(np.prod(shape)) for shape in MIXED)]).tolist()
RESIDUALS = ["compressed.worker.residual", "compressed.server.residual"]


def run_of(name, workers, transport, watch=(), moments=False, **arguments):
    def make(transport):
        given = {"seed": SEED, "min_size": 1, **FLOAT, **arguments}
        return ROWS[name].make(sgd(), transport=transport, **given)

    return Run(make, workers, MIXED, transport, RATES, watch, moments)


def is_uncompressed(name, step):
    # The warm-up of Signum is its own: it sends the sign of the gradient.
    return step % 4 == 3 or (step < 3 and ROWS[name].wrapper != "Signum")


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("name", "workers", "transport"),
    [
        ("DistEFBlockSGDM", 2, AllGather),
        ("DistEFBlockSGDM", 3, Sharded),
        ("TernGrad", 2, AllReduce),
        ("TernGrad", 3, AllGather),
        ("Signum", 3, AllGather),
        ("Signum, mean of signs", 2, AllGather),
    ],
)
def test_residuals_wait_and_momenta_continue(name, workers, transport):
    watch = RESIDUALS if ROWS[name].server_state else ()
    run = run_of(name, workers, transport, watch)
    rule = reference.Workers(run.optimizers[0].method, workers, SPLITS, SEED)

    def update_of(step, *given):
        return rule.update(step, *given, is_uncompressed(name, step))

    run.follows(update_of, atol=2e-6 if "Signum" in name else 1e-5)
    for step, watched in enumerate(run.watched):
        # The 5th step has no rate, so the 6th is the first that leaves a residual.
        has_residual = [np.any(residual) for own in watched for residual in own]
        assert has_residual == [step > 4] * len(has_residual), step


def test_shards_give_the_bits_of_a_gather():
    runs = [run_of("DistEFBlockSGDM", 3, each) for each in (AllGather, Sharded)]
    assert runs[0].weights.tobytes() == runs[1].weights.tobytes()


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ["VarianceBased", "Strom", "Hybrid, gaps"])
def test_sparse_methods_wait(name):
    arguments = {
        "VarianceBased": {"alpha": 1.2, "zeta": 0.9},
        "Strom": {"threshold": 1.5},
        "Hybrid, gaps": {"threshold": 1.5, "alpha": 1.2, "zeta": 0.9},
    }[name]
    run = run_of(name, 2, AllGather, moments=name != "Strom", **arguments)
    late = reference.Late(run.moments, SPLITS, **arguments)

    def update_of(step, gradients, weights, rate):
        if is_uncompressed(name, step):
            return gradients.mean(0)
        return late.update(step, gradients, weights, rate)

    run.follows(update_of, atol=1e-5)
    # The traffic is that of the other steps.
    sent = np.mean([optimizer.traffic.elements_sent for optimizer in run.optimizers])
    assert sent == pytest.approx(np.mean(late.sent))


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"warmup_steps": -1}, "warmup_steps must be an integer, at least 0"),
        ({"dense_every": 0}, "dense_every must be an integer, at least 1"),
    ],
)
def test_steps_out_of_range_raise(arguments, text):
    with pytest.raises(ValueError, match=f"{text}.*Received: "):
        tfgradcomp.TernGrad("sgd", **arguments)
