"""The number of batches of a pass over the data, the same on all workers."""

from __future__ import annotations

from typing import Any

import numpy as np

from tfgradcomp.compat.distributed_dataset import expect_end, is_endless
from tfgradcomp.compat.epoch_iterator import (
    distributed_dataset,
    number_of_batches,
    set_number_of_batches,
)
from tfgradcomp.fit.loop_sync import LoopSync
from tfgradcomp.fit.signals import LoopSignals


def agree_on_length(loop: LoopSync, signals: LoopSignals, epoch_iterator: Any) -> None:
    """Gives a pass the same number of batches on all workers; all must call it.

    Training ends with the shortest data. Evaluation and prediction continue until all
    workers have shown their rows. `steps_per_epoch` of any worker limits all.

    Args:
        loop: The loop that begins the pass.
        signals: Its signals.
        epoch_iterator: Keras' iterator over the batches.
    """
    data = distributed_dataset(epoch_iterator)
    is_local_endless = is_endless(data)
    steps = epoch_iterator.steps_per_epoch
    batches = number_of_batches(epoch_iterator)
    mine = [steps or -1, batches or -1, int(is_local_endless)]
    rows = signals.gather(mine, "fit/lengths")
    if (rows == rows[0]).all():
        return
    if is_local_endless and not rows[:, 2].all():
        # Otherwise this worker would not ask the others whether they have rows.
        expect_end(data)
    is_training = loop.kind == "fit"
    lengths = np.where(rows[:, 0] > 0, rows[:, 0], rows[:, 1])
    known = rows[rows[:, 1] > 0, 1]
    if is_training:
        batches = int(min(known)) if len(known) else None
    else:
        batches = int(max(known)) if len(known) == len(rows) else None
    limits = rows[rows[:, 0] > 0, 0]
    if len(limits):
        steps = int(min(limits))
        if epoch_iterator.steps_per_epoch:
            epoch_iterator.steps_per_epoch = steps
        batches = batches and min(batches, steps) if is_training else steps
        batches = batches or steps
    set_number_of_batches(epoch_iterator, batches)
    if is_training and (lengths != lengths[0]).any():
        names = [str(n) if n > 0 else "unknown" for n in lengths.tolist()]
        loop.warn(
            "The workers' data have different lengths: an epoch ends on all of them "
            "when the first has no more. Expected: as many batches for all. Received: "
            f"batches by worker={dict(enumerate(names))}"
        )
