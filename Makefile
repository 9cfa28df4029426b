PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

# The methods against NumPy: the tests that pure TensorFlow must pass, too; of those with
# four workers and of a model with plain parts the native operations' run is enough.
METHODS := tests/servers tests/optimizers/test_trajectories.py \
	$(addprefix tests/compressors/test_,clip.py sign.py ternary.py)

.PHONY: quickstart lint test clean

$(BIN)/tfgradcomp-launch: pyproject.toml setup.py
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --editable ".[cpu,examples,test]"
	-$(BIN)/python -m tfgradcomp.ops --build
	touch $@

quickstart: $(BIN)/tfgradcomp-launch  ## Train on two real workers on this machine.
	$(BIN)/tfgradcomp-launch --workers 2 examples/fashion_mnist.py --method terngrad

lint: $(BIN)/tfgradcomp-launch  ## What .pre-commit-config.yaml runs before a commit.
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run --Werror $(shell find custom_ops tests -name "*.h" -o -name "*.cc" -o -name "*.cu")
	$(BIN)/lint-imports
	$(BIN)/mypy

test: lint  ## What CI runs.
	TFGRADCOMP_OPS=python $(BIN)/pytest -n 2 -k "not (some and plain) and not -4- and not [4-" $(METHODS)
	$(BIN)/pytest -n 2 --dist loadfile -m "not slow"

clean:
	rm -rf $(VENV) build *.egg-info tfgradcomp/ops/*.so
