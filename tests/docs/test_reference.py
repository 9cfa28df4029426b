"""Reference pages: the command lines are those of the programs, and all variables."""

import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    import command_lines

    yield command_lines
    del sys.modules["command_lines"]


@pytest.mark.skipif(
    sys.version_info[:2] != (3, 11), reason="argparse of other versions wraps otherwise"
)
def test_the_page_of_command_lines_is_as_its_script_writes_it(script):
    text = script.PAGE.read_text()
    assert script.updated(text) == text


def test_every_option_is_on_the_page(script):
    text = script.PAGE.read_text()
    for function in script.COMMANDS.values():
        options = set(re.findall(r"--[a-z][a-z-]+", script.help_of(function)))
        assert options and all(option in text for option in options)


def test_every_script_and_main_program_has_its_help(script):
    project = (ROOT / "pyproject.toml").read_text()
    scripts = re.findall(r'^(tfgradcomp-\w+) = "', project, re.M)
    assert scripts and set(scripts) <= set(script.COMMANDS)


def test_every_environment_variable_has_a_row():
    page = (ROOT / "docs/reference/environment.md").read_text()
    files = [*ROOT.glob("tfgradcomp/**/*.py"), ROOT / "setup.py"]
    text = "".join(path.read_text() for path in files)
    own = set(re.findall(r"\bTFGRADCOMP_(?!BUILT)[A-Z]\w+", text))
    read = set(re.findall(r"environ(?:\.get\(|\[)\"([A-Z_]+)\"", text))
    named = set(re.findall(r"`([A-Z_]+)`", page))
    # PATH finds compilers, as everywhere.
    assert own | read - {"PATH"} <= named
