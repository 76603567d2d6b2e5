# make demo      compile SmolLM2-135M-Instruct to native code and let it answer
# make test      lint, types, import rules and the quick tests
# make test-all  the same with the slow tests
# make lint      lint, types and import rules alone
# make bench     measure this machine, every kernel and the demo's engine (no lint, no tests)
# make bench-peers    compare with other engines, which it installs (1.7 GB to download);
#                     PEERS="llama_cpp openvino" takes these alone
# make clean     remove what was built here (the venv and downloaded models stay)

# The first Python on the path that is new enough; `make PYTHON=...` overrides it.
PYTHON ?= $(shell for p in python3 python3.11 python3.12 python3.13; do \
	if $$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; \
	then echo $$p; break; fi; done)

VENV := .venv
BIN := $(VENV)/bin
PIP_INSTALL := $(BIN)/python -m pip install -qq --disable-pip-version-check
LLMBUILD := $(BIN)/llmbuild

# A file's tests stay together, as they share what they compile. Each of the two workers keeps to
# one thread of torch's, or they would wait for each other.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/pytest -q -n 2 --dist loadfile --no-loadscope-reorder

FOLDERS := $(wildcard builder plugins quant runtime)
SOURCES := $(shell find llmbuild $(FOLDERS) -name '*.py' -o -name '*.h')

DEMO_RECIPE := recipes/smollm2-135m.yaml
DEMO_ENGINE := engines/smollm2-135m
DEMO_PROMPT := Explain in a few sentences why the sky is blue.

# Links that lay the folders out as Python sees them, for tools that read source from a folder.
TREE := build/tree

.PHONY: demo test test-all lint bench bench-peers clean python compiler tree
.DELETE_ON_ERROR:

demo: $(DEMO_ENGINE)/manifest.json
	$(LLMBUILD) generate $(DEMO_ENGINE) "$(DEMO_PROMPT)" --chat --max-tokens 64

$(DEMO_ENGINE)/manifest.json: $(DEMO_RECIPE) $(SOURCES) $(VENV)/.build-installed | compiler
	$(LLMBUILD) fetch $(DEMO_RECIPE)
	$(LLMBUILD) compile $(DEMO_RECIPE) -o $(DEMO_ENGINE)

test: lint
	$(PYTEST) -m "not slow"

test-all: lint
	$(PYTEST)

lint: tree $(VENV)/.dev-installed
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	cd $(TREE) && $(CURDIR)/$(BIN)/mypy --config-file $(CURDIR)/pyproject.toml \
		--cache-dir $(CURDIR)/.mypy_cache -p llmbuild
	cd $(TREE) && $(CURDIR)/$(BIN)/lint-imports --no-logo --no-cache $(CURDIR)/.importlinter

bench: $(DEMO_ENGINE)/manifest.json
	$(BIN)/python -m bench.machine
	$(BIN)/python -m bench.kernels
	$(BIN)/python -m bench.engine $(DEMO_ENGINE)

bench-peers: $(VENV)/.build-installed | compiler
	@mkdir -p build
	$(BIN)/python -m bench.peers $(addprefix --only ,$(PEERS)) \
		--out build/peers.md --json build/peers.json

tree:
	@rm -rf $(TREE) && mkdir -p $(TREE)/llmbuild
	@ln -s $(addprefix $(CURDIR)/,$(wildcard llmbuild/*.py llmbuild/py.typed $(FOLDERS))) \
		$(TREE)/llmbuild/

clean:
	rm -rf build dist engines llmbuild.egg-info .mypy_cache .pytest_cache .ruff_cache

# The install is editable, so only a change of the project's metadata asks for another one.
$(VENV)/.build-installed: pyproject.toml llmbuild/version.py | $(VENV)/.created
	$(PIP_INSTALL) --editable ".[build]"
	@touch $@

$(VENV)/.dev-installed: pyproject.toml llmbuild/version.py | $(VENV)/.created
	$(PIP_INSTALL) --editable ".[build,dev]"
	@touch $@ $(VENV)/.build-installed

$(VENV)/.created: | python
	$(PYTHON) -m venv $(VENV)
	@touch $@

python:
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
		echo 'llmbuild needs Python 3.11 or newer, and "$(PYTHON)" is none:' \
			'install one, or name it with `make PYTHON=/path/to/python`.' >&2; exit 1; }

compiler:
	@command -v g++ >/dev/null || { \
		echo 'the CPU target compiles with g++, which is not on PATH:' \
			'install it (Debian, Ubuntu: apt-get install g++).' >&2; exit 1; }
