# Each target sets itself up on a fresh machine with Python 3.11 to 3.13; a second call starts at once.
.PHONY: help setup demo test test-slow test-faults test-hosts test-ray test-browser test-prometheus fuzz lint bench verify-patches clean

PY := .venv/bin/python
READY := .venv/ready
# As scripts/setup.sh finds it: the tool alone, as in some images, makes no GPU.
MACHINE := $(or $(INFLIGHT_DEVICE),$(if $(shell nvidia-smi -L 2>/dev/null | grep GPU),gpu,cpu))
WORKERS ?= 2
DEMO := $(if $(filter gpu,$(MACHINE)),demo_gpu,demo)
# Torch, OpenMP and vLLM's workers must not each take every core.
export OMP_NUM_THREADS ?= 1
export HF_HUB_OFFLINE ?= 1
export TOKENIZERS_PARALLELISM ?= false

help:
	@echo "make demo            train SmolLM2-135M with a generator that never stops (some minutes on 2 cores)"
	@echo "make test            unit tests, tests against a real vLLM on CPU, and a whole tiny run"
	@echo "make test-faults     harm done to real processes: kills, stops, full disks, strangers"
	@echo "make test-hosts      runs over several hosts: network namespaces, ssh, cut and slow links (root)"
	@echo "make test-ray        runs on a Ray cluster of two nodes of this machine; a node is killed (ARGS='-m ray': vLLM too)"
	@echo "make test-browser    the HTML report in a real Chromium, which is installed where there is none"
	@echo "make test-prometheus metrics and dashboard with a real Prometheus, which is installed where there is none"
	@echo "make fuzz            every decoder against damaged input (SECONDS=600)"
	@echo "make test-slow       the tests that take minutes each"
	@echo "make lint            ruff, mypy, and the wording of documentation, docstrings and messages"
	@echo "make bench           measure the stall at a swap, the transfer and the lag on this machine"
	@echo "make verify-patches  check that every diff in patches/ fits the vLLM that it is for"
	@echo "make clean           remove .venv and what tests left"
	@echo
	@echo "ARGS goes on to what a target runs: make demo ARGS=trainer.steps=10, make test ARGS='-k gate'"

$(READY): pyproject.toml scripts/setup.sh $(wildcard patches/*)
	@./scripts/setup.sh

setup: $(READY)

demo: $(READY)
	@$(PY) -m inflight.launcher --config-name $(DEMO) machine=$(MACHINE) $(ARGS)

# Two worker processes: tests wait for engines and timeouts more than they compute. A file stays in one worker, since
# its tests share an engine.
test: $(READY)
	$(PY) -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder $(ARGS)

test-slow: $(READY)
	$(PY) -m pytest -m slow $(ARGS)

test-faults: $(READY)
	$(PY) -m pytest -m "faults and not gpu" tests/faults $(ARGS)

test-hosts: $(READY)
	$(PY) -m pytest -m netns tests/hosts $(ARGS)

test-ray: $(READY)
	$(PY) -m pip --disable-pip-version-check install -qq --no-build-isolation -e ".[ray]"
	$(PY) -m pytest -m "ray and not slow" tests/cluster $(ARGS)

test-browser: $(READY)
	@./scripts/browser.sh
	$(PY) -m pytest -m browser tests/browser $(ARGS)

test-prometheus: $(READY)
	@command -v prometheus >/dev/null || apt-get install -y --no-install-recommends prometheus
	$(PY) -m pytest -m prometheus tests/prometheus $(ARGS)

fuzz: $(READY)
	$(PY) tests/fuzz/rounds.py $(or $(SECONDS),600)

lint: $(READY)
	$(PY) -m ruff check .
	$(PY) scripts/prose.py
	$(PY) -m mypy

bench: $(READY)
ifeq ($(MACHINE),cpu)
	$(PY) -m bench.publish
	$(PY) -m bench.interruption --config-name interruption_cpu $(ARGS)
else
	$(PY) -m bench.transfer
	$(PY) -m bench.interruption $(ARGS)
endif

verify-patches: $(READY)
	$(PY) -m pytest -m slow tests/slow/test_patches_wheels.py $(ARGS)

clean:
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist *.egg-info
	find . -name __pycache__ -prune -exec rm -rf {} +
