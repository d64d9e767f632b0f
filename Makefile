# `make demo` and `make test` set everything up themselves; the rest are for development.
PYTHON ?= python3
TORCH  ?= torch==2.13.0
PY     := .venv/bin/python

# Some virtual machines advertise AMX and trap on it; oneDNN must not use what is not there.
export ONEDNN_MAX_CPU_ISA ?= AVX512_CORE_BF16

.PHONY: help setup test test-slow sanitize attack lint wheel docs bench demo clean

help:            ## list the targets
	@grep -E '^[a-z-]+: .*##' $(MAKEFILE_LIST) | sed 's/: .*## /\t/' | expand -t 14

setup: .venv/.installed   ## create .venv with the package, all extras and the tools

# torch first and pinned: the build on hand satisfies the package's range, so nothing larger is fetched.
.venv/.installed: pyproject.toml
	test -x $(PY) || $(PYTHON) -m venv .venv
	$(PY) -m pip install --quiet --disable-pip-version-check "$(TORCH)" "numpy>=2"
	$(PY) -m pip install --quiet --disable-pip-version-check -e ".[dev]"
	touch $@

# One process per core and one thread each; a file's tests share what they prepare, so a process runs whole files.
PYTEST := OMP_NUM_THREADS=1 $(PY) -m pytest -n auto --dist loadfile

test: setup      ## the fast tests
	$(PYTEST)

test-slow: setup ## every test, the long ones too
	$(PYTEST) -m "slow or not slow"

# The kernels under AddressSanitizer and UndefinedBehaviorSanitizer, with this CPU's vectors and with the shortest,
# in a cache of their own; then their threads under ThreadSanitizer.
sanitize: setup  ## random configurations with the C++ kernels instrumented
	for cpu in native x86-64; do \
	XDG_CACHE_HOME=$(CURDIR)/.venv/sanitized \
	OSDN_CXXFLAGS="-O1 -g -march=$$cpu -fno-omit-frame-pointer -fsanitize=address,undefined -fno-sanitize-recover=all" \
	LD_PRELOAD="$$(c++ -print-file-name=libasan.so) $$(c++ -print-file-name=libubsan.so)" \
	ASAN_OPTIONS=detect_leaks=0 OMP_NUM_THREADS=2 OMP_WAIT_POLICY=passive \
	$(PY) -m pytest -p no:cacheprovider -n auto --dist worksteal tests/ops/test_agreement.py tests/ops/test_sequences.py tests/ops/test_isolation.py tests/ops/test_half.py \
	    tests/ops/test_cpu_convolution.py tests/ops/test_cpu_normalization.py tests/ops/test_cpu_gated_norm.py \
	    tests/ops/test_cpu_decay.py tests/ops/test_cpu_cross_entropy.py tests/ops/test_cpu_row_product.py tests/layers/test_decoding.py tests/models/test_decoder.py \
	    -k "not chunkwise and not reference]" || exit 1; done
	$(PY) -m pytest -p no:cacheprovider -m slow tests/ops/test_cpu_races.py

# A failure prints a seed: `python -m tests.attack --replay KIND SEED` repeats it.
MINUTES ?= 5
attack: setup    ## kills, damage, hostile files and random operators for MINUTES=5
	$(PY) -W ignore -m tests.attack --minutes $(MINUTES)

lint: setup      ## ruff, mypy and clang-format
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	.venv/bin/clang-format --dry-run --Werror osdn/ops/cpu/*.h osdn/ops/cpu/*.cpp tests/ops/*.cpp

wheel: setup     ## build the wheel into dist/
	$(PY) -m build --wheel

docs: setup      ## the site with the API reference, into site/; fails on a broken link
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict

bench: setup     ## time the operators against their peers
	$(PY) -m osdn bench ops

demo: setup      ## train small models in minutes, and a page on what online scaling did
	$(PY) -m osdn demo

clean:           ## remove .venv, builds, caches, and all of runs/ with your results
	rm -rf .venv dist build site runs *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
