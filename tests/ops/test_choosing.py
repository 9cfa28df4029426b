"""Tests of the choice between native operations and the reference."""

import inspect
import subprocess
import sys
import warnings
from types import SimpleNamespace

import numpy as np
import pytest
import tensorflow as tf

from tests.helpers import bits
from tfgradcomp import ops
from tfgradcomp.ops import dispatch, library
from tfgradcomp.ops.reference import blocks
from tfgradcomp.ops.registry import OPERATIONS


@pytest.fixture(scope="module")
def loaded():
    return library.library()


@pytest.fixture
def in_auto_mode(monkeypatch):
    monkeypatch.delenv("TFGRADCOMP_OPS", raising=False)
    monkeypatch.setattr(dispatch, "_warned", set())


def types_of(function, *args):
    """Returns the types of all operations of a traced function, of inner ones too."""
    graph = tf.function(function).get_concrete_function(*args).graph.as_graph_def()
    nodes = [graph.node, *(inner.node_def for inner in graph.library.function)]
    return {node.op for part in nodes for node in part}


def test_a_bad_mode_is_refused(monkeypatch):
    monkeypatch.setenv("TFGRADCOMP_OPS", "fast")
    with pytest.raises(ValueError, match="TFGRADCOMP_OPS='fast'"):
        ops.pack_signs([1.0])


def test_an_operation_that_is_missing_falls_back_alone(
    monkeypatch, loaded, in_auto_mode
):
    operations = {f"tfgradcomp_{name}": None for name in OPERATIONS}
    operations["tfgradcomp_pack_signs"] = loaded.operations.tfgradcomp_pack_signs
    del operations["tfgradcomp_unpack_codes"]
    partial = loaded._replace(operations=SimpleNamespace(**operations))
    monkeypatch.setattr(library, "_loaded", partial)
    monkeypatch.setattr(library, "gpu_is_visible", lambda: False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            assert list(ops.unpack_codes(tf.constant([5]), 2, 3)) == [1, 0, 1]
        assert "Tfgradcomp>PackSigns" in types_of(lambda: ops.pack_signs([1.0]))
    (warning,) = caught
    assert "has no unpack_codes" in str(warning.message)
    assert warning.filename == __file__


@pytest.mark.parametrize("mode, expected", [("auto", False), ("native", True)])
def test_a_library_without_cuda_leaves_a_gpu_to_tensorflow(
    monkeypatch, loaded, in_auto_mode, mode, expected
):
    cpu = loaded._replace(path=loaded.path.with_name("ops-cpu.so"))
    monkeypatch.setattr(library, "_loaded", cpu)
    monkeypatch.setattr(library.Library, "built_with", "CUDA left out")
    monkeypatch.setattr(library, "gpu_is_visible", lambda: True)
    monkeypatch.setenv("TFGRADCOMP_OPS", mode)

    def on_cpu():
        with tf.device("CPU:0"):
            return ops.pack_signs([1.0])

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        types = types_of(lambda: ops.pack_signs([1.0]))
        types_on_cpu = types_of(on_cpu)
        assert list(on_cpu()) == [1]
    assert ("Tfgradcomp>PackSigns" in types) == expected
    assert "Tfgradcomp>PackSigns" in types_on_cpu
    told = [str(w.message) for w in caught]
    assert len(told) == (0 if expected else 1)
    assert all("it has no kernels for GPUs (CUDA left out)" in text for text in told)


@pytest.mark.parametrize("mode", ["auto", "native"])
def test_xla_gets_tensorflow_only(monkeypatch, mode, loaded):
    monkeypatch.setenv("TFGRADCOMP_OPS", mode)
    monkeypatch.setattr(library, "gpu_is_visible", lambda: False)
    x = tf.constant([1.0, -1.0, 1.0])
    assert "Tfgradcomp>PackSigns" in types_of(ops.pack_signs, x)
    # The inner function has a graph of its own, inside the one that XLA compiles.
    for function in (ops.pack_signs, tf.function(lambda x: ops.pack_signs(x))):
        compiled = tf.function(function, jit_compile=True)
        assert not any(t.startswith("Tfgradcomp") for t in types_of(compiled, x))
        assert list(compiled(x)) == [5]


def test_a_size_that_is_a_tensor_gets_the_reference(monkeypatch, loaded):
    monkeypatch.setattr(library, "gpu_is_visible", lambda: False)
    words, count = tf.constant([5]), tf.constant(3)
    for size, is_native in ((3, True), (count, False)):
        for call in (
            lambda size=size: ops.unpack_codes(words, 2, size),
            lambda size=size: ops.unpack_codes(words, base=2, count=size),
        ):
            assert ("Tfgradcomp>UnpackCodes" in types_of(call)) == is_native
            assert list(call()) == [1, 0, 1]


@pytest.mark.parametrize("sees_gpu", [False, True])
def test_an_operation_of_cpus_alone_is_tensorflows_beside_a_gpu(
    monkeypatch, loaded, sees_gpu
):
    monkeypatch.setattr(library, "gpu_is_visible", lambda: sees_gpu)
    x, is_finite = tf.constant([1.0, np.nan]), tf.constant(False)
    types = types_of(lambda: ops.first_nonfinite(x, is_finite))
    assert ("Tfgradcomp>FirstNonfinite" in types) != sees_gpu
    assert int(ops.first_nonfinite(x, is_finite)) == 0


def test_public_functions_have_the_documentation_of_the_reference():
    for name, operation in OPERATIONS.items():
        assert getattr(ops, name) is operation
        assert operation.__doc__ == operation.reference.__doc__
        assert operation.__name__ == name and name in ops.__all__
        assert inspect.signature(operation) == inspect.signature(operation.reference)


def test_every_public_name_is_there_and_any_other_is_an_error():
    assert dir(ops) == sorted(ops.__all__)
    for name in ops.__all__:
        assert getattr(ops, name) is not None
    with pytest.raises(AttributeError, match="'tfgradcomp.ops' has no .* It has: "):
        ops.pack_nothing()


def test_an_import_of_the_package_waits_with_tensorflow():
    code = "import sys, tfgradcomp.ops; print('tensorflow' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "False\n", done.stderr


def test_the_mean_magnitude_is_the_reference_s():
    x = np.random.default_rng(0).normal(size=5000).astype(np.float32)
    for splits in ([0, 5000], [0, 1, 700, 5000]):
        got, expected = (
            ops.mean_magnitude(x, splits),
            blocks.mean_magnitude(x, splits),
        )
        assert bits(got) == bits(expected)
