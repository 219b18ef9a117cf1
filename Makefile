# Every target sets up what it needs: on a new machine, `make demo` or `make test` is the first command to give.
.DEFAULT_GOAL := help
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c

PYTHON ?= python3
# Of three processes on two cores, one may wait for a disk, a deadline or a process that it started.
JOBS ?= 3
# Files in the order of tests/conftest.py, slow ones first.
DIST := --dist loadfile --no-loadscope-reorder
# Tests start hundreds of interpreters: each would compile the package anew where Python is told to keep no byte code.
export PYTHONDONTWRITEBYTECODE :=
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.stamp
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet

.PHONY: help
help:  ## list the targets
	@awk -F':.*## ' '/^[a-z0-9-]+:.*## / {printf "make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

.PHONY: venv
venv: $(STAMP)  ## make .venv, with this checkout and all its tools in it

# PyTorch's CPU build is enough for everything but `make gpu`. pip takes it before a CUDA build of the same version,
# wherever it finds it: in the indexes that it is configured with, and in the one that TORCH_INDEX names.
TORCH_INDEX ?=
TORCH_FROM = $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX))
TORCH_NOTE := 0.2 GB if pip finds a CPU build; 3 GB if it finds only one with CUDA: TORCH_INDEX=URL, see CONTRIBUTING.md
# What pip says of downloads, with their sizes, and nothing else of it.
DOWNLOADS = { grep --line-buffered -E '^ *(Downloading|Using cached|Processing) [^ ]*(torch|nvidia|cuda|triton)' || true; }

# `.` stands beside `.[dev]`: pip looks for the version of ckptfmt that ckptfmt-tools requires before it resolves extras.
# The build backend goes in first and builds without isolation, so that it is held to the pins as everything else is.
$(STAMP): pyproject.toml conformance/pyproject.toml tools/pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "ckptfmt needs Python 3.11 or newer; try: make PYTHON=python3.12 $(MAKECMDGOALS)")'
	@echo "setting up $(VENV); torch is the most of it: $(TORCH_NOTE)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(PIP) install --constraint constraints.txt hatchling editables
	@$(BIN)/python -m pip --disable-pip-version-check install --progress-bar off --constraint constraints.txt \
		$(TORCH_FROM) torch | $(DOWNLOADS)
	@$(PIP) install --constraint constraints.txt --no-build-isolation --editable . --editable ./conformance --editable ./tools --editable '.[dev]'
	@touch $@

.PHONY: demo
demo: venv  ## the whole story on this machine, in about a minute
	@$(BIN)/python -m ckptfmt demo

.PHONY: test
test: venv  ## the suite, the slow tests and the examples in docstrings too
	@$(BIN)/python -m pytest -n $(JOBS) $(DIST)

.PHONY: test-fast
test-fast: venv  ## the suite without what is marked slow
	@$(BIN)/python -m pytest -n $(JOBS) $(DIST) -m 'not slow and not exhaustive'

.PHONY: test-exhaustive
test-exhaustive: venv  ## what `make test` leaves out: minutes of what other tests sample
	@$(BIN)/python -m pytest -n $(JOBS) $(DIST) -m exhaustive

.PHONY: test-plugins-exhaustive
test-plugins-exhaustive: venv-plugins  ## what `make test-plugins` leaves out: all loaders with each end and number of processes
	@$(PLUGINS)/bin/python -m pytest -n $(JOBS) $(DIST) -p no:cacheprovider -m exhaustive tests/plugins

# The tests that need an S3 server run on moto in `make test`. Here they run on Ceph's gateway, with those that take long.
S3_TESTS := tests/s3 tests/store tests/commit/test_commit.py tests/delta/test_delta.py tests/read/test_verify.py \
	tests/read/test_verify_deltas.py tests/run tests/loop/test_checkpointer.py tests/loop/test_choose.py tests/save/test_deltas.py

