"""Write the help of all command lines into docs/reference/command-lines.md.

python docs/command_lines.py
"""

import contextlib
import importlib
import io
import os
import re
from pathlib import Path

PAGE = Path(__file__).parent / "reference" / "command-lines.md"
# The functions that read the command lines, by the commands.
COMMANDS = {
    "tfgradcomp-launch": "tfgradcomp.launch.arguments:parse",
    "tfgradcomp-plan": "tfgradcomp.planning.arguments:parse",
    "tfgradcomp-hub": "tfgradcomp.federated.commands:hub",
    "tfgradcomp-join": "tfgradcomp.federated.commands:join",
    "python -m tfgradcomp.ops": "tfgradcomp.ops.__main__:main",
    "python -m tfgradcomp.reshard": "tfgradcomp.checkpoint.reshard:main",
    "python -m tfgradcomp.callbacks.timeline": "tfgradcomp.callbacks.timeline:main",
}


def help_of(function):
    """Return what a command line prints with --help, at a width of 80 columns."""
    module, _, name = function.partition(":")
    read, text = getattr(importlib.import_module(module), name), io.StringIO()
    width = os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = "80"
    try:
        with contextlib.redirect_stdout(text), contextlib.suppress(SystemExit):
            read(["--help"])
    finally:
        del os.environ["COLUMNS"]
        if width is not None:
            os.environ["COLUMNS"] = width
    return text.getvalue()


def updated(text):
    """Return the page with the help of all commands."""
    for command, function in COMMANDS.items():
        begin, end = f"<!-- {command}: begin -->", f"<!-- {command}: end -->"
        content = f"{begin}\n```text\n{help_of(function)}```\n{end}"
        text = re.sub(f"{begin}.*{end}", lambda _, c=content: c, text, flags=re.S)
    return text


if __name__ == "__main__":
    PAGE.write_text(updated(PAGE.read_text()))
