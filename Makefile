# `make demo` and `make test` need nothing but Python 3.11+ and make; all else is installed in .venv.

PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test lint types check bench bench-peers clean

demo: .venv/demo.stamp
	$(BIN)/ssfl train demo

test: .venv/dev.stamp
	OMP_NUM_THREADS=1 $(BIN)/pytest -q -n 2 --dist loadfile

lint: .venv/dev.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: .venv/dev.stamp
	$(BIN)/mypy

check: lint types test

# Tables on the screen, figures in build/bench; SSFL_DATA says where CIFAR-10 is.
bench: .venv/dev.stamp
	mkdir -p build/bench
	$(BIN)/python benchmarks/startup.py --json build/bench/startup.json
	$(BIN)/python benchmarks/overhead.py --json build/bench/overhead.json
	$(BIN)/python benchmarks/memory.py --json build/bench/memory.json
	$(BIN)/python benchmarks/scale.py --json build/bench/scale.json
	$(BIN)/python benchmarks/round.py --workers 1 2 --json build/bench/round.json

# Installs Flower and pfl-research in environments of their own.
bench-peers: .venv/dev.stamp
	mkdir -p build/bench
	$(BIN)/python benchmarks/peers.py --json build/bench/peers.json

.venv/bin/python:
	$(PYTHON) -m venv .venv

# torch is installed first and by its exact version, so that nothing else chooses another.
.venv/demo.stamp: .venv/bin/python pyproject.toml constraints.txt
	$(BIN)/python -m pip install -q --disable-pip-version-check "$$(grep '^torch==' constraints.txt)" -c constraints.txt
	$(BIN)/python -m pip install -q --disable-pip-version-check -e . -c constraints.txt
	touch $@

.venv/dev.stamp: .venv/demo.stamp
	$(BIN)/python -m pip install -q --disable-pip-version-check -e ".[dev,mpi,flower,onnx]" -c constraints.txt
	touch $@

clean:
	rm -rf .venv build .pytest_cache .mypy_cache .ruff_cache
