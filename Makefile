# Two commands matter: `make demo` and `make test`. Each installs what it needs into .venv on first use.
PYTHON ?= python3
LOCK := $(shell if nvidia-smi -L >/dev/null 2>&1; then echo requirements-gpu.lock; else echo requirements-cpu.lock; fi)
STAMP := .venv/.installed-$(LOCK)
PYTEST := .venv/bin/python -m pytest

.PHONY: setup demo test slow torture gpu oracle mutants bench keys lint lock

setup: $(STAMP)

# --no-deps: the lock file is the whole list, resolved without the wheels that break beside torch's CPU build (pyproject.toml, [tool.uv])
$(STAMP): $(LOCK) pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Quiver needs Python >= 3.11, found " + sys.version)'
	test -x .venv/bin/python || $(PYTHON) -m venv .venv
	.venv/bin/python -m pip install --quiet --no-deps -r $(LOCK)
	.venv/bin/python -m pip install --quiet --no-deps --no-build-isolation --editable .
	touch $@

demo: setup
	.venv/bin/quiver run deployments/recipes/demo.toml

# Files side by side, in the order of their names: the long ones, which wait for servers and workers, come first
JOBS ?= 2
SIDE_BY_SIDE := --numprocesses $(JOBS) --dist loadfile --no-loadscope-reorder
test: setup
	$(PYTEST) $(SIDE_BY_SIDE) -m "not slow and not gpu and not torture"

slow: setup
	$(PYTEST) -m slow

# Faults and broken files in full: three hours or so on two cores. TORTURE_SHARE=0.1: a tenth of the trials
torture: setup
	$(PYTEST) $(SIDE_BY_SIDE) -m torture

gpu: setup
	$(PYTEST) -m gpu

# The other systems that tests/oracles compares with, in a folder of their own; without them those tests skip
ORACLES := 'trl==1.16.*' 'verl==0.9.1' 'tensordict==0.10.*' ray msgpack omegaconf pyvers codetiming
.oracles/verl: $(STAMP)
	.venv/bin/python -m pip install --quiet --no-deps --upgrade --target .oracles $(ORACLES)
	rm -rf .oracles/tests .oracles/scripts
	touch $@

# The trackers that nothing else here needs, each with what it needs
TRACKERS := wandb==0.31.0 cwevals mlflow-skinny==3.17.2 databricks-sdk GitPython gitdb smmap 'importlib_metadata<10' zipp \
	sqlparse google-auth pyasn1 pyasn1_modules trackio==0.43.0 gradio_client brotli pillow distro
.trackers/wandb: $(STAMP)
	.venv/bin/python -m pip install --quiet --no-deps --upgrade --target .trackers $(TRACKERS)
	touch $@

oracle: .oracles/verl .trackers/wandb
	PYTHONPATH=.oracles:.trackers $(PYTEST) -m oracle tests/oracles

# Small bugs in a copy of the code: what the tests caught once they must catch again. An hour or so
mutants: setup
	.venv/bin/python -m tests.mutants

# What benchmarks run beside Quiver, in a folder of its own
.peers/trl: $(STAMP)
	.venv/bin/python -m pip install --quiet --no-deps --upgrade --target .peers trl==1.16.0

# An hour or more; figures want a quiet machine. QUICK=--quick: small sizes, to see that all run
BENCHMARKS := optimizer_step iteration generation logprobs store data_path growth rewards reward_servers startup orchestration many_versions
bench: .peers/trl
	@for name in $(BENCHMARKS); do echo "## $$name"; .venv/bin/python -m tests.benchmarks.$$name $(QUICK) || exit 1; done

# The reference of a recipe's keys, from their docstrings; a test holds it to be current
keys: setup
	.venv/bin/python -m quiver.flows.keys > deployments/docs/keys.md

lint: setup
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/python -m tests.measures

# Needs uv. FIND_LINKS: a folder or index page that holds torch's CPU wheel (https://download.pytorch.org/whl/cpu/torch on an open network).
COMPILE := uv pip compile pyproject.toml --extra demo --extra trackers --extra dev --python-version 3.11 \
	--python-platform x86_64-manylinux_2_28 --no-header --no-annotate --quiet --upgrade
FIND_LINKS ?= https://download.pytorch.org/whl/cpu/torch
lock:
	$(COMPILE) --extra cpu --find-links $(FIND_LINKS) --output-file requirements-cpu.lock
	$(COMPILE) --extra gpu --output-file requirements-gpu.lock
