"""What the workers of a pool do in the tests of `model.fit`, a function a case.

Each trains small models in some way and returns what came out. Under MirroredStrategy
the one process is both workers, as the two devices.
"""

import contextlib
import hashlib
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

import tfgradcomp
from tests.cluster import strategy_and_rank
from tfgradcomp.collectives.replicas import Replicas

SGD = keras.optimizers.SGD
random = np.random.default_rng(7)
X = random.normal(size=(60, 64)).astype("float32")
Y = random.normal(size=(60, 3)).astype("float32")


def scope():
    """The scope of this process' strategy."""
    strategy, _ = strategy_and_rank()
    return strategy.scope()


def own_rank():
    """This process' rank."""
    _, rank = strategy_and_rank()
    return rank


def digest(model):
    """A hash of the weights."""
    data = b"".join(w.tobytes() for w in model.get_weights())
    return hashlib.sha256(data).hexdigest()


def residuals(model):
    """A hash of each worker's own state."""
    return {
        v.name: hashlib.sha256(v.local_values().tobytes()).hexdigest()
        for v in model.optimizer._state.variables()
    }


def make(optimizer, policy="float32", units=40, **kwargs):
    """A compiled two-layer model with a large and a small kernel."""
    keras.backend.clear_session()
    keras.utils.set_random_seed(3)
    keras.mixed_precision.set_global_policy(policy)
    with scope():
        model = keras.Sequential(
            [
                keras.Input((64,)),
                keras.layers.Dense(units, activation="relu", name="first"),
                keras.layers.Dense(3, name="second"),
            ]
        )
        model.compile(optimizer(), "mse", metrics=["mae"], **kwargs)
    return model


def fit(model, x=X, epochs=2, **kwargs):
    """Trains on global batches of 12; returns the history."""
    kwargs = {"batch_size": 12, "verbose": 0, "shuffle": False, **kwargs}
    return model.fit(x, Y[: len(x)], epochs=epochs, **kwargs).history


def trained(optimizer, epochs=2, x=X, fit_arguments=None, **kwargs):
    """What a training run leaves behind."""
    model = make(optimizer, **kwargs)
    history = fit(model, x, epochs, **(fit_arguments or {}))
    traffic = getattr(model.optimizer, "traffic", None)
    return {
        "digest": digest(model),
        "traffic": traffic
        and {
            "sent": traffic.words_sent,
            "received": traffic.words_received,
            "up": traffic.bits_per_element_up,
            "ratio": traffic.ratio,
        },
        "weights": [w.tolist() for w in model.get_weights()],
        "history": history,
        "iterations": int(tf.convert_to_tensor(model.optimizer.iterations)),
        "skipped": getattr(model.optimizer, "skipped_steps", None),
    }


def poisoned(row):
    """The inputs with one NaN; batches of 12 alternate: 6 rows to each worker."""
    x = X.copy()
    x[row, 5] = np.nan
    return x


def method(name, sgd, transport="all_gather", **defaults):
    """A function that makes an optimizer; "auto" might differ from run to run."""
    rate, momentum = sgd

    def make_one(accumulation=None, **kwargs):
        inner = SGD(rate, momentum=momentum, gradient_accumulation_steps=accumulation)
        settings = {"transport": transport, **defaults, **kwargs}
        return getattr(tfgradcomp, name)(inner, **settings)

    return make_one


METHODS = {
    "terngrad": method("TernGrad", (0.01, 0.9)),
    "terngrad_own_scale": method("TernGrad", (0.01, 0.0), share_scaler=False),
    "signsgd": method("SignSGD", (1e-3, 0.0)),
    "signum": method("Signum", (1e-3, 0.0)),
    "dist_ef_sgd": method("DistEFSGD", (0.01, 0.0)),
    "dist_ef_block_sgd": method("DistEFBlockSGD", (0.01, 0.0)),
    "dist_ef_block_sgdm": method("DistEFBlockSGDM", (0.01, 0.0), weight_decay=1e-3),
    "half_precision": method("HalfPrecision", (0.01, 0.0), "all_reduce"),
    "orq": method("ORQ", (0.01, 0.9), levels=5, reply="requantize"),
    "variance_based": method("VarianceBased", (0.01, 0.9)),
    "strom": method("Strom", (0.05, 0.0), "auto", threshold=0.02),
    "hybrid": method(
        "Hybrid", (0.05, 0.0), threshold=0.01, alpha=1.3, index_coding="delta"
    ),
}
# Validation is the same for all methods, and takes as long as a training.
VALIDATED = ("terngrad", "hybrid")


def case_method(name):
    """A method, some with validation, and what the collectives are given."""
    arguments = {"validation_data": (X, Y)} if name in VALIDATED else {}
    with recorded() as (seen, varying):
        answer = trained(METHODS[name], fit_arguments=arguments)
    return answer | {"seen": sorted({*seen}), "varying": varying}