.PHONY: test-s3
test-s3: venv  ## the tests of object stores on Ceph, which it starts and stops; needs Ceph's packages, see CONTRIBUTING.md
	@CKPTFMT_TEST_S3=ceph $(BIN)/python -m pytest -m '' $(S3_TESTS)

# What depends on torch most: live objects, saves, deltas, device paths on the CPU, compiled steps, conversions, layouts
# on several processes. It takes less than six minutes of processor time for each version, on as many cores as JOBS says.
# Each version has an environment of its own below .venv-torch: 1 GB for the CPU, 5.5 GB where pip finds CUDA builds.
TORCH_VERSIONS := 2.7.1 2.15.0
TORCH_TESTS := tests/adapters tests/regressions tests/convert/test_round_trips.py tests/convert/test_foreign.py \
	tests/resharding/test_sharded.py tests/resharding/test_data_parallel.py tests/resharding/test_plain.py \
	tests/resharding/test_deltas.py tests/resharding/test_sharing.py tests/overlap/test_compiled.py \
	tests/overlap/test_guard.py tests/overlap/test_trainings.py tests/interface/test_api.py tests/loop/test_checkpointer.py \
	tests/save/test_deltas.py tests/save/test_device_deltas.py tests/loop/test_own_loops.py tests/save/test_peers.py \
	tests/save/test_saves.py

.PHONY: test-torch
test-torch: $(TORCH_VERSIONS:%=test-torch-%)  ## a subset on the oldest and the newest torch; installs up to 11 GB

test-torch-%:
	@echo "setting up .venv-torch/$* (the first time it installs torch $*: up to 6 GB where pip finds CUDA builds)"
	@test -x .venv-torch/$*/bin/python || $(PYTHON) -m venv .venv-torch/$*
	@grep -vE '^(torch|sympy|networkx|fsspec|mypy|ruff)==' constraints.txt > .venv-torch/$*/constraints.txt
	@.venv-torch/$*/bin/python -m pip --disable-pip-version-check --quiet install \
		--constraint .venv-torch/$*/constraints.txt $(TORCH_FROM) torch==$* numpy hypothesis pytest \
		pytest-timeout pytest-xdist hatchling editables build types-jsonschema 'moto[s3]' flask flask-cors
	@.venv-torch/$*/bin/python -m pip --disable-pip-version-check --quiet install \
		--constraint .venv-torch/$*/constraints.txt --no-build-isolation \
		--editable . --editable ./conformance --editable ./tools --editable '.[cloud,torch]'
	@.venv-torch/$*/bin/python -m pytest -n $(JOBS) $(DIST) $(TORCH_TESTS)

# What needs no torch, on the other supported versions of Python.
PYTHONS := 3.12 3.13
PYTHON_TESTS := tests/documents tests/layout tests/codecs tests/read tests/run tests/cli tests/commit tests/write \
	tests/store tests/stage tests/data tests/interface/test_errors.py
# Files of these folders that import torch, or start programs that do.
PYTHON_LEAVES_OUT := tests/cli/test_doctor.py tests/cli/test_listing.py tests/cli/test_rehearse.py \
	tests/cli/test_rehearse_page.py tests/cli/test_report.py tests/codecs/test_prediction_members.py \
	tests/codecs/test_prediction_training.py tests/data/test_rl.py tests/read/test_kept.py \
	tests/read/test_oracle.py

.PHONY: test-pythons
test-pythons: $(PYTHONS:%=test-python-%)  ## what needs no torch, on the other supported versions of Python

test-python-%:
	@echo "setting up .venv-pythons/$* (the first time: 0.3 GB, without torch)"
	@test -x .venv-pythons/$*/bin/python || python$* -m venv .venv-pythons/$*
	@grep -vE '^(torch|mypy|ruff)==' constraints.txt > .venv-pythons/$*/constraints.txt
	@.venv-pythons/$*/bin/python -m pip --disable-pip-version-check --quiet install \
		--constraint .venv-pythons/$*/constraints.txt hatchling editables hypothesis 'moto[s3]' flask flask-cors \
		pytest pytest-timeout pytest-xdist
	@.venv-pythons/$*/bin/python -m pip --disable-pip-version-check --quiet install \
		--constraint .venv-pythons/$*/constraints.txt --no-build-isolation \
		--editable . --editable ./conformance --editable ./tools --editable '.[cloud,completion]'
	@.venv-pythons/$*/bin/python -m pytest -n $(JOBS) $(DIST) $(PYTHON_LEAVES_OUT:%=--ignore=%) $(PYTHON_TESTS)

