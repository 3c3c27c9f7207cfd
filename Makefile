# Each target needs nothing done before: only git, make and Python 3.11 or newer.
PYTHON ?= python3
REPRO ?=
VENV := .venv
BIN := $(CURDIR)/$(VENV)/bin

UV := $(shell command -v uv)
INSTALLER ?= $(if $(UV),$(UV) pip install --python $(VENV)/bin/python,$(VENV)/bin/python -m pip install)
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
export UV_NO_SOURCES := 1
# Containers often forbid Python to keep compiled modules: each start then compiles PyTorch again, for seconds.
export PYTHONDONTWRITEBYTECODE :=
# Tests wait for the disk to sync tens of thousands of small files. In memory that takes no time, where there are 8 GB of it.
IN_MEMORY = $(shell [ "$$(df -Pk /dev/shm 2>/dev/null | awk 'END {print $$4}')" -gt 8000000 ] 2>/dev/null && echo /dev/shm)
LOCK_FOR := --python-version 3.11 --python-platform x86_64-unknown-linux-gnu

.PHONY: help install demo test coverage mutants lint docs site dist lock dvc.yaml audit-packages clean

help:
	@echo "make demo     install, then run the whole pipeline on 8x8 digits: images, ledger, local metrics"
	@echo "make test     install with the test extra, then run all tests"
	@echo "make coverage fail if the last \`make test\` took fewer branches of the privacy code than demanded"
	@echo "make mutants  put each known mistake into a copy of the code: its tests must fail (SECONDS_LEFT=60: a sample)"
	@echo "make lint     ruff (rules and layout), mypy, and the language of texts"
	@echo "make docs     the site made of docs/, in build/site: open build/site/index.html"
	@echo "make dist     source archive and wheel in dist/, checked and tried in new environments"
	@echo "make install  only make $(VENV) and install into it (LOCKED=1: by requirements.lock, every file checked by its hash)"
	@echo "make dvc.yaml write the pipeline from the table sfumato/settings/stages.py"
	@echo "make lock     write requirements.lock again, by uv and the public index"
	@echo "make audit-packages  ask pip-audit whether a locked package has a known hole (needs the network)"
	@echo "make clean    remove $(VENV) and the caches of tools; keeps artifacts, DVC's cache and .sfumato"

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Python 3.11 or newer is needed: make PYTHON=python3.11 ..." >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

# PyTorch's CPU builds, for machines without an NVIDIA card. The public index has no others for macOS, and serves where
# PyTorch's own does not answer within five seconds.
define install_torch
@command -v nvidia-smi > /dev/null || [ "$$(uname)" = Darwin ] || { \
	$(PYTHON) -c 'from urllib.request import urlopen; urlopen("$(TORCH_INDEX)/torch/", timeout=5)' 2> /dev/null && \
	$(INSTALLER) --no-deps --index-url $(TORCH_INDEX) $$(sed -n 's/^\(torch.*\);.*/\1/p' cpu.txt); } || \
	echo "PyTorch's index cannot be reached. The public index serves: on Linux, 3 GB with CUDA instead of 0.2 GB." >&2
endef

# With LOCKED the lock has all that both need, and nothing is installed that it does not name.
ifneq ($(LOCKED),)
$(VENV)/.installed $(VENV)/.installed-test: pyproject.toml requirements.lock | $(VENV)/bin/python
	$(INSTALLER) --require-hashes -r requirements.lock
	$(INSTALLER) --no-deps --no-build-isolation -e .
	@touch $(VENV)/.installed $(VENV)/.installed-test
else
$(VENV)/.installed: pyproject.toml constraints.txt cpu.txt | $(VENV)/bin/python
	$(install_torch)
	$(INSTALLER) -c constraints.txt -e .
	@touch $@

$(VENV)/.installed-test: pyproject.toml constraints.txt cpu.txt | $(VENV)/bin/python
	$(install_torch)
	$(INSTALLER) -c constraints.txt -e '.[test]'
	@touch $@ $(VENV)/.installed
endif

$(VENV)/.installed-docs: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(INSTALLER) -c constraints.txt mkdocs-material 'mkdocstrings[python]' mike ruff
	@touch $@

