# make train   install, then train the quickstart on 8 CPU ranks
# make real    install, then fine-tune a pretrained model in two layouts beside one process
# make presets install, then draw the losses of every preset of the optimizer (15 minutes)
# make parity  install, then compare every combination of schedules with one process (10 minutes)
# make full    install, then run every grid whole, private training's and all models' too (hours)
# make test    install, then lint, types, structure and all tests
#
# make ops        install, then build the optimizer's compiled ops and say what runs where
# make sanitize   install, then run kernels and CPU loops under AddressSanitizer and UBSan
#
# make lightning-compat SRC=path/of/a/checkout/of/pytorch-lightning
#              run Lightning's own tests of ddp with goose3d in its place
#
# PYTHON=python3.12 make ...   chooses the interpreter of the environment (3.11 or newer).

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

.PHONY: venv train real presets parity full test ops sanitize lint types structure lightning-compat clean

venv: $(INSTALLED)

$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed; use make PYTHON=...")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --constraint constraints.txt --editable '.[dev]'
	touch $@

train: venv
	$(BIN)/goose3d fit --config recipes/quickstart.yaml

real: venv
	GOOSE3D_REAL_STEPS=20 $(BIN)/python -m pytest -m real

presets: venv
	OMP_NUM_THREADS=1 $(BIN)/python recipes/presets.py
	cp runs/presets/presets.png goose_strategy/optim/presets.png

parity: venv
	$(BIN)/python -m pytest -m full tests/parity

full: venv
	$(BIN)/python -m pytest -m full

test: lint types structure
	$(BIN)/python -m pytest

ops: venv
	$(BIN)/python -m cuda_ops.build
	$(BIN)/python -m cuda_ops.info

sanitize: venv
	GOOSE3D_SANITIZE=1 $(BIN)/python -m pytest tests/cuda_ops/test_sanitizers.py

lint: venv
	$(BIN)/ruff check
	$(BIN)/ruff format --check

types: venv
	$(BIN)/mypy

structure: venv
	$(BIN)/lint-imports
	$(BIN)/python -m pytest tests/architecture

lightning-compat: venv
	@test -d "$(SRC)/tests" || { echo "use make lightning-compat SRC=path/of/a/checkout/of/pytorch-lightning"; exit 2; }
	$(BIN)/python -m tests.lightning_compat $(SRC)

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