# Packages of others, pinned, in environments of their own: .venv-signing has the reference library of signatures, with
# Sigstore, and .venv-plugins the frameworks themselves, 2.5 GB beside torch.
PLUGINS := .venv-plugins
SIGNING := .venv-signing
NEEDS_signing := '.[cloud,sigstore]' model-signing pyOpenSSL hypothesis pytest pytest-timeout pytest-xdist 'moto[s3]' \
	flask flask-cors
NEEDS_plugins := '.[accelerate,jax,lightning,ray,torch-checkpointing,torchdata,transformers]' \
	flax optax hypothesis pytest pytest-timeout pytest-xdist \
	datasets webdataset peft trl timm stable-baselines3 diffusers tensorboard mlflow-skinny wandb \
	'torchft; sys_platform == "linux" and platform_machine == "x86_64"'

.venv-%/.stamp: pyproject.toml conformance/pyproject.toml tools/pyproject.toml constraints-%.txt
	@echo "setting up .venv-$*"
	@test -x .venv-$*/bin/python || $(PYTHON) -m venv .venv-$*
	@.venv-$*/bin/python -m pip --disable-pip-version-check --quiet install --constraint constraints-$*.txt \
		hatchling editables
	@.venv-$*/bin/python -m pip --disable-pip-version-check --quiet install --constraint constraints-$*.txt \
		--no-build-isolation --editable . --editable ./conformance --editable ./tools --editable $(NEEDS_$*)
	@touch $@

.PHONY: venv-signing
venv-signing: $(SIGNING)/.stamp  ## make .venv-signing, with the reference library of signatures

# CKPTFMT_OMS_CORPUS=DIR adds the library's own bundles, which are in the folder scripts/tests of its repository,
# sigstore/model-transparency.
.PHONY: test-signing
test-signing: venv-signing  ## signatures with the reference library, and by identities of Sigstore
	@$(SIGNING)/bin/python -m pytest -p no:cacheprovider tests/signing/test_reference.py

.PHONY: venv-plugins
venv-plugins: $(PLUGINS)/.stamp  ## make .venv-plugins, with the frameworks that the plug-ins are tested with

.PHONY: test-plugins
test-plugins: venv-plugins  ## the plug-ins with the real frameworks, in minutes
	@$(PLUGINS)/bin/python -m pytest -n $(JOBS) $(DIST) -p no:cacheprovider tests/plugins

# Forged documents and checkpoints, changed by a fuzzer that is guided by coverage. Each night begins with the corpus
# of the nights before.
FUZZER := atheris==3.0.0
FUZZ_MINUTES ?= 60
FUZZ_CORPUS ?= .fuzz

.PHONY: fuzz
fuzz: venv  ## the fuzzer, for FUZZ_MINUTES on all cores; the corpus grows in FUZZ_CORPUS
	@$(PIP) install $(FUZZER)
	@$(BIN)/python -m tests.fuzz.night $(FUZZ_CORPUS) --minutes $(FUZZ_MINUTES) --json $(FUZZ_CORPUS)/figures.json

# The reader in JavaScript. Its tests compare it with the Python package, so that they need the environment, too.
.PHONY: js-tools
js-tools: js/node_modules/.stamp  ## install the JavaScript package's tools for development, from npm's registry

js/node_modules/.stamp: js/package.json js/package-lock.json
	@cd js && npm ci --ignore-scripts --no-audit --no-fund --loglevel=error
	@touch $@

