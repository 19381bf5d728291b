# The two commands of the README are `make demo` and `make test`; each sets up all it needs, and both can be run again.
BIN := .venv/bin
CXX_FILES := $(shell git ls-files '*.c' '*.cpp' '*.h')
# Parts of C++ files; the tables of Unicode are as their script writes them.
CXX_PARTS := $(filter-out %unicode_tables.inc,$(shell git ls-files '*.inc'))

.PHONY: setup demo demo-llm demo-vision test test-fast test-gpu lint format docs lock benchmark clean

setup:
	@scripts/setup.sh

demo: demo-llm demo-vision

# A language model for edgec's own engine, and a question to it.
demo-llm: setup
	$(BIN)/edgec build recipes/smollm2-135m.yaml --target native
	$(BIN)/edgec run out/smollm2-135m "Why is the sky blue? Answer in two sentences." --stats --max-tokens 120

# An image classifier for four engines.
demo-vision: setup
	$(BIN)/edgec build recipes/efficientnet-lite0.yaml

test: setup
	$(BIN)/pytest -n 2 --dist loadfile -m "not gpu"

# No converters and no downloads: under a minute.
test-fast: setup
	$(BIN)/pytest -n 2 -m "not gpu and not slow and not network"

test-gpu: setup
	$(BIN)/pytest -m gpu -rs

lint: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(if $(CXX_FILES),$(BIN)/clang-format --dry-run --Werror $(CXX_FILES) $(CXX_PARTS))
	$(if $(CXX_FILES),scripts/check-cpp.sh $(filter %.cpp,$(CXX_FILES)))
	$(BIN)/python -m edgec.docgen --check

format: setup
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .
	$(if $(CXX_FILES),$(BIN)/clang-format -i $(CXX_FILES) $(CXX_PARTS))

docs: setup
	$(BIN)/python -m edgec.docgen

# Pins what is installed now, after changing requirements.in and installing from it by hand.
lock:
	scripts/lock.sh

benchmark: setup
	$(BIN)/python benchmarks/build.py

clean:
	rm -rf build dist out .mypy_cache .ruff_cache .pytest_cache *.egg-info
