"""What tests run in all roles: trains a small model by each method named ("ORQ async"),
saves and resumes ("resuming"), does what is refused ("errors").

With parameter servers in `TF_CONFIG` it trains by them, else under
MultiWorkerMirroredStrategy: the same model, batches and steps.
"""

import functools
import hashlib
import json
import os
import sys

import keras
import numpy as np
import tensorflow as tf

import tfgradcomp
from tests.cluster import report

FEATURES, CLASSES, BATCH = 100, 4, 8
EPOCHS, STEPS, PUSHES = 2, 5, 20
METHODS = {
    "TernGrad": lambda **kw: tfgradcomp.TernGrad(
        keras.optimizers.SGD(0.002, momentum=0.9), **kw
    ),
    "Signum": lambda **kw: tfgradcomp.Signum(keras.optimizers.SGD(0.001), **kw),
    "DistEF": lambda **kw: tfgradcomp.DistEFBlockSGDM(
        keras.optimizers.SGD(0.003), 0.9, **kw
    ),
    "skipping": lambda **kw: tfgradcomp.TernGrad(
        keras.optimizers.SGD(0.002), nonfinite="skip", **kw
    ),
    "ORQ": lambda **kw: tfgradcomp.ORQ(keras.optimizers.Adam(0.002), **kw),
}


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
        name, _, mode = method.partition(" ")
        trainer = tfgradcomp.ParameterServerTrainer(
            make_model, METHODS[name](), mode=mode or "sync", **COMPILE
        )
        history = trainer.fit(
            functools.partial(dataset, has_nan=name == "skipping"),
            epochs=EPOCHS,
            steps_per_epoch=PUSHES if mode else STEPS,
            validation_data=dataset_of_chief(),
            verbose=0,
        )
        answers[method] = {
            "workers": [digest(weights) for weights in trainer.weights_of_workers()],
            "chief": digest(w.numpy() for w in trainer.model.trainable_weights),
            "iterations": int(trainer.optimizer.iterations.numpy()),
            "skipped": trainer.optimizer.skipped_steps,
            "history": history.history,
        }
    report(folder, 0, answers)


def resuming(folder):
    """Weights after one more epoch, and after it once more from what was saved."""
    trainer = tfgradcomp.ParameterServerTrainer(
        make_model, METHODS["DistEF"](), **COMPILE
    )

    def one_more():
        trainer.fit(dataset, steps_per_epoch=STEPS, verbose=0)
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
    """What is said of a dataset that ends unannounced, one model for all, a policy."""
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
                make, METHODS["TernGrad"](), **COMPILE
            )
            trainer.fit(data, steps_per_epoch=STEPS, verbose=0)
        except ValueError as error:
            said.append(str(error))
    keras.mixed_precision.set_global_policy("float32")
    return said


def any_batch(x, y):
    """Every one; how many there are TensorFlow cannot know."""
    return True


OTHERS = {"resuming": resuming, "errors": errors}


def dataset_of_chief():
    return dataset(tf.distribute.InputContext(1, 100, 1)).take(3)


def with_collectives(folder, methods):
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    answers = {}
    for method in methods:
        keras.utils.set_random_seed(0)
        with strategy.scope():
            model = make_model()
            model.compile(METHODS[method](transport="all_gather"), **COMPILE)
        data = strategy.distribute_datasets_from_function(dataset)
        history = model.fit(data, epochs=EPOCHS, steps_per_epoch=STEPS, verbose=0)
        answers[method] = {
            "weights": digest(w.numpy() for w in model.trainable_weights),
            "history": history.history,
        }
    report(folder, strategy.cluster_resolver.task_id, answers)


def main(folder, *methods):
    cluster = json.loads(os.environ["TF_CONFIG"])["cluster"]
    run = with_servers if "ps" in cluster else with_collectives
    run(folder, methods)


if __name__ == "__main__":
    main(*sys.argv[1:])
