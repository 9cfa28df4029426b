"""Train on parameter servers: weights stay on the workers, codes travel.

A chief, two workers and a server on this machine, in rounds or without a barrier:

    tfgradcomp-launch --workers 2 --ps 1 examples/parameter_server.py
    tfgradcomp-launch --workers 2 --ps 1 examples/parameter_server.py --mode async
    tfgradcomp-launch --workers 2 --ps 1 examples/parameter_server.py \
        --method VarianceBased --batches-per-update 2

All roles run this script. On workers and servers the trainer's constructor does not
return; only the chief runs the rest. The last lines show a checksum of every worker's
weights.
"""

import argparse
import functools
import hashlib
import sys

import data
import keras
import models

import tfgradcomp

METHODS = {
    "TernGrad": tfgradcomp.TernGrad,
    "VarianceBased": tfgradcomp.VarianceBased,
    "Strom": functools.partial(tfgradcomp.Strom, threshold="auto"),
}


def parse_arguments():
    """Return the command line's values."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--mode", choices=("sync", "async"), default="sync")
    parser.add_argument("--method", choices=METHODS, default="TernGrad")
    parser.add_argument("--batches-per-update", type=int, default=1)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=64, help="per worker")
    parser.add_argument("--learning-rate", type=float, default=0.03)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps-per-epoch", type=int, help="default: all examples")
    return parser.parse_args()


def main():
    """Train, evaluate, report."""
    arguments = parse_arguments()
    keras.utils.set_random_seed(arguments.seed)
    batches = arguments.batches_per_update
    sgd = keras.optimizers.SGD(
        arguments.learning_rate,
        momentum=0.9,
        gradient_accumulation_steps=batches if batches > 1 else None,
    )
    trainer = tfgradcomp.ParameterServerTrainer(
        models.make_lenet,
        METHODS[arguments.method](sgd),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
        mode=arguments.mode,
    )
    source = data.load()
    if source.notice:
        print(source.notice)

    def dataset_fn(context):
        # Every worker reads its own part.
        train = data.load().train
        part = train.shard(context.num_input_pipelines, context.input_pipeline_id)
        return data.batches(part, arguments.batch_size, arguments.seed).repeat()

    # A step takes a batch from every worker, without a barrier from one.
    workers = trainer.num_workers if arguments.mode == "sync" else 1
    examples = int(source.train.cardinality())
    steps = arguments.steps_per_epoch or examples // (arguments.batch_size * workers)
    # An epoch ends with an update.
    steps -= steps % batches
    history = trainer.fit(
        dataset_fn,
        epochs=arguments.epochs,
        steps_per_epoch=steps,
        validation_data=data.batches(source.test, 1000),
        # A bar that redraws itself is unreadable in a file.
        verbose=1 if sys.stdout.isatty() else 2,
    )
    print(f"test accuracy: {history.history['val_accuracy'][-1]:.4f}")
    float32 = 4 * trainer.model.count_params()
    traffic = trainer.traffic
    print(
        f"bytes per update and worker: {traffic.bytes_sent:.0f} sent, "
        f"{traffic.bytes_received:.0f} received; float32: {float32} each way"
    )
    for rank, weights in enumerate(trainer.weights_of_workers()):
        content = b"".join(weight.tobytes() for weight in weights)
        print(
            f"worker {rank}: weights sha256 {hashlib.sha256(content).hexdigest()[:16]}"
        )


if __name__ == "__main__":
    main()
