# Two commands set everything up on a machine with Python 3.11 and pip: `make demo` and `make test`.
# The environment is installed once, and again only after pyproject.toml or constraints.txt changed.

PYTHON ?= python3.11
VENV ?= .venv
# Further options for pip, for example an index with builds of PyTorch for the CPU only.
PIP_FLAGS ?=
# Test processes at a time; each computes with one thread.
JOBS ?= 2
# The same for the GPU's tests, most of whose time is compiling kernels.
GPU_JOBS ?= 8
OUT ?= outputs

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIP_FLAGS) --constraint constraints.txt

.PHONY: help install install-dev demo sheet test test-gpu test-diffusers bench memcheck lint format clean
.DELETE_ON_ERROR:

help:
	@echo "make demo      install, then draw a contact sheet of 8 pictures with the shipped pipeline"
	@echo "make test      install, then run every test that needs no GPU"
	@echo "make test-gpu  the tests that need a CUDA device"
	@echo "make test-diffusers DIFFUSERS_SRC=...  Diffusers' own tests, from its checkout, on our classes"
	@echo "make bench     time the operator beside its peers, and against the number of tokens, into outputs/"
	@echo "make memcheck  the kernels under NVIDIA's memory checker (CUDA device, compute-sanitizer)"
	@echo "make sheet     draw the contact sheet that the README shows"
	@echo "make lint      check style and format;  make format  mend them"
	@echo "make clean     remove the environment and what building left behind"

$(BIN)/python:
	@command -v $(PYTHON) >/dev/null || { \
	  echo "$(PYTHON) not found: install Python 3.11, or name a later one: make PYTHON=python3.12 ..." >&2; exit 1; }
	$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); exit 1; }

$(VENV)/.installed: pyproject.toml constraints.txt | $(BIN)/python
	@echo "Installing into $(VENV) (PyTorch is the large part; once)"
	$(PIP) --editable .
	@touch $@

$(VENV)/.installed-quantize: $(VENV)/.installed-dev
	$(PIP) --editable ".[quantize]"
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	@echo "Installing the development tools into $(VENV) (once)"
	$(PIP) --editable ".[dev]"
	$(BIN)/python -m pip check
	@touch $@

install: $(VENV)/.installed
install-dev: $(VENV)/.installed-dev

demo: install
	$(BIN)/mhla generate --prompts assets/prompts/demo.txt --seed 0 --out $(OUT)/demo --sheet $(OUT)/demo.png

sheet: install
	$(BIN)/mhla generate --prompts assets/emoji_prompts.json --seed 0 --out $(OUT)/contact_sheet \
	  --sheet assets/contact_sheet.webp --columns 6

test: install-dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "not gpu" --numprocesses $(JOBS) --dist worksteal

test-gpu: $(VENV)/.installed-quantize
	$(BIN)/python -m pytest -v -m gpu --numprocesses $(GPU_JOBS) --dist worksteal

bench: install-dev
	$(BIN)/mhla bench op --out $(OUT)/op.json
	$(BIN)/mhla bench op --scaling --out $(OUT)/op_scaling.json
	$(BIN)/python eval/plot_scaling.py $(OUT)/op_scaling.json $(OUT)/operator_scaling.png

memcheck: install-dev
	$(BIN)/python eval/check_memory.py --out eval/results/memcheck_h200.txt

# Diffusers' wheel holds no tests: DIFFUSERS_SRC is a checkout of its repository. Their conftest takes the place of ours.
# It would also put the checkout's src/ before the installed Diffusers, so the tests are reached from another folder.
test-diffusers: install-dev
	@test -f "$(DIFFUSERS_SRC)/tests/conftest.py" || { \
	  echo "give a checkout of Diffusers: make test-diffusers DIFFUSERS_SRC=path/to/diffusers" >&2; exit 1; }
	$(PIP) parameterized requests-mock
	mkdir -p $(OUT)/diffusers && ln -sfn "$(abspath $(DIFFUSERS_SRC))/tests" $(OUT)/diffusers/tests
	OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 PYTHONPATH="$(abspath $(OUT))/diffusers:tests/support" \
	  $(BIN)/python -m pytest -o addopts="--import-mode=importlib --noconftest" -p tests.conftest \
	  --numprocesses $(JOBS) --dist worksteal $(wildcard tests/diffusers_mixins/*.py)

lint: install-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: install-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
