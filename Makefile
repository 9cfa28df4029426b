PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: quickstart test test-all mutations clean

$(BIN)/tfgradcomp-launch: pyproject.toml setup.py
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --editable ".[cpu,examples,test]"
	-$(BIN)/python -m tfgradcomp.ops --build
	touch $@

quickstart: $(BIN)/tfgradcomp-launch  ## Train on two real workers on this machine.
	$(BIN)/tfgradcomp-launch --workers 2 examples/fashion_mnist.py --method terngrad

test: $(BIN)/tfgradcomp-launch  ## What CI runs.
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pytest -n 2 --dist loadfile -m "not slow"

test-all: $(BIN)/tfgradcomp-launch  ## The same, with the studies that take minutes.
	$(BIN)/pytest -n 2 --dist loadfile

mutations: $(BIN)/tfgradcomp-launch  ## Whether quick tests notice faults in the package.
	$(BIN)/python -m tests.mutations

clean:
	rm -rf $(VENV) build *.egg-info tfgradcomp/ops/*.so
