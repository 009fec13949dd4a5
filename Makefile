# Everything a newcomer needs: `make serve` (or `make chat`) and `make test`. The first call sets up .venv, pinned.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip --disable-pip-version-check
MODEL ?= smollm2

.PHONY: serve chat test test-wide test-models test-clients soak lint format bench wheel clean

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

# A wheel with compiled CPU kernels, in dist/. For another kind of machine: make wheel WHEEL_MACHINE=aarch64 CC=aarch64-linux-gnu-gcc
wheel: $(VENV)/.installed
	WHEEL_NEEDS_KERNELS=1 WHEEL_MACHINE=$(WHEEL_MACHINE) $(if $(WHEEL_MACHINE),CC=$(CC)) \
	  $(PIP) wheel . -q --no-deps --no-build-isolation -w dist
	@ls dist/*.whl

clean:
	rm -rf $(VENV) build *.egg-info

$(VENV)/.installed: requirements.txt pyproject.toml tools/environment.py
	$(PYTHON) tools/environment.py $(VENV)
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed requirements-dev.txt
	$(PIP) install -q -r requirements-dev.txt
	@touch $@

# Other people's clients need many packages, so they have an environment of their own.
.venv-clients/.installed: tests/clients/requirements.txt
	$(PYTHON) -m venv .venv-clients
	.venv-clients/bin/pip --disable-pip-version-check install -q -r tests/clients/requirements.txt
	@touch $@
