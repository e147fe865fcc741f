# `make demo`, `make docs` and `make test` do everything from a fresh clone: environment, pinned dependencies, run.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
ZOO := $(VENV)/.zoo
SITE := $(VENV)/.site
FRAMEWORKS ?= .venv-frameworks
PYTEST := $(BIN)/python -m pytest
# Two processes of one thread each; the tests of a file stay together, since many share what the first one made. What one
# run compiles (300 files of tests, and the library with its checks) the next one reads, whatever the environment says.
PARALLEL := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(PYTEST) -n 2 --dist loadfile

.PHONY: demo demo-fisher mutants fuzz test test-slow test-gpu test-interpreted test-variants test-variants-short lint types
.PHONY: test-zoo test-distributed test-frameworks imports check bench clean docs docs-again clean-docs test-site

# The main result of the first study: run, claims, and pages to look at. A second call runs only what is missing.
demo: $(READY)
	$(BIN)/layerwise run head-to-head --preset laptop
	$(BIN)/layerwise report

demo-fisher: $(READY)
	$(BIN)/python examples/fisher_structures.py

# The site, docs/_build/html/index.html. A warning is an error, and so is a link inside it that leads nowhere. Examples of
# the gallery run once and again when they change; `make docs-again` runs all of them, as after a change of the library.
docs: $(SITE)
	OMP_NUM_THREADS=1 $(BIN)/layerwise run head-to-head --preset laptop --out docs/_build/runs
	OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(BIN)/python -m sphinx -W --keep-going -q -b html -d docs/_build/doctrees docs docs/_build/html

docs-again: clean-docs docs

# The built site in a real browser: no word on the console, the search finds, nothing is asked of the network. Pages of the
# report and of the doctor: what a pointer, a keyboard and a screen reader meet (axe-core).
test-site: docs
	$(PYTEST) tests/site tests/report -m "slow or not slow" -rs

test: $(READY)
	$(PARALLEL) tests -m "not slow and not gpu"

test-slow: $(READY)
	$(PYTEST) tests -m "slow and not gpu and not distributed"

# Every member sharded over two and four processes, against one process; saved and loaded by other numbers of them. Less
# than half an hour of processor time, in one to four processes at once.
test-distributed: $(READY)
	OMP_NUM_THREADS=1 $(PYTEST) tests/distributed -rs

# Hugging Face's Trainer, accelerate, Lightning, torchtitan and a Ray cluster, in a venv of their own, which takes some
# minutes to install. Then some ten minutes, of which three are processor time: machines of the cluster are waited for.
test-frameworks: $(FRAMEWORKS)/.ready
	OMP_NUM_THREADS=1 $(FRAMEWORKS)/bin/python -m pytest tests/frameworks tests/experiments/test_ray_engine.py -rs
	OMP_NUM_THREADS=1 $(FRAMEWORKS)/bin/python -m pytest tests/experiments/test_runner.py -k ray -rs

test-gpu: $(READY)
	$(PYTEST) tests -m gpu

# Triton's kernels on a CPU, some four minutes; where triton is absent every test is skipped, and says so.
test-interpreted: $(READY)
	TRITON_INTERPRET=1 $(PARALLEL) tests -m interpreted -rs

# Algorithms broken on purpose, one line at a time: do the claims notice? Some twenty minutes.
mutants: $(READY)
	$(BIN)/python tests/mutants/mutation.py

# Models that people have against plain autograd, and docs/models.md against the code (tests/zoo/zoo_table.py writes it).
test-zoo: $(ZOO)
	HF_HUB_OFFLINE=1 $(PARALLEL) tests/zoo -rs

# Random models, orders of calls and frozen parameters against plain autograd; some five minutes.
fuzz: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python tests/fuzz/fuzz.py --cases 1500 --processes 2 --shrink
	OMP_NUM_THREADS=1 $(BIN)/python tests/fuzz/fuzz.py --cases 750 --processes 2 --shrink --frozen

# Tests that compare trainings, as other processors round: other BLAS kernels, threads, orders of sums.
test-variants: $(READY)
	$(BIN)/python tests/variants.py

test-variants-short: $(READY)
	$(BIN)/python tests/variants.py --short

lint: $(READY)
	$(BIN)/ruff check --no-cache src tests benchmarks examples
	$(BIN)/ruff format --no-cache --check src tests benchmarks examples

types: $(READY)
	$(BIN)/pyright

imports: $(READY)
	$(BIN)/lint-imports

check: lint types imports test

bench: $(READY)
	$(BIN)/python benchmarks/curvature.py

# pip rather than uv: it honours constraints.txt on every index, also where torch is a local CPU build.
$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	touch $(READY)

$(ZOO): $(READY)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[zoo]"
	touch $(ZOO)

# torchtitan without what it requires: its readers of data ask for an older fsspec, its optimizers for none of it.
$(FRAMEWORKS)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(FRAMEWORKS)
	$(FRAMEWORKS)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev,frameworks]"
	$(FRAMEWORKS)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --no-deps torchtitan spmd_types
	touch $(FRAMEWORKS)/.ready

$(SITE): $(READY)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[docs]"
	touch $(SITE)

clean-docs:
	rm -rf docs/_build docs/gallery docs/experiments docs/sg_execution_times.rst

clean: clean-docs
	rm -rf $(VENV) $(FRAMEWORKS) .pytest_cache .ruff_cache
