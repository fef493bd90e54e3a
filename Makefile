# make quickstart   align a small real model on this machine, in minutes
# make test         check that the numbers are correct (make check: linters and unit tests alone)
# Others: quickstart-pairs (DPO with LoRA), lint, test-full (every combination), test-slow, test-py312, test-lowest (the oldest
# packages), test-emulated (jobs on emulated GPUs), mutants (deliberate faults, which tests must find), chaos, chaos-once,
# test-slurm, test-browser, golden (rewrite tests/data/golden.json), goldens (rewrite tests/data/outputs), gpu (tests and
# benchmarks on a GPU), gpu-wheels (the packages that it needs without an index), image-test, audit, bench (a KTO step against
# TRL's; OTHER_TRL=PYTHON adds a version of TRL), docs (the documentation site, in build/docs), wheel, clean.
# Each creates the virtual environment it needs. QUICKSTART_STEPS=2 shortens the quickstart.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
# Every process of the tests would compile all modules again, and each worker rewrite the assertions of all tests.
unexport PYTHONDONTWRITEBYTECODE

# The newest Python tested with the pinned versions comes first. Override: make PYTHON=/path/to/python VENV=.venv-mine
first_that_runs = $(shell for python in $(1); do "$$python" --version >/dev/null 2>&1 && { command -v "$$python"; break; }; done; true)
PYTHON ?= $(call first_that_runs,python3.11 python3.12 python3.13 python3)
PYTHON312 ?= $(call first_that_runs,python3.12 $(wildcard $(HOME)/.pyenv/versions/3.12*/bin/python3.12))
VENV ?= .venv
VENV312 ?= .venv-py312
VENV_LOWEST ?= .venv-lowest
VENV_EMULATED ?= .venv-emulated
CONSTRAINTS ?= $(if $(findstring 3.12,$(shell $(PYTHON) --version)),constraints-py312.txt,constraints.txt)
BASE_IMAGE ?=
BIN := $(VENV)/bin
REQUIREMENTS := pyproject.toml setup.py $(CONSTRAINTS)
PIP_FLAGS := --quiet --disable-pip-version-check
PYTEST_FLAGS ?=
N ?= 200
# The quickstart's.
MODEL ?= $(HOME)/.cache/nemo_kto/quickstart/SmolLM2-135M-Instruct
# Of `make gpu`: the newest TRL that it compares with; a Python that has torch, by default the first one.
TRL ?= 1.16.*
with_torch := -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec("torch") is None)' 2>/dev/null
first_with_torch = $(shell for python in python3 python3.11 python3.12 python3.13; do if "$$python" $(with_torch); then echo "$$python"; break; fi; done)
GPU_PYTHON ?= $(if $(filter file,$(origin PYTHON)),$(or $(first_with_torch),$(PYTHON)),$(PYTHON))
# Each worker is a process with its own gloo ranks. The tests of a file run in one worker and share their fixtures. Files keep
# their order, in which those of unit tests are last: long files would leave one worker without work in the end.
WORKERS ?= 2
PYTEST := -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder
# An installation prints nothing for minutes, and an environment takes seconds to create: this shows that they still run.
STILL_RUNS := if [ -t 1 ]; then dots='\r   ... %s s'; last='\n'; else dots='   ... %s s\n'; last=''; fi; \
	(while sleep 3 >/dev/null 2>&1; do printf "$$dots" $$SECONDS; done) & trap "kill $$!; printf '$$last'" EXIT;
