# Each target makes what it needs, in .venv and .venv-conda; in an activated conda environment that has PyTorch, as that of
# environment.yml, everything runs there. From outside: PYTHON and TORCH pick what the former are made of, VARIANT and CHANNEL
# what `package` builds and against what; extension_cpp/_build.py lists the variables of the build. The tools have the versions
# and hashes of locked/; LOCKED=0 takes the newest ones. PyTorch, and what has to match it, are of the version that TORCH says.
PYTHON ?= python3
TORCH ?= torch==2.13.0
LOCKED ?= 1
QUIET := --quiet --quiet --disable-pip-version-check
ACTIVE := $(and $(CONDA_PREFIX),$(wildcard $(CONDA_PREFIX)/conda-meta/pytorch-[0-9]*.json))
ifeq ($(ACTIVE),)
BIN := .venv/bin
CONDA := .venv-conda/bin
READY := .venv/.ready
INSTALLED := .venv/.installed
else
BIN := $(CONDA_PREFIX)/bin
CONDA := $(BIN)
READY := $(firstword $(ACTIVE))
INSTALLED := build/installed/$(notdir $(CONDA_PREFIX))
endif
RUN := $(BIN)/python
TOOLS := PATH="$(abspath $(BIN)):$$PATH"

.PHONY: test test-all test-builds fuzz features selection op check op-rename op-remove new-distribution package wheel env bench bench-check tune report matrix lock lint format clean

.venv/.ready: pyproject.toml locked/tools.txt
	@echo "making .venv, of PyTorch and the tools: usually one minute"
	$(PYTHON) -m venv .venv
ifeq ($(LOCKED),0)
	$(RUN) -m pip install $(QUIET) --upgrade "pip>=25.1"
	$(RUN) -m pip install $(QUIET) "$(TORCH)" --group dev
else
	$(RUN) -m pip install $(QUIET) --require-hashes -r locked/tools.txt
	$(RUN) -m pip install $(QUIET) "$(TORCH)" --group with-torch
endif
	@$(TOOLS) $(RUN) tests/checkout/torchvision_for_cpu.py
	touch $@

# ninja recompiles what has changed in csrc/ and nothing else. Not by pip, which keeps what a compiler says to itself; pip
# only installs it, editable, so that Python files need no step.
.PHONY: build libraries
build: libraries $(INSTALLED)

libraries: $(READY)
	@echo "compiling what has changed in csrc/: all of it takes half a minute, with CUDA minutes"
	@$(TOOLS) $(RUN) setup.py --quiet build_ext --inplace

$(INSTALLED): pyproject.toml extension_cpp/_version.py $(if $(ACTIVE),$(READY)) | libraries
	@$(TOOLS) $(RUN) -m pip install $(QUIET) --no-build-isolation --no-deps -e .
	@mkdir -p $(@D) && touch $@

# By file, as tests of one file share what they build; in the order of their folders, which has the longest first.
PYTEST := $(RUN) -m pytest -n auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder --durations 12
# The tests run whatever lint finds, so that one run reports both.
define lint-and-test
@$(MAKE) --no-print-directory build
@$(MAKE) --no-print-directory lint; linted=$$?; $(PYTEST) -m "$(1)"; tested=$$?; \
    test $$linted = 0 || echo "make $@: lint failed, its messages are above the tests: make format fixes what it can"; \
    exit $$((linted ? linted : tested))
endef

test:
	@echo "make test: compiles, lints and tests; usually four minutes on two cores, and one more to make .venv first"
	$(call lint-and-test,not packages and not builds and not long)

# Also what takes minutes and rarely breaks alone; .github/workflows/long.yml runs it every week.
test-all:
	@echo "make test-all: compiles, lints and tests; usually half an hour on two cores"
	$(call lint-and-test,not packages or long)

# What must hold of the packages, beyond the tests that they carry, and of wheels, distributions and what jit compiles.
test-builds: build
	$(MAKE) package VARIANT=all
	$(PYTEST) -m "(packages or builds) and not long" tests/checkout

# Calls with arguments that nobody thought of, to every operator, compiled with sanitizers in build/asan, for a minute or
# SECONDS of them. FUZZ has options: tests/fuzz.py --help. tests/test_fuzz.py is the short form, without sanitizers.
SECONDS ?= 60
fuzz: build
	@$(TOOLS) PYTHONPATH="$(CURDIR)" $(RUN) tests/fuzz.py --sanitize --seconds $(SECONDS) $(FUZZ)

# Writes the table of what each operator has, by its declaration and the tests.
features: build
	$(RUN) tests/features.py

# Writes the table of what solvers pick, in docs/install.md; with a conda on PATH by its solvers too, in some minutes.
selection: $(READY)
	$(RUN) tests/checkout/selection.py

# A new operator NAME, of a KIND and a SHAPE; without NAME it says which there are.
ifndef NAME
op: $(READY)
	@$(RUN) -m templates.op list
else
op: build
	$(RUN) -m templates.op add "$(NAME)" $(if $(KIND),--kind "$(KIND)") $(if $(SHAPE),--shape "$(SHAPE)")
	@$(MAKE) --no-print-directory build
	$(RUN) -m pytest "tests/test_$(NAME).py"
	@echo "next: edit csrc/$(NAME).cpp and extension_cpp/ops/$(NAME).py, and after each edit: make check NAME=$(NAME)." \
	    "The guide: $(firstword $(wildcard docs/add-an-operator.md) README.md)"
