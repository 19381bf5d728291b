#!/usr/bin/env bash
# check-cpp.sh FILE…: every C++ file compiles without a warning.
set -euo pipefail
cd "$(dirname "$0")/.."
# Headers of the libraries are not ours to warn about, hence -isystem.
include=$(.venv/bin/python -c 'import importlib.util as u; print(u.find_spec("tvm_ffi").submodule_search_locations[0])')/include
for file in "$@"; do
  "${CXX:-g++}" -std=c++17 -Wall -Wextra -Werror -fsyntax-only -isystem "$include" "$file"
done
