# Everything from a fresh Debian 12: `make demo` and `make test` install what is missing, build and run.
# Details of each step are in .deps/log. JOBS=N limits the compilers; ARGS is passed on, for example
#   make demo ARGS="--set zero_optimization.stage=3"        make test ARGS="-L zero"
#   make bench-peers ARGS="--write"                         make fuzz SECONDS_EACH=60
# TESSERA_TORCH=2.12 builds with another torch (requirements.txt), in build-torch2.12:   make test TESSERA_TORCH=2.12

.DEFAULT_GOAL := help
.PHONY: help deps build python wheel wheels sdist release-check bundle docs demo data test test-docs test-full test-hosts test-torches test-peers fashion-hosts asan tsan lint bench bench-peers bench-python bench-consolidate bench-curves bench-hosts bench-ranks bench-activations bench-offload-python methods soak fuzz mutants clean distclean
SHELL := /bin/bash
MAKEFLAGS += --no-print-directory
NPROC ?= 2
PLATFORM ?= manylinux_2_35_x86_64
override TORCH_SUFFIX :=
ifneq ($(TESSERA_TORCH),)
  export TESSERA_TORCH
  override TORCH_SUFFIX := $(shell TESSERA_TORCH='$(subst ','\'',$(TESSERA_TORCH))'; . scripts/common.sh; echo "found $$TESSERA_BUILD_SUFFIX")
  ifeq ($(TORCH_SUFFIX),)
    $(error TESSERA_TORCH is not a torch of requirements.txt)
  endif
  override TORCH_SUFFIX := $(word 2,$(TORCH_SUFFIX))
  export TESSERA_BUILD_DIR := $(CURDIR)/build$(TORCH_SUFFIX)
  export TESSERA := $(TESSERA_BUILD_DIR)/tessera
endif
override BUILD := build$(TORCH_SUFFIX)
override VENV := .deps/venv$(TORCH_SUFFIX)

help:  ## lists these commands
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-11s %s\n", $$1, $$2 }' Makefile

deps:  ## installs what is missing: Debian packages, libtorch (.deps/)
	@scripts/setup.sh

build: deps  ## builds the command, build/tessera
	@scripts/build.sh release tessera

python:  ## builds the Python package, build/python, to import it there
	@scripts/setup.sh --python
	@scripts/build.sh release tessera tessera_engine_module