endif

# After each edit of operator NAME: compiles what has changed, runs its contract and times it, in seconds; saves nothing. ALL=1
# also checks what torch.compile and torch.export make of it; WATCH=1 goes on, and checks after each edit, in fewer seconds.
check: $(READY)
	@$(TOOLS) $(RUN) -m templates.check "$(NAME)" $(if $(ALL),--all) $(if $(WATCH),--watch)

# Operator NAME becomes TO, in its files; what else names it (documents, other modules) is not changed.
op-rename: $(READY)
	$(RUN) -m templates.op rename "$(NAME)" --to "$(TO)"
	@$(MAKE) --no-print-directory build

op-remove: $(READY)
	$(RUN) -m templates.op remove "$(NAME)" $(if $(FORCE),--force)
	@$(MAKE) --no-print-directory build

# A distribution of your own: NAME, in the new folder DEST (README.md).
new-distribution: $(READY)
	@$(RUN) -m templates.distribution check "$(NAME)" "$(DEST)"
	$(RUN) -m copier copy --trust --data "name=$(NAME)" --defaults "$(CURDIR)" "$(DEST)"

.PHONY: engine
engine:
	@$(if $(ACTIVE),,$(PYTHON) package/prepare.py)

package: engine
	@PATH="$(abspath $(CONDA)):$$PATH" $(CONDA)/python -m package

env: engine
	@PATH="$(abspath $(CONDA)):$$PATH" $(CONDA)/python -m package.env

# For PyPI: both libraries in one. The older the system that it is made on, the more systems can use it. Where there is no
# nvcc, NVIDIA's wheels have one. A commit gives the same bytes to everyone: its time stands for the clock, nothing is left of an
# earlier build, and modes are not those of the builder's umask.
NVCC := $(shell command -v nvcc)
wheel: export USE_CUDA ?= 1
wheel: export SOURCE_DATE_EPOCH ?= $(shell git log -1 --format=%ct 2>/dev/null || echo 315532800)
wheel: $(READY) $(if $(NVCC)$(filter 0,$(USE_CUDA)),,build/nvcc/.ready)
	rm -rf dist/wheel build/lib* build/bdist*
	TORCH_CUDA_ARCH_LIST="$(or $(TORCH_CUDA_ARCH_LIST),all)" \
	    $(if $(NVCC),,CUDA_HOME="$$(echo "$(CURDIR)"/build/nvcc/nvidia/cu*)") \
	    $(RUN) -m build --wheel --no-isolation --outdir dist/wheel/made
	$(TOOLS) $(RUN) -m auditwheel repair --exclude 'libtorch*' --exclude 'libc10*' \
	    --wheel-dir dist/wheel dist/wheel/made/*.whl
	$(RUN) -m package.reproducible dist/wheel/*.whl

build/nvcc/.ready: channel/pins.yaml | $(READY)
	rm -rf build/nvcc && mkdir -p build/nvcc
	$(RUN) -m channel.pins > build/nvcc/wheels.txt
	$(RUN) -m pip install $(QUIET) --no-deps --upgrade --target build/nvcc -r build/nvcc/wheels.txt
	touch $@

# Alone it measures everything, saves and draws. BENCH has options, and COMPARE=<commit> says what became faster or slower
# since that commit's results: with either nothing is saved, unless BENCH has --save, which `make report` draws then.
bench: build
	$(RUN) -m benchmarks $(or $(BENCH),$(if $(COMPARE),,--save)) $(if $(COMPARE),--compare $(COMPARE))
	$(if $(BENCH)$(COMPARE),,$(RUN) -m benchmarks.report)

# A short form, of the package as it is installed; it fails where an operator fell behind its peer by more than the noise,
# and decides nothing while the machine is busy.
bench-check: package
	rm -rf build/bench-check && mkdir -p build/bench-check && cp -r benchmarks build/bench-check
	cd build/bench-check && ../../dist/env/cpu/bin/python -m benchmarks --check

# On a GPU: finds the configurations of Triton's kernels that the next build compiles for GPUs of its architecture.
tune: build
	$(RUN) -m benchmarks.tune

# Draws the committed results, and fills in the documents' tables.
report: build
	$(RUN) -m benchmarks.report

matrix: build
	$(MAKE) package VARIANT=all
	$(RUN) tests/checkout/matrix.py $(MATRIX)

# Writes locked/, after a change of pyproject.toml: one file for every system and every Python from 3.10. Versions that are there
# stay where they can; with UPGRADE=1 all become the newest. Which index they came from is not written down.
LOCK = $(BIN)/uv pip compile --quiet --universal --python-version 3.10 --generate-hashes --no-annotate --no-header \
    --no-emit-index-url $(if $(UPGRADE),--upgrade)
lock: $(READY)
	$(RUN) -m pip install $(QUIET) uv
	$(LOCK) --group tools --output-file locked/tools.txt
	$(LOCK) --group conda --constraints locked/tools.txt --output-file locked/conda.txt

CSRC = $(shell find csrc -type f)
lint: $(READY)
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy
	$(BIN)/clang-format --dry-run --Werror $(CSRC)

format: $(READY)
	$(RUN) -m ruff check --fix .
	$(RUN) -m ruff format .
	$(BIN)/clang-format -i $(CSRC)

clean:
	rm -rf build dist *.egg-info extension_cpp/*.so
