"""Building, loading and choosing the native ops.

One library is compiled at most: where a test needs a build, a compiler takes its place
that copies the library and counts.
"""

import os
import subprocess
import sys
import time
import warnings
from types import SimpleNamespace

import numpy as np
import pytest
import tensorflow as tf

from tests.helpers import bits
from tfgradcomp import ops
from tfgradcomp.ops import SplitVector, build, dispatch, native, reference

# Never the library that an install left in the package.
CACHE_ONLY = """
import pathlib
from tfgradcomp.ops import native
native._INSTALLED = pathlib.Path("/nowhere")
"""
PACK_TWICE = """
from tfgradcomp import ops
print(ops.pack_signs([1.0, -1.0, 1.0]).numpy(), ops.pack_signs([1.0]).numpy())
"""
PRINT_TYPES = """
import tensorflow as tf
graph = tf.function(ops.pack_signs).get_concrete_function([1.0]).graph
print(any(o.type == "Tfgradcomp>PackSigns" for o in graph.get_operations()))
"""
COPYING_COMPILER = """#!{python}
import shutil, sys, time
with open({log!r}, "a") as log:
    print(*sys.argv[1:], file=log)
if "--version" in sys.argv:
    print("a compiler that copies")
elif "-shared" in sys.argv:
    time.sleep(2)
    shutil.copy({library!r}, sys.argv[sys.argv.index("-o") + 1])
"""


@pytest.fixture(scope="module")
def library():
    return native.library()


@pytest.fixture
def in_auto_mode(monkeypatch):
    monkeypatch.delenv("TFGRADCOMP_OPS", raising=False)
    monkeypatch.setattr(dispatch, "_warned", set())


@pytest.fixture
def compiler(tmp_path, library):
    """A compiler that copies; `lines` are the commands it got."""
    log, path = tmp_path / "log", tmp_path / "c++"
    path.write_text(
        COPYING_COMPILER.format(
            python=sys.executable, log=str(log), library=str(library.path)
        )
    )
    path.chmod(0o755)
    return SimpleNamespace(path=path, lines=lambda: log.read_text().splitlines())


def environment(cache, **variables):
    inherited = {k: v for k, v in os.environ.items() if k != "TFGRADCOMP_OPS"}
    here = {"XDG_CACHE_HOME": str(cache), "TFGRADCOMP_CUDA": "0"}
    return {**inherited, **here, **{k: str(v) for k, v in variables.items()}}


def run(arguments, cache, **variables):
    return subprocess.run(
        [sys.executable, *arguments],
        env=environment(cache, **variables),
        capture_output=True,
        text=True,
        timeout=120,
    )


def types_of(function, *args):
    """Types of all operations that tracing a function gives, in inner ones too."""
    graph = tf.function(function).get_concrete_function(*args).graph.as_graph_def()
    nodes = [graph.node, *(inner.node_def for inner in graph.library.function)]
    return {node.op for part in nodes for node in part}


# -- Building -----------------------------------------------------------------------


