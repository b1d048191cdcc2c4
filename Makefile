# Everything runs in ./.venv; `make venv` makes it. What CI runs is .ci/run.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: venv test lint chaos bench
venv: $(BIN)/omnara
$(BIN)/omnara: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install -q -c constraints.txt -e '.[dev]'
	@touch $@

test: venv
	$(BIN)/pytest

lint: venv
	$(BIN)/ruff check .
	$(BIN)/ruff format --check omnara
	$(BIN)/mypy
	$(BIN)/lint-imports

# Failure rows with the default time constants: minutes per test.
chaos: venv
	$(BIN)/pytest -n 0 -m slow tests/chaos

# make bench SCENARIO=steps
SCENARIO ?= steps
bench: venv
	$(BIN)/python -m bench $(SCENARIO) --json
