# What a developer runs. `make help` lists it. Each target makes the environment it needs in .venv first;
# with an unchanged pyproject.toml and tools/ that takes no time.

PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin
PYTEST := $(RUN)/python -m pytest

export HF_HUB_OFFLINE := 1

.DEFAULT_GOAL := help
.PHONY: help env dev-env engine demo rehearse test test-soak test-fast test-engine test-contract test-cgroup-v2 lint format \
	bench-step bench-spill bench-release bench-allocator clean

help:  ## list every target
	@grep -hE '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 18

env:  ## the environment to serve and to run the demo: .venv with vLLM's CPU build and a small model
	@$(PYTHON) tools/environment.py run

engine: env

dev-env:  ## the environment for developers: env, test tools, linters
	@$(PYTHON) tools/environment.py dev

demo: env  ## real vLLM on the CPU, conversations taking turns, a restart in the middle, a table; leaves build/demo.json
	@mkdir -p build
	$(RUN)/parkade demo --json build/demo.json

rehearse: env  ## real vLLM in a memory control group: a neighbour, a moving limit, a full disk, a kill; leaves build/rehearse.json
	@mkdir -p build
	$(RUN)/parkade rehearse --json build/rehearse.json

test: dev-env  ## every test: units, real kernel, real files, real vLLM
	$(PYTEST) tests

test-soak: dev-env  ## hundreds of releases, a rehearsal, SIGKILL of whole servers: many minutes of real engines
	$(PYTEST) tests -m soak

test-fast: dev-env  ## what needs no engine and no long wait
	$(PYTEST) tests -m "not engine and not slow"

test-engine: dev-env  ## real vLLM only
	$(PYTEST) tests -m "engine and not soak"

test-contract: dev-env  ## vLLM 0.33's plug-in surface, checked over its published wheel (a large download)
	PARKADE_CONTRACT_WHEEL="vllm==0.33.*" $(PYTEST) tests/contract

test-cgroup-v2: dev-env  ## readings, changed limits, neighbours and the rehearsal on a real cgroup v2 kernel (PARKADE_CGROUP2)
	$(PYTEST) tests/component/test_*cgroup_v2.py

lint: dev-env  ## ruff, mypy --strict, import contracts
	$(RUN)/ruff check .
	$(RUN)/ruff format --check .
	$(RUN)/mypy
	$(RUN)/lint-imports

format: dev-env  ## let ruff format and fix
	$(RUN)/ruff check --fix .
	$(RUN)/ruff format .

bench-step bench-spill bench-release bench-allocator: bench-%: dev-env
	@mkdir -p build
	$(RUN)/parkade bench $* --json build/bench-$*.json

bench-step:  ## what the engine's step pays per block, at 1,000 to 1,000,000 blocks; leaves build/bench-step.json
bench-spill:  ## packs against fio's direct sequential bandwidth; leaves build/bench-spill.json
bench-release:  ## giving RAM back, against malloc_trim; leaves build/bench-release.json
bench-allocator:  ## prompts after a heap release, and with glibc's tunables; leaves build/bench-allocator.json

clean:  ## remove build outputs and caches, keep the environment
	rm -rf build .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
