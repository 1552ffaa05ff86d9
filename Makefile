# Two commands on a fresh machine with Python 3.11 (or 3.12, 3.13) and make:
#   make demo    train the built-in task: five tasks, two rollout nodes, two trainer nodes, on this machine
#   make test    lint, types and tests, about five minutes on two cores
PYTHON ?= $(shell command -v python3.11 || command -v python3.12 || command -v python3.13 || command -v python3)
CHECK_PYTHON = $(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13) and "Python 3.11, 3.12 or 3.13 is needed: make PYTHON=/path/to/python3.11")'
SEED ?= 0
ENGINE ?= embedded
SOAK_MINUTES ?= 30
GPU_OUT ?= runs/gpu-check
JOBS ?= 4
VENV := .venv
SKY := .venv-sky
TRL := .venv-trl
OLDEST := .venv-oldest
OLDEST_TORCH := $(shell sed -n 's/.*"torch>=\([0-9.]*\).*/\1/p' pyproject.toml)
AUDIT := .venv-audit
BASE := .cache/tiny-base
CONFIG := jobgroup/configs/$(if $(filter sglang,$(ENGINE)),tiny-sglang-cpu,tiny-cpu).yaml
GROUP := jobgroup/rlhf-math-jobgroup.yaml
TOOLS_GROUP := jobgroup/rlhf-math-tools-jobgroup.yaml
DEMO_DIR := runs/demo-$(if $(filter sglang,$(ENGINE)),sglang-)seed$(SEED)
AGENT_DIR := runs/demo-agent-$(if $(filter sglang,$(ENGINE)),sglang-)seed$(SEED)

ifeq ($(filter embedded sglang,$(ENGINE)),)
$(error ENGINE is '$(ENGINE)': embedded or sglang)
endif

.PHONY: help demo demo-agent doctor sglang-cpu check unit test suite test-slow test-long test-all test-oldest lint style types docs fuzz check-jobgroup jobgroups mutants bench bench-gate bench-trl gpu-check gpu-bundle chaos soak audit clean

help:
	@echo 'make demo [SEED=0]   train the built-in task on this machine, about four minutes'
	@echo '     ENGINE=sglang   the same with two real SGLang servers on this CPU; installs them first'
	@echo 'make demo-agent      train a tiny model to use a tool, in a job group with the environment-server [SEED=0]'
	@echo 'make doctor          is this machine ready for the demo? A line per check, and what to do about each that fails'
	@echo 'make sglang-cpu      install SGLang for the CPU in .venv-sglang, about three minutes and 2.4 GB'
	@echo 'make check           lint, types and the unit tests; about two minutes on two cores'
	@echo 'make test            lint, types, the unit tests and those of the guarantees; about five minutes on two cores [JOBS=4]'
	@echo 'make test-slow       the other tests, but for long forms; about twenty minutes on two cores'
	@echo 'make test-all        everything: also long forms (make test-long), the oldest torch, fuzz and soak; more than an hour'
	@echo 'make test-oldest     what computes, with torch $(OLDEST_TORCH), the oldest that pyproject.toml allows; installs several GB'
	@echo 'make docs            this documentation as a site in site/'
	@echo 'make lint            ruff, mypy and the import rules alone'
	@echo 'make fuzz            generated input against every service and parser, FUZZ_SECONDS=60 for each service'
	@echo 'make check-jobgroup  the job groups, checked offline by SkyPilot itself [YAML=mine.yaml ARGS="--env MAX_STEPS=10"]'
	@echo 'make jobgroups       write the variants of the job group from jobgroup/overlays/'
	@echo 'make bench           the benchmarks behind the figures in the docs'
	@echo 'make bench-gate      does training learn and cost what it did before? About a minute [GATE=--record]'
	@echo 'make gpu-check       on a machine with a GPU: what could not be tested without one; three parts of eight minutes [PART=1]'
	@echo '     NO_ENV=1        the same with the packages of PYTHON=python3 as they are; no environment is made, nothing downloaded'
	@echo 'make gpu-bundle      packs that check for a machine without a network; INSTALLED=its pip list [GPU_PYTHON=3.12]'
	@echo 'make bench-trl       speed and learning beside TRL, which it installs in $(TRL); about twelve minutes'
	@echo 'make audit           the pinned dependencies against public advisories; needs the internet'
	@echo 'make chaos           the job group while processes are killed, stopped and cut off, and programs that catch every error; ten minutes'
	@echo 'make soak            the job group for a long time: does anything grow? [SOAK_MINUTES=30]'
	@echo 'make mutants         which changes of a room do its tests notice? ROOM=trainer/observe [N=40] [SEED=0] [TESTS=tests/trainer] [SLOW=1]'
	@echo 'make clean           remove environments, caches and runs'

