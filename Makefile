# Everything runs from the virtual environment VENV, made on first use with the interpreter PYTHON. In a checkout with a
# space in its path give VENV a folder without: torch's Inductor hands its own folder to the C++ compiler unquoted.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PIP := $(BIN)/python -m pip --disable-pip-version-check

# The bitwise gate, as far as it needs no second process.
GATE := tests/ranks/training/test_exact.py::test_one_process_trains_like_eager_mode

# verl and what its engines import, in a folder of their own: it asks for older versions of what else is installed.
VERL := verl tensordict antlr4-python3-runtime attrs cloudpickle codetiming hydra-core jsonschema \
	jsonschema-specifications msgpack omegaconf orjson pillow protobuf pylatexenc pyvers ray referencing rpds-py torchdata
TESTS_OF_VERL := tests/train/integrations/test_verl.py tests/ranks/integrations/test_verl_ranks.py

# What runs on a GPU: by PYTHON and its own torch, without VENV. EARLIER are results of the same code to go on from.
OUT ?= build/gpu
UNTIL ?= 560
GPU = $(PYTHON) -m benchmarks.gpu --out "$(OUT)" --until $(UNTIL) $(if $(EARLIER),--continue "$(EARLIER)")

# Ranks and tests share the cores: one thread for each of them.
export OMP_NUM_THREADS := 1

.DEFAULT_GOAL := help
.PHONY: help venv demo demo-infinity check docs test test-quick nightly compat golden clean gpu gpu-report

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' | expand -t 16

venv: $(STAMP) ## make .venv and install zerofx into it, as pinned in constraints.txt

# torch goes first and alone, so that nothing else can pull in another build of it.
$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet -c constraints.txt torch
	$(PIP) install --quiet -c constraints.txt -e ".[test,examples,docs,dev]"
	touch $@

demo: venv ## train a small GPT, sharded over two processes (a few minutes)
	$(BIN)/python -m torch.distributed.run --standalone --nproc-per-node 2 examples/train_gpt.py

# Alone on the machine, so it may have all cores.
demo-infinity: venv ## train a GPT of 1.0 billion parameters within 4 GiB of memory (12 GB of disk, some minutes)
	mkdir -p build/nvme
	OMP_NUM_THREADS=$$(nproc) ZEROFX_NVME_DIR=$${ZEROFX_NVME_DIR:-build/nvme} $(BIN)/python examples/train_infinity.py --table

check: venv ## format, lint and types
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy

# A page says where it is from by links that work in the repository as well, so the site has the repository's folders.
docs: venv ## build the site of docs/ in build/site; a link that leads nowhere is an error
	mkdir -p build/pages/benchmarks
	for page in README.md CONTRIBUTING.md docs; do ln -sfn ../../$$page build/pages/$$page; done
	ln -sfn ../../../benchmarks/results build/pages/benchmarks/results
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict

test: venv ## the tests that need no GPU and little time
	$(BIN)/python -m pytest -q -n 2 --dist worksteal -m "not slow and not gpu"

test-quick: venv ## graphs, plans, and that one process trains to the bit: under 3 minutes on 2 cores
	$(BIN)/python -m pytest -q -n 2 --dist worksteal -m "not slow and not gpu and not captures" tests/graph tests/plan $(GATE)

nightly: venv ## the slow tests, all cases of sweeps, and the GPU tests where there is a GPU
	$(PIP) install --quiet -c constraints.txt bitsandbytes torchao
	$(BIN)/python -m pytest -q -m "slow or sweep or days or gpu"
	$(PIP) install --quiet --no-deps --target build/verl -c constraints.txt $(VERL)
	PYTHONPATH=build/verl $(BIN)/python -m pytest -q -m slow $(TESTS_OF_VERL)

compat: venv ## the quick tests with each version of torch, one after the other (6 GB and half an hour each)
	$(BIN)/python -m tests.compat

gpu: ## all that a GPU is needed for, the most telling first, in UNTIL seconds; EARLIER=gpu.json goes on from there
	$(GPU)

gpu-report: ## tables, plots and the README's rows of what `make gpu` has left in OUT
	$(PYTHON) -m benchmarks.gpu.report "$(OUT)"

golden: venv ## rewrite the expected texts under tests/golden; read the diff before you commit it
	$(BIN)/python -m pytest -q -n 2 -m "golden and not gpu" --update-golden

clean: ## remove what building and testing leave behind (not the virtual environment)
	rm -rf build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis zerofx_dump torch_compile_debug
	find . -name __pycache__ -not -path "./.venv/*" -prune -exec rm -rf {} +
