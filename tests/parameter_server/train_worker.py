"""Script of all roles: trains a small model with named rows of the table of methods.

A case is "TernGrad", "TernGrad/async", "TernGrad+2" (two batches per round), "skipping"
(with a NaN), "resuming" (saves and resumes) or "errors". A pool's workers train the
same model on the same batches by `with_collectives`.
"""

import functools
import hashlib
import sys

import keras
import numpy as np
import tensorflow as tf

import tfgradcomp
from tests import autotune
from tests.cluster import report, strategy_and_rank
from tests.methods import ROWS

FEATURES, CLASSES, BATCH = 100, 4, 8
EPOCHS, STEPS, PUSHES = 2, 5, 20


def optimizer_of(name, **arguments):
    """The wrapper of a row, with a learning rate that is stable on raw inputs."""
    name, _, batches = name.partition("+")
    row = ROWS[name]
    sgd = keras.optimizers.SGD(
        0.2 * row.learning_rate,
        gradient_accumulation_steps=int(batches) if batches else None,
    )
    return row.make(sgd, **{**row.in_training, **arguments})


def steps_of(name):
    """Steps per epoch; the number of updates is the same for all rows."""
    return STEPS * int(name.partition("+")[2] or 1)


def make_model():
    model = keras.Sequential(
        [
            keras.Input((FEATURES,)),
            keras.layers.Dense(1200, "relu", kernel_initializer=_kernel(1)),
            keras.layers.Dense(CLASSES, kernel_initializer=_kernel(2)),
        ]
    )
    return model


def _kernel(seed):
    return keras.initializers.RandomNormal(stddev=0.2, seed=seed)


def dataset(context, has_nan=False):
    """Batches that differ between workers; the second of worker 1 may have a NaN."""
    rng = np.random.default_rng(context.input_pipeline_id)
    x = rng.normal(size=(STEPS * BATCH, FEATURES)).astype(np.float32)
    y = np.argmax(x[:, :CLASSES] + x[:, CLASSES : 2 * CLASSES], axis=1)
    if has_nan and context.input_pipeline_id == 1:
        x[BATCH, 0] = np.nan
    data = tf.data.Dataset.from_tensor_slices((x, y.astype(np.int32)))
    return data.batch(BATCH, drop_remainder=True).repeat()


def digest(weights):
    return hashlib.sha256(b"".join(w.tobytes() for w in weights)).hexdigest()


COMPILE = {
    "loss": keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    "metrics": ["accuracy"],
}


def with_servers(folder, methods):
    answers = {}
    for method in methods:
        keras.utils.set_random_seed(0)
        if method in OTHERS:
            answers[method] = OTHERS[method](folder)
            continue
        name, _, mode = method.partition("/")
        skips = name == "skipping"
        optimizer = (
            optimizer_of("TernGrad", nonfinite="skip") if skips else optimizer_of(name)
        )
        trainer = tfgradcomp.ParameterServerTrainer(
            make_model, optimizer, mode=mode or "sync", **COMPILE
        )
        history = trainer.fit(
            functools.partial(dataset, has_nan=skips),
            epochs=EPOCHS,
            steps_per_epoch=PUSHES if mode else steps_of(name),
            validation_data=dataset_of_chief(),
            verbose=0,
        )
        answers[method] = {
            "workers": [digest(weights) for weights in trainer.weights_of_workers()],
            "chief": digest(w.numpy() for w in trainer.model.trainable_weights),
            "iterations": int(trainer.optimizer.iterations.numpy()),
            "skipped": trainer.optimizer.skipped_steps,
            "elements_sent": trainer.traffic.elements_sent,
            "history": history.history,
        }
    report(folder, 0, answers)


def resuming(folder, name="DistEFBlockSGDM"):
    """Weights after one more epoch, and after repeating it from each saved file."""
    trainer = tfgradcomp.ParameterServerTrainer(
        make_model, optimizer_of(name), **COMPILE
    )

    def one_more():
        trainer.fit(dataset, steps_per_epoch=steps_of(name), verbose=0)
        return digest(trainer.weights_of_workers()[0])

    one_more()
    weights = f"{folder}/saved.weights.h5"
    trainer.model.save_weights(weights)
    checkpoint = tf.train.Checkpoint(model=trainer.model, optimizer=trainer.optimizer)
    path = checkpoint.write(f"{folder}/checkpoint")
    straight = one_more()
    trainer.model.load_weights(weights)
    of_weights = one_more()
    checkpoint.read(path).assert_existing_objects_matched()
    return [straight, of_weights, one_more()]


def errors(folder):
    """The errors for a dataset that ends, one model for all, and loss scaling."""
    model = make_model()
    said = []
    for make, data, policy in (
        (make_model, lambda context: dataset(context).take(2).filter(any_batch), None),
        (lambda: model, dataset, None),
        (make_model, dataset, "mixed_float16"),
    ):
        keras.mixed_precision.set_global_policy(policy or "float32")
        try:
            trainer = tfgradcomp.ParameterServerTrainer(
                make, optimizer_of("TernGrad"), **COMPILE
            )
            trainer.fit(data, steps_per_epoch=STEPS, verbose=0)
        except ValueError as error:
            said.append(str(error))
    keras.mixed_precision.set_global_policy("float32")
    return said


def any_batch(x, y):
    """A filter that hides the number of batches from TensorFlow."""
    return True


OTHERS = {
    "resuming": resuming,
    "resuming what waits": functools.partial(resuming, name="VarianceBased+2"),
    "errors": errors,
}


def dataset_of_chief():
    return dataset(tf.distribute.InputContext(1, 100, 1)).take(3)


def with_collectives(names):
    """Trains with rows under the strategy of a pool's worker."""
    strategy, _ = strategy_and_rank()
    answers = {}
    for name in names:
        keras.utils.set_random_seed(0)
        with strategy.scope():
            model = make_model()
            model.compile(optimizer_of(name, transport="all_gather"), **COMPILE)
        data = strategy.distribute_datasets_from_function(dataset)
        history = model.fit(
            data, epochs=EPOCHS, steps_per_epoch=steps_of(name), verbose=0
        )
        answers[name] = {
            "weights": digest(w.numpy() for w in model.trainable_weights),
            "elements_sent": model.optimizer.traffic.elements_sent,
            "history": history.history,
        }
    return answers


if __name__ == "__main__":
    autotune.disable()
    with_servers(sys.argv[1], sys.argv[2:])
