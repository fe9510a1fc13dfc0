# The only entry points. `make site`, `make serve`, `make test`; see README.md.
PYTHON ?= python3
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
export TORCH_INDEX
export NO_MKDOCS_2_WARNING = 1
BIN = .venv/bin
READY = .venv/.ready
L ?=
S ?=

.PHONY: site serve test faults lessons lesson notebooks check lint constraints clean help

help:  ## show this list
	@grep -hE '^[a-z]+:.*##' Makefile | sed -E 's/:[^#]*## /\t/' | expand -t 14

site: $(READY)  ## run what changed and build the website into site/
	@$(BIN)/course site

serve: $(READY)  ## live preview: save a lesson, see its page
	@$(BIN)/course serve

lessons: $(READY)  ## run what changed; of n machines the i-th: make lessons S=i/n
	@$(BIN)/course run $(if $(S),--shard $(S))

lesson: $(READY)  ## run and render one lesson: make lesson L=compiler/switch
	@test -n "$(L)" || { echo "say which: make lesson L=unit/slug"; exit 2; }
	@$(BIN)/course page $(L)

notebooks: $(READY)  ## write the learners' notebooks, notebooks/*/*.ipynb
	@$(BIN)/course notebooks

check: $(READY)  ## everything that can be checked without running a lesson
	@$(BIN)/course check

lint: $(READY)
	@$(BIN)/ruff check --quiet . && $(BIN)/ruff format --quiet --check .

test: lint site check  ## everything that continuous integration needs to be green
	@$(BIN)/python -m pytest

faults: $(READY)  ## stop a build at 50 random moments; each time the next one must be right
	@KILLS=50 $(BIN)/python -m pytest -n0 tests/contract/test_build.py -k killed_at_any_moment

constraints:  ## pin anew: the newest versions that pyproject.toml allows
	@$(PYTHON) -m course.pin

clean:  ## remove all that is generated and not committed
	rm -rf site .cache docs/lessons .venv *.egg-info .pytest_cache .ruff_cache node_modules

$(READY): pyproject.toml constraints.txt course/install_torch.py
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt pip setuptools
	@$(BIN)/python -m course.install_torch
	@echo "installing the rest …"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --group test -e .
	@touch $@