@contextlib.contextmanager
def recorded():
    """Lists of calls (call site, size, type), and of the sizes of those that vary."""
    seen, varying = [], []
    gather, reduce = Replicas.gather, Replicas._reduce

    def record(vector, call_site):
        if vector.shape[0] is None:
            tf.py_function(lambda n: varying.append(int(n)), [tf.size(vector)], [])
        elif "log" not in call_site:
            seen.append((call_site, int(vector.shape[0]), vector.dtype.name))

    def gather_recorded(self, vector, call_site):
        record(vector, call_site)
        return gather(self, vector, call_site)

    def reduce_recorded(self, vector, merge_op, call_site):
        record(vector, call_site)
        return reduce(self, vector, merge_op, call_site)

    Replicas.gather, Replicas._reduce = gather_recorded, reduce_recorded
    try:
        yield seen, varying
    finally:
        Replicas.gather, Replicas._reduce = gather, reduce


TRANSPORTS = {
    "terngrad": ("all_gather", "all_reduce", "sharded"),
    "signum": ("all_gather", "all_reduce", "sharded"),
    "dist_ef_block_sgdm": ("all_gather", "sharded"),
    "orq": ("all_gather", "sharded"),
}


def case_transports(name):
    """A method on every transport, in several buckets and in loops, and without."""

    def run(transport, bucket_bytes, steps_per_execution):
        return trained(
            lambda: METHODS[name](
                transport=transport, bucket_bytes=bucket_bytes, min_size=3
            ),
            epochs=1,
            units=600,
            steps_per_execution=steps_per_execution,
        )["digest"]

    return {
        "one bucket": run("all_gather", 2**20, 1),
        **{transport: run(transport, 1, 4) for transport in TRANSPORTS[name]},
    }


def case_transports_under_conditions():
    """Collectives inside of conditionals: accumulated gradients, mixed precision."""
    return {
        transport: trained(
            lambda transport=transport: tfgradcomp.DistEFBlockSGDM(
                SGD(0.01, gradient_accumulation_steps=2),
                transport=transport,
                bucket_bytes=1,
                min_size=3,
            ),
            units=600,
            policy="mixed_float16",
            steps_per_execution=2,
        )["digest"]
        for transport in ("all_gather", "sharded")
    }


def case_varying(name):
    """Sizes that vary, where a graph is deepest: loops, overflows, windows, buckets."""
    return trained(
        lambda: METHODS[name](accumulation=2, bucket_bytes=64),
        steps_per_execution=4,
        policy="mixed_float16",
        epochs=4,
    )


def case_auto():
    """A transport chosen on the cluster, and what is taken where none pays."""
    line = tfgradcomp.transports.Line
    slow = tfgradcomp.transports.Costs(*[line(1e-4, 1e-5)] * 3)
    idle = tfgradcomp.transports.Costs(*[line(1e-4, 0.0)] * 3)
    settings = {
        "measured": {"transport": "auto"},
        "slow": {"transport": slow, "fallback": "float32"},
        "idle": {"transport": idle},
        "idle, fallback": {"transport": idle, "fallback": "float32"},
    }
    answers = {}
    for name, arguments in settings.items():
        model = make(
            lambda arguments=arguments: METHODS["signum"](**arguments), units=600
        )
        fit(model, epochs=1)
        (bucket,) = [
            b for b in model.optimizer._plan.buckets if b.vector == "compressed"
        ]
        answers[name] = {
            "digest": digest(model),
            "route": type(bucket.route).__name__,
            "compressor": type(bucket.route.method.compressor).__name__,
        }
    return answers


def case_steps_per_execution():
    """One step a call and four."""
    return {
        str(steps): trained(METHODS["terngrad"], steps_per_execution=steps)
        for steps in (1, 4)
    }


def case_stock():
    """Plain Keras by the public function, and the identity compressor."""
    tfgradcomp.enable_multi_worker_fit()
    return {
        "plain": trained(lambda: SGD(0.05)),
        "identity": trained(
            lambda: tfgradcomp.DistEFSGD(
                SGD(0.05), compressor="identity", transport="all_gather"
            )
        ),
    }


def case_eagerly():
    """Without a graph."""
    return trained(METHODS["terngrad"], run_eagerly=True)


