"""Run the notebooks of this folder again, in place, with their output.

pip install ".[cpu,docs]"          # in a clone
python docs/notebooks/run.py       # a minute each; or name some of them
"""

import os
import sys
from pathlib import Path

import nbformat
from nbclient import NotebookClient

HERE = Path(__file__).resolve().parent


def joined(outputs):
    """Return outputs, pieces of one stream joined."""
    found = []
    for output in outputs:
        if found and output.output_type == "stream" == found[-1].output_type:
            if output.name == found[-1].name:
                found[-1].text += output.text
                continue
        found.append(output)
    return found


def run(path):
    """Run a notebook and write it, without the times of its cells."""
    notebook = nbformat.read(path, 4)
    resources = {"metadata": {"path": str(HERE)}}
    NotebookClient(notebook, timeout=600, resources=resources).execute()
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
        if cell.cell_type == "code":
            cell.outputs = joined(cell.outputs)
    version = notebook.metadata.language_info.version
    notebook.metadata.language_info = {"name": "python", "version": version}
    nbformat.write(notebook, path)


if __name__ == "__main__":
    # The kernels inherit this: only lines of Python are printed.
    os.environ |= {"TF_CPP_MIN_LOG_LEVEL": "3", "TF_ENABLE_ONEDNN_OPTS": "0"}
    for path in map(Path, sys.argv[1:] or sorted(HERE.glob("*.ipynb"))):
        print(path.name, flush=True)
        run(path)
