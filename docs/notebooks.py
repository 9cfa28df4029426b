"""Notebooks of pages, with their code as cells to run, and pages of notebooks."""

from __future__ import annotations

import json
import re

# A block in a list, or one with dots in it, is a sketch: it stays text.
CODE = re.compile(r"^```python\n((?:(?!\.\.\.|^```).*\n)*?)```$", re.M)
LINK = re.compile(r"(?<!!)\[([^\]]*)\]\((?![a-z]+:)[^()\s]+\)")


def notebook(markdown: str) -> str:
    """Returns a page as a notebook of Jupyter, format 4.5.

    Links to other pages become their text: a notebook is read alone.
    """
    cells = []
    # Every other part is code.
    for index, part in enumerate(CODE.split(markdown)):
        kind = "code" if index % 2 else "markdown"
        text = (part if kind == "code" else LINK.sub(r"\1", part)).strip()
        if not text:
            continue
        cell = {"cell_type": kind, "id": f"{kind}-{index}", "metadata": {}}
        if kind == "code":
            cell |= {"execution_count": None, "outputs": []}
        cells.append({**cell, "source": text.splitlines(keepends=True)})
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    metadata = {"kernelspec": kernel, "language_info": {"name": "python"}}
    content = {"cells": cells, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(content, indent=1, ensure_ascii=False) + "\n"


def page_of(notebook: str, name: str) -> str:
    """Returns a notebook that was run as a page, with its output.

    Args:
        notebook: The text of the notebook's file.
        name: Name of the file, beside the page, for a link to it.
    """
    parts = []
    for cell in json.loads(notebook)["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source)
            continue
        parts.append(f"```python\n{source}\n```")
        lines = [
            "".join(output.get("text") or output["data"]["text/plain"])
            for output in cell["outputs"]
        ]
        if lines:
            parts.append(f"```text\n{''.join(lines).rstrip()}\n```")
    return "\n\n".join([*parts, f"[This page as a notebook]({name}){{download}}\n"])
