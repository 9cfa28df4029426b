"""Code in documents and in docstrings runs as it stands there."""

import inspect
import re
import subprocess
import sys
import textwrap
import types
from pathlib import Path

import keras
import pytest

import tfgradcomp
from tests.cluster import light_environment
from tfgradcomp import compressors, optimizers, servers

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = [
    *ROOT.glob("*.md"),
    *ROOT.glob("docs/**/*.md"),
    *ROOT.glob("examples/*.md"),
    *ROOT.glob("benchmarks/*.md"),
]
BLOCK = re.compile(r"^( *)```python\n(.*?)^\1```$", re.M | re.S)
# A block with one of these needs a cluster, a process of its own or the reader's own
# code: it is compiled.
SKETCH = re.compile(
    r"\.\.\.|TF_CONFIG|tf\.distribute|ParameterServerTrainer|virtual_workers"
)


def blocks_of(text):
    """The Python blocks of a text, with the number of the line before each."""
    return [
        (text[: match.start()].count("\n") + 1, textwrap.dedent(match[2]))
        for match in BLOCK.finditer(text)
    ]


def run(blocks, name, namespace):
    """Runs blocks one after the other, in a module of their own."""
    module = types.ModuleType(name)
    vars(module).update(namespace)
    sys.modules[name] = module
    try:
        for line, code in blocks:
            # Errors then name the line of the document.
            compiled = compile("\n" * line + code, f"{name}.md", "exec")
            if not SKETCH.search(code):
                exec(compiled, vars(module))
    finally:
        del sys.modules[name]
        keras.config.set_dtype_policy("float32")


@pytest.mark.sample(9)
@pytest.mark.parametrize(
    "path", DOCUMENTS, ids=[str(p.relative_to(ROOT)) for p in DOCUMENTS]
)
def test_the_code_of_a_document_runs(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run(blocks_of(path.read_text()), f"document_{path.stem.replace('-', '_')}", {})


def test_code_is_found():
    text = (ROOT / "docs/writing-a-method.md").read_text()
    assert len(blocks_of(text)) == text.count("```python") >= 4
    assert not any(SKETCH.search(code) for _, code in blocks_of(text))


def classes_with_examples():
    yield pytest.param(tfgradcomp.Auto, id="tfgradcomp.Auto")
    for package in (compressors, servers, optimizers):
        for name in package.__all__:
            item = getattr(package, name)
            if inspect.isclass(item) and "```python" in (item.__doc__ or ""):
                yield pytest.param(item, id=f"{package.__name__}.{name}")


@pytest.mark.sample(34)
@pytest.mark.parametrize("kind", [*classes_with_examples()])
def test_the_example_of_a_docstring_runs(kind):
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
    names = {
        name: getattr(package, name)
        # Bare names are those of compressors, where a wrapper has the same name.
        for package in (optimizers, servers, compressors)
        for name in package.__all__
    }
    given = {"keras": keras, "tfgradcomp": tfgradcomp, "model": model, **names}
    run(blocks_of(inspect.getdoc(kind)), f"docstring_{kind.__name__}", given)


def test_code_that_fails_names_its_document():
    with pytest.raises(ZeroDivisionError) as error:
        run([(3, "x = 1\nx / 0\n")], "document_failing", {})
    frame = error.tb
    while frame.tb_next:
        frame = frame.tb_next
    assert frame.tb_frame.f_code.co_filename == "document_failing.md"
    assert frame.tb_lineno == 5


@pytest.mark.slow
@pytest.mark.parametrize("name", ["README.md", "docs/getting-started.md"])
def test_the_first_script_trains_two_workers(name, tmp_path):
    _, code = blocks_of((ROOT / name).read_text())[0]
    script = tmp_path / "train.py"
    # A tenth of README's rows: 20 steps in an epoch.
    script.write_text(code.replace("25_600", "2_560"))
    command = ["-m", "tfgradcomp.launch", "--workers", "2", "--network", "host"]
    done = subprocess.run(
        [sys.executable, *command, str(script)],
        env=light_environment(),
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "accuracy" in done.stdout