install: $(VENV)/.installed

# The demo keeps its own state inside the clone, unless SFUMATO_STATE says otherwise. Real images belong into the default state directory.
demo: $(VENV)/.installed
	@$(BIN)/stage recipe show | grep -q '^data:.*source: digits' || { echo "make demo is for the digits, and params.yaml names other images: run stage run" >&2; exit 2; }
	@PATH="$(BIN):$$PATH" SFUMATO_STATE="$${SFUMATO_STATE:-$(CURDIR)/.sfumato}" \
		DVC_SITE_CACHE_DIR="$${DVC_SITE_CACHE_DIR:-$${SFUMATO_STATE:-$(CURDIR)/.sfumato}/dvc}" $(BIN)/stage run -- $(REPRO)
	@echo "open artifacts/synthesize/grid.png           the digits that were drawn" && \
		echo "     artifacts/report/index.html             the report, which may be shared" && \
		echo "     evaluation/report.html                  your own page: how useful the digits are; do not share it"

# SlipCover warns that it does not measure the branches of the tests themselves.
test: $(VENV)/.installed-test
	@mkdir -p build
	@PATH="$(BIN):$$PATH" TMPDIR="$${TMPDIR:-$(IN_MEMORY)}" OMP_NUM_THREADS=1 \
		PYTHONWARNINGS="ignore:Unable to activate pytest branch coverage" \
		$(BIN)/python -m slipcover -m pytest -n 2 --dist loadfile --no-loadscope-reorder tests

coverage: $(VENV)/.installed-test
	@$(BIN)/python tests/branch_coverage.py

# One process and one thread. SECONDS_LEFT=N starts no further mutant after N seconds, in a random order.
mutants: $(VENV)/.installed-test
	@PATH="$(BIN):$$PATH" TMPDIR="$${TMPDIR:-$(IN_MEMORY)}" OMP_NUM_THREADS=1 $(BIN)/python tests/mutants/run.py $(if $(SECONDS_LEFT),--seconds $(SECONDS_LEFT),--check)

lint: $(VENV)/.installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python tests/language/check.py

dvc.yaml: $(VENV)/.installed
	$(BIN)/python -m sfumato.planning.project_files > $@.new && mv $@.new $@

# uv and pip-audit run in environments of their own, which are thrown away. `pip-audit` reads the lock and installs nothing.
lock:
	tools=$$(mktemp -d) && $(PYTHON) -m venv $$tools && $$tools/bin/pip install -q uv && \
		echo setuptools > $$tools/build.in && \
		$$tools/bin/uv pip compile -q pyproject.toml $$tools/build.in --extra test -c constraints.txt --generate-hashes \
			$(LOCK_FOR) --no-header --no-annotate -o $$tools/lock && \
		{ sed -n '/^#/p' requirements.lock; cat $$tools/lock; } > $$tools/whole && \
		mv $$tools/whole requirements.lock; status=$$?; rm -rf $$tools; exit $$status

audit-packages:
	tools=$$(mktemp -d) && $(PYTHON) -m venv $$tools && $$tools/bin/pip install -q pip-audit && \
		$$tools/bin/pip-audit --require-hashes --disable-pip -r requirements.lock; status=$$?; rm -rf $$tools; exit $$status

docs: $(VENV)/.installed-docs
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# One version of the site, on the branch gh-pages beside the others: VERSION=dev, or VERSION=0.4.0 ALIAS=latest; PUSH=1 publishes it.
# mike runs the first mkdocs of PATH.
site: $(VENV)/.installed-docs
	@PATH="$(BIN):$$PATH" NO_MKDOCS_2_WARNING=1 $(BIN)/mike deploy --update-aliases $(if $(PUSH),--push) $(VERSION) $(ALIAS)
	@$(if $(ALIAS),$(BIN)/mike set-default $(if $(PUSH),--push) $(ALIAS))

# Source archive and wheel in dist/, checked and tried in new environments. TESTS: what the source archive is tested by
dist: | $(VENV)/bin/python
	@INSTALLER="$(INSTALLER)" .ci/dist "$(TAG)" $(TESTS)

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find sfumato stages tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +
