# Two commands matter: `make demo` and `make test`. Each installs what it needs into .venv on first use.
PYTHON ?= python3
PYTHONS := 3.11 3.12 3.13
LOCK := $(shell if nvidia-smi -L >/dev/null 2>&1; then echo requirements-gpu.lock; else echo requirements-cpu.lock; fi)
STAMP := .venv/.installed-$(LOCK)
# The oldest driver of NVIDIA's that CUDA 13 runs on
DRIVER := 580
PYTEST := .venv/bin/python -m pytest

.PHONY: setup demo servers test slow torture gpu gpu-report oracle environments mutants bench keys lint lock

setup: $(STAMP)

# --no-deps: the lock file is the whole list, resolved without the wheels that break beside torch's CPU build (pyproject.toml, [tool.uv])
PIP := .venv/bin/python -m pip install --no-deps --progress-bar off
TORCH = $(shell grep '^torch==' $(LOCK))
# PyPI has no CPU build of torch. For this one package, where pip's own indexes lack it:
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
$(STAMP): $(LOCK) pyproject.toml
	@$(PYTHON) -c 'import sys; found = "%d.%d" % sys.version_info[:2]; sys.exit(found not in "$(PYTHONS)".split() and "Quiver runs on Python $(PYTHONS), found " + found + ": make setup PYTHON=python3.11")'
	@case $(LOCK) in *gpu*) driver=$$(nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>/dev/null | head -n 1); \
		test "$${driver:-$(DRIVER)}" = "$(DRIVER)" || test "$${driver%%.*}" -ge $(DRIVER) || { echo "The GPU's driver is $$driver, and $(TORCH) needs $(DRIVER) or newer: install that first." >&2; exit 1; };; esac
# Triton compiles a small C file against Python's headers at its first launch; so do Quiver's kernels and vLLM
	@case $(LOCK) in *gpu*) compiler=$${CC:-$$(command -v gcc || command -v clang)}; \
		command -v "$${compiler%% *}" >/dev/null || { echo "No C compiler ($${compiler:-gcc or clang}), and Triton needs one on a GPU: install it first (apt-get install gcc, or dnf install gcc)." >&2; exit 1; }; \
		header=$$($(PYTHON) -c 'import sysconfig; print(sysconfig.get_path("include", "posix_prefix"))')/Python.h; \
		test -e "$$header" || { echo "There is no $$header, and Triton needs it on a GPU: install Python's headers first (apt-get install python3-dev, or dnf install python3-devel)." >&2; exit 1; };; esac
	@for stamp in .venv/.installed-*; do if [ -e "$$stamp" ] && [ "$$stamp" != "$@" ]; then \
		echo "The .venv was made from $${stamp#.venv/.installed-}: it is made anew."; rm -rf .venv; fi; done
	test -x .venv/bin/python || $(PYTHON) -m venv .venv
	@echo "Installing the packages of $(LOCK): a few minutes and 4 GB of disk on a CPU, more with a GPU."
	@$(PIP) '$(TORCH)' || $(PIP) --index-url $(TORCH_INDEX) '$(TORCH)' || { echo "No index has $(TORCH): make setup TORCH_INDEX=URL, of an index that has it." >&2; exit 1; }
	@$(PIP) -r $(LOCK)
	@$(PIP) --quiet --no-build-isolation --editable .