NOT_SILENT := echo 'installing (the first time this takes minutes)'; $(STILL_RUNS)
# What the newest megatron-core and torch could change: models, gradients, steps, checkpoints, messages; at a sample of layouts.
DISTRIBUTED312 := {layouts,experts,pipeline_stages,gradients,logprobs,context,load_balance,main_grad,fp8,offload}
DISTRIBUTED312 += {lora*,dora,checkpoint*,elastic,export,moments,overlap,traffic,plan_activations,engine_names,no_waiting}
TESTS312 := tests/unit/layers/test_attention.py tests/unit/device/test_kernels.py
TESTS312 += $(patsubst %,tests/distributed/*/test_%.py,$(DISTRIBUTED312)) tests/parity/test_huggingface.py \
	tests/integration/test_resume.py -k 'not (tp4 or dp4 or micro_batch or recompute)'

.PHONY: help quickstart quickstart-pairs check golden goldens test test-full test-matrix test-slow test-py312 test-lowest test-emulated mutants chaos chaos-once test-slurm test-browser gpu gpu-wheels image-test audit lint bench docs wheel clean

help:
	@sed -n '1,9s/^# //p' Makefile

$(VENV)/.made:
	$(STILL_RUNS) $(PYTHON) -m venv $(VENV)
	touch $@

# The first installation needs the constraints: without them pip would install another torch.
$(VENV)/.quickstart: $(VENV)/.made $(REQUIREMENTS)
	$(NOT_SILENT) $(BIN)/python -m pip install $(PIP_FLAGS) -c $(CONSTRAINTS) -e '.[quickstart]'
	touch $@

$(VENV)/.test: $(VENV)/.made $(REQUIREMENTS)
	$(NOT_SILENT) $(BIN)/python -m pip install $(PIP_FLAGS) -c $(CONSTRAINTS) -e '.[test,quickstart]'
	touch $@ $(VENV)/.quickstart

quickstart: $(VENV)/.quickstart
	$(BIN)/python examples/quickstart/run.py kto

quickstart-pairs: $(VENV)/.quickstart
	$(BIN)/python examples/quickstart/run.py dpo

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/bandit --quiet --configfile pyproject.toml --recursive nemo_kto examples
	$(BIN)/hadolint Dockerfile
	grep -rlE '^#!.*\b(ba)?sh' .ci examples tests/slurm | xargs $(BIN)/shellcheck

# Linters, types and unit tests.
check: lint
	$(BIN)/python $(PYTEST) -m 'not slow' $(PYTEST_FLAGS) tests/unit tests/test_*.py

# After a change that is meant to change an output or a help text.
goldens: $(VENV)/.test
	WRITE_GOLDENS=1 $(BIN)/python -m pytest -q $$(grep -rl --include='test_*.py' assert_output tests)
	$(BIN)/python -m tests.unit.tools.translate.test_translation

# After a change that is meant to change numbers.
golden: $(VENV)/.test
	$(BIN)/python -m tests.distributed.golden

test: lint
	$(BIN)/python $(PYTEST) -m 'not slow and not slurm and not browser' $(PYTEST_FLAGS)

test-full: lint
	$(BIN)/python $(PYTEST) -m 'not slow and not slurm and not browser' --matrix=full $(PYTEST_FLAGS)

# Only the combinations that test-full adds to test.
test-matrix: $(VENV)/.test
	$(BIN)/python $(PYTEST) -m 'full and not slow and not slurm and not browser' --matrix=full $(PYTEST_FLAGS)

test-slow: $(VENV)/.test
	$(BIN)/python -m pytest -m 'slow and not chaos' $(PYTEST_FLAGS)

# Each fault of tests/mutants.toml, or those of these names (N='NAME NAME'), must make a quick test fail.
mutants: N =
mutants: $(VENV)/.test
	$(BIN)/python -m tests.mutants $(N)

# Kills a tiny job N times at random, after the tests that kill it in every phase or damage its files; about an hour for 200.
chaos: $(VENV)/.test
	$(BIN)/python -m pytest -m chaos $(PYTEST_FLAGS) tests/chaos
	$(BIN)/python -W ignore -m tests.chaos.long_run --kills $(N) --page docs/internals/reliability.md

# Each experiment with the Python interface, the commands, secrets and full disks, once; as root.
chaos-once: $(VENV)/.test
	$(BIN)/python -W ignore -m tests.chaos.once --page docs/internals/reliability.md

# On a SLURM of two nodes that the tests start on this machine, for which they need root, slurm-wlm and munge.
test-slurm: $(VENV)/.slurm
	$(BIN)/python -m pytest -m slurm --matrix=full $(PYTEST_FLAGS) tests/slurm

# Reports in a headless Chromium (CHROMIUM=PATH), whose pictures are kept.
SCREENSHOTS = build/screenshots
test-browser: $(VENV)/.test
	SCREENSHOTS=$(SCREENSHOTS) $(BIN)/python -m pytest -m browser $(PYTEST_FLAGS) tests/browser

$(VENV)/.slurm: $(VENV)/.test
	$(BIN)/python -m pip install $(PIP_FLAGS) -c $(CONSTRAINTS) -e '.[slurm]'
	touch $@

image-test: $(VENV)/.made
	PYTHON=$(BIN)/python .ci/image $(BASE_IMAGE)

$(VENV312)/.test: pyproject.toml setup.py constraints-py312.txt
	$(STILL_RUNS) $(PYTHON312) -m venv $(VENV312)
	$(NOT_SILENT) $(VENV312)/bin/python -m pip install $(PIP_FLAGS) -c constraints-py312.txt -e '.[test]'
	touch $@

ifeq ($(PYTHON312),)
test-py312:
	@echo "no python3.12 here: the tests with the newest megatron-core are skipped (set PYTHON312=...)"
else
test-py312: $(VENV312)/.test
	$(VENV312)/bin/python $(PYTEST) -m 'not slow' $(PYTEST_FLAGS) $(TESTS312)
endif

# The lower bounds of pyproject.toml: unit tests, and steps, checkpoints and an export on ranks. Its torch is one for CUDA, of 7 GB.
$(VENV_LOWEST)/.test: pyproject.toml setup.py constraints-lowest.txt
	$(STILL_RUNS) $(PYTHON) -m venv $(VENV_LOWEST)
	$(NOT_SILENT) $(VENV_LOWEST)/bin/python -m pip install $(PIP_FLAGS) -c constraints-lowest.txt -e '.[test]'
	touch $@

test-lowest: $(VENV_LOWEST)/.test
	$(VENV_LOWEST)/bin/python $(PYTEST) -m 'not slow' $(PYTEST_FLAGS) \
		tests/unit tests/distributed/*/test_{gradients,logprobs,checkpoint,export}.py

# The tests for a GPU, on emulated ones. One takes ten minutes there, because it computes in bf16 on the CPU.
$(VENV_EMULATED)/.test: $(VENV)/.test .ci/emulated-environment
	$(NOT_SILENT) .ci/emulated-environment $(PYTHON) $(VENV) $(VENV_EMULATED) $(CONSTRAINTS)
	touch $@

test-emulated: $(VENV_EMULATED)/.test
	$(VENV_EMULATED)/bin/python $(PYTEST) --matrix=full --ignore=tests/gpu/test_plan_memory.py $(PYTEST_FLAGS) \
		tests/gpu

# What is pinned, against the advisories of the package index; without a network it says so.
audit: $(VENV)/.made
	$(BIN)/python .ci/audit constraints.txt constraints-py312.txt

# Against TRL's KTOTrainer, as it is installed here and, where OTHER_TRL names the Python of another environment, as there.
bench: $(VENV)/.test
	$(BIN)/python benchmarks/kto_vs_trl.py $(MODEL) $(if $(OTHER_TRL),--other-trl $(OTHER_TRL))

# On a machine with a GPU, in 12 minutes besides installing; the same command continues what was stopped; docs/gpu/README.md.
# One step: STEP=machine, kernels, llama-1b, qwen-7b, trl or tests; less time: MINUTES=M; without an index: WHEELS=FOLDER;
# results into FOLDER: OUT=FOLDER.
gpu:
	@$(GPU_PYTHON) benchmarks/gpu_versions.py --check
	$(NOT_SILENT) .ci/gpu-environment $(GPU_PYTHON) $(VENV) '$(TRL)' $(WHEELS)
	$(BIN)/python benchmarks/gpu_report.py --trl-python $(VENV)-trl/bin/python \
		$(STEP:%=--step %) $(MINUTES:%=--minutes %) $(OUT:%=--folder %)

# On a machine with an index: the packages that `make gpu WHEELS=wheels` installs on one without.
gpu-wheels:
	@echo 'collecting wheels (minutes)'; $(STILL_RUNS) $(or $(PYTHON312),$(PYTHON)) benchmarks/gpu_wheels.py $(or $(WHEELS),wheels) --trl '$(TRL)'

# Warnings are errors, broken links among them. After a change of keys or pages: python -m docs.site.generate.
docs: $(VENV)/.test
	$(BIN)/python -m sphinx --fail-on-warning --keep-going --quiet -d build/doctrees docs build/docs
	@echo build/docs/index.html

wheel: $(VENV)/.made
	rm -rf build  # or setuptools would ship the files of an earlier build
	$(BIN)/python -m pip wheel $(PIP_FLAGS) --no-deps --wheel-dir dist .

clean:
	rm -rf build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache
