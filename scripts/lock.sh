#!/usr/bin/env bash
# Writes requirements.lock from what .venv holds. A resolver can't make this list (see the lock's first lines): change
# requirements.in, install the change into .venv by hand, run the tests, then run this.
set -euo pipefail
cd "$(dirname "$0")/.."
{
  sed -n '/^#/p' requirements.lock
  # A local build's suffix (+cpu) names a file that others don't have.
  .venv/bin/python -m pip freeze --exclude-editable --exclude pip --exclude setuptools | sed 's/^\([^=]*==[^+]*\)+.*/\1/'
} > requirements.lock.new
mv requirements.lock.new requirements.lock