# One environment for everything that runs on this machine; the pins are in constraints.txt.
$(VENV)/.made: pyproject.toml constraints.txt
	@$(CHECK_PYTHON)
	@echo 'making the environment in $(VENV): once, a few minutes'
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/pip install --quiet --disable-pip-version-check -c constraints.txt torch==2.13.0
	$(VENV)/bin/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[services,rollout,trainer,dev]'
	@touch $@

$(BASE)/config.json: | $(VENV)/.made
	OMP_WAIT_POLICY=passive OMP_NUM_THREADS=2 $(VENV)/bin/python -m trainer.tiny_model $(BASE)

sglang-cpu:
	@PYTHON=$(PYTHON) bash jobgroup/sglang-cpu/install.sh .venv-sglang

demo: $(VENV)/.made $(BASE)/config.json $(if $(filter sglang,$(ENGINE)),sglang-cpu)
	$(VENV)/bin/python -m jobgroup.local $(GROUP) --follow ppo-trainer --clear $(DEMO_DIR) --log-dir $(DEMO_DIR)/logs \
	  --env RUN_CONFIG=$(CONFIG) --env SEED=$(SEED) --env RUN_DIR=$(DEMO_DIR) \
	  --env OMP_NUM_THREADS=1

# The warm start, the job group with the tool, the same problems without the tool, and the report.
demo-agent: $(VENV)/.made $(if $(filter sglang,$(ENGINE)),sglang-cpu)
	OMP_WAIT_POLICY=passive OMP_NUM_THREADS=1 $(VENV)/bin/python -m examples.tool_calculator.base $(AGENT_DIR) --seed $(SEED)
	$(VENV)/bin/python -m jobgroup.local $(TOOLS_GROUP) --follow ppo-trainer --clear $(AGENT_DIR)/run --log-dir $(AGENT_DIR)/run/logs \
	  --env RUN_CONFIG=examples/tool_calculator/grpo.yaml --env SEED=$(SEED) --env RUN_DIR=$(AGENT_DIR)/run \
	  --env RLHF_ENVIRONMENT__NAME=python:examples.tool_calculator.calculator:Calculator \
	  --env MODEL_NAME=$(AGENT_DIR)/base --env RLHF_DATA__SOURCE=$(AGENT_DIR)/problems \
	  $(if $(filter sglang,$(ENGINE)),--env RLHF_ROLLOUT__ENGINE=sglang --env RLHF_ROLLOUT__DEVICE=cpu) --env OMP_NUM_THREADS=1
	@OMP_WAIT_POLICY=passive OMP_NUM_THREADS=2 $(VENV)/bin/python -m trainer.evaluate_model --model "$$(ls -d $(AGENT_DIR)/run/checkpoints/step_* | tail -1)" \
	  --compare $(AGENT_DIR)/base --dataset $(AGENT_DIR)/problems --num-samples 256 --max-new-tokens 40 \
	  --set data.prompt_field=question --set data.answer_field=answer --output-file $(AGENT_DIR)/alone.json > $(AGENT_DIR)/alone.txt
	@$(VENV)/bin/python -m examples.tool_calculator.report $(AGENT_DIR)

