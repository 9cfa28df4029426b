"""Train a LeNet-style network on Fashion-MNIST with compressed gradients.

Two workers on this machine, the uncompressed baseline, and one worker alone:

    tfgradcomp-launch --workers 2 examples/fashion_mnist.py --method terngrad
    tfgradcomp-launch --workers 2 examples/fashion_mnist.py --method none
    python examples/fashion_mnist.py

Eight workers in one process, with the bits that eight processes would have:

    python examples/fashion_mnist.py --virtual 8

The launcher sets TF_CONFIG for each worker; on several machines set it yourself. The
last lines show a checksum of every worker's weights: they match.
"""

import argparse
import hashlib
import sys

import data
import keras
import models
import tensorflow as tf

import tfgradcomp

# The first learning rate, the momentum of the inner SGD, and the wrapper around it.
# A sign is a step of full length, so signSGD has a small rate. Unlike the paper's, it
# has momentum, which averages the votes. Methods with their own momentum need an inner
# SGD without. Three levels add variance, so TernGrad's rate is smaller than that of
# "none".
METHODS = {
    "none": (0.05, 0.9, None),
    "terngrad": (0.03, 0.9, "TernGrad"),
    "signsgd": (2e-4, 0.9, "SignSGD"),
    "signum": (1e-3, 0.0, "Signum"),
    "dist_ef_sgd": (0.4, 0.0, "DistEFSGD"),
    "dist_ef_block_sgd": (0.4, 0.0, "DistEFBlockSGD"),
    "dist_ef_block_sgdm": (0.04, 0.0, "DistEFBlockSGDM"),
    "half_precision": (0.05, 0.9, "HalfPrecision"),
}


def add_training_arguments(parser):
    """Add the arguments that `train` reads."""
    add = parser.add_argument
    add("--model", choices=models.MODELS, default="lenet")
    add("--epochs", type=int, default=3)
    add("--batch-size", type=int, default=64, help="per worker")
    add("--seed", type=int, default=0)
    add("--steps-per-epoch", type=int, default=-1, help="-1: all")
    add("--steps-per-execution", type=int, default=1)


def parse_arguments():
    """Return the command line's values."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--method", choices=METHODS, default="terngrad")
    parser.add_argument("--learning-rate", type=float, help="default: by method")
    add_training_arguments(parser)
    parser.add_argument("--virtual", type=int, help="workers within this process")
    arguments = parser.parse_args()
    if arguments.learning_rate is None:
        arguments.learning_rate = METHODS[arguments.method][0]
    return arguments


def make_optimizer(method, learning_rate, steps):
    """Return SGD with a rate that falls to 0, in the method's wrapper."""
    _, momentum, wrapper = METHODS[method]
    schedule = keras.optimizers.schedules.CosineDecay(learning_rate, steps)
    sgd = keras.optimizers.SGD(schedule, momentum=momentum)
    if wrapper is not None:
        # A small model on one machine needs no compression, and "auto" would notice;
        # the example uses the method's transport.
        transport = "all_reduce" if method == "half_precision" else "all_gather"
        return getattr(tfgradcomp, wrapper)(sgd, transport=transport)
    # Stock Keras cannot fit on several workers; the wrappers enable this themselves.
    tfgradcomp.enable_multi_worker_fit()
    return sgd


def report_traffic(optimizer, parameters, workers):
    """Print a worker's bytes in a step, and the ratio to a float32 ring all-reduce."""
    # A ring passes every element on 2(N - 1) times, 1/N of the vector at a time.
    ring = 2 * (workers - 1) / workers * 4 * parameters
    sent = received = ring
    if hasattr(optimizer, "traffic"):
        sent, received = optimizer.traffic.bytes_sent, optimizer.traffic.bytes_received
    print(f"bytes per step and worker: {sent:.0f} sent, {received:.0f} received")
    if workers > 1:
        print(
            f"compression ratio: {2 * ring / (sent + received):.2f} "
            "(bytes sent and received by a float32 ring all-reduce / by this method)"
        )


def train(title, arguments, strategy, make_optimizer):
    """Train the model, evaluate it, report. `make_optimizer` takes the total steps."""
    workers = strategy.num_replicas_in_sync
    rank = getattr(strategy.cluster_resolver, "task_id", None) or 0
    keras.utils.set_random_seed(arguments.seed)
    source = data.load()
    if rank == 0 and source.notice:
        print(source.notice)
    examples = data.batches(
        source.train, arguments.batch_size * workers, arguments.seed
    ).take(arguments.steps_per_epoch)
    with strategy.scope():
        model = models.MODELS[arguments.model]()
        optimizer = make_optimizer(arguments.epochs * len(examples))
        model.compile(
            optimizer,
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
            steps_per_execution=arguments.steps_per_execution,
        )
    if rank == 0:
        print(
            f"{title}: {workers} x {arguments.batch_size} examples a step, "
            f"learning rate {arguments.learning_rate:g}, seed {arguments.seed}, "
            f"{model.count_params()} parameters"
        )
    # A bar that redraws itself is unreadable in a file; shuffle=True would warn.
    verbose = (1 if sys.stdout.isatty() else 2) if rank == 0 else 0
    model.fit(examples, epochs=arguments.epochs, verbose=verbose, shuffle=False)
    _, accuracy = model.evaluate(data.batches(source.test, 1000), verbose=0)
    if rank == 0:
        print(f"test accuracy: {accuracy:.4f}")
        report_traffic(optimizer, model.count_params(), workers)
    weights = b"".join(weight.tobytes() for weight in model.get_weights())
    digest = hashlib.sha256(weights).hexdigest()[:16]
    print(f"worker {rank} of {workers}: weights sha256 {digest}, data {source.source}")


def main():
    """Train with the method of the command line."""
    arguments = parse_arguments()
    if arguments.virtual:
        strategy = tfgradcomp.virtual_workers(arguments.virtual)
    else:
        strategy = tf.distribute.MultiWorkerMirroredStrategy()
    method, rate = arguments.method, arguments.learning_rate
    train(
        method, arguments, strategy, lambda steps: make_optimizer(method, rate, steps)
    )


if __name__ == "__main__":
    main()
