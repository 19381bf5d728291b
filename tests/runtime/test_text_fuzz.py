"""Hostile bytes to everything that reads text, under AddressSanitizer and UBSan."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from edgec.runtime.compile import build_tests
from tests.runtime.tokenizer_files import train, write


@pytest.mark.slow
def test_mutated_files_and_texts_break_nothing(tmp_path: Path) -> None:
    program = build_tests(tmp_path, sanitize=["address", "undefined"], main="fuzz_text.cpp")
    trained = write(train("smollm", added=True, alphabet=False, vocabulary=200), tmp_path / "tokenizer.json")
    for arguments in (["1", "20000"], ["2", "3000", str(trained)]):
        done = subprocess.run([program, *arguments], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        iterations, parsed, loaded = (int(word) for word in done.stdout.split() if word.isdigit())
        assert loaded > iterations // 50 and parsed > loaded  # the mutations are mild enough to get past the parser
