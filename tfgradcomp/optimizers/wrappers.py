"""The wrappers of the methods: a Keras optimizer for each function of `methods/`."""

from __future__ import annotations

from tfgradcomp import methods
from tfgradcomp.optimizers.method_wrapper import MethodWrapper


class TernGrad(MethodWrapper, function=methods.terngrad):
    r"""Three levels an element: 1.6 bits up, \( \log_2(2N+1) \) bits down.

    Example:
        ```python
        optimizer = tfgradcomp.TernGrad(keras.optimizers.SGD(0.01, momentum=0.9))
        model.compile(optimizer, "sparse_categorical_crossentropy")
        ```
    """


class PowerSGD(MethodWrapper, function=methods.power_sgd):
    """Factors of low rank of each matrix, in two all-reduces.

    Example:
        ```python
        inner = keras.optimizers.SGD(0.1, momentum=0.9)
        model.compile(tfgradcomp.PowerSGD(inner, rank=2), "mse")
        ```
    """


class SignSGD(MethodWrapper, function=methods.signsgd):
    """One bit an element, up and down.

    Example:
        ```python
        model.compile(tfgradcomp.SignSGD(keras.optimizers.SGD(1e-4)), "mse")
        ```
    """


class Signum(MethodWrapper, function=methods.signum):
    """signSGD on each worker's momentum: one bit an element, up and down.

    Example:
        ```python
        model.compile(tfgradcomp.Signum(keras.optimizers.SGD(1e-4)), "mse")
        ```
    """


class DistEFSGD(MethodWrapper, function=methods.dist_ef_sgd):
    """Error feedback on the workers and on the server, with any compressor C.

    Example:
        ```python
        model.compile(tfgradcomp.DistEFSGD(keras.optimizers.SGD(0.05)), "mse")
        ```
    """


class DistEFBlockSGD(MethodWrapper, function=methods.dist_ef_block_sgd):
    """dist-EF-SGD with a scale a block: one bit an element, up and down.

    Example:
        ```python
        model.compile(tfgradcomp.DistEFBlockSGD(keras.optimizers.SGD(0.05)), "mse")
        ```
    """


class DistEFBlockSGDM(MethodWrapper, function=methods.dist_ef_block_sgdm):
    """dist-EF-blockSGD with Nesterov momentum on each worker.

    Example:
        ```python
        model.compile(tfgradcomp.DistEFBlockSGDM(keras.optimizers.SGD(0.01)), "mse")
        ```
    """


class OneBitSGD(MethodWrapper, function=methods.one_bit_sgd):
    """1-bit SGD: signs with two means a column, and error feedback.

    Example:
        ```python
        model.compile(tfgradcomp.OneBitSGD(keras.optimizers.SGD(0.1)), "mse")
        ```
    """


class DGC(MethodWrapper, function=methods.dgc):
    """The largest of accumulated momenta: one element in a thousand a step.

    Example:
        ```python
        optimizer = tfgradcomp.DGC(keras.optimizers.SGD(0.1), density_steps=500)
        model.compile(optimizer, "sparse_categorical_crossentropy")
        ```
    """


class ChunkedTopK(MethodWrapper, function=methods.chunked_top_k):
    """The k largest elements of each chunk, under error feedback that forgets.

    Example:
        ```python
        outer = tfgradcomp.ChunkedTopK(keras.optimizers.SGD(1.0), k=64, chunk=4096)
        model.compile(tfgradcomp.LocalSteps("adamw", outer, every=30), "mse")
        ```
    """


class RandomK(MethodWrapper, function=methods.random_k):
    """The values of a few elements that all workers draw together.

    Example:
        ```python
        optimizer = tfgradcomp.RandomK(keras.optimizers.SGD(0.01), ratio=0.05)
        model.compile(optimizer, "sparse_categorical_crossentropy")
        ```
    """


