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

# Keras and TensorFlow have an environment of their own: TensorFlow wants an older h5py than the rest.
KERAS_VENV ?= .venv-keras
KERAS_PY := $(KERAS_VENV)/bin/python
KERAS := $(KERAS_VENV)/.installed
KERAS_PINS := $(KERAS_VENV)/constraints.txt

# The environment variables reach the build of the package itself, which `-c` does not: the first
# is read by pip up to 25.2, the second by later ones.
pip_install = PIP_CONSTRAINT=$(2) PIP_BUILD_CONSTRAINT=$(2) \
	$(1) -m pip install --quiet --disable-pip-version-check --no-compile $(PIP_FLAGS) -c $(2)
PIP_INSTALL = $(call pip_install,$(PY),constraints.txt)
KERAS_PIP_INSTALL = $(call pip_install,$(KERAS_PY),$(KERAS_PINS))
# pip would compile every module of torch and all else, on one core: more than half of its time.
# Instead those that training imports, once, and for the tests all of them on all cores (but for
# templates among them that are no Python).
COMPILE = env -u PYTHONDONTWRITEBYTECODE $(PY)

.DEFAULT_GOAL := help
.PHONY: help train test quick check lint format types unit keras-tests browser cluster pictures wheel oldest clean

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
	@$(MAKE) --no-print-directory cluster
	@$(MAKE) --no-print-directory unit
	@$(MAKE) --no-print-directory oldest
	@$(MAKE) --no-print-directory keras-tests

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

# Keras chooses its backend once per process, so the tests of each run in a process of their own.
# pytest gives 5 where no test is collected for a backend, and make fails.
keras-tests: $(DEV) $(KERAS)
	$(PY) -m pyright --project pyright-keras.json --pythonpath $(KERAS_PY)
	KERAS_BACKEND=tensorflow $(KERAS_PY) -m pytest -n 2 --dist worksteal tests/keras $(PYTEST_FLAGS)
	KERAS_BACKEND=torch $(KERAS_PY) -m pytest -n 2 --dist worksteal tests/keras $(PYTEST_FLAGS)

