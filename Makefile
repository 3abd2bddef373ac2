# Everything runs in .venv, made on first use: `make help` lists the targets.

VENV := .venv
BIN := $(VENV)/bin

# Variables for the command line, e.g. `make serve MODEL=org/name PORT=9000`.
PORT ?= 8000
MODEL ?=
ARGS ?=
EXTRA ?=
PYTEST_ARGS ?= -n auto --maxprocesses 4

export PYTHON
export PIP_DISABLE_PIP_VERSION_CHECK := 1

# uv when it is there, as it is faster; pip otherwise.
INSTALL := $(if $(shell command -v uv),uv pip install --quiet --python $(BIN)/python,$(BIN)/python -m pip install --quiet)

# One stamp per set of dependencies; make installs again when pyproject.toml is newer.
COMMA := ,
RUN_STAMP := $(VENV)/installed$(addprefix -,$(subst $(COMMA),-,$(EXTRA)))
TEST_STAMP := $(VENV)/installed-test

.PHONY: help serve test lint types format clean
.DELETE_ON_ERROR:

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "make %-8s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@echo
	@echo 'serve takes MODEL=, PORT=, EXTRA=cuda or EXTRA=tpu, and ARGS= for every other option;'
	@echo 'test takes PYTEST_ARGS=; all take PYTHON= for the interpreter that makes .venv.'

serve: $(RUN_STAMP) ## install and start the server (small default model, port 8000)
	@exec $(BIN)/jaxllm serve $(MODEL) --port $(PORT) $(ARGS)

test: $(TEST_STAMP) ## run the tests
	$(BIN)/python -m pytest $(PYTEST_ARGS)

lint: $(TEST_STAMP) ## check style, format and the direction of imports
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

types: $(TEST_STAMP) ## check types
	$(BIN)/pyright --pythonpath $(BIN)/python

format: $(TEST_STAMP) ## format the code and fix what can be fixed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean: ## remove .venv and caches
	rm -rf $(VENV) dist build .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Follows the link to the interpreter: one that was replaced or removed makes .venv anew.
$(BIN)/python:
	@python=$$(sh .ci/find-python) && echo "making $(VENV) with $$python" && "$$python" -m venv --clear $(VENV)

$(VENV)/installed%: pyproject.toml $(BIN)/python
	@echo 'installing jaxllm$(if $(EXTRA), [$(EXTRA)]) into $(VENV): minutes the first time'
	@$(INSTALL) --editable '.$(if $(EXTRA),[$(EXTRA)])'
	@touch $@

$(VENV)/installed: pyproject.toml $(BIN)/python
	@echo 'installing jaxllm into $(VENV): minutes the first time'
	@$(INSTALL) --editable .
	@touch $@

$(TEST_STAMP): pyproject.toml $(BIN)/python
	@echo 'installing jaxllm and its test tools into $(VENV): minutes the first time'
	@$(INSTALL) --editable '.[test]'
	@touch $@ $(VENV)/installed