wheel:  ## makes the Python package's wheel, dist/tessera-*.whl
	@scripts/setup.sh --wheel
	@scripts/build.sh release tessera tessera_engine_module
	@tag=$$($(VENV)/bin/python -c 'import sys; print("cp{0}{1}-cp{0}{1}".format(*sys.version_info))'); \
	$(VENV)/bin/python -m pip wheel --quiet --no-build-isolation --no-deps --wheel-dir dist . \
	  --config-settings "cmake.define.TESSERA_BUILD_DIR=$(CURDIR)/$(BUILD)" --config-settings build-dir=$(BUILD)/wheel $(if $(PLATFORM), \
	  --config-settings cmake.define.TESSERA_PLATFORM=$(PLATFORM) --config-settings wheel.tags=$$tag-$(PLATFORM))
	@wheel=$$(ls -t dist/tessera-*.whl | head -n 1); torch=$${wheel#*+torch}; \
	echo "$$wheel: $$(du -h --apparent-size $$wheel | cut -f 1); install it with: pip install 'torch==$${torch%%-*}.*' numpy $$wheel"

wheels:  ## a wheel for each torch of requirements.txt, and their index
	@set -e; for torch in $$(. scripts/common.sh; echo $$TORCHES); do $(MAKE) wheel TESSERA_TORCH=$$torch; done
	@python3 -B scripts/simple_index.py dist

sdist:  ## makes dist/tessera-*.tar.gz, which pip builds for its torch
	@scripts/setup.sh --wheel
	@$(VENV)/bin/python -c 'from scikit_build_core.build import build_sdist; print("pip install --no-build-isolation dist/" + build_sdist("dist"))'

release-check:  ## whether version, tag, sdist and wheels are a release's
	@python3 -B scripts/release_check.py

bundle:  ## makes a folder to take to a GPU node, dist/*.tar.gz
	@scripts/setup.sh --python
	@scripts/build.sh release bundle_programs
	@$(VENV)/bin/python -B bundle/make_bundle.py --build $(BUILD)

docs:  ## builds the site of these pages, dist/docs/index.html
	@scripts/setup.sh --docs
	@NO_MKDOCS_2_WARNING=1 .deps/venv-docs/bin/python -B -m mkdocs build --quiet --strict --config-file docs/site/mkdocs.yml
	@echo dist/docs/index.html

demo: build  ## trains a CNN on Fashion-MNIST on NPROC=2 ranks, ZeRO stage 2
	@$(BUILD)/tessera train configs/fashion_mnist.json --nproc $(NPROC) $(ARGS)

data: deps  ## fetches the reviews of text classification, 38 MB, to data/
	@scripts/data.sh

test:  ## builds everything and runs all tests
	@scripts/setup.sh --python
	@scripts/build.sh release
	@scripts/test.sh release $(ARGS)

test-docs:  ## the site's links, search and layout, in Chromium: 1 min
	@scripts/setup.sh --docs
	@.deps/venv-docs/bin/python -B tests/docs/site_test.py $(ARGS)

test-full:  ## what `make test` leaves out: more backends, worlds, models
	@scripts/setup.sh --python
	@scripts/build.sh release
	@scripts/test.sh release -C Full -L full
	@PYTHONPATH=$(CURDIR)/$(BUILD)/python TESSERA=$(CURDIR)/$(BUILD)/tessera $(VENV)/bin/python -B tests/python/ddp_test.py full

hosts_program = TESSERA_TEST_HOSTS_REQUIRED=1 TESSERA=$(CURDIR)/$(BUILD)/tessera TORCHRUN=$(CURDIR)/$(VENV)/bin/torchrun \
  PYTHONPATH=$(CURDIR)/$(BUILD)/python $(VENV)/bin/python -B tests/hosts
test-hosts:  ## a training under ssh, mpirun, srun, torchrun, Spark, Ray, ...
	@scripts/setup.sh --hosts
	@scripts/build.sh release tessera tessera_engine_module
	@$(hosts_program)/hosts_test.py $(ARGS)
	@$(if $(ARGS),,$(hosts_program)/doctor_test.py)
	@$(if $(ARGS),,$(hosts_program)/engines_test.py)

test-torches:  ## each torch of requirements.txt: build, wheel, a training
	@scripts/setup.sh --python
	@$(VENV)/bin/python -B tests/install/torches.py $(ARGS)

test-peers:  ## beside the real ones: its error lists the variables
	@scripts/setup.sh --peers
	@scripts/build.sh release tessera tessera_engine_module
	@$(if $(DEEPSPEED)$(ACCELERATE)$(FRAMEWORKS)$(OPTIMIZERS)$(CONTINUED)$(DEEPSPEED_CHECKPOINTS),,echo "error: expected DEEPSPEED=folder, ACCELERATE=folder (checkouts), FRAMEWORKS=1, OPTIMIZERS=1, CONTINUED=1 or DEEPSPEED_CHECKPOINTS=folder (packages)"; exit 2)
	@$(if $(DEEPSPEED),$(VENV)/bin/python -B tests/peers/deepspeed_suite.py $(DEEPSPEED) $(ARGS))
	@$(if $(ACCELERATE),$(VENV)/bin/python -B tests/peers/accelerate_suite.py $(ACCELERATE) $(ARGS))
	@$(if $(FRAMEWORKS),$(VENV)/bin/python -B tests/peers/frameworks_suite.py $(ARGS))
	@$(if $(OPTIMIZERS),$(VENV)/bin/python -B tests/peers/optimizers_suite.py $(ARGS))
	@$(if $(CONTINUED),$(VENV)/bin/python -B tests/peers/continued_suite.py $(ARGS))
	@$(if $(DEEPSPEED_CHECKPOINTS),scripts/build.sh release trainers_tool && $(VENV)/bin/python -B tests/peers/deepspeed_checkpoints.py $(DEEPSPEED_CHECKPOINTS) $(ARGS))

fashion-hosts:  ## make demo's job under each launcher, on one and two hosts
	@scripts/setup.sh --hosts
	@scripts/build.sh release tessera
	@TESSERA_TEST_JOB=fashion_mnist $(hosts_program)/hosts_test.py $(or $(ARGS),-k test_torchrun -k test_mp -k test_s -k test_pdsh -k test_openmpi)

asan:  ## the same under Address- and UndefinedBehaviorSanitizer
	@scripts/setup.sh --python
	@scripts/build.sh asan
	@scripts/test.sh asan $(ARGS)

tsan:  ## collectives, gathers, offload, saves, loader: ThreadSanitizer
	@scripts/setup.sh --python
	@scripts/build.sh tsan comm_test cpu_allocator_test residency_test device_offload_test engine_checkpoint_test train_test
	@scripts/test.sh tsan -C Full -R '^(comm_test_[1-9]|cpu_allocator_test|(residency|device_offload|engine_checkpoint)_test(_gloo)?|train_test)$$' $(ARGS)

lint:  ## clang-tidy over the C++ sources (FILES=... some)
	@scripts/setup.sh --python
	@scripts/lint.sh $(FILES)

bench:  ## builds and runs the benchmarks
	@scripts/setup.sh --python
	@scripts/build.sh release benchmarks tessera
	@set -e; for program in $(BUILD)/bench_*; do echo "== $$program"; $$program $(ARGS); done
	@$(VENV)/bin/python -B benchmarks/peers/train_step.py stages

bench-peers:  ## a step and checkpoints beside DDP, FSDP2 and DeepSpeed
	@scripts/setup.sh --peers
	@scripts/build.sh release tessera step_rank checkpoint_rank
	@$(VENV)/bin/python -B benchmarks/peers/train_step.py peers $(ARGS)
	@$(VENV)/bin/python -B benchmarks/peers/checkpoint.py

bench-python:  ## a step in Python beside DDP, FSDP2, DeepSpeed: 5 min
	@scripts/setup.sh --peers
	@scripts/build.sh release tessera tessera_engine_module
	@PYTHONPATH=$(CURDIR)/$(BUILD)/python $(VENV)/bin/python -B benchmarks/python/train_step.py models $(ARGS)

bench-consolidate:  ## beside zero_to_fp32.py: 65 GB of disk
	@scripts/setup.sh --peers
	@scripts/build.sh release tessera
	@$(VENV)/bin/python -B benchmarks/peers/consolidate.py $(ARGS)

bench-curves:  ## losses of a GPT under several optimizers: 10 min
	@scripts/setup.sh --python
	@scripts/build.sh release tessera tessera_engine_module
	@PYTHONPATH=$(CURDIR)/$(BUILD)/python $(BUILD)/tessera launch -n 2 -- $(VENV)/bin/python -B benchmarks/python/optimizer_curves.py $(ARGS)

bench-hosts:  ## a step on 2 and 4 hosts beside DDP and FSDP2: 25 min
	@scripts/setup.sh --python
	@scripts/build.sh release tessera step_rank
	@$(VENV)/bin/python -B benchmarks/peers/train_step.py hosts $(ARGS)

bench-activations:  ## recomputation and offload beside torch's: 25 min
	@scripts/setup.sh --python
	@scripts/build.sh release tessera tessera_engine_module
	@PYTHONPATH=$(CURDIR)/$(BUILD)/python $(VENV)/bin/python -B benchmarks/python/train_step.py activations $(ARGS)

bench-offload-python:  ## beside FSDP2, DeepSpeed: 12 min
	@scripts/setup.sh --peers
	@scripts/build.sh release tessera tessera_engine_module
	@PYTHONPATH=$(CURDIR)/$(BUILD)/python $(VENV)/bin/python -B benchmarks/python/train_step.py offload $(ARGS)

bench-ranks:  ## what grows with the number of ranks: 4 min
	@scripts/setup.sh --python
	@scripts/build.sh release many_ranks
	@set -e; for way in tessera c10d; do echo "== $$way"; \
	  unshare --map-root-user --net sh -c 'ip link set lo up; exec "$$0" "$$@"' $(BUILD)/many_ranks --way $$way $(ARGS); done

methods:  ## one training every way, Tessera's and Python's: an hour
	@scripts/setup.sh --peers
	@scripts/data.sh
	@scripts/build.sh release tessera
	@$(VENV)/bin/python -B benchmarks/methods/methods.py $(ARGS)

soak: build  ## kills ranks at random; ARGS=restarts, damage, alone or hosts
	@nice python3 -B tests/soak/soak.py $(ARGS)

fuzz: deps  ## feeds damaged checkpoints to the readers; needs clang++
	@command -v clang++ >/dev/null || { echo "error: clang++ not found: Debian package clang brings it" >&2; exit 1; }
	@scripts/build.sh fuzz fuzzers
	@tests/checkpoint/fuzz/run.sh

mutants:  ## puts bugs into a copy; the tests must find them
	@scripts/setup.sh --python
	@nice python3 -B tests/mutants/mutants.py $(ARGS)

clean:  ## removes what was built
	@rm -rf build build-mutants build-torch* build-debug* build-asan* build-tsan* build-fuzz* build-lint*

distclean: clean  ## removes what was built and installed, .deps/ too
	@rm -rf .deps
