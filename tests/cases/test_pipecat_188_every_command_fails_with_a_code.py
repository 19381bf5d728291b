"""pipecat-cloud#188: a command returned its exit object instead of raising it, so every failure exited 0.

Here: each command's failure is seen from a subprocess.
"""

from __future__ import annotations

import pytest

from edgec.cli.main import COMMANDS
from tests.conftest import Edgec

pytestmark = pytest.mark.slow

FAILURES = {
    "build": ["build", "none.yaml"],
    "plan": ["plan", "none.yaml"],
    "run": ["run", "none", "hello"],
    "bench": ["bench", "none"],
    "serve": ["serve", "none", "--port", "0"],
    "reference": ["reference", "none", "--port", "0"],
    "validate": ["validate", "none"],
    "simulate": ["simulate", "none.jsonl"],
    "inspect": ["inspect", "none.onnx"],
    "diff": ["diff", "none.onnx", "none.tflite"],
    "doctor": ["doctor", "--target", "nothing"],
    "schema": ["schema", "nothing"],
    "init": ["init", "."],
    "cache": ["cache", "prune", "--keep", "much"],
}


def test_every_command_has_a_failure_here() -> None:
    assert set(FAILURES) == set(COMMANDS)


@pytest.mark.parametrize("command", sorted(FAILURES))
def test_a_failure_exits_with_2_and_says_why_in_one_line(edgec: Edgec, command: str) -> None:
    done = edgec(*FAILURES[command])
    assert done.code == 2, done.stderr
    assert done.stderr.strip()
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("command", sorted(FAILURES))
def test_an_unknown_option_exits_with_2(edgec: Edgec, command: str) -> None:
    done = edgec(command, "--no-such-option")
    assert done.code == 2
    assert "--no-such-option" in done.stderr
