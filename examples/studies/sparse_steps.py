"""Steps of sparse methods that count residuals relative to the threshold."""

import math

import tensorflow as tf

from tfgradcomp.per_example.second_moments import step_of

BATCH_SIZE = 32
# |r| over the threshold is counted between these powers of 2.
BINS = 16


class Steps:
    """Takes steps of a model, several in one call, and counts |r| over the threshold.

    Args:
        strategy: The workers.
        model: The model, compiled.
        images: Images for training, uint8.
        labels: Their labels.
        order: Indices of images; the images of a step are consecutive.
        has_threshold: Whether the method has a threshold.
    """

    def __init__(self, strategy, model, images, labels, order, has_threshold):
        self.strategy, self.model, self.optimizer = strategy, model, model.optimizer
        self.workers = strategy.num_replicas_in_sync
        self.images, self.labels, self.order = images, labels, tf.constant(order)
        with strategy.scope():
            self.optimizer.build(model.trainable_variables)
        residuals = [v for v in self.optimizer.variables if "worker.residual" in v.name]
        self.residual = residuals[0] if has_threshold else None
        self.taken, self._take = 0, tf.function(self._steps)

    def take(self, until):
        """Take steps up to a total; return the counts, by powers of 2."""
        counts = self._take(tf.constant(self.taken), tf.constant(until))
        self.taken = until
        return counts.numpy()

    def _steps(self, begin, end):
        counts = tf.zeros([BINS], tf.int64)
        for number in tf.range(begin, end):
            of_workers = self.strategy.run(self._step, args=(number,))
            for count in self.strategy.experimental_local_results(of_workers):
                counts += count
        return counts

    @tf.autograph.experimental.do_not_convert
    def _step(self, number):
        rank = tf.distribute.get_replica_context().replica_id_in_sync_group
        begin = (number * self.workers + rank) * BATCH_SIZE
        rows = self.order[begin : begin + BATCH_SIZE]
        x = tf.cast(tf.gather(self.images, rows), tf.float32) / 255
        y = tf.gather(self.labels, rows)
        variables, further = self.model.trainable_variables, {}
        if getattr(self.optimizer, "needs_second_moments", False):
            step = step_of(self.model, x, y)
            gradients, further = step.gradients, {"second_moments": step.moments}
        else:
            with tf.GradientTape() as tape:
                loss = self.model.compute_loss(x, y, self.model(x, training=True))
                # As Keras divides it.
                loss /= self.workers
            gradients = tape.gradient(loss, variables)
        if self.residual is None:
            self.optimizer.apply(gradients, variables, **further)
            return tf.zeros([BINS], tf.int64)
        flat = tf.concat([tf.reshape(g, [-1]) for g in gradients], 0) * self.workers
        r = tf.identity(tf.convert_to_tensor(self.residual)) + flat
        with tf.control_dependencies([r]):
            self.optimizer.apply(gradients, variables, **further)
        # A sent element changes by the threshold, the others do not change.
        sent = tf.abs(r - tf.convert_to_tensor(self.residual))
        is_sent = sent > 0
        power = tf.math.log(tf.boolean_mask(tf.abs(r) / sent, is_sent)) / math.log(2)
        power = tf.cast(tf.clip_by_value(power, 0, BINS - 1), tf.int32)
        return tf.math.bincount(power, minlength=BINS, maxlength=BINS, dtype=tf.int64)