.PHONY: js
js: venv js-tools  ## the JavaScript package: types, tests and the conformance suite
	@cd js && npm run --silent types && npm test --silent
	@$(BIN)/python -m ckptfmt conformance run --adapter 'node js/conformance/adapter.mjs'

# The page of `ckptfmt view`, for a checkout and for the wheel of the tools.
.PHONY: view
view: venv js-tools  ## the page of `ckptfmt view`: its build and its tests, in Chromium where there is one
	@cd js && npm run --silent view
	@mkdir -p tools/ckptfmt_tools/_view && cp js/view/dist/* tools/ckptfmt_tools/_view/
	@cd js && npm run --silent test-view
	@test -x /usr/bin/chromium || echo "NOT TESTED: the page in a browser, since there is no /usr/bin/chromium" >&2

# One tree of README, docs/, spec/ and what they link to, so that a link or an anchor that leads nowhere is a warning.
DOCS_OUT ?= out/docs

.PHONY: docs
docs: venv  ## build the pages into out/docs; fails on a warning, such as a link that leads nowhere; no network
	@$(BIN)/python -m sphinx -q -E -W --keep-going -c docs -d $(DOCS_OUT)/.doctrees . $(DOCS_OUT)
	@echo "$(DOCS_OUT)/docs/index.html"

.PHONY: docs-links
docs-links: venv  ## list the links that lead out of the repository, and fetch each
	@$(BIN)/python -m sphinx -q -E -b linkcheck -c docs -d $(DOCS_OUT)/.doctrees . $(DOCS_OUT)-links; \
		cat $(DOCS_OUT)-links/output.txt

.PHONY: conformance
conformance: venv  ## the conformance suite against this implementation, trajectories and all, in five minutes
	@$(BIN)/python -m ckptfmt conformance run --adapter reference --jobs $(JOBS)

.PHONY: vectors
vectors: venv  ## make the suite's cases and the table of coverage anew
	@$(BIN)/python -m conformance.generate

.PHONY: scoreboard
scoreboard: venv  ## ask other libraries what the suite asks of any, and write the table
	@$(BIN)/python -m ckptfmt_conformance.scoreboard --out conformance/SCOREBOARD.md

GPU_OUT ?= out/gpu

.PHONY: gpu
gpu:  ## all that needs a GPU, in ten minutes: with the Python that has torch, PYTHON=..., and the packages in .wheels
	@$(PYTHON) -m benchmarks.gpu --out $(GPU_OUT)

.PHONY: gpu-wheels
gpu-wheels: venv  ## fetch the packages that `make gpu` takes along, for GPU_PYTHON=3.12 on x86-64
	@$(BIN)/python -m benchmarks.gpu.wheels $(if $(GPU_PYTHON),--python $(GPU_PYTHON))

.PHONY: gpu-rehearsal
gpu-rehearsal: venv  ## `make gpu` on the processor, with torch, the packages in .wheels and nothing else
	@$(BIN)/python -m benchmarks.gpu.rehearsal --out $(GPU_OUT)-rehearsal

.PHONY: lint
lint: venv  ## ruff: rules and format
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .

.PHONY: types
types: venv  ## mypy, strict
	@$(BIN)/mypy

.PHONY: imports
imports: venv  ## the layers: imports go down only
	@$(BIN)/lint-imports --no-logo

.PHONY: release
release: lint types imports docs js-tools  ## check, build all distributions twice, compare the bytes, and leave them in dist; uploads nothing
	@$(BIN)/python -m tests.house.release --out dist

.PHONY: check
check: lint types imports test  ## lint, types, imports and test, as continuous integration runs them

.PHONY: house
house: venv  ## how large files and functions are, and how the docstrings read
	@$(BIN)/python -m tests.house.report

.PHONY: format
format: venv  ## put the code into the house's format
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

.PHONY: clean
clean:  ## remove .venv, the caches of the tools and what builds leave
	@rm -rf $(VENV) $(PLUGINS) $(SIGNING) .venv-pythons .venv-torch js/node_modules js/types js/view/dist tools/ckptfmt_tools/_view build dist .fuzz .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
