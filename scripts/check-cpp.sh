#!/usr/bin/env bash
# check-cpp.sh FILE…: every C++ file compiles without a warning, the runtime's for Arm too where its compiler is here.
set -euo pipefail
cd "$(dirname "$0")/.."
native=edgec/runtime/native
# Headers of the libraries are not ours to warn about, hence -isystem.
tvm=$(.venv/bin/python -c 'import importlib.util as u; print(u.find_spec("tvm_ffi").submodule_search_locations[0])')/include

check() { # FILE COMPILER PROCESSOR
  local flags=(-isystem "$tvm")
  if [[ $1 == "$native"/* ]]; then
    flags=("-I$native/include" "-I$native/src" "-I$native/tests" -Wno-psabi)
    # What the kernel files need, as compile.py reads it.
    read -r -a own < <(awk -v f="$(basename "$1")" -v p="$3" '$1 == f && $2 == p { $1 = $2 = ""; print }' \
      "$native/src/kernels/flags.txt") || own=()
    flags+=("${own[@]}")
  fi
  "$2" -std=c++17 -Wall -Wextra -Werror -fsyntax-only "${flags[@]}" "$1"
}
export -f check
export native tvm

printf '%s\0' "$@" | xargs -0 -P "$(nproc)" -I {} bash -euc 'check "$1" "${CXX:-g++}" "$(uname -m)"' _ {}
if command -v aarch64-linux-gnu-g++ > /dev/null; then
  printf '%s\0' "$@" | grep -z "^$native/src/kernels/" |
    xargs -0 -P "$(nproc)" -I {} bash -euc 'check "$1" aarch64-linux-gnu-g++ aarch64' _ {}
fi
