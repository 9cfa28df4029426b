"""Without Flower an import says how to install it."""

import importlib
import sys

import pytest


def test_without_flower_the_import_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "flwr.app", None)
    for name in [n for n in sys.modules if n.startswith("tfgradcomp.flower")]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(ImportError, match=r'pip install "tfgradcomp\[flower\]"'):
        importlib.import_module("tfgradcomp.flower")
