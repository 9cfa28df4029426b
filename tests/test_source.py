"""Tests that read the source: what must hold for every file of the repository."""

import ast
import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import grimp
import pytest

import tfgradcomp
from tfgradcomp.callbacks import BackupAndRestore

REPOSITORY = Path(__file__).resolve().parents[1]
PACKAGE = Path(tfgradcomp.__file__).resolve().parent
MOST_LINES, MOST_LINES_ELSEWHERE = 400, 450
SOURCES = (".py", ".h", ".cc", ".cu")

# Programs: what they print is their result.
PROGRAMS = (
    *("checkpoint/reshard.py", "launch/launcher.py", "ops/__main__.py"),
    *("planning/command.py",),
)

# Methods of named tuples, which begin with an underscore and are public.
PUBLIC = {"_asdict", "_fields", "_make", "_replace", "_exit", "_current_frames"}


def modules(*left_out):
    """The path in the package, and the syntax tree, of each of its files."""
    for path in sorted(PACKAGE.rglob("*.py")):
        name = path.relative_to(PACKAGE).as_posix()
        if not name.startswith(left_out):
            yield name, ast.parse(path.read_text())


def nodes(tree, *kinds):
    return [node for node in ast.walk(tree) if isinstance(node, kinds)]


def own_names(tree):
    """The names that a module defines: functions, classes, variables, attributes."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            if ast.unparse(node.value) in ("self", "cls"):
                yield node.attr


def private_names(tree, own):
    """The private names of Keras and TensorFlow that a module uses."""
    for node in nodes(tree, ast.Import, ast.ImportFrom, ast.Attribute):
        text = ast.unparse(node)
        if re.search(r"keras\.src|tensorflow\.python|tf\.__internal__", text):
            yield node.lineno, text
        elif isinstance(node, ast.Attribute) and re.match("_[a-z]", node.attr):
            if node.attr not in own:
                yield node.lineno, text
    for node in nodes(tree, ast.Call):
        names = [n.value for n in node.args if isinstance(n, ast.Constant)]
        if ast.unparse(node.func) in ("getattr", "hasattr", "setattr", "replace"):
            for name in names:
                if re.match("_[a-z]", str(name)) and name not in own:
                    yield node.lineno, ast.unparse(node)


def cycles(imports):
    """The sets of modules that import each other, directly or through others."""
    reached = {}
    for start in imports:
        seen, waiting = set(), [start]
        while waiting:
            for module in imports[waiting.pop()] - seen:
                seen.add(module)
                waiting.append(module)
        reached[start] = seen
    return {
        tuple(sorted(m for m in reached[start] if start in reached[m]))
        for start in imports
        if start in reached[start]
    }


def test_no_module_imports_itself_through_others():
    graph = grimp.build_graph(
        "tfgradcomp", exclude_type_checking_imports=True, cache_dir=None
    )
    imports = {m: graph.find_modules_directly_imported_by(m) for m in graph.modules}
    for package in [m for m in imports if "tfgradcomp.core.registry" in imports[m]]:
        # It imports all modules of its folder, by their names.
        imports[package] |= graph.find_children(package)
    assert cycles(imports) == set()


def test_cycles_are_found():
    imports = {"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a", "d"}}
    assert cycles(imports) == {("b", "c"), ("d",)}


def test_every_folder_of_the_package_is_a_package():
    # Without the file the folder is in no wheel.
    folders = {path.parent for path in PACKAGE.rglob("*.py")}
    assert [str(f) for f in folders if not (f / "__init__.py").exists()] == []


def test_no_import_stands_inside_a_function():
    found = [
        f"{name}:{node.lineno}: {ast.unparse(node)}"
        for name, tree in modules()
        for function in nodes(tree, ast.FunctionDef, ast.AsyncFunctionDef)
        for node in nodes(function, ast.Import, ast.ImportFrom)
    ]
    assert found == [], "\n".join(found)


def test_private_names_of_keras_and_tensorflow_are_in_compat_only():
    everything = dict(modules())
    own = PUBLIC | {name for tree in everything.values() for name in own_names(tree)}
    found = [
        f"{name}:{line}: {text}"
        for name, tree in modules("compat/")
        for line, text in private_names(tree, own)
    ]
    assert found == [], "\n".join(found)


@pytest.mark.parametrize(
    "source",
    [
        "from keras.src import backend",
        "import tensorflow.python.eager",
        "tf.__internal__.distribute.interim",
        "optimizer._clip_gradients(gradients)",
        "self._trainable_variables",
        "replace(keras.Optimizer, '_clip_gradients', function)",
    ],
)
def test_private_names_are_found(source):
    assert len(list(private_names(ast.parse(source), PUBLIC))) >= 1


def test_library_code_asserts_nothing_and_prints_nothing():
    # Errors are exceptions with a message; notes go to `tfgradcomp.core.logging`.
    found = [
        f"{name}:{node.lineno}"
        for name, tree in modules()
        for node in nodes(tree, ast.Assert, ast.Call)
        if isinstance(node, ast.Assert)
        or (ast.unparse(node.func) == "print" and name not in PROGRAMS)
    ]
    assert found == [], "\n".join(found)


def test_docstrings_begin_with_a_verb_or_a_noun():
    documented = ast.Module, ast.ClassDef, ast.FunctionDef
    found = []
    for name, tree in modules():
        for node in nodes(tree, *documented):
            first = (ast.get_docstring(node) or "-").split()[0]
            if first in ("As", "How", "See", "What", "Where", "Whether", "Who"):
                line = getattr(node, "lineno", 1)
                found.append(f"{name}:{line}: {first} ...")
    assert found == [], "\n".join(found)


def test_no_source_file_is_long():
    # A file that is longer has two jobs.
    folders = (
        *("tfgradcomp", "custom_ops", "tests", "benchmarks", "examples", "docs"),
        "tools",
    )
    paths = [
        path
        for folder in folders
        for path in sorted((REPOSITORY / folder).rglob("*"))
        if path.suffix in SOURCES
    ]
    assert len(paths) > 100
    counts = {path: len(path.read_text().splitlines()) for path in paths}
    found = [
        f"{path.relative_to(REPOSITORY)}: {count}"
        for path, count in counts.items()
        if count > (MOST_LINES if PACKAGE in path.parents else MOST_LINES_ELSEWHERE)
    ]
    assert found == [], "\n".join(found)


def test_the_picture_of_the_architecture_is_current():
    path = REPOSITORY / "docs" / "architecture.py"
    spec = importlib.util.spec_from_file_location("architecture", path)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    assert script.picture() == path.with_suffix(".svg").read_text()
    drawn = {name for names, _ in script.LAYERS for name in names.split(" · ")}
    folders = {init.parent.name for init in PACKAGE.glob("*/__init__.py")}
    assert drawn == folders


def test_public_classes_document_arguments_errors_and_an_example():
    for name in tfgradcomp.__all__:
        item = getattr(tfgradcomp, name)
        if isinstance(item, type):
            for part in ("Args:", "Example:", "Raises:"):
                assert part in item.__doc__, (name, part)


def test_import_without_tensorflow_says_what_to_install():
    code = (
        "import importlib.util as u; find = u.find_spec\n"
        "u.find_spec = lambda name: None if name == 'tensorflow' else find(name)\n"
        "import tfgradcomp"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 1
    assert "pip install 'tfgradcomp[cpu]'" in done.stderr


def test_callbacks_can_be_imported_by_their_public_name():
    assert tfgradcomp.callbacks.BackupAndRestore is BackupAndRestore
