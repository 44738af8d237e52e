# Everything runs inside .venv, which the first target that needs it creates.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help demo deploy-demo test test-e2e coverage check check-files audit docs package fuzz bench format clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / {printf "  make %-11s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(VENV)/.run ## four methods on handwritten digits, with a table and a picture (half a minute)
	@$(BIN)/freshet demo $(ARGS)

deploy-demo: $(VENV)/.flower ## a federation of real processes on this machine, on Flower (some minutes)
	@$(BIN)/freshet deploy local --devices 4 $(ARGS)

test: $(VENV)/.dev ## run the tests
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n auto --dist worksteal $(ARGS)

test-e2e: $(VENV)/.dev $(VENV)/.flower ## run the tests that start real Flower processes (some minutes)
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 --dist worksteal -m e2e tests/flower $(ARGS)

coverage: $(VENV)/.dev $(VENV)/.maintain ## run the tests and count the lines that they reach (longer than make test)
	@$(BIN)/coverage erase
	@OMP_NUM_THREADS=1 $(BIN)/coverage run -m pytest -q -n auto --dist worksteal $(ARGS)
	@$(BIN)/coverage combine --quiet && $(BIN)/coverage report --fail-under=0
	@$(BIN)/coverage report --include='src/freshet/core/*'

check: $(VENV)/.dev ## lint, types, import contract, known weaknesses of dependencies
	@$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy && $(BIN)/lint-imports
	@$(MAKE) --no-print-directory audit

check-files: $(VENV)/.maintain ## check the workflows, the container files and the chart
	@PATH="$(CURDIR)/$(BIN):$$PATH" scripts/check_files.sh

audit: $(VENV)/.dev ## hold the pinned dependencies against the database of known weaknesses
	@$(BIN)/pip-audit --version > /dev/null 2>&1 || { echo "dependencies not audited: pip-audit is not installed"; exit 0; }; \
	out=$$($(BIN)/pip-audit --progress-spinner off --timeout 10 --skip-editable 2>&1); code=$$?; \
	case "$$out" in \
	*"No known vulnerabilities"*|*"known vulnerabilit"*) printf '%s\n' "$$out"; exit $$code;; \
	*) echo "dependencies not audited: the database of known weaknesses cannot be reached";; esac

docs: $(VENV)/.docs ## build the documentation into site/, without a single warning
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet && echo "site/index.html"

package: $(VENV)/.maintain ## build wheel and sdist into dist/ and check them
	@rm -rf dist && $(BIN)/python -m build && $(BIN)/twine check --strict dist/* && $(BIN)/check-wheel-contents dist/*.whl
	@$(BIN)/validate-pyproject pyproject.toml

fuzz: $(VENV)/.dev $(VENV)/.fuzz ## the random tests, forty times as long, and guided ones (an hour or more)
	@for target in pickle codec trace-csv trace-json toml line segment idx; do \
		$(BIN)/python tests/hostile/guided.py $$target || exit 1; done
	@FRESHET_FUZZ=40 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n auto --timeout 3600 tests/hostile tests/methods/test_norm_gate_runs.py $(ARGS)

bench: $(VENV)/.dev ## measure speed and memory (some minutes; close other programs)
	@for script in kernel simulator startup aggregation memory long_run; do $(BIN)/python benchmarks/$$script.py || exit 1; echo; done

format: $(VENV)/.dev ## put the code in shape
	@$(BIN)/ruff check --fix . ; $(BIN)/ruff format .

clean: ## remove the environment and caches (run directories stay)
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Freshet needs Python 3.11 or newer; try: make PYTHON=python3.11 $(MAKECMDGOALS)"; exit 2; }
	@$(PYTHON) -m venv $(VENV) || { echo "cannot create $(VENV); on Debian: apt install python3-venv"; exit 2; }

# $(call install,WHAT,TARGET): quietly, with a dot per second; pip's own words only if it fails.
define install
@echo "installing $(1) into $(VENV), about a minute"
@$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e '$(2)' > $(VENV)/pip.log 2>&1 & pid=$$!; \
	while kill -0 $$pid 2> /dev/null; do printf .; sleep 1; done; echo; \
	wait $$pid || { cat $(VENV)/pip.log; echo "the installation failed, see above"; exit 1; }
endef

$(VENV)/.run: pyproject.toml constraints.txt | $(BIN)/python
	$(call install,Freshet,.)
	@touch $@

$(VENV)/.dev: pyproject.toml constraints.txt | $(BIN)/python
	$(call install,Freshet and its test tools,.[dev])
	@touch $@ $(VENV)/.run

$(VENV)/.maintain: pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing the tools of maintainers into $(VENV) ..."
	@$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt $$($(BIN)/python -c \
		'import pathlib, tomllib; print(*tomllib.loads(pathlib.Path("pyproject.toml").read_text())["dependency-groups"]["maintain"])')
	@touch $@

$(VENV)/.fuzz: pyproject.toml constraints.txt | $(BIN)/python
	$(call install,the fuzzer,.[fuzz])
	@touch $@

$(VENV)/.docs: pyproject.toml constraints.txt | $(BIN)/python
	$(call install,mkdocs,.[docs])
	@touch $@ $(VENV)/.run

$(VENV)/.flower: pyproject.toml constraints.txt | $(BIN)/python
	$(call install,Freshet and Flower,.[flower])
	@touch $@ $(VENV)/.run
