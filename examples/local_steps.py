"""Train with local steps: 16 on each worker, then one exchange of a bit an element.

Four workers on this machine, and the same training with float32 in each step:

    tfgradcomp-launch --workers 4 examples/local_steps.py
    tfgradcomp-launch --workers 4 examples/local_steps.py --every 0

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
    add("--every", type=int, default=16, help="local steps; 0: float32 in each step")
    add("--outer-rate", type=float, default=0.7, help="learning rate of the exchange")
    add("--learning-rate", type=float, default=1e-3)
    add_training_arguments(parser)
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
    """Train with the optimizer of the command line."""
    arguments = parse_arguments()
    title = f"an exchange in {arguments.every} steps" if arguments.every else "float32"
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    train(title, arguments, strategy, lambda steps: make_optimizer(arguments, steps))


if __name__ == "__main__":
    main()
