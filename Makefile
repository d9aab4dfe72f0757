# Two commands: `make run` trains a small model on this machine's own text, `make test` checks everything.
VENV ?= .venv
PY := $(VENV)/bin/python
STAMP := $(VENV)/.installed
SOURCES := pyproject.toml setup.py constraints.txt $(wildcard ops/*.cpp ops/*.h)
PYTHON ?= python3

.PHONY: run test install lint slow clean emulator

install: $(STAMP)

$(STAMP): $(SOURCES)
	@test -x $(PY) || $(PYTHON) -m venv $(VENV)
	@echo "installing into $(VENV) (the first time takes a minute or two)"
	@$(PY) -m pip install -q --disable-pip-version-check -c constraints.txt torch
	@$(PY) -m pip install -q --disable-pip-version-check -c constraints.txt -e '.[dev,plot]'
	@touch $@

run: $(STAMP)
	@$(PY) -m memferry_ascend train --text stdlib --model gpt-1m --steps 500 --clip 1 --precision fp32 \
		--out runs/quickstart --overwrite

lint: $(STAMP)
	@$(VENV)/bin/ruff format --check .
	@$(VENV)/bin/ruff check .
	@$(VENV)/bin/mypy memferry_ascend
	@$(VENV)/bin/mypy topology

# The unmodified torch_npu wheel over an emulated CANN (docs/ascend.md). build.py knows when nothing changed. The wheel
# exists for x86-64 Linux; elsewhere the tests that need it say so and are skipped.
emulator: $(STAMP)
	@$(PY) tests/emulator/build.py --wheel

test: $(STAMP) lint emulator
	@$(PY) tests/side_by_side.py -m "not slow"

slow: $(STAMP)
	@$(PY) -m pytest -m slow

clean:
	rm -rf $(VENV) build *.egg-info memferry_ascend/_ops*.so .pytest_cache .mypy_cache .ruff_cache .hypothesis