def test_processes_that_start_at_once_build_once(tmp_path, compiler):
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", CACHE_ONLY + PACK_TWICE + PRINT_TYPES],
            env=environment(tmp_path, CXX=compiler.path, TFGRADCOMP_OPS="native"),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(3)
    ]
    try:
        said = [worker.communicate(timeout=120) for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    assert [out for out, _ in said] == ["[5] [1]\nTrue\n"] * 3, said
    assert sum("-shared" in line for line in compiler.lines()) == 1
    assert sum("building the native ops" in err for _, err in said) == 1
    left_out = "CUDA kernels left out: TFGRADCOMP_CUDA=0"
    assert sum(left_out in err for _, err in said) == 1
    made = sorted(path.name for path in (tmp_path / "tfgradcomp" / "ops").iterdir())
    assert made == [build.library_name(tf.__version__, cuda=False), "lock"]


def test_those_who_waited_do_not_repeat_a_build_that_failed(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(native, "_INSTALLED", tmp_path)
    builds = []

    def fail(folder):
        builds.append(folder)
        raise build.BuildError("no such luck")

    monkeypatch.setattr(native, "_build", fail)
    now = time.time()
    with pytest.raises(build.BuildError, match="no such luck"):
        native._build_once()
    monkeypatch.setattr(native.time, "time", lambda: now - 60)
    with pytest.raises(build.BuildError, match="no such luck"):
        native._build_once()
    assert len(builds) == 1
    monkeypatch.undo()


def test_without_a_compiler_one_warning_says_what_to_do(tmp_path):
    done = run(["-c", CACHE_ONLY + PACK_TWICE], tmp_path, CXX="/bin/false")
    assert done.stdout == "[5] [1]\n", done.stderr
    assert done.stderr.count("RuntimeWarning: tfgradcomp falls back") == 1
    assert "/bin/false failed with status 1" in done.stderr
    assert "python -m tfgradcomp.ops --build" in done.stderr


def test_without_a_compiler_native_mode_raises(tmp_path):
    done = run(
        ["-c", CACHE_ONLY + PACK_TWICE],
        tmp_path,
        CXX="/nowhere/c++",
        TFGRADCOMP_OPS="native",
    )
    assert done.returncode == 1
    assert "UnavailableError: TFGRADCOMP_OPS=native, but" in done.stderr
    assert "Could not run /nowhere/c++" in done.stderr
    assert "python -m tfgradcomp.ops --build" in done.stderr


def test_python_mode_builds_nothing(tmp_path):
    code = CACHE_ONLY + PACK_TWICE + PRINT_TYPES
    done = run(["-c", code], tmp_path, CXX="/bin/false", TFGRADCOMP_OPS="python")
    assert done.stdout == "[5] [1]\nFalse\n", done.stderr
    assert "tfgradcomp" not in done.stderr
    assert not (tmp_path / "tfgradcomp").exists()


def test_a_library_for_another_tensorflow_is_not_taken(tmp_path, monkeypatch, library):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(native, "_INSTALLED", tmp_path)
    names = [build.library_name("2.19.1", cuda) for cuda in (False, True)]
    for name in names:
        (tmp_path / name).write_bytes(library.path.read_bytes())
    assert native.find_library() is None
    fitting = tmp_path / build.library_name(tf.__version__, cuda=False)
    fitting.write_bytes(library.path.read_bytes())
    monkeypatch.setattr(native, "gpu_is_visible", lambda: False)
    assert native.find_library() == fitting
    # Where a build would give CUDA kernels too, they are worth one.
    monkeypatch.setattr(native, "gpu_is_visible", lambda: True)
    monkeypatch.setattr(build, "find_nvcc", lambda: ("nvcc", "nvcc"))
    assert native.find_library() is None


def test_a_library_that_does_not_load_is_said_so(tmp_path):
    broken = tmp_path / "tfgradcomp" / "ops"
    broken.mkdir(parents=True)
    (broken / build.library_name(tf.__version__, cuda=False)).write_text("broken")
    done = run(["-c", CACHE_ONLY + PACK_TWICE], tmp_path)
    assert done.stdout == "[5] [1]\n", done.stderr
    assert done.stderr.count("RuntimeWarning: tfgradcomp falls back") == 1
    assert "cannot be loaded" in done.stderr


def test_a_changed_source_is_another_library(tmp_path, monkeypatch):
    (tmp_path / "kernels.h").write_text("// One.")
    monkeypatch.setattr(build, "source_folder", lambda: tmp_path)
    before = build.library_name("2.21.0", cuda=False)
    (tmp_path / "kernels.h").write_text("// Two.")
    assert build.library_name("2.21.0", cuda=False) != before


def test_an_error_of_the_compiler_is_shown(tmp_path, monkeypatch):
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu" / "kernels.cc").write_text("no C++ at all;")
    monkeypatch.setattr(build, "source_folder", lambda: tmp_path)
    with pytest.raises(build.BuildError, match="no C.. at all"):
        build.build_cpu_library(tmp_path / "library.so")
    assert not (tmp_path / "library.so").exists()


def test_the_tool_builds(tmp_path, compiler):
    done = run(["-m", "tfgradcomp.ops", "--build"], tmp_path, CXX=compiler.path)
    name = build.library_name(tf.__version__, cuda=False)
    assert done.stdout == f"{tmp_path / 'tfgradcomp' / 'ops' / name}\n", done.stderr
    assert all(line.startswith("tfgradcomp: ") for line in done.stderr.splitlines())
    failed = run(["-m", "tfgradcomp.ops", "--build"], tmp_path, CXX="/bin/false")
    assert failed.returncode == 1
    assert "/bin/false failed with status 1" in failed.stderr


def test_the_tool_informs(tmp_path, library):
    done = run(["-m", "tfgradcomp.ops", "--info"], tmp_path, TFGRADCOMP_OPS="auto")
    assert done.returncode == 0 and done.stderr == ""
    assert f"TensorFlow:      {tf.__version__}\n" in done.stdout
    assert f"Cache:           {tmp_path / 'tfgradcomp' / 'ops'}\n" in done.stdout
    cached = tmp_path / "tfgradcomp" / "ops" / library.path.name
    cached.parent.mkdir(parents=True)
    cached.write_bytes(library.path.read_bytes())
    done = run(["-m", "tfgradcomp.ops", "--info"], tmp_path)
    assert f"Built with:      TensorFlow {tf.__version__}; " in done.stdout
    assert f"Instruction set: {library.instruction_set}\n" in done.stdout
    assert "CUDA " in done.stdout


# -- Choosing -----------------------------------------------------------------------


def test_a_bad_mode_is_refused(monkeypatch):
    monkeypatch.setenv("TFGRADCOMP_OPS", "fast")
    with pytest.raises(ValueError, match="TFGRADCOMP_OPS='fast'"):
        ops.pack_signs([1.0])


def test_an_operation_that_is_missing_falls_back_alone(
    monkeypatch, library, in_auto_mode
):
    operations = {f"tfgradcomp_{name}": None for name in native.NAMES}
    operations["tfgradcomp_pack_signs"] = library.operations.tfgradcomp_pack_signs
    del operations["tfgradcomp_unpack_codes"]
    partial = library._replace(operations=SimpleNamespace(**operations))
    monkeypatch.setattr(native, "_loaded", partial)
    monkeypatch.setattr(native, "gpu_is_visible", lambda: False)
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
    monkeypatch, library, in_auto_mode, mode, expected
):
    cpu = library._replace(path=library.path.with_name("ops-cpu.so"))
    monkeypatch.setattr(native, "_loaded", cpu)
    monkeypatch.setattr(native.Library, "built_with", "CUDA left out")
    monkeypatch.setattr(native, "gpu_is_visible", lambda: True)
    monkeypatch.setenv("TFGRADCOMP_OPS", mode)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        types = types_of(lambda: ops.pack_signs([1.0]))
    assert ("Tfgradcomp>PackSigns" in types) == expected
    told = [str(w.message) for w in caught]
    assert len(told) == (0 if expected else 1)
    assert all("it has no kernels for them (CUDA left out)" in text for text in told)


@pytest.mark.parametrize("mode", ["auto", "native"])
def test_xla_gets_tensorflow_only(monkeypatch, mode, library):
    monkeypatch.setenv("TFGRADCOMP_OPS", mode)
    monkeypatch.setattr(native, "gpu_is_visible", lambda: False)
    x = tf.constant([1.0, -1.0, 1.0])
    assert "Tfgradcomp>PackSigns" in types_of(ops.pack_signs, x)
    # The inner function has a graph of its own, inside the one that XLA compiles.
    for function in (ops.pack_signs, tf.function(lambda x: ops.pack_signs(x))):
        compiled = tf.function(function, jit_compile=True)
        assert not any(t.startswith("Tfgradcomp") for t in types_of(compiled, x))
        assert list(compiled(x)) == [5]


def test_public_functions_have_the_documentation_of_the_reference():
    for name in native.NAMES:
        function = getattr(ops, name)
        assert function.__doc__ == getattr(reference, name).__doc__
        assert function.__name__ == name and name in ops.__all__


# -- The operations -----------------------------------------------------------------

X, STREAM = np.ones(5, np.float32), np.array([1, 2, 3], np.int64)
ONE, TWO = np.ones(1, np.float32), np.ones(2, np.float32)
WORDS = np.zeros((2, 1), np.int32)

# For each operation, arguments that are right.
CALLS = {
    "pack_codes": dict(codes=np.ones(5, np.int32), base=3),
    "unpack_codes": dict(words=WORDS, base=3, count=5),
    "pack_signs": dict(x=X, stream=STREAM),
    "pack_momentum_signs": dict(
        x=X, momentum=X, beta=0.9, warming_up=False, stream=STREAM
    ),
    "pack_ternary": dict(
        x=X, limit=TWO, scale=TWO, row_splits=[0, 2, 5], stream=STREAM
    ),
    "block_statistics": dict(x=X, row_splits=[0, 2, 5]),
    "sum_codes": dict(words=WORDS, base=3, count=5, sum_base=7),
    "sum_levels": dict(
        words=WORDS, scale=TWO, row_splits=[0, 2, 5], base=3, step=1, zero=2
    ),
    "mean_of_signs": dict(
        words=WORDS, scale=np.ones((2, 2), np.float32), row_splits=[0, 2, 5]
    ),
    "find_levels": dict(x=X, row_splits=[0, 2, 5], rule="optimal", count=5, sweeps=1),
    "pack_levels": dict(
        x=X,
        levels=np.ones((2, 3), np.float32),
        row_splits=[0, 2, 5],
        stream=STREAM,
    ),
    "mean_of_levels": dict(
        words=WORDS, levels=np.ones((2, 2, 3), np.float32), row_splits=[0, 2, 5]
    ),
    "majority_vote": dict(words=WORDS, count=5, base=3, reply_base=2, stream=STREAM),
    "sign_error_feedback": dict(
        x=X,
        momentum=X,
        residual=X,
        mu=0.9,
        ratio=0.5,
        moving=True,
        row_splits=[0, 2, 5],
    ),
    "mean_sign_error_feedback": dict(
        sent_words=WORDS,
        sent_scale=np.ones((2, 2), np.float32),
        residual=X,
        ratio=0.5,
        moving=True,
        row_splits=[0, 2, 5],
    ),
    "mean_sign_sums": dict(
        sent_words=WORDS,
        sent_scale=np.ones((2, 2), np.float32),
        residual=X,
        ratio=0.5,
        row_splits=[0, 2, 5],
    ),
    "mean_sign_residual": dict(
        sent_words=WORDS,
        sent_scale=np.ones((2, 2), np.float32),
        residual=X,
        ratio=0.5,
        moving=True,
        words=WORDS[0],
        scale=TWO,
        row_splits=[0, 2, 5],
    ),
    "pack_unambiguous": dict(
        x=X,
        moments=X,
        residual=X,
        variance=X,
        alpha=1.5,
        decay=0.999,
        row_splits=[0, 2, 5],
    ),
    "pack_over_threshold": dict(
        x=X,
        moments=X,
        residual=X,
        variance=X,
        threshold=0.5,
        alpha=1.5,
        decay=0.999,
    ),
    "mean_of_sparse": dict(
        words=np.array([[1, 4], [-1, -1]], np.int32),
        scale=np.ones((2, 2), np.float32),
        row_splits=[0, 2, 5],
    ),
}
HUGE = 2**40
NO_WORKERS, LONG_WORDS = np.zeros((0, 1), np.int32), np.zeros((2, 2), np.int32)
BAD_VECTOR = [X[:4], X[np.newaxis], np.float32(1)]
# The gradient may have any shape.
BAD_X = [X[:4], np.float32(1), SplitVector(tf.split(np.ones(6, np.float32), [0, 5, 1]))]
BAD_SIZES = [[4], [2, 4], [6, -1], [2, 3, 2**62, 2**62, 2**62, 2**62]]
BAD_SPLITS = [
    [0, 2, 4],
    [1, 2, 5],
    [0, 5, 5],
    [0, 6, 5],
    [0, -1, 5],
    [0, 2, 3, 5],
    [0],
    [],
    [[0, 2, 5]],
]
# Where nothing else says how many blocks there are, or how many elements.
BAD_SPLITS_ALONE = [s for s in BAD_SPLITS if s != [0, 2, 3, 5]]
BAD_SPLITS_FIRST = [[1, 2, 5], [0, 5, 5], [0, 6, 5], [0, -1, 5], [0, 2, 3, 5], [5]]
BAD_WORDS = [LONG_WORDS, WORDS[0], NO_WORKERS]
BAD_STREAM = [STREAM[:2], STREAM[np.newaxis]]
BAD_BASE = [1, 0, -1, 2**32 + 1, HUGE]
BAD_COUNT = [-1, 50, HUGE, 2**62]
BAD_SCALAR = [ONE, X]
BAD_GATHERED = dict(
    x=BAD_X,
    moments=BAD_X,
    residual=BAD_VECTOR,
    variance=BAD_VECTOR,
    alpha=[-1.0, np.inf, np.nan],
    decay=[-0.1, 1.1, np.nan],
)
BAD_SENT = dict(
    sent_words=BAD_WORDS,
    sent_scale=[TWO, np.ones((1, 2), np.float32), np.ones((2, 3), np.float32)],
    residual=[np.ones(40, np.float32), *BAD_VECTOR[1:]],
    ratio=BAD_SCALAR,
    row_splits=BAD_SPLITS,
)
# And values that are wrong, each by itself.
BAD = {
    "pack_codes": dict(codes=[np.int32(1), WORDS], base=BAD_BASE),
    "unpack_codes": dict(
        words=[np.int32(1), LONG_WORDS], base=BAD_BASE, count=BAD_COUNT
    ),
    "pack_signs": dict(stream=BAD_STREAM),
    "pack_momentum_signs": dict(
        x=BAD_X, momentum=BAD_VECTOR, warming_up=[[True]], stream=BAD_STREAM
    ),
    "pack_ternary": dict(
        x=BAD_X,
        limit=[ONE, X],
        scale=[ONE, X],
        row_splits=BAD_SPLITS,
        stream=BAD_STREAM,
    ),
    "block_statistics": dict(x=BAD_X, row_splits=BAD_SPLITS_ALONE),
    "sum_codes": dict(
        words=BAD_WORDS,
        base=[*BAD_BASE, 2**32],
        count=BAD_COUNT,
        sum_base=[4, *BAD_BASE],
    ),
    "sum_levels": dict(
        sizes=BAD_SIZES,
        words=BAD_WORDS,
        scale=[ONE, X],
        row_splits=BAD_SPLITS_FIRST,
        base=BAD_BASE,
        step=[2**31, -(2**31), 2**30, HUGE],
        zero=[2**31, -(2**31), HUGE],
    ),
    "mean_of_signs": dict(
        sizes=BAD_SIZES,
        words=BAD_WORDS,
        scale=[TWO, np.ones((1, 2), np.float32), np.ones((2, 3), np.float32)],
        row_splits=BAD_SPLITS_FIRST,
    ),
    "find_levels": dict(
        x=BAD_X,
        row_splits=BAD_SPLITS_ALONE,
        rule=["best", "", "symmetric", "means"],
        count=[-1, 0, 1, 4, 6, 2**16 + 1, HUGE],
        sweeps=[-1],
    ),
    "pack_levels": dict(
        x=BAD_X,
        levels=[
            TWO,
            np.ones((1, 3), np.float32),
            np.ones((2, 0), np.float32),
            np.ones((2, 1), np.float32),
            np.ones((2, 2**16 + 1), np.float32),
            np.ones((2, 3, 1), np.float32),
        ],
        row_splits=BAD_SPLITS,
        stream=BAD_STREAM,
    ),
    "mean_of_levels": dict(
        sizes=BAD_SIZES,
        words=BAD_WORDS,
        levels=[
            np.ones((2, 3), np.float32),
            np.ones((1, 2, 3), np.float32),
            np.ones((2, 1, 3), np.float32),
            np.ones((2, 2, 0), np.float32),
            np.ones((2, 2, 1), np.float32),
            np.ones((2, 2, 2**16 + 1), np.float32),
        ],
        row_splits=BAD_SPLITS_FIRST,
    ),
    "majority_vote": dict(
        words=BAD_WORDS,
        count=BAD_COUNT,
        base=[*BAD_BASE, 4],
        reply_base=[*BAD_BASE, 4],
        stream=BAD_STREAM,
    ),
    "sign_error_feedback": dict(
        x=BAD_X,
        momentum=BAD_VECTOR,
        residual=BAD_VECTOR,
        ratio=BAD_SCALAR,
        moving=[[True]],
        row_splits=BAD_SPLITS_ALONE,
    ),
    "mean_sign_error_feedback": dict(BAD_SENT, moving=[[True]]),
    "mean_sign_sums": BAD_SENT,
    "mean_sign_residual": dict(
        BAD_SENT, moving=[[True]], words=[WORDS, LONG_WORDS[0]], scale=[ONE, X]
    ),
    "pack_unambiguous": dict(BAD_GATHERED, row_splits=BAD_SPLITS_ALONE),
    "pack_over_threshold": dict(
        BAD_GATHERED,
        moments=[*BAD_X, None],
        variance=[*BAD_VECTOR, None],
        threshold=[0.0, -1.0, np.inf, np.nan],
    ),
    "mean_of_sparse": dict(
        sizes=BAD_SIZES,
        words=[WORDS[0], NO_WORKERS, LONG_WORDS[:1]],
        scale=[TWO, np.ones((1, 2), np.float32), np.ones((2, 3), np.float32)],
        row_splits=[*BAD_SPLITS_FIRST, [0, 2, 2**28]],
    ),
}


def on_cpu(name, arguments):
    with tf.device("CPU:0"):
        return getattr(native, name)(**arguments)


def test_every_operation_is_in_the_tables():
    assert tuple(CALLS) == tuple(BAD) == native.NAMES


@pytest.mark.parametrize("name", native.NAMES)
def test_results_are_the_reference_s_and_shapes_are_static(name):
    expected = tf.nest.flatten(getattr(reference, name)(**CALLS[name]))
    traced = tf.function(lambda: getattr(native, name)(**CALLS[name]))
    static = tf.nest.flatten(traced.get_concrete_function().structured_outputs)
    for got in (tf.nest.flatten(on_cpu(name, CALLS[name])), static):
        shapes = [t.shape.as_list() for t in expected]
        if got is static and name in ("pack_unambiguous", "pack_over_threshold"):
            shapes[0] = [None]  # As many words as there are.
        assert [t.shape.as_list() for t in got] == shapes
        assert [t.dtype for t in got] == [t.dtype for t in expected]
    for a, b in zip(tf.nest.flatten(traced()), expected, strict=True):
        assert bits(a) == bits(b)


@pytest.mark.parametrize(
    "name, argument", [(name, argument) for name in BAD for argument in BAD[name]]
)
def test_a_wrong_argument_is_an_error_never_a_crash(name, argument):
    for value in BAD[name][argument]:
        arguments = {**CALLS[name], argument: value}
        with pytest.raises(tf.errors.InvalidArgumentError) as caught:
            on_cpu(name, arguments)
        assert "Received" in str(caught.value), value


@pytest.mark.parametrize("name", native.NAMES)
def test_vectors_may_be_empty(name):
    empty = dict(row_splits=[0])
    if name != "find_levels":  # There it is the number of levels.
        empty["count"] = 0
    nothing = np.zeros(0, np.float32)
    vectors = "x", "moments", "momentum", "residual", "variance", "limit", "codes"
    for argument in vectors:
        dtype = np.asarray(CALLS[name].get(argument, nothing)).dtype
        empty[argument] = nothing.astype(dtype)
    words = np.asarray(CALLS[name].get("words", WORDS))
    empty["words"], empty["sent_words"] = words[..., :0], WORDS[:, :0]
    scale = np.ndim(CALLS[name].get("scale", nothing))
    empty["scale"] = np.zeros((2, 0), np.float32) if scale == 2 else nothing
    empty["sent_scale"] = np.zeros((2, 0), np.float32)
    levels = np.shape(CALLS[name].get("levels", WORDS))
    empty["levels"] = np.zeros([*levels[:-2], 0, 3], np.float32)
    arguments = {k: empty.get(k, v) for k, v in CALLS[name].items()}
    for result in tf.nest.flatten(on_cpu(name, arguments)):
        # A count of nothing is a number, too.
        assert result.shape.num_elements() == 0 or (result.shape == [] and result == 0)


@pytest.mark.parametrize(
    "name, argument",
    [(name, a) for name in CALLS for a in ("stream", "momentum", "sum_base", "both")],
)
def test_optional_arguments_may_be_left_out(name, argument):
    left_out = dict.fromkeys([argument])
    if argument == "both":  # There is none without the other.
        left_out = dict.fromkeys(["moments", "variance"])
    if not left_out.keys() <= CALLS[name].keys() or (name, argument) in [
        ("pack_momentum_signs", "momentum"),
        ("pack_ternary", "stream"),
        ("pack_unambiguous", "both"),
    ]:
        return
    arguments = {**CALLS[name], **left_out}
    got = tf.nest.flatten(on_cpu(name, arguments))
    expected = tf.nest.flatten(getattr(reference, name)(**arguments))
    for a, b in zip(got, expected, strict=True):
        assert (a is None and b is None) or bits(a) == bits(b)


def test_shapes_that_are_not_known_yet_are_checked_when_they_are():
    @tf.function(input_signature=[tf.TensorSpec(None), tf.TensorSpec(None)])
    def statistics(x, y):
        words = native.pack_momentum_signs(x, y, 0.9, False, STREAM)[0]
        assert words.shape.as_list() == [None]
        return native.unpack_codes(words, 2, 5)

    with tf.device("CPU:0"):
        assert statistics(X, X).shape == [5]
        with pytest.raises(tf.errors.InvalidArgumentError, match="momentum must have"):
            statistics(X, X[:4])


def test_there_is_no_gradient():
    x = tf.constant(X)
    with tf.GradientTape() as tape:
        tape.watch(x)
        _, momentum, _ = native.pack_momentum_signs(x, x, 0.9, False, STREAM)
    assert tape.gradient(momentum, x) is None


@pytest.mark.parametrize("inter_op_threads, kept", [(-1, True), (1, False)])
def test_threads_take_denormals_as_the_thread_of_the_op(inter_op_threads, kept):
    # TensorFlow's threads flush them; -1 runs the op in this thread, which does not.
    # It shares 4 MB out to four threads that do.
    count = 1_000_000
    config = tf.compat.v1.ConfigProto(
        inter_op_parallelism_threads=inter_op_threads, intra_op_parallelism_threads=4
    )
    with tf.Graph().as_default(), tf.device("CPU:0"):
        words = tf.zeros([1, ops.words_for(count, 2)], tf.int32)
        scale = tf.compat.v1.placeholder(tf.float32, [1])
        values = native.sum_levels(words, scale, [0, count], base=2, step=1, zero=1)
        with tf.compat.v1.Session(config=config) as session:
            denormal = np.array([1e-40], np.float32)
            got = session.run(values, {scale: denormal})
    assert bits(got) == bits(np.full(count, -denormal if kept else -0.0, np.float32))


def test_the_mean_magnitude_is_the_reference_s():
    x = np.random.default_rng(0).normal(size=5000).astype(np.float32)
    for splits in ([0, 5000], [0, 1, 700, 5000]):
        got, expected = (
            ops.mean_magnitude(x, splits),
            reference.mean_magnitude(x, splits),
        )
        assert bits(got) == bits(expected)
