# Everything a developer types. Each target is one line of real work; state and caches live under
# OUTRIDER_HOME (default ~/.cache/outrider), so several clones share them.
export OUTRIDER_HOME ?= $(HOME)/.cache/outrider
export PYTHONPATH := operator:runtime:hack:hack/cluster
PYTHON ?= python3
VENV := $(OUTRIDER_HOME)/venv/bin

.DEFAULT_GOAL := help
.PHONY: help venv lint test test-unit test-runtime test-cluster test-node test-e2e demo down images crds docs lock \
        soak bench-operator bench-fleet clean

help:            ## this list
	@sed -n 's/^\([a-z0-9 -]*\):.*## /  make \1\t/p' Makefile | expand -t 60

demo:            ## cluster, images, model, one question answered speculatively, and the story in status
	@$(PYTHON) -m demo.cluster && hack/venv && $(VENV)/python -m demo

down:            ## remove the local cluster; images, models and caches stay
	@hack/cluster/cluster down

test:            ## everything, from a fresh machine on; one closing line
	@$(PYTHON) hack/run_tests.py

test-unit test-runtime test-cluster test-node test-e2e: ## one part of it
	@$(PYTHON) hack/run_tests.py $(@:test-%=%)

lint:            ## ruff, mypy --strict, import-linter
	@$(PYTHON) hack/run_tests.py lint

soak: bench-operator ## the long ones: 1,000 objects, a rush on 40 replicas, the real HPA, two real replicas
	@$(VENV)/python -m demo prepare && $(VENV)/python -m pytest -m soak --timeout 3600 tests

bench-operator: venv ## create and reconcile 1,000 objects on a real API server, then let 1,000 stand idle
	@$(VENV)/python benchmarks/operator_scale.py && $(VENV)/python benchmarks/operator_idle.py

bench-fleet: venv ## a simulated fleet under five loads, beside the HPA's rule and an oracle
	@$(VENV)/python benchmarks/fleet.py

venv:            ## the development environment, made once for all clones
	@hack/venv

images:          ## both container images, by buildah
	@hack/image/build.sh operator runtime

crds: venv       ## regenerate crds/ from the pydantic models
	@$(VENV)/python -m outrider_operator.api.crd

docs: venv       ## regenerate docs/api.md from the pydantic models
	@$(VENV)/python hack/api_docs.py docs/api.md

lock: venv       ## refresh requirements/ from pyproject.toml
	@hack/image/lock.sh --upgrade

clean:           ## build leftovers of this clone
	@find . -name __pycache__ -prune -exec rm -rf {} + ; rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