doctor: $(VENV)/.made
	@OMP_WAIT_POLICY=passive $(VENV)/bin/python -m jobgroup.doctor

lint: style types

style: $(VENV)/.made
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .

types: $(VENV)/.made
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports

# A file's tests share their fixtures, so a file stays in one process. Many tests wait: four processes keep two cores busy.
# Test subprocesses read compiled modules, so bytecode must be written. A worker that ends is not started again: xdist would run
# its file again and again.
PYTEST = PYTHONDONTWRITEBYTECODE= OMP_WAIT_POLICY=passive OMP_NUM_THREADS=1 $(VENV)/bin/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder --max-worker-restart 0

# mypy uses one core, and runs beside the tests.
check: style $(BASE)/config.json
	$(MAKE) --no-print-directory --jobs 2 types unit

# Unit tests compute and do not wait: one process for each core is enough.
unit: JOBS = logical
unit: $(BASE)/config.json
	$(PYTEST) -m 'not integration and not slow'

test: style $(BASE)/config.json
	$(MAKE) --no-print-directory --jobs 2 types suite

# A quick test that hangs is named while the run is still young, but after its own limits of 400 seconds, which say more.
suite: PYTEST += --timeout 500 -o faulthandler_timeout=550
suite: $(BASE)/config.json
	$(PYTEST) -m 'not slow'

test-slow: $(BASE)/config.json
	$(PYTEST) -m 'slow and not long'

test-long: $(BASE)/config.json
	$(PYTEST) -m long

test-all: test test-slow test-long
	$(MAKE) test-oldest fuzz soak

# The oldest torch has its own triton, whose interpreter needs an older numpy.
$(OLDEST)/.made: pyproject.toml constraints.txt
	@$(CHECK_PYTHON)
	@echo 'making the environment of torch $(OLDEST_TORCH) in $(OLDEST): once, a few minutes and, for CUDA, 6 GB'
	$(PYTHON) -m venv $(OLDEST)
	grep -vE '^(torch|triton|numpy)==' constraints.txt > $(OLDEST)/constraints.txt
	echo 'numpy<2.4' >> $(OLDEST)/constraints.txt
	$(OLDEST)/bin/pip install --quiet --disable-pip-version-check -c $(OLDEST)/constraints.txt torch==$(OLDEST_TORCH)
	$(OLDEST)/bin/pip install --quiet --disable-pip-version-check -c $(OLDEST)/constraints.txt \
	  -e '.[services,trainer,tensorboard]' hypothesis requests pytest pytest-asyncio pytest-timeout pytest-xdist
	@touch $@

test-oldest: VENV := $(OLDEST)
test-oldest: PYTEST += -W 'ignore:Conversion of an array:DeprecationWarning'
test-oldest: $(OLDEST)/.made $(BASE)/config.json
	$(PYTEST) -m 'not slow or integration' tests/learning tests/trainer/policy tests/trainer/weights
	$(PYTEST) tests/checks/test_gpu_check_*.py

$(VENV)/.docs-made: $(VENV)/.made
	$(VENV)/bin/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[docs]'
	@touch $@

# The reference is generated from the code; the HTTP API needs the tiny model.
docs: $(VENV)/.docs-made $(BASE)/config.json
	NO_MKDOCS_2_WARNING=1 OMP_WAIT_POLICY=passive $(VENV)/bin/mkdocs build --strict

# The short form is part of `make test`.
fuzz: $(VENV)/.made $(BASE)/config.json
	FUZZ_SECONDS=$${FUZZ_SECONDS:-60} OMP_WAIT_POLICY=passive OMP_NUM_THREADS=1 $(VENV)/bin/python -m pytest tests/fuzz --timeout 3600 -o faulthandler_timeout=0