# For editors, which read no package-dir: the package as it is installed (pyproject.toml, extraPaths)
	@mkdir -p .editor/quiver && for name in schemas stages flows deployments stages/api/__init__.py; do \
		ln -sfn ../../$$name .editor/quiver/$${name##*/}; done
	@touch $@

demo: setup
	.venv/bin/quiver run deployments/recipes/demo.toml

# Servers of buckets, for tests, each in a folder of its own: moto answers s3://, Azurite az://.
# One that cannot be installed here is named, and its tests skip.
MOTO := moto==5.2.5 boto3==1.44.8 botocore==1.44.8 s3transfer==0.19.3 jmespath==1.1.0 responses==0.26.3 xmltodict==1.0.4 \
	py-partiql-parser==0.6.3 flask==3.1.3 flask-cors==6.0.5 werkzeug==3.1.9 blinker==1.9.0 itsdangerous==2.2.0
.servers/moto/.installed: $(STAMP)
	@.venv/bin/python -m pip install --quiet --no-deps --upgrade --target $(@D) $(MOTO) && touch $@ || \
		echo "moto is not installed: tests of s3:// skip." >&2
.servers/azurite/.installed: $(STAMP)
	@timeout 600 npm install --no-audit --no-fund --loglevel error --ignore-scripts --prefix $(@D) azurite@3.37.0 && touch $@ || \
		echo "Azurite is not installed: tests of az:// skip." >&2

servers: .servers/moto/.installed .servers/azurite/.installed

# Files side by side, in the order of their names: the long ones, which wait for servers and workers, come first.
# One process more than there are processors, because they wait; each takes up to 3 GB.
# The run ends if one of the processes is lost: it would wait for ever for the rest of that one's file.
JOBS ?= $(shell echo $$(($$(nproc) < 8 ? $$(nproc) + 1 : 8)))
SIDE_BY_SIDE := --numprocesses $(JOBS) --dist loadfile --no-loadscope-reorder --max-worker-restart 0
test: setup servers
	env -u PYTHONDONTWRITEBYTECODE $(PYTEST) $(SIDE_BY_SIDE) --durations 10 -m "not slow and not gpu and not torture"

slow: setup servers
	$(PYTEST) -m slow

# Faults and broken files in full: three hours or so on two cores. TORTURE_SHARE=0.1: a tenth of the trials
torture: setup servers
	$(PYTEST) $(SIDE_BY_SIDE) --dist worksteal -m torture

gpu: setup
	$(PYTEST) -m gpu

# The first quarter of an hour on a GPU, in parts that write into OUT as they go. It needs no setup: PyTorch alone will do
OUT ?= gpu-report
REPORT_PYTHON ?= $(if $(wildcard .venv/bin/python),.venv/bin/python,python3)
gpu-report:
	$(REPORT_PYTHON) -m tests.benchmarks.gpu_report --out "$(OUT)" $(QUICK) $(if $(WHEELS),--wheels "$(WHEELS)") $(if $(PARTS),--parts $(PARTS))

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

# gymnasium, whose environments may answer turns, in a folder of its own; without it its tests skip
.gymnasium/gymnasium: $(STAMP)
	.venv/bin/python -m pip install --quiet --no-deps --upgrade --target .gymnasium gymnasium==1.4.0 cloudpickle farama-notifications
	touch $@

environments: .gymnasium/gymnasium
	PYTHONPATH=.gymnasium $(PYTEST) tests/stages/turns/test_environments.py

# Small bugs in a copy of the code: what the tests caught once they must catch again. An hour or so
mutants: setup servers
	.venv/bin/python -m tests.mutants

# What benchmarks run beside Quiver, in a folder of its own
.peers/trl: $(STAMP)
	.venv/bin/python -m pip install --quiet --no-deps --upgrade --target .peers trl==1.16.0 liger-kernel==0.8.5

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
# One lock for all Pythons: a package that not each of them gets bears a marker (uv's --universal reads the metadata of one wheel alone).
COMPILE := uv pip compile pyproject.toml --extra demo --extra trackers --extra dev --python-platform x86_64-manylinux_2_28 \
	--no-header --no-annotate --quiet --upgrade
FIND_LINKS ?= https://download.pytorch.org/whl/cpu/torch
MERGE := awk 'FNR == 1 { python = FILENAME; sub(/.*-/, "", python) } \
	{ pythons[$$0] = pythons[$$0] (count[$$0]++ ? " or " : "") "python_version == \"" python "\"" } \
	END { for (line in count) print line (count[line] == ARGC - 1 ? "" : " ; " pythons[line]) }'
lock:
	# the registry's CUDA wheel of torchvision breaks `import transformers` beside torch's CPU build
	echo "torchvision; sys_platform == 'never'" > .lock-never
	for python in $(PYTHONS); do \
		$(COMPILE) --python-version $$python --extra cpu --find-links $(FIND_LINKS) --overrides .lock-never --output-file .lock-cpu-$$python && \
		$(COMPILE) --python-version $$python --extra gpu --output-file .lock-gpu-$$python || exit 1; \
	done
	$(MERGE) .lock-cpu-* | LC_ALL=C sort > requirements-cpu.lock
	$(MERGE) .lock-gpu-* | LC_ALL=C sort > requirements-gpu.lock
	rm .lock-*
