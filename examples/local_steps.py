"""Train with local steps: 16 on each worker, then one exchange of a bit an element.

Train with four workers on this machine, then with float32 in each step:

    tfgradcomp-launch --workers 4 examples/local_steps.py
    tfgradcomp-launch --workers 4 examples/local_steps.py --every 0

With `--delay 1`, messages travel while the next step computes.

The last lines show a checksum of every worker's weights: they match.
"""

import argparse

import keras
import tensorflow as tf
from fashion_mnist import add_training_arguments, train

import tfgradcomp


def parse_arguments():
    """Return the command line's values."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--every", default=16, help="local steps, or auto; 0: float32 in each step")
    add("--stagger", action="store_true", help="groups of variables take turns")
    add("--delay", type=int, default=0, help="steps that an exchange may take")
    add("--outer-rate", type=float, default=0.7, help="learning rate of the exchange")
    add("--learning-rate", type=float, default=1e-3)
    add_training_arguments(parser)
    arguments = parser.parse_args()
    if arguments.every != "auto":
        arguments.every = int(arguments.every)
    return arguments


def make_optimizer(arguments, steps):
    """Return Adam, in `LocalSteps` unless `--every` is 0."""
    schedule = keras.optimizers.schedules.CosineDecay(arguments.learning_rate, steps)
    adam = keras.optimizers.Adam(schedule)
    if not arguments.every:
        tfgradcomp.enable_multi_worker_fit()
        return adam
    outer = tfgradcomp.DistEFBlockSGDM(
        keras.optimizers.SGD(arguments.outer_rate), transport="sharded"
    )
    names = "every", "stagger", "delay"
    return tfgradcomp.LocalSteps(
        adam, outer, **{name: getattr(arguments, name) for name in names}
    )


def main():
    """Train with the optimizer of the command line."""
    arguments = parse_arguments()
    title = f"every={arguments.every}" if arguments.every else "float32"
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    train(title, arguments, strategy, lambda steps: make_optimizer(arguments, steps))


if __name__ == "__main__":
    main()