class ORQ(MethodWrapper, function=methods.orq):
    r"""\( s = 2^K + 1 \) levels an element, chosen for each block anew, unbiased.

    Example:
        ```python
        optimizer = tfgradcomp.ORQ(keras.optimizers.SGD(0.1, momentum=0.9), levels=5)
        model.compile(optimizer, "sparse_categorical_crossentropy")
        ```
    """


class BinGrad(MethodWrapper, function=methods.bingrad):
    """Two levels an element, chosen for each block anew: one bit.

    Example:
        ```python
        model.compile(tfgradcomp.BinGrad(keras.optimizers.SGD(0.1)), "mse")
        ```
    """


class QSGD(MethodWrapper, function=methods.qsgd):
    """Evenly spaced levels up to the norm of each block, unbiased.

    Example:
        ```python
        model.compile(tfgradcomp.QSGD(keras.optimizers.SGD(0.1), levels=5), "mse")
        ```
    """


class Int8(MethodWrapper, function=methods.int8):
    """Integers from -127 to 127 times a scale a block: eight bits an element.

    Example:
        ```python
        model.compile(tfgradcomp.Int8("adam"), "mse")
        ```
    """


class Int4(MethodWrapper, function=methods.int4):
    """Integers from -7 to 7 times a scale a block: four bits an element.

    Example:
        ```python
        model.compile(tfgradcomp.Int4("adam", block_size=512), "mse")
        ```
    """


class LinearQuantization(MethodWrapper, function=methods.linear_quantization):
    """Levels at evenly spaced quantiles of each block, unbiased: a baseline of ORQ's.

    Example:
        ```python
        optimizer = tfgradcomp.LinearQuantization(keras.optimizers.SGD(0.1))
        model.compile(optimizer, "mse")
        ```
    """


class ScalarCodebook(MethodWrapper, function=methods.scalar_codebook):
    """The nearest of 4, 8 or 16 levels that fit a normal law, in both directions.

    Example:
        ```python
        outer = tfgradcomp.ScalarCodebook(keras.optimizers.SGD(1.0), bits=3)
        model.compile(tfgradcomp.LocalSteps("adam", outer, every=16), "mse")
        ```
    """


class ScaledSign(MethodWrapper, function=methods.scaled_sign):
    """The sign of each element times the mean magnitude of its block: one bit.

    Example:
        ```python
        model.compile(tfgradcomp.ScaledSign(keras.optimizers.SGD(0.05)), "mse")
        ```
    """


class NaturalCompression(MethodWrapper, function=methods.natural_compression):
    """Random rounding to powers of two: eight bits an element, unbiased.

    Example:
        ```python
        optimizer = tfgradcomp.NaturalCompression(keras.optimizers.SGD(0.1))
        model.compile(optimizer, "mse")
        ```
    """


class Strom(MethodWrapper, function=methods.strom):
    """A sign for each element whose sum is beyond a threshold, nothing for the others.

    Example:
        ```python
        optimizer = tfgradcomp.Strom(keras.optimizers.SGD(0.1), threshold=0.01)
        model.compile(optimizer, "sparse_categorical_crossentropy")
        ```
    """


class VarianceBased(MethodWrapper, function=methods.variance_based):
    """A word for each element whose sign is beyond doubt, nothing for the others.

    Example:
        ```python
        optimizer = tfgradcomp.VarianceBased(keras.optimizers.Adam())
        model.compile(optimizer, "sparse_categorical_crossentropy")
        ```
    """


class Hybrid(MethodWrapper, function=methods.hybrid):
    """A sign for each element that is beyond a threshold, and beyond doubt.

    Example:
        ```python
        optimizer = tfgradcomp.Hybrid(keras.optimizers.Adam(), threshold="auto")
        model.compile(optimizer, "sparse_categorical_crossentropy")
        ```
    """


class HalfPrecision(MethodWrapper, function=methods.half_precision):
    """Sixteen bits an element: gradients are cast and added up in half precision.

    Example:
        ```python
        model.compile(tfgradcomp.HalfPrecision("adam"), "mse")
        ```
    """