def case_predict():
    """predict and evaluate on sizes that do not divide, after a fit."""
    model = make(METHODS["terngrad"])
    fit(model)
    answer = {}
    for size in (60, 49, 13):
        first, second = model.get_weights()[:2], model.get_weights()[2:]
        want = np.maximum(X[:size] @ first[0] + first[1], 0) @ second[0] + second[1]
        got = model.predict(X[:size], batch_size=12, verbose=0)
        loss, mae = model.evaluate(X[:size], Y[:size], batch_size=12, verbose=0)
        answer[str(size)] = {
            "predict": float(np.abs(got - want).max())
            if got.shape == want.shape
            else 9,
            "mae": [mae, float(np.abs(want - Y[:size]).mean())],
            "loss": [loss, float(np.square(want - Y[:size]).mean())],
        }
    return answer


def case_empty_share():
    """A convolution evaluates 13 rows in batches of 12: one worker's share is empty."""
    keras.utils.set_random_seed(3)
    images = np.random.default_rng(8).normal(size=(13, 8, 8, 1)).astype("float32")
    with scope():
        model = keras.Sequential(
            [
                keras.Input((8, 8, 1)),
                keras.layers.Conv2D(16, 3, activation="relu"),
                keras.layers.MaxPooling2D(),
                keras.layers.Conv2D(16, 3, activation="relu"),
                keras.layers.Flatten(),
                keras.layers.Dense(3),
            ]
        )
        model.compile(METHODS["terngrad"](), "mse", metrics=["mae"])
    _, mae = model.evaluate(images, Y[:13], batch_size=12, verbose=0)
    return {"mae": mae, "want": float(np.abs(np.array(model(images)) - Y[:13]).mean())}


def case_dict_inputs():
    """Named inputs from a dataset."""
    keras.utils.set_random_seed(3)
    with scope():
        a, b = keras.Input((32,), name="a"), keras.Input((32,), name="b")
        hidden = keras.layers.Dense(40)(keras.layers.concatenate([a, b]))
        model = keras.Model({"a": a, "b": b}, keras.layers.Dense(3)(hidden))
        model.compile(METHODS["dist_ef_block_sgdm"](), "mse")
    data = tf.data.Dataset.from_tensor_slices(({"a": X[:, :32], "b": X[:, 32:]}, Y))
    model.fit(data.batch(12), epochs=2, verbose=0)
    return {"digest": digest(model)}


def case_keras_rules():
    """Rules of the inner optimizer, where nothing is lost."""
    rules = {
        "accumulation": {"gradient_accumulation_steps": 2},
        "clipnorm": {"clipnorm": 0.1},
        "ema": {"use_ema": True, "ema_momentum": 0.5, "ema_overwrite_frequency": 3},
    }
    return {
        name: trained(
            lambda rule=rule: tfgradcomp.DistEFSGD(
                SGD(0.05, **rule), "identity", transport="all_gather"
            ),
            steps_per_execution=2,
        )
        for name, rule in rules.items()
    }


def case_overflow():
    """Mixed precision: one worker alone overflows in its second batch."""
    x = X.copy()
    x[22] = 6e4
    model = make(METHODS["dist_ef_block_sgdm"], policy="mixed_float16")
    fit(model, x, epochs=1)
    wrapper = model.optimizer.inner_optimizer
    return {
        "digest": digest(model),
        "scale": float(model.optimizer.dynamic_scale.numpy()),
        "iterations": int(tf.convert_to_tensor(wrapper.iterations)),
        "finite": bool(all(np.isfinite(w).all() for w in model.get_weights())),
    }


def case_nonfinite():
    """A NaN on worker 1 alone: raise, and skip."""
    answer = {}
    model = make(METHODS["dist_ef_block_sgdm"])
    fit(model, epochs=1)
    before = digest(model), residuals(model)
    try:
        fit(model, poisoned(8)[:12], epochs=1)
        answer["error"] = None
    except tf.errors.InvalidArgumentError as error:
        answer["error"] = str(error)
    answer["unchanged"] = before == (digest(model), residuals(model))
    answer["skip"] = trained(
        lambda: METHODS["terngrad"](nonfinite="skip"), x=poisoned(8), epochs=1
    )
    answer["window"] = trained(
        lambda: tfgradcomp.TernGrad(
            SGD(0.01, gradient_accumulation_steps=2),
            nonfinite="skip",
            transport="all_gather",
        ),
        x=poisoned(8)[:48],
        epochs=1,
    )
    return answer


