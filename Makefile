PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# pip alone makes no such file: an environment of users lacks what tests need.
READY := $(VENV)/ready

# Dozens of processes start in the tests: they share what is compiled once.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: quickstart lint test test-all flower fuzz studies-quick gpu matrix mutations soak docs wheels clean

$(READY): pyproject.toml setup.py
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --editable ".[cpu,examples,test]"
	-$(BIN)/python -m tfgradcomp.ops --build
	touch $@

quickstart: $(READY)  ## Train on two real workers on this machine.
	$(BIN)/tfgradcomp-launch --workers 2 examples/fashion_mnist.py --method terngrad

lint: $(READY)  ## What .pre-commit-config.yaml runs before a commit.
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run --Werror $(shell find custom_ops tests -name "*.h" -o -name "*.cc" -o -name "*.cu")
	$(BIN)/lint-imports
	$(BIN)/mypy

test: lint  ## What CI runs. Workers of clusters wait now and then: 3 for two cores.
	$(BIN)/pytest -n 3 --dist loadfile -m "not slow" --sample --durations 20

test-all: $(READY)  ## The same, with the slow tests, whose passes tests/slow_runs.csv keeps.
	$(BIN)/pytest -n 3 --dist loadfile --record

flower:  ## The tests with Flower, in build/flower: its versions of protobuf and others are older.
	$(PYTHON) -m venv build/flower
	build/flower/bin/pip install --quiet --editable ".[cpu,examples,flower,test]"
	build/flower/bin/pytest -n 2 tests/flower tests/docs/test_site.py

fuzz: $(READY)  ## A million arbitrary messages for each decoder, and ThreadSanitizer.
	$(BIN)/pytest -m slow -k "arbitrary or one_number or any_words or threads_share" tests/ops tests/compressors tests/transports tests/parameter_server

studies-quick: $(READY)  ## The quick form of each study and of the leaderboard: do they still run?
	set -e; for script in $(sort $(shell grep -l __main__ examples/studies/*.py)) examples/leaderboard.py; do \
		echo "$$script --quick"; $(BIN)/python $$script --quick; done

gpu:  ## Builds, verifies and measures the CUDA kernels in eight minutes; no TensorFlow.
	$(PYTHON) -m benchmarks.gpu

matrix:  ## The tests of the seam to Keras and TensorFlow on several versions of them.
	$(PYTHON) tests/matrix.py

mutations: $(READY)  ## Whether quick tests notice faults in the package.
	$(BIN)/python -m tests.mutations

soak: $(READY)  ## Faults on purpose, and 100,000 steps; writes docs/faults.md.
	$(BIN)/python -m tests.faults
	$(BIN)/python -m tests.soak

docs: $(BIN)/mkdocs  ## The site of docs/, into site/; a warning is an error.
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

$(BIN)/mkdocs: $(READY)
	$(BIN)/pip install --quiet --editable ".[docs]"
	touch $@

wheels:  ## The sdist, and a wheel with ready-made native operations, in dist/.
	$(PYTHON) tools/wheels.py

clean:
	rm -rf $(VENV) build dist site *.egg-info tfgradcomp/ops/*.so
