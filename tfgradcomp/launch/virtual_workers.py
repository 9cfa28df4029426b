"""Virtual workers for studies: one process that trains as several would.

Separate from the launcher, which imports no TensorFlow.
"""

from __future__ import annotations

import os

import tensorflow as tf

from tfgradcomp.compat.distributed_dataset import make_batches_optional
from tfgradcomp.core.arguments import check_integer
from tfgradcomp.core.logging import logger
from tfgradcomp.fit import enable_multi_worker_fit
from tfgradcomp.launch.environment import described_cluster, share_of_cores

_THREADS = "TF_NUM_INTRAOP_THREADS"


def virtual_workers(num_workers: int) -> tf.distribute.MirroredStrategy:
    """Returns a strategy under which this process trains as N workers would.

    For studies of a method with N workers, without starting N processes. Weights,
    residuals and all other state of every worker have the same bits as with N processes
    under `tf.distribute.MultiWorkerMirroredStrategy`, given the same data, seeds and
    number of threads per operation. It is not for speed: the workers share the cores of
    this machine, and nothing crosses a network.

    Each worker is a logical CPU of TensorFlow. TensorFlow makes its devices once in a
    process, so call this function first: before any tensor, variable or model is made.

    Args:
        num_workers: N, 1 or more. The global batch is divided among the workers.

    Returns:
        The strategy, whose replicas are the workers, in the order of ranks.

    Raises:
        ValueError: If N is no positive integer, or if this process is itself a worker
            of a cluster.
        RuntimeError: If TensorFlow has made its devices already.

    Example:
        ```python
        import tfgradcomp

        strategy = tfgradcomp.virtual_workers(8)
        with strategy.scope():
            model = keras.Sequential([keras.Input((20,)), keras.layers.Dense(100)])
            model.compile(tfgradcomp.TernGrad(keras.optimizers.SGD(0.1)), "mse")
        model.fit(x, y, batch_size=8 * 32)
        ```
    """
    check_integer("num_workers", num_workers, 1)
    described = described_cluster(os.environ)
    if described:
        raise ValueError(
            "virtual_workers needs a single process, but this process is a worker of a "
            "cluster. Start the program without a launcher, or use "
            f"tf.distribute.MultiWorkerMirroredStrategy. Received: {described}, "
            f"num_workers={num_workers}"
        )
    threading = tf.config.threading
    threads = int(os.environ.get(_THREADS, 0)) or share_of_cores(num_workers)
    cpu, *_ = tf.config.list_physical_devices("CPU")
    try:
        # An operation divides its sums by the number of threads.
        if not threading.get_intra_op_parallelism_threads():
            threading.set_intra_op_parallelism_threads(threads)
        # A worker that waits for the others may hold its thread.
        threading.set_inter_op_parallelism_threads(max(16, 2 * num_workers))
        tf.config.set_logical_device_configuration(
            cpu, [tf.config.LogicalDeviceConfiguration()] * num_workers
        )
    except RuntimeError:
        raise RuntimeError(
            "virtual_workers must set TensorFlow's devices, but they exist already. "
            "Call virtual_workers once, at the program's start: before any tensor, "
            "variable, model or other strategy. In a notebook, restart the kernel. "
            f"Received: num_workers={num_workers}, "
            f"devices={len(tf.config.list_logical_devices('CPU'))}"
        ) from None
    names = [f"CPU:{rank}" for rank in range(num_workers)]
    strategy = tf.distribute.MirroredStrategy(names)
    # Finite datasets as each of several processes reads them: no step knows the number
    # of its rows. Where it is known, TensorFlow turns a division by it into a product.
    make_batches_optional(strategy)
    # Optimizers without a wrapper then take the same steps as in N processes.
    enable_multi_worker_fit()
    logger.info(
        "virtual_workers(%d): this process trains as %d workers would. This is for "
        "studies, not for speed.",
        num_workers,
        num_workers,
    )
    return strategy
