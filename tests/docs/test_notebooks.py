"""Notebooks of pages are whole, and what they run is what the page says."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cluster import light_environment

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "docs"))
from notebooks import notebook  # noqa: E402

PAGES = re.search(r"notebooks: \[(.*)\]", (ROOT / "mkdocs.yml").read_text())[1]


def cells_of(page):
    content = json.loads(notebook((ROOT / "docs" / page).read_text()))
    assert (content["nbformat"], content["nbformat_minor"]) == (4, 5)
    cells = content["cells"]
    assert len({cell["id"] for cell in cells}) == len(cells)
    return [(cell["cell_type"], "".join(cell["source"])) for cell in cells]


@pytest.mark.parametrize("page", PAGES.split(", "))
def test_a_notebook_has_the_words_of_its_page(page):
    cells = cells_of(page)
    assert {kind for kind, _ in cells} == {"markdown", "code"}
    text = (ROOT / "docs" / page).read_text()
    for kind, source in cells:
        if kind == "code":
            assert f"```python\n{source}\n```" in text
    # The fences of code and the targets of links are gone, and nothing else.
    words = re.findall(r"\w+", re.sub(r"^```python|\]\([^)]*\)", "", text, flags=re.M))
    assert re.findall(r"\w+", "\n".join(source for _, source in cells)) == words


def test_sketches_stay_text():
    assert [kind for kind, _ in cells_of("virtual-workers.md")] == [
        "markdown",
        "code",
        "markdown",
    ]


@pytest.mark.slow
def test_the_notebook_of_virtual_workers_runs(tmp_path):
    code = "\n".join(s for kind, s in cells_of("virtual-workers.md") if kind == "code")
    run = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env=light_environment(),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stderr
    assert re.search(r"^worker 2: norm of the residual \d", run.stdout, re.M)


RUN = sorted((ROOT / "docs/notebooks").glob("*.ipynb"))


def code_of(path):
    cells = json.loads(path.read_text())["cells"]
    return [cell for cell in cells if cell["cell_type"] == "code"]


@pytest.mark.parametrize("path", RUN, ids=lambda path: path.stem)
def test_a_notebook_was_run_from_top_to_bottom(path):
    cells = code_of(path)
    counts = [cell["execution_count"] for cell in cells]
    assert counts == [*range(1, len(cells) + 1)]
    kinds = {output["output_type"] for cell in cells for output in cell["outputs"]}
    assert "stream" in kinds and "error" not in kinds
    assert "/home" not in path.read_text() and "/tmp" not in path.read_text()


@pytest.mark.slow
@pytest.mark.parametrize("path", RUN, ids=lambda path: path.stem)
def test_a_notebook_still_runs(path, tmp_path):
    code = "\n".join("".join(cell["source"]) for cell in code_of(path))
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True, timeout=300)