# SkyPilot pins other versions of the services' dependencies, so it has a separate environment.
$(SKY)/.made: jobgroup/skypilot-requirements.txt
	@$(CHECK_PYTHON)
	@echo 'making the environment of SkyPilot in $(SKY): once, about a minute'
	$(PYTHON) -m venv $(SKY)
	$(SKY)/bin/pip install --quiet --disable-pip-version-check -r $<
	@touch $@

check-jobgroup: $(SKY)/.made
	$(SKY)/bin/python -m tests.support.jobgroups.check $(YAML) $(ARGS)

jobgroups: $(VENV)/.made
	$(VENV)/bin/python -m tests.support.jobgroups.render

bench: $(VENV)/.made $(BASE)/config.json
	for name in engine rewards sandbox replay groups update publish overlap collector router learning agents; do echo "== $$name"; OMP_WAIT_POLICY=passive OMP_NUM_THREADS=1 $(VENV)/bin/python -m benchmarks.$$name || exit 1; done

bench-gate: $(VENV)/.made $(BASE)/config.json
	OMP_WAIT_POLICY=passive OMP_NUM_THREADS=1 $(VENV)/bin/python -m benchmarks.gate $(GATE)

# NO_ENV=1 uses $(PYTHON) as it is, with the torch and transformers that the machine has.
gpu-check: $(if $(NO_ENV),,$(VENV)/.made)
	$(if $(NO_ENV),$(PYTHON),$(VENV)/bin/python) -m checks.gpu_check --out $(GPU_OUT) $(if $(PART),--part $(PART)) $(GPU_ARGS)

gpu-bundle: $(VENV)/.made $(BASE)/config.json
	$(VENV)/bin/python -m checks.gpu_check.bundle --out gpu-check.tar.gz $(if $(GPU_PYTHON),--python $(GPU_PYTHON)) \
	  $(if $(INSTALLED),--installed $(INSTALLED))

# TRL is a baseline, not a dependency, so it has a separate environment.
$(TRL)/.made: benchmarks/trl-requirements.txt constraints.txt
	@$(CHECK_PYTHON)
	@echo 'making the environment of TRL in $(TRL): once, about two minutes'
	$(PYTHON) -m venv $(TRL)
	$(TRL)/bin/pip install --quiet --disable-pip-version-check -c constraints.txt -r $<
	@touch $@

bench-trl: $(VENV)/.made $(BASE)/config.json $(TRL)/.made
	$(VENV)/bin/python -m benchmarks.vs_trl speed
	$(VENV)/bin/python -m benchmarks.vs_trl learning

mutants: $(BASE)/config.json
	@test -n '$(ROOM)' || { echo 'name a room: make mutants ROOM=trainer/observe'; exit 2; }
	OMP_WAIT_POLICY=passive OMP_NUM_THREADS=1 $(VENV)/bin/python -m tests.support.mutants $(ROOM) \
	  $(if $(N),--count $(N)) --seed $(SEED) $(if $(TESTS),--tests $(TESTS)) $(if $(SLOW),--slow)

# Not part of `make test`: it needs the internet. A separate environment, so that it audits the pins, not itself.
$(AUDIT)/.made:
	$(PYTHON) -m venv $(AUDIT)
	$(AUDIT)/bin/pip install --quiet --disable-pip-version-check pip-audit
	@touch $@

audit: $(AUDIT)/.made
	$(AUDIT)/bin/pip-audit --strict --requirement constraints.txt --no-deps --disable-pip

chaos: $(VENV)/.made $(BASE)/config.json
	$(PYTEST) -n 0 tests/chaos -m ''

soak: $(VENV)/.made $(BASE)/config.json
	@mkdir -p runs
	OMP_WAIT_POLICY=passive OMP_NUM_THREADS=1 $(VENV)/bin/python -m benchmarks.soak --minutes $(SOAK_MINUTES) --json runs/soak.json

clean:
	rm -rf $(VENV) $(SKY) $(TRL) $(OLDEST) $(AUDIT) .venv-sglang .cache runs state site .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache dist *.egg-info
