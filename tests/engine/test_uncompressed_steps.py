"""Steps that travel as float32, beside NumPy."""

import keras
import numpy as np
import pytest

import tfgradcomp
from tests import reference
from tests.helpers import Rates
from tests.optimizers.test_trajectories_of_quantizers import Late
from tests.optimizers.trajectories import MIXED, SEED, Run
from tfgradcomp.transports.all_gather import AllGather
from tfgradcomp.transports.all_reduce import AllReduce
from tfgradcomp.transports.sharded import Sharded

RATES = [0.1, 0.1, 0.05, 0.05, 0.0, 0.05, 0.2, 0.1, 0.0, 0.1, 0.02, 0.04]
# The first three steps, then the 4th, the 8th and the 12th.
FLOAT = {"warmup_steps": 3, "dense_every": 4}
IN_FLOAT = [0, 1, 2, 3, 7, 11]
SPLITS = np.cumsum([0, *(int(np.prod(shape)) for shape in MIXED)]).tolist()


def run_of(wrapper, workers, transport, watch=(), moments=False, **arguments):
    def make(transport):
        inner = keras.optimizers.SGD(Rates(RATES))
        return wrapper(inner, transport=transport, min_size=1, **{**FLOAT, **arguments})

    return Run(make, workers, MIXED, transport, RATES, watch, moments)


@pytest.mark.parametrize(
    ("workers", "transport"), [(2, AllGather), (3, AllGather), (2, Sharded)]
)
def test_what_is_owed_waits(workers, transport):
    run = run_of(
        tfgradcomp.DistEFBlockSGDM,
        workers,
        transport,
        watch=["compressed.worker.residual", "compressed.server.residual"],
        momentum=0.7,
    )
    rule = reference.DistEF(
        lambda v: reference.scaled_sign(v, SPLITS), workers, SPLITS[-1], 0.7
    )

    def update_of(step, gradients, weights, rate):
        if step not in IN_FLOAT:
            return rule.update(gradients, weights, rate)
        # What is owed stays in units of the rate at which it was left.
        rule.m = 0.7 * rule.m + gradients
        return (0.7 * rule.m + gradients).mean(0)

    run.follows(update_of, atol=1e-5)
    for step, watched in enumerate(run.watched):
        # The 5th step has no rate, so the 6th is the first that owes something.
        owes = [np.any(residual) for own in watched for residual in own]
        assert owes == [step > 4] * len(owes), step


def test_shards_give_the_bits_of_a_gather():
    runs = [
        run_of(tfgradcomp.DistEFBlockSGDM, 3, transport, weight_decay=0.01)
        for transport in (AllGather, Sharded)
    ]
    assert runs[0].weights.tobytes() == runs[1].weights.tobytes()


@pytest.mark.parametrize("workers", [2, 3])
@pytest.mark.parametrize("transport", [AllGather, AllReduce])
def test_terngrad_sends_the_mean_gradient(workers, transport):
    run = run_of(tfgradcomp.TernGrad, workers, transport, seed=SEED)

    def update_of(step, gradients, weights, rate):
        if step in IN_FLOAT:
            return gradients.mean(0)
        clipped = np.stack([reference.clip(g, SPLITS) for g in gradients])
        scale = np.max([reference.largest(g, SPLITS) for g in clipped], 0)
        codes = [
            reference.ternary_codes(g, scale, SPLITS, SEED, step, rank)
            for rank, g in enumerate(clipped)
        ]
        return np.mean(codes, 0) * reference.spread(scale, SPLITS)

    run.follows(update_of, atol=1e-5)


@pytest.mark.parametrize("workers", [2, 3])
@pytest.mark.parametrize("aggregate", ["vote", "mean"])
def test_signum_keeps_its_momentum_running(workers, aggregate):
    run = run_of(
        tfgradcomp.Signum,
        workers,
        AllGather,
        momentum=0.8,
        warmup_steps=2,
        aggregate=aggregate,
        seed=SEED,
    )
    m = 0.0

    def update_of(step, gradients, weights, rate):
        # Its own warm-up: the first two steps send the sign of the gradient itself.
        nonlocal m
        m = 0.8 * m + 0.2 * gradients
        sent = gradients if step < 2 else m
        is_float = step % 4 == 3
        if aggregate == "mean":
            signs = [reference.sign(row, SEED, step) for row in sent]
            return np.mean(np.sign(sent) if is_float else signs, 0)
        if is_float:
            return np.sign(sent.mean(0))
        signs = [reference.sign(row, SEED, step) for row in sent]
        return reference.vote(signs, "zero", SEED, step)

    run.follows(update_of)


@pytest.mark.parametrize("method", ["VarianceBased", "Strom", "Hybrid"])
def test_what_is_late_waits(method):
    arguments = {
        "VarianceBased": {"alpha": 1.2, "zeta": 0.9},
        "Strom": {"threshold": 1.5},
        "Hybrid": {"threshold": 1.5, "alpha": 1.2, "zeta": 0.9},
    }[method]
    has_moments = method != "Strom"
    wrapper = getattr(tfgradcomp, method)
    run = run_of(wrapper, 2, AllGather, moments=has_moments, **arguments)
    late = Late(run, MIXED, **arguments)

    def update_of(step, gradients, weights, rate):
        if step in IN_FLOAT:
            return gradients.mean(0)
        return late(step, gradients, weights, rate)

    run.follows(update_of, atol=1e-5)
    # The traffic is that of the other steps.
    sent = np.mean([optimizer.traffic.elements_sent for optimizer in run.optimizers])
    assert sent == pytest.approx(np.mean(late.sent))


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"warmup_steps": -1}, "warmup_steps must be an integer, at least 0"),
        ({"warmup_steps": 1.5}, "warmup_steps must be an integer"),
        ({"dense_every": 0}, "dense_every must be an integer, at least 1"),
        ({"dense_every": True}, "dense_every must be an integer"),
    ],
)
def test_steps_out_of_range_are_refused(arguments, text):
    with pytest.raises(ValueError, match=f"{text}.*Received: "):
        tfgradcomp.TernGrad("sgd", **arguments)