# Chromium, in which tests/test_page.py tries the page of gems draw. Where it is absent and cannot be
# installed, those tests are skipped and say so.
browser:
	@if command -v chromium >/dev/null && command -v chromedriver >/dev/null; then :; \
	elif [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
		echo "installing chromium and chromium-driver"; apt-get update -qq && \
		DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends \
			chromium chromium-driver >/dev/null; \
	else echo "NO BROWSER: install chromium and chromedriver to test the page" >&2; fi

# Slurm, with PMIx for Open MPI's ranks, and Lmod: tests/test_slurm.py starts a Slurm of its own as
# root, tests/test_packaging.py loads a module. Without them those tests are skipped and say so.
CLUSTER = slurmctld slurmd slurm-client munge libpmix-dev lmod tcl
cluster:
	@if [ -x /usr/sbin/slurmctld ] && [ -x /usr/sbin/slurmd ] && [ -x /usr/bin/srun ] && \
		[ -x /usr/sbin/munged ] && [ -e /usr/share/lmod/lmod/init/bash ]; then :; \
	elif [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
		echo "installing $(CLUSTER)"; { apt-get update -qq && \
		DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends \
			$(CLUSTER) >/dev/null; } || echo "NO SLURM, NO LMOD: their tests are skipped" >&2; \
	else echo "NO SLURM, NO LMOD: install $(CLUSTER) to test them" >&2; fi

# The pictures of the documents, by the commands that docs/pictures.md shows.
pictures: $(DEV)
	@grep -E '^gems draw .*--svg docs/' docs/pictures.md | PATH="$(abspath $(VENV))/bin:$$PATH" sh -ex >/dev/null

# What runs from the unpacked archive, too: some that read files beside gems/, one that computes.
ARCHIVE = test_architecture test_documents test_words test_geometry

# What a stranger gets: the wheel alone, imported from outside the repository.
wheel: $(DEV)
	@rm -rf $(WHEEL)
	$(PY) -m build --no-isolation --outdir $(WHEEL) . >/dev/null
	$(PY) -m validate_pyproject pyproject.toml
	$(PY) -m twine check --strict $(WHEEL)/gems_hires-*
	$(PY) -m check_wheel_contents --toplevel gems $(WHEEL)/gems_hires-*.whl
	$(PY) -m pip install --quiet --disable-pip-version-check --no-deps --no-index \
		--target $(WHEEL)/site $(WHEEL)/gems_hires-*.whl
	cd $(WHEEL)/site && test -f gems/py.typed && test -f gems/machines/v100.json && PYTHONPATH="$$PWD" bin/gems --version
	cd $(WHEEL)/site && PYTHONPATH="$$PWD" bin/gems draw --stages 2 --html page.html >/dev/null
	cd $(WHEEL)/site && $(abspath $(PY)) -c "import os, sys, gems; \
		assert gems.__file__.startswith(os.getcwd()), gems.__file__; \
		heavy = {'torch', 'tensorflow'} & set(sys.modules); \
		assert not heavy, f'import gems loads {heavy}'"
	cd $(WHEEL) && tar -xzf gems_hires-*.tar.gz && cd gems_hires-*/ && \
		$(abspath $(PY)) -m pytest -q -p no:cacheprovider $(ARCHIVE:%=tests/%.py)

# The lower bounds of pyproject.toml, in an environment of their own: 1.7 GB, since torch 2.6 on PyPI
# is built for CUDA; tests/scripts/no_cuda.py stands in for what is not installed with it. Where it
# cannot be had, this is skipped and says so.
OLDEST_VENV ?= .venv-oldest
OLDEST_PY := $(OLDEST_VENV)/bin/python
OLDEST := $(OLDEST_VENV)/.installed
OLDEST_RUN = LD_LIBRARY_PATH=$(abspath $(OLDEST_VENV))/no-cuda PYTHONPATH=. $(OLDEST_PY)
oldest:
	@if $(MAKE) --no-print-directory $(OLDEST); then \
		$(OLDEST_RUN) tests/scripts/oldest.py && \
		$(OLDEST_RUN) -m torch.distributed.run --nproc-per-node 2 tests/scripts/train.py \
			'{"stages": 2, "micro_batches": 4}'; \
	else echo "NO TORCH 2.6: it cannot be installed, the lower bounds are not tested" >&2; fi

$(OLDEST): pyproject.toml
	@echo "installing torch 2.6 into $(OLDEST_VENV)"
	@$(PYTHON) -m venv $(OLDEST_VENV)
	@$(OLDEST_PY) -m pip install --quiet --disable-pip-version-check --no-compile --retries 1 \
		$(PIP_FLAGS) numpy==1.24.0 safetensors==0.4.3 rich==13.0.0 pyyaml==6.0 \
		filelock typing-extensions sympy==1.13.1 networkx jinja2 fsspec
	@$(OLDEST_PY) -m pip install --quiet --disable-pip-version-check --no-compile --retries 1 \
		$(PIP_FLAGS) --no-cache-dir --no-deps torch==2.6.0
	@$(OLDEST_PY) tests/scripts/no_cuda.py $(OLDEST_VENV)/lib/python3*/site-packages/torch/lib \
		$(OLDEST_VENV)/no-cuda
	@touch $@

clean:
	rm -rf $(VENV) $(KERAS_VENV) $(OLDEST_VENV) dist runs .pytest_cache .ruff_cache .hypothesis
	find gems tests -name __pycache__ -type d -prune -exec rm -rf {} +

# Order-only: the interpreter's date says nothing about what is installed.
$(RUN): pyproject.toml constraints.txt | $(PY)
	@echo "installing gems and torch into $(VENV)"
	@$(PIP_INSTALL) -e '.[torch,data]'
	@$(COMPILE) -c 'import gems.cli.main, gems.torch.trainer'
	@touch $@

$(DEV): pyproject.toml constraints.txt | $(PY)
	@echo "installing gems, torch and the tools of development into $(VENV)"
	@$(PIP_INSTALL) -e '.[torch,data,mpi,dev]'
	@PIP_CONSTRAINT=constraints.txt $(PY) -m pip install --quiet --disable-pip-version-check \
		$(PIP_FLAGS) --no-deps --ignore-installed --no-warn-script-location --prefix $(VENV)/mpich mpich
	@$(COMPILE) -m compileall -q -j 0 $(VENV)/lib >/dev/null || true
	@touch $@ $(RUN)

# torch first, by its pin: the CPU wheel, where one is at hand. TensorFlow would not ask for it.
$(KERAS): pyproject.toml constraints.txt constraints-keras.txt | $(KERAS_PY)
	@echo "installing gems, torch, Keras and TensorFlow into $(KERAS_VENV)"
	@sed -n 's/^\([A-Za-z0-9_.-]*\)==.*/^\1==/p' constraints-keras.txt > $(KERAS_PINS).names
	@grep -v -i -f $(KERAS_PINS).names constraints.txt > $(KERAS_PINS)
	@cat constraints-keras.txt >> $(KERAS_PINS)
	@$(KERAS_PIP_INSTALL) torch numpy
	@$(KERAS_PIP_INSTALL) -e '.[torch,keras,keras-tests]'
	@env -u PYTHONDONTWRITEBYTECODE $(KERAS_PY) -c "import tensorflow, keras, gems.torch.trainer"
	@touch $@

$(PY) $(KERAS_PY): NEW = $(@:%/bin/python=%)
$(PY) $(KERAS_PY):
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(v < (3, 11) and \
		f"constraints.txt pins versions for Python 3.11 and later, $(PYTHON) is {v[0]}.{v[1]}: \
	set PYTHON to a later one")'
	@echo "making $(NEW)"
	@$(PYTHON) -m venv $(NEW)
