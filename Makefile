PYTHON ?= python3
VENV ?= .venv
WORKERS ?= 2
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

.PHONY: help install test test-all test-gpu lint format report docs-check demo assets clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/'

$(INSTALLED): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[demo,dev]'
	@touch $@

install: $(INSTALLED) ## make .venv with everything the demo and the tests need

# The tests' trainings and tolerances are for CPUs; on a machine with a GPU they would find it.
test: $(INSTALLED) ## run the tests, WORKERS processes at a time
	CUDA_VISIBLE_DEVICES= $(BIN)/python -m pytest --numprocesses $(WORKERS) --dist worksteal -m "not slow"

test-all: $(INSTALLED) ## run the slow tests, too
	CUDA_VISIBLE_DEVICES= $(BIN)/python -m pytest --numprocesses $(WORKERS) --dist worksteal

test-gpu: $(INSTALLED) ## run the kernels' tests on a GPU
	$(BIN)/python -m pytest tests/lowrank_kv/ops/kernels

lint: $(INSTALLED) ## check style
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(INSTALLED) ## rewrite the sources in the house style
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

report: $(INSTALLED) ## write the tables, figures and numbers of the documents from results/
	$(BIN)/python -m scripts.report
	$(BIN)/python -m scripts.draw_structure

docs-check: $(INSTALLED) ## fail where a document says something else than results/, or the picture something else than the imports
	$(BIN)/python -m scripts.report --check
	$(BIN)/python -m scripts.draw_structure --check

assets: $(INSTALLED) ## fetch the demo model and text into the user cache directory
	$(BIN)/python scripts/fetch_demo_assets.py

demo: assets ## calibrate and train on the demo model, compare at equal bytes, generate
	rm -rf runs/demo runs/demo-bases
	$(BIN)/lowrank-kv calibrate --config configs/calibrate-demo.yaml
	$(BIN)/accelerate launch --config_file configs/accelerate/single.yaml train_dynakv.py --config configs/smollm2-demo.yaml
	$(BIN)/python scripts/compare.py --config configs/compare-demo.yaml --output runs/demo/comparison
	$(BIN)/python scripts/generate.py --checkpoint runs/demo/checkpoint --max-new-tokens 48 \
		--prompt "Mr. Speaker, Mr. President, my fellow citizens: the state of our economy"

clean: ## remove runs and build leftovers
	rm -rf runs build dist *.egg-info
