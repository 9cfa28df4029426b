"""Rules for the source as a whole."""

import re
import subprocess
import sys
from pathlib import Path

import tfgradcomp
from tfgradcomp.callbacks import BackupAndRestore

PACKAGE = Path(tfgradcomp.__file__).parent
PRIVATE = re.compile(
    r"keras\.src|tensorflow\.python|tf\.__internal__"
    # An underscored attribute of something that is neither self nor cls.
    r"|\b(?:inner|model|strategy|optimizer|trainer|layer|variable)\._[a-z]"
    # Replacing a function needs its name, and most of these names are private.
    r"|\breplace\([^\"')]*,\s*[\"']"
)


def test_private_names_of_keras_and_tensorflow_are_in_compat_only():
    found = [
        f"{path.relative_to(PACKAGE)}: {line.strip()}"
        for path in PACKAGE.rglob("*.py")
        if path.parent != PACKAGE / "compat"
        for line in path.read_text().splitlines()
        if PRIVATE.search(line)
    ]
    assert found == []


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
