"""A worker with two logical CPUs, of a cluster of two.

TensorFlow gives a task without GPUs one CPU, even if it has several logical devices. A
private method of the strategy decides this, and is replaced here.
"""

import sys

import numpy as np
import tensorflow as tf
from tensorflow.python.distribute import collective_all_reduce_strategy

from tests.cluster import report


def devices_of_task(extended, cluster_resolver, worker_device):
    return tuple(f"{worker_device}/device:CPU:{i}" for i in range(2)), "CPU"


tf.config.threading.set_inter_op_parallelism_threads(16)
tf.config.set_logical_device_configuration(
    tf.config.list_physical_devices("CPU")[0],
    [tf.config.LogicalDeviceConfiguration()] * 2,
)
extended = collective_all_reduce_strategy.CollectiveAllReduceExtended
extended._initialize_local_devices = devices_of_task
strategy = tf.distribute.MultiWorkerMirroredStrategy()

# After the strategy, because this import uses the devices.
from tests.collectives import devices_cases as cases  # noqa: E402

training = cases.Training([0, 0, 1, 1], cases.dist_ef, strategy=strategy)
weights = training.take(cases.gradients_of(3))
state = training.saved()
fitted, losses = cases.fit_on(strategy, cases.dist_ef)
answer = {
    "replicas": strategy.num_replicas_in_sync,
    "weights": weights.tolist(),
    "residual": state["compressed.worker.residual"].tolist(),
    "fitted": [np.stack(replicas).tolist() for replicas in fitted],
    "losses": losses,
}
report(sys.argv[1], strategy.cluster_resolver.task_id, answer)
