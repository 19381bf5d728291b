#!/usr/bin/env bash
# Everything a fresh Debian machine with Python 3.11 and gcc needs: .venv from requirements.lock, and the Debian packages
# that cross-compile for Arm and run what was compiled. Safe to run again; does nothing when nothing has changed.
set -euo pipefail
cd "$(dirname "$0")/.."

python=${PYTHON:-python3}
stamp=.venv/.installed-$(sha256sum requirements.lock pyproject.toml | sha256sum | cut -c1-16)
if [ ! -e "$stamp" ]; then
  [ -x .venv/bin/python ] || "$python" -m venv .venv
  echo "setting up .venv (some 4 GB; minutes the first time)" >&2
  torch=$(grep '^torch==' requirements.lock)
  # torch first, and with its own dependencies: where its build is for CUDA they are many, for the CPU none.
  .venv/bin/python -m pip install --quiet "$torch"
  .venv/bin/python -m pip install --quiet --no-deps -r <(grep -v '^torch==' requirements.lock)
  .venv/bin/python -m pip install --quiet --no-deps --no-build-isolation --editable .
  rm -f .venv/.installed-*
  touch "$stamp"
fi

missing=()
command -v aarch64-linux-gnu-g++ > /dev/null || missing+=(g++-aarch64-linux-gnu)
command -v qemu-aarch64-static > /dev/null || missing+=(qemu-user-static)
command -v npm > /dev/null || missing+=(npm)
if [ ${#missing[@]} -gt 0 ]; then
  if [ "$(id -u)" = 0 ] && command -v apt-get > /dev/null; then
    apt-get update -qq
    DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends "${missing[@]}" > /dev/null
  else
    echo "not installed, and not root to install it: ${missing[*]} (parts for Arm will be reported as unproven)" >&2
  fi
fi
