# Everything runs in .venv, made on first use and reused until pyproject.toml or constraints.txt change.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready

.PHONY: audit demo test test-slow test-gpu lint golden bench bench-gpu bench-attacks bench-rivals bench-flips docs test-wheel clean

demo: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/netmoments report digits digits --sigma 0.05

# Two processes of one thread: the tensors are small, and threads that wait for one another take many times as long.
test: lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "not slow and not gpu and not fuzz" -n 2 --dist loadfile --no-loadscope-reorder

test-slow: $(READY)
	$(BIN)/python -m pytest -m slow

# 10⁵ random inputs, a quarter of an hour on two cores; seeds and counts are printed. FUZZ="--seed 1" for others,
# FUZZ=--write for the table of docs/reliability.md.
test-fuzz: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.fuzz $(FUZZ)

# The site, in build/docs: offline, warnings are errors, every example is run; then doctests, and links of the pages made.
docs: $(VENV)/.docs-ready
	OMP_NUM_THREADS=1 $(BIN)/sphinx-build -W --keep-going -n -q -b html -d build/doctrees docs build/docs
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q tests/docs tests/test_readme.py netmoments

# Wheel and sdist, in build/dist; the wheel then works in an environment of its own, without the checkout.
test-wheel:
	rm -rf build/dist build/wheel
	$(PYTHON) -m venv build/wheel/tools
	build/wheel/tools/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt build
	build/wheel/tools/bin/python -m build --outdir build/dist .
	build/wheel/tools/bin/python tests/wheel.py files build/dist
	$(PYTHON) -m venv build/wheel/fresh
	build/wheel/fresh/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt build/dist/*.whl
	build/wheel/fresh/bin/python -I tests/wheel.py moments
	build/wheel/fresh/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt \
		"netmoments[data,report] @ file://$(CURDIR)/$$(ls build/dist/*.whl)"
	build/wheel/fresh/bin/python -I tests/wheel.py report

# The GPU machine brings its own torch and may have nothing else: no virtual environment there.
test-gpu:
	$(PYTHON) -m pytest -m gpu tests

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# What sixty calls give, beside what they gave before methods became values: numbers that a change must keep.
golden: $(READY)
	$(BIN)/python -m benchmarks.golden compare

# Needs MNIST (netmoments download mnist, or $$NETMOMENTS_DATA).
bench: $(READY)
	$(BIN)/python -m benchmarks.engine
	$(BIN)/python -m benchmarks.networks
	$(BIN)/python -m benchmarks.speed --record benchmarks/records/speed-cpu.json

bench-gpu:
	$(PYTHON) -m benchmarks.gpu_kernel
	$(PYTHON) -m benchmarks.speed --device cuda --record benchmarks/records/speed-cuda.json

# Both need MNIST.
bench-attacks: $(READY)
	$(BIN)/python -m benchmarks.attacks

# Hours on a CPU, minutes on a GPU.
bench-rivals: $(READY)
	$(BIN)/python -m benchmarks.rival_attacks

# Rare flips: ours, splitting and the last particle; and our intervals. Needs MNIST, a folder with networks.py, and one with
# FER2013. Hours on a CPU.
GALLERY ?= data/gallery
FACES   ?= $(NETMOMENTS_DATA)
bench-flips: $(READY)
	$(BIN)/python -m benchmarks.flips $(GALLERY) table --faces $(FACES)
	$(BIN)/python -m benchmarks.flips $(GALLERY) coverage --seeds 200
	$(BIN)/python -m benchmarks.flips $(GALLERY) common --faces $(FACES)

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[all,test]"
	touch $(READY)

$(VENV)/.docs-ready: $(READY)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[docs]"
	touch $@

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis

# Pinned packages beside the known vulnerabilities; needs the network.
audit: $(READY)
	@$(BIN)/python -m pip_audit --version >/dev/null 2>&1 || { echo "first: $(BIN)/pip install pip-audit"; exit 1; }
	$(BIN)/python -m pip_audit --requirement constraints.txt --no-deps