def case_state(folder):
    """Saved and restored in every way, the run goes on to the same bits."""
    folder, rank = Path(folder), own_rank()
    answer = {}
    model = make(METHODS["dist_ef_block_sgdm"])
    fit(model)
    answer["at_save"] = digest(model), residuals(model)
    if rank == 0:
        model.save(folder / "of_worker_0.keras")
    model.save(folder / f"own-{rank}.keras")
    model.save_weights(folder / f"own-{rank}.weights.h5")
    checkpoint = tf.train.Checkpoint(model=model, optimizer=model.optimizer)
    checkpoint.write(str(folder / f"checkpoint-{rank}"))
    fit(model)
    answer["uninterrupted"] = digest(model)

    with scope():
        loaded = keras.saving.load_model(folder / f"own-{rank}.keras")
    fit(loaded)
    answer["keras"] = digest(loaded)

    weights = make(METHODS["dist_ef_block_sgdm"])
    with scope():
        weights.optimizer.build(weights.trainable_variables)
    weights.load_weights(folder / f"own-{rank}.weights.h5")
    fit(weights)
    answer["weights"] = digest(weights)

    restored = make(METHODS["dist_ef_block_sgdm"])
    with scope():
        restored.optimizer.build(restored.trainable_variables)
    checkpoint = tf.train.Checkpoint(model=restored, optimizer=restored.optimizer)
    checkpoint.read(
        str(folder / f"checkpoint-{rank}")
    ).assert_existing_objects_matched()
    fit(restored)
    answer["checkpoint"] = digest(restored)

    with scope():
        same = keras.saving.load_model(folder / "of_worker_0.keras")
    answer["of_worker_0"] = digest(same), residuals(same)
    return answer


def case_checkpoint_callback(folder):
    """Keras' own callbacks, a file a worker."""
    path = str(Path(folder) / f"best-{own_rank()}.keras")
    model = make(METHODS["terngrad"])
    fit(model, callbacks=[keras.callbacks.ModelCheckpoint(path)])
    with scope():
        loaded = keras.saving.load_model(path)
    return {"equal": digest(model) == digest(loaded)}


class Interrupt(keras.callbacks.Callback):
    """Ends training after two epochs."""

    def on_epoch_end(self, epoch, logs=None):
        if epoch == 1:
            raise KeyboardInterrupt


def case_shared_paths(folder):
    """One script gives all workers the same paths."""
    folder = Path(folder) / "shared"
    optimizer = METHODS["dist_ef_block_sgdm"]
    straight = make(optimizer)
    fit(straight, epochs=4)
    backup = keras.callbacks.BackupAndRestore(str(folder / "backup"))
    callbacks = [
        backup,
        keras.callbacks.ModelCheckpoint(str(folder / "checkpoints/whole.keras")),
        keras.callbacks.ModelCheckpoint(
            str(folder / "checkpoints/{epoch}.weights.h5"), save_weights_only=True
        ),
        Interrupt(),
    ]
    interrupted = make(optimizer)
    try:
        fit(interrupted, epochs=4, callbacks=callbacks)
    except KeyboardInterrupt:
        pass
    resumed = make(optimizer)
    # A fresh callback, as in a fresh process.
    backup = keras.callbacks.BackupAndRestore(str(folder / "backup"))
    fit(resumed, epochs=4, callbacks=[backup])
    with scope():
        # Without the optimizer: either worker's file may be the last one.
        path = folder / "checkpoints" / "whole.keras"
        whole = keras.saving.load_model(path, compile=False)
    return {
        "straight": digest(straight),
        "resumed": digest(resumed),
        "checkpoint": digest(whole) == digest(interrupted),
        "files": sorted(path.name for path in (folder / "checkpoints").iterdir()),
    }


def case_different_weights():
    """Worker 1 has loaded other weights: all raise, none trains on."""
    model = make(METHODS["terngrad"])
    if own_rank() == 1:
        model.set_weights([w + 1 for w in model.get_weights()])
    try:
        fit(model, epochs=1)
        return {"error": None}
    except ValueError as error:
        return {"error": str(error)}


def case_no_iterator_to_build():
    """The symbolic build reads no data: each pass begins exactly one iterator."""
    passes = []

    def generate():
        passes.append(1)
        yield from zip(X, Y, strict=True)

    spec = (tf.TensorSpec((64,)), tf.TensorSpec((3,)))
    data = tf.data.Dataset.from_generator(generate, output_signature=spec).batch(12)
    model = make(METHODS["terngrad"])
    model.fit(data, epochs=2, verbose=0)
    return {"passes": len(passes)}


def case_different_models():
    """Worker 1 names a layer differently: all raise, none hangs."""
    keras.backend.clear_session()
    with scope():
        name = "second" if own_rank() == 0 else "other"
        model = keras.Sequential(
            [
                keras.Input((64,)),
                keras.layers.Dense(40),
                keras.layers.Dense(3, name=name),
            ]
        )
        model.compile(METHODS["terngrad"](), "mse")
    try:
        fit(model, epochs=1)
        return {"error": None}
    except ValueError as error:
        return {"error": str(error)}


def case_different_arguments():
    """Worker 1 has another seed."""
    model = make(lambda: METHODS["terngrad"](seed=own_rank()))
    try:
        fit(model, epochs=1)
        return {"error": None}
    except ValueError as error:
        return {"error": str(error)}
