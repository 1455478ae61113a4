# make train   from nothing to a network trained on real tissue, with a heat map and a report
# make test    lint, types, tests and the wheel: all that CI runs
# make quick   lint and the tests that find most, in under two minutes: for the daily loop
#
# Both make $(VENV) if it is absent and install the pinned versions; a second run installs nothing.
# On a machine without a GPU, take the small torch:
#   make train PIP_FLAGS="--extra-index-url https://download.pytorch.org/whl/cpu"

PYTHON ?= python3
VENV ?= .venv
PIP_FLAGS ?=

# the main job: tiles of a slide, GEMS-MASTER over three stages of which the first is two tiles
MODEL ?= resnet110-v2
TILE ?= 32
STAGES ?= 3
TILES ?= 2
TIMES ?= 2
EPOCHS ?= 3
BATCH ?= 4
OUT ?= runs/train
TRAIN_FLAGS ?=

PY := $(VENV)/bin/python
RUN := $(VENV)/.installed-run
DEV := $(VENV)/.installed-dev
WHEEL := dist/check

# The environment variables reach the build of the package itself, which `-c` does not: the first
# is read by pip up to 25.2, the second by later ones.
PIP_INSTALL = PIP_CONSTRAINT=constraints.txt PIP_BUILD_CONSTRAINT=constraints.txt \
	$(PY) -m pip install --quiet --disable-pip-version-check --no-compile $(PIP_FLAGS) -c constraints.txt
# pip would compile every module of torch and all else, on one core: more than half of its time.
# Instead those that training imports, once, and for the tests all of them on all cores (but for
# templates among them that are no Python).
COMPILE = env -u PYTHONDONTWRITEBYTECODE $(PY)

.DEFAULT_GOAL := help
.PHONY: help train test quick check lint format types unit browser pictures wheel clean

help:
	@sed -n '1,7s/^# \{0,1\}//p' Makefile

train: $(RUN)
	$(VENV)/bin/gems train --app medical --image-size $(TILE) --augment --num-workers 1 --heat-map \
		--model $(MODEL) --split-size $(STAGES) --num-spatial-parts $(TILES) --times $(TIMES) \
		--batch-size $(BATCH) --num-epochs $(EPOCHS) --optimizer adam --learning-rate 0.003 \
		--out $(OUT) --overwrite $(TRAIN_FLAGS)

test: check wheel

# In this order, also under `make -j`: the quick answers first.
check: $(DEV)
	@$(MAKE) --no-print-directory lint
	@$(MAKE) --no-print-directory types
	@$(MAKE) --no-print-directory browser
	@$(MAKE) --no-print-directory unit

# What breaks first when something is wrong: the numbers, the schedules, the words between ranks.
QUICK = test_architecture test_geometry test_exact test_golden test_check test_consensus test_generate test_batch_split
quick: $(DEV)
	@$(MAKE) --no-print-directory lint
	GEMS_GENERATE=100 $(PY) -m pytest -q -n 2 --dist worksteal $(QUICK:%=tests/%.py) $(PYTEST_FLAGS)

lint: $(DEV)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .

format: $(DEV)
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

types: $(DEV)
	$(PY) -m pyright --pythonpath $(PY)

# Two tests at a time: many of them start ranks of their own.
unit: $(DEV)
	$(PY) -m pytest -n 2 --dist worksteal $(PYTEST_FLAGS)

# Chromium, in which tests/test_page.py tries the page of gems draw. Where it is absent and cannot be
# installed, those tests are skipped and say so.
browser:
	@if command -v chromium >/dev/null && command -v chromedriver >/dev/null; then :; \
	elif [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
		echo "installing chromium and chromium-driver"; apt-get update -qq && \
		DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends \
			chromium chromium-driver >/dev/null; \
	else echo "NO BROWSER: install chromium and chromedriver to test the page" >&2; fi

# The pictures of the documents, by the commands that docs/pictures.md shows.
pictures: $(DEV)
	@grep -E '^gems draw .*--svg docs/' docs/pictures.md | PATH="$(abspath $(VENV))/bin:$$PATH" sh -ex >/dev/null

# What a stranger gets: the wheel alone, imported from outside the repository.
wheel: $(DEV)
	@rm -rf $(WHEEL)
	$(PY) -m build --wheel --no-isolation --outdir $(WHEEL) . >/dev/null
	$(PY) -m pip install --quiet --disable-pip-version-check --no-deps --no-index \
		--target $(WHEEL)/site $(WHEEL)/gems-*.whl
	cd $(WHEEL)/site && test -f gems/py.typed && test -f gems/machines/v100.json && PYTHONPATH="$$PWD" bin/gems --version
	cd $(WHEEL)/site && PYTHONPATH="$$PWD" bin/gems draw --stages 2 --html page.html >/dev/null
	cd $(WHEEL)/site && $(abspath $(PY)) -c "import os, sys, gems; \
		assert gems.__file__.startswith(os.getcwd()), gems.__file__; \
		heavy = {'torch', 'tensorflow'} & set(sys.modules); \
		assert not heavy, f'import gems loads {heavy}'"

clean:
	rm -rf $(VENV) dist runs .pytest_cache .ruff_cache .hypothesis
	find gems tests -name __pycache__ -type d -prune -exec rm -rf {} +

# Order-only: the interpreter's date says nothing about what is installed.
$(RUN): pyproject.toml constraints.txt | $(PY)
	@echo "installing gems and torch into $(VENV)"
	@$(PIP_INSTALL) -e '.[torch,data]'
	@$(COMPILE) -c 'import gems.cli.main, gems.torch.trainer'
	@touch $@

$(DEV): pyproject.toml constraints.txt | $(PY)
	@echo "installing gems, torch and the tools of development into $(VENV)"
	@$(PIP_INSTALL) -e '.[torch,data,dev]'
	@$(COMPILE) -m compileall -q -j 0 $(VENV)/lib >/dev/null || true
	@touch $@ $(RUN)

$(PY):
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(v < (3, 11) and \
		f"constraints.txt pins versions for Python 3.11 and later, $(PYTHON) is {v[0]}.{v[1]}: \
	set PYTHON to a later one")'
	@echo "making $(VENV)"
	@$(PYTHON) -m venv $(VENV)
