# Two commands do everything on a fresh machine with Python 3.11 and make:
#   make demo    train the built-in task: five tasks, two rollout nodes, two trainer nodes, on this machine
#   make test    the whole test suite
PYTHON ?= $(shell command -v python3.11 || command -v python3)
SEED ?= 0
VENV := .venv
BASE := .cache/tiny-base
CONFIG := jobgroup/configs/tiny-cpu.yaml
GROUP := jobgroup/rlhf-math-jobgroup.yaml
DEMO_DIR := runs/demo-seed$(SEED)

.PHONY: help demo test lint bench clean

help:
	@echo 'make demo [SEED=0]   train the built-in task on this machine, about four minutes'
	@echo 'make test            environment, lint, types, whole test suite'
	@echo 'make lint            ruff, mypy and the import rules alone'
	@echo 'make bench           the benchmarks behind the figures in the docs'
	@echo 'make clean           remove environments, caches and runs'

# One environment for everything that runs on this machine; the pins are in constraints.txt.
$(VENV)/.made: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11) and "Python 3.11 is needed: make PYTHON=/path/to/python3.11")'
	@echo 'making the environment in $(VENV): once, a few minutes'
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/pip install --quiet --disable-pip-version-check -c constraints.txt torch==2.13.0
	$(VENV)/bin/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[services,rollout,trainer,dev]'
	@touch $@

$(BASE)/config.json: $(VENV)/.made
	OMP_WAIT_POLICY=passive OMP_NUM_THREADS=2 $(VENV)/bin/python -m trainer.tiny_model $(BASE)

demo: $(VENV)/.made $(BASE)/config.json
	@rm -rf $(DEMO_DIR)
	$(VENV)/bin/python -m jobgroup.local $(GROUP) --follow ppo-trainer --log-dir $(DEMO_DIR)/logs \
	  --env RUN_CONFIG=$(CONFIG) --env SEED=$(SEED) --env RUN_DIR=$(DEMO_DIR) --env STATE_DIR=$(DEMO_DIR)/state \
	  --env MODEL_NAME= --env NUM_EPOCHS= --env BATCH_SIZE= --env OMP_NUM_THREADS=1

lint: $(VENV)/.made
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports

test: lint $(BASE)/config.json
	OMP_WAIT_POLICY=passive OMP_NUM_THREADS=1 $(VENV)/bin/python -m pytest

bench: $(VENV)/.made $(BASE)/config.json
	for script in benchmarks/*.py; do echo "== $$script"; OMP_WAIT_POLICY=passive $(VENV)/bin/python $$script || exit 1; done

clean:
	rm -rf $(VENV) .cache runs state .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache *.egg-info
