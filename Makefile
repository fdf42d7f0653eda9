# Two commands set everything up on a fresh machine: `make demo` and `make test`.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
LOCK := requirements/cpu.lock
# Named by content: a second run has nothing to do, a changed file installs again.
LOCK_STAMP := $(VENV)/.lock-$(shell sha256sum $(LOCK) | cut -c1-16)
PKG_STAMP := $(VENV)/.pkg-$(shell sha256sum pyproject.toml | cut -c1-16)
ARGS ?=
export PYTHONUNBUFFERED := 1

.PHONY: setup demo test lint unit format lock clean

setup: $(LOCK_STAMP) $(PKG_STAMP)

# Plain pip, no resolution: only CUDA builds of torchvision and torchaudio resolve beside a CPU torch, and text models
# need neither. A user outside needs PyTorch's public CPU index as an extra index for torch itself.
$(LOCK_STAMP): $(LOCK)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --require-hashes -r $(LOCK)
	rm -f $(VENV)/.lock-*
	touch $@

$(PKG_STAMP): $(LOCK_STAMP) pyproject.toml
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --no-index -e .
	rm -f $(VENV)/.pkg-*
	touch $@

demo: setup
	$(BIN)/vllm-aiter-mla demo $(ARGS)

test: lint unit

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

unit: setup
	$(BIN)/python -m pytest $(ARGS)

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

lock: setup
	$(BIN)/python tools/make_lock.py

clean:
	rm -rf $(VENV) build dist *.egg-info
