"""Train with local steps: 16 on each worker, then one exchange of a bit an element.

Four workers on this machine, and the same training with float32 in each step:

    tfgradcomp-launch --workers 4 examples/local_steps.py
    tfgradcomp-launch --workers 4 examples/local_steps.py --every 0

The last lines show a checksum of every worker's weights: they match.
"""

import argparse
import hashlib

import data
import keras
import models
import tensorflow as tf
from fashion_mnist import report_traffic

import tfgradcomp


def parse_arguments():
    """Return the command line's values."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--every", type=int, default=16, help="local steps; 0: float32 in each step")
    add("--outer-rate", type=float, default=0.7, help="learning rate of the exchange")
    add("--epochs", type=int, default=3)
    add("--batch-size", type=int, default=64, help="per worker")
    add("--learning-rate", type=float, default=1e-3)
    add("--seed", type=int, default=0)
    add("--steps-per-epoch", type=int, default=-1, help="-1: all")
    return parser.parse_args()


def make_optimizer(arguments, steps):
    """Return Adam, with local steps around it or not."""
    schedule = keras.optimizers.schedules.CosineDecay(arguments.learning_rate, steps)
    adam = keras.optimizers.Adam(schedule)
    if not arguments.every:
        tfgradcomp.enable_multi_worker_fit()
        return adam
    outer = tfgradcomp.DistEFBlockSGDM(
        keras.optimizers.SGD(arguments.outer_rate), transport="sharded"
    )
    return tfgradcomp.LocalSteps(adam, outer, every=arguments.every)


def main():
    """Train, evaluate, report."""
    arguments = parse_arguments()
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    workers = strategy.num_replicas_in_sync
    rank = strategy.cluster_resolver.task_id or 0
    keras.utils.set_random_seed(arguments.seed)
    source = data.load()
    if rank == 0 and source.notice:
        print(source.notice)
    train = data.batches(source.train, arguments.batch_size * workers, arguments.seed)
    train = train.take(arguments.steps_per_epoch)
    with strategy.scope():
        model = models.make_lenet()
        optimizer = make_optimizer(arguments, arguments.epochs * len(train))
        model.compile(
            optimizer,
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
        )
    verbose = 2 if rank == 0 else 0
    model.fit(train, epochs=arguments.epochs, verbose=verbose, shuffle=False)
    _, accuracy = model.evaluate(data.batches(source.test, 1000), verbose=0)
    if rank == 0:
        print(f"test accuracy: {accuracy:.4f}")
        report_traffic(optimizer, model.count_params(), workers)
    weights = b"".join(weight.tobytes() for weight in model.get_weights())
    digest = hashlib.sha256(weights).hexdigest()[:16]
    print(f"worker {rank} of {workers}: weights sha256 {digest}, data {source.source}")


if __name__ == "__main__":
    main()
