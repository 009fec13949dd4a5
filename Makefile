# Everything a newcomer needs: `make serve` (or `make chat`) and `make test`. The first call sets up .venv, pinned.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip --disable-pip-version-check
MODEL ?= smollm2

.PHONY: serve chat test test-wide test-models test-clients soak lint format bench clean

serve: $(VENV)/.installed
	$(BIN)/trireme serve $(MODEL)

chat: $(VENV)/.installed
	$(BIN)/trireme chat --model $(MODEL)

# Threads: the tests are many small steps; one thread each is fastest and leaves the second core to the second worker.
test: $(VENV)/.installed-dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile -m "not gpu and not models and not soak and not clients and not wide"

# Within thirty minutes: a session that takes longer fails.
test-wide: $(VENV)/.installed-dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile --session-timeout=1800 -m "wide and not gpu and not models"

test-models: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -m models

test-clients: $(VENV)/.installed-dev .venv-clients/.installed
	$(BIN)/python -m pytest -m clients

soak: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -m soak

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(VENV)/.installed
	$(BIN)/trireme bench latency
	$(BIN)/trireme bench throughput --sharegpt

clean:
	rm -rf $(VENV) build *.egg-info

$(VENV)/bin/pip:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: requirements.txt pyproject.toml | $(VENV)/bin/pip
	@echo "Setting up $(VENV) (once; torch is about 200 MB) ..."
	$(PIP) install -q torch==$$(sed -n 's/^torch==//p' requirements.txt)
	$(PIP) install -q -r requirements.txt setuptools
	$(PIP) install -q --no-deps --no-build-isolation -e .
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed requirements-dev.txt
	$(PIP) install -q -r requirements-dev.txt
	@touch $@

# Other people's clients need many packages, so they have an environment of their own.
.venv-clients/.installed: tests/clients/requirements.txt
	$(PYTHON) -m venv .venv-clients
	.venv-clients/bin/pip --disable-pip-version-check install -q -r tests/clients/requirements.txt
	@touch $@
