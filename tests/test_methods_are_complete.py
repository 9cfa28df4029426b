"""Nothing that a method needs is missing: its row, its documents, its names."""

import inspect
import re
from pathlib import Path

import keras
import pytest

import tfgradcomp
from tests.benchmarks.scripts import import_script
from tests.methods import ROWS, halves_of, parts_of
from tests.saved_arguments import SAVED_ARGUMENTS
from tests.selection import rows
from tfgradcomp import compressors, optimizers, servers
from tfgradcomp.collectives import Loopback
from tfgradcomp.core import Layout
from tfgradcomp.optimizers.compressed_optimizer import COMMON_ARGUMENTS
from tfgradcomp.transports import messages
from tfgradcomp.transports.auto import BY_NAME

ROOT = Path(__file__).resolve().parents[1]
# Of one size, but for the last.
BLOCKS = Layout.from_sizes([5000], 512)
# Pinned: files that users have saved hold them.
REGISTERED = {
    "tfgradcomp": """BinGrad CompressedOptimizer DistEFBlockSGD DistEFBlockSGDM
        DistEFSGD HalfPrecision Hybrid LinearQuantization ORQ OneBitAdam OneBitLAMB QSGD
        ScaledSign SignSGD Signum Strom TernGrad VarianceBased ZeroOneAdam""",
    "tfgradcomp.compressors": """BinGrad Clip ErrorFeedback Hybrid Identity
        LinearQuantization Momentum NesterovMomentum ORQ QSGD ScaledSign Sign Strom
        Ternary TopK VarianceBased WeightDecay""",
    "tfgradcomp.servers": """CodeSum MajorityVote Mean Recompress Requantize
        SignOfMean""",
}


def concrete(package, base):
    """The public classes of a package that can be constructed."""
    public = [getattr(package, name) for name in package.__all__]
    return [
        kind
        for kind in public
        if inspect.isclass(kind)
        and issubclass(kind, base)
        and not inspect.isabstract(kind)
    ]


WRAPPERS = concrete(optimizers, optimizers.CompressedOptimizer)
# Those that go around SGD; the other three have files of tests of their own.
AROUND_SGD = [k for k in WRAPPERS if not issubclass(k, optimizers.OneBitAdam)]
COMPRESSORS = concrete(compressors, compressors.Compressor)
SERVERS = concrete(servers, servers.Server)
every_class = pytest.mark.parametrize(
    "kind", [*WRAPPERS, *COMPRESSORS], ids=lambda kind: f"{kind.__module__}.{kind}"
)


def missing(wanted, found):
    return sorted(kind.__name__ for kind in wanted if kind.__name__ not in found)


def test_every_class_has_a_row_in_the_table_of_methods():
    methods = [row.method for row in ROWS.values()]
    used = {
        type(part).__name__
        for method in methods
        for half in (method.compressor, method.server)
        for part in parts_of(half)
    }
    assert missing(AROUND_SGD, {row.wrapper for row in ROWS.values()}) == []
    assert missing(COMPRESSORS, used) == []
    assert missing(SERVERS, used) == []


def test_every_class_has_its_place_in_the_table_of_all_methods():
    text = (ROOT / "docs/methods/all.md").read_text()
    begin = text.index("| wrapper |")
    table = text[begin : text.index("\n\n", begin)]
    wrappers = re.findall(r"^\| `(\w+)` \|", table, re.M)
    assert missing(WRAPPERS, wrappers) == []
    assert sorted(set(wrappers)) == sorted(kind.__name__ for kind in WRAPPERS)
    assert missing(COMPRESSORS, re.findall(r"\w+", table)) == []


@pytest.mark.parametrize("kinds", [WRAPPERS, COMPRESSORS], ids=["wrappers", "others"])
def test_every_class_has_an_example_and_says_where_it_is_from(kinds):
    assert missing(kinds, {k.__name__ for k in kinds if "Example:" in k.__doc__}) == []


@rows()
def test_every_wrapper_builds_the_method_of_its_row(row):
    optimizer = row.make(keras.optimizers.SGD(0.1))
    assert type(optimizer).__name__ == row.wrapper
    assert halves_of(optimizer.method) == row.method


def test_every_wrapper_has_other_arguments_than_its_defaults_to_be_saved():
    own = [k for k in AROUND_SGD if k is not optimizers.CompressedOptimizer]
    assert missing(own, SAVED_ARGUMENTS) == []
    for kind in own:
        saved = SAVED_ARGUMENTS[kind.__name__].keys()
        common = {"inner_optimizer", *COMMON_ARGUMENTS}
        # Signum has a warm-up of its own.
        arguments = {*kind.argument_names} - (common - saved)
        assert arguments == saved, kind.__name__


def test_the_names_under_which_keras_knows_the_classes_are_pinned():
    packages = {
        "tfgradcomp": WRAPPERS,
        "tfgradcomp.compressors": [*COMPRESSORS, compressors.WeightDecay],
        "tfgradcomp.servers": SERVERS,
    }
    assert packages.keys() == REGISTERED.keys()
    for package, kinds in packages.items():
        for kind in kinds:
            own = vars(kind).get("registered_name") or kind.__name__
            name = f"{package}>{own}"
            assert keras.saving.get_registered_name(kind) == name
            assert keras.saving.get_registered_object(name) is kind
        # None of those that files may hold is gone.
        for name in REGISTERED[package].split():
            assert keras.saving.get_registered_object(f"{package}>{name}"), name


@rows()
def test_every_row_states_the_requirements_of_its_method(row):
    compressor, server = row.compressor, row.server
    assert compressor.needs_second_moments == row.needs_second_moments
    fields = compressor.fields(BLOCKS)
    assert messages.has_variable_length(fields) == row.variable_length
    assert _vectors(compressor.init(BLOCKS)) == row.state
    assert _vectors(server.init(BLOCKS)) == row.server_state
    collectives = Loopback(2).collectives(0)
    fused = row.method.fused()
    carried = {n for n, t in BY_NAME.items() if t(collectives).supports(fused, BLOCKS)}
    assert carried == {*row.transports}


def _vectors(state):
    """Names of the vectors of a state, outermost first."""
    if not isinstance(state, dict):
        return ()
    names = tuple(name for name in state if name != "inner")
    return (*names, *_vectors(state.get("inner")))


def test_benchmarks_find_every_wrapper():
    sparse = {name for name, _ in import_script("index_coding").methods().values()}
    steps = import_script("step").WRAPPED
    own = [k for k in AROUND_SGD if k is not optimizers.CompressedOptimizer]
    assert missing(own, {*steps, *sparse}) == []
    assert missing(own, {*import_script("wire_size").methods(), *sparse}) == []
    # What holds a momentum is compared with an optimizer that has one.
    held = {row.wrapper for row in ROWS.values() if row.holds_momentum}
    assert {name for name, plain in steps.items() if "momentum" in plain} == held


def test_everything_exported_is_there():
    for package in (tfgradcomp, compressors, servers, optimizers):
        for name in package.__all__:
            assert getattr(package, name) is not None, name
