.DEFAULT_GOAL := help
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

# Everything runs from the virtual environment; the stamp makes set-up a one-time cost.
$(VENV)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt \
		--editable '.[embedded,test]'
	@touch $@

.PHONY: help
help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

.PHONY: venv
venv: $(VENV)/.ready ## set up the virtual environment that every target uses

.PHONY: demo
demo: $(VENV)/.ready ## settle recorded pods into an embedded Postgres and show what was saved
	$(BIN)/podsettle demo

# Tests wait for processes more than they compute; CI, which also waits for containers, takes it slower.
WORKERS ?= $(if $(CI),2,4)

.PHONY: test
test: $(VENV)/.ready ## run the tests (embedded Postgres; containers too where a Docker engine answers)
	$(BIN)/python -m pytest --numprocesses $(WORKERS) --dist loadfile

KUBERNETES := 1.36
MANIFESTS := $(filter-out %/kustomization.yaml,$(wildcard k8s/base/*.yaml k8s/overlays/*/*.yaml k8s/samples/*.yaml))

.PHONY: lint
lint: $(VENV)/.ready ## check style and types of Python and SQL
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/sqlfluff lint --disable-progress-bar sql
	$(BIN)/kubernetes-validate --strict --quiet -k $(KUBERNETES) $(MANIFESTS)

.PHONY: format
format: $(VENV)/.ready ## format the Python code
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

.PHONY: cluster-test
cluster-test: $(VENV)/.ready ## prove it on a real Kubernetes on this machine (as root), or on E2E_KUBECONFIG's
	$(BIN)/python -m pytest tests/cluster

# The one file is compiled for the Python that runs it in the task's image; Debian's is the usual one.
SHIM_PYTHON ?= $(firstword $(wildcard /usr/bin/python3) $(PYTHON))
.PHONY: shim
shim: ## make agent-shim: one file, and a bundle for images without Python, in dist/agent-shim
	$(SHIM_PYTHON) -m agent_shim.packing dist/agent-shim

.PHONY: bench
bench: $(VENV)/.ready ## measure, as ratios in one run
	$(BIN)/python -m pytest -q -s tests/bench/bench_*.py

.PHONY: clean
clean: ## stop the embedded Postgres of the demo and remove what was built here
	-@test -x $(BIN)/podsettle && $(BIN)/podsettle demo --stop
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
