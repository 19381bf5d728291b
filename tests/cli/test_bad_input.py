"""What a new user gets wrong: one line that says it, one that says what to do, and exit code 2, before any work."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from torch import nn

from tests.conftest import Done, Edgec
from tests.sources.test_gguf import write as write_gguf
from tests.tasks.tiny_lm import llama

Write = Callable[..., Path]


def refused(done: Done, *says: str) -> None:
    assert done.code == 2, done.stderr
    assert done.stdout == ""
    lines = done.stderr.strip().splitlines()
    assert lines[-2].startswith("edgec: ") and lines[-1].startswith("  "), done.stderr
    assert all(word in lines[-2] + lines[-1] for word in says), done.stderr
    assert "Traceback" not in done.stderr
    assert not [line for line in lines if line.startswith("✓")], "something was built first"


@pytest.mark.parametrize("share", [0.0, 0.01, 0.2, 0.97])
def test_a_truncated_safetensors_file(edgec: Edgec, write_recipe: Write, share: float) -> None:
    path = write_recipe(("factory: model.py:tiny", "factory: model.py:tiny\n  from: weights.safetensors"))
    module = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4))
    weights = edgec.folder / "weights.safetensors"
    save_file(module.state_dict(), weights)
    assert load_file(weights)
    content = weights.read_bytes()
    weights.write_bytes(content[: int(share * len(content))])
    refused(edgec("build", path), "weights.safetensors", "[bad-checkpoint]", "is it complete?")


@pytest.mark.parametrize("share", [0.0, 0.01, 0.2, 0.97])
def test_a_truncated_gguf_file(edgec: Edgec, write_recipe: Write, share: float) -> None:
    text = (
        "  causal-lm:\n    evaluation: {from: a.txt}\n    calibration: {from: b.txt}\n    context: 64\n    blocks: 16\n"
    )
    path = write_recipe(
        ("factory: model.py:tiny", "from: tiny.gguf"),
        ("  tensors:\n    inputs: {image: [1, 3, 12, 12]}\n", text),
    )
    for name in ("a.txt", "b.txt"):
        (edgec.folder / name).write_text(name * 1000)
    weights = write_gguf(edgec.folder / "tiny.gguf", llama())
    content = weights.read_bytes()
    weights.write_bytes(content[: int(share * len(content))])
    refused(edgec("build", path), "tiny.gguf", "[bad-checkpoint]", "is it complete?")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["build", "recipe.yaml", "--tagret", "copy"], "no such option `--tagret`; did you mean `--target`?"),
        (["build", "recipe.yaml", "--target", "cpoy"], "did you mean `copy`?"),
        (["build", "recipe.yaml", "--set", "seeed=1"], "did you mean `seed`?"),
        (["build", "recipe.yaml", "--set", "passes.scale.facter=1"], "did you mean `factor`?"),
        (["build", "recipe.yaml", "--set"], "requires an argument"),
        (["build"], "Missing argument"),
        (["build", "recipe.yaml", "another.yaml"], "unexpected extra argument"),
        (["biuld", "recipe.yaml"], "Did you mean 'build'?"),
        (["build", "recip.yaml"], "No such file"),
    ],
)
def test_a_misspelt_word(edgec: Edgec, write_recipe: Write, arguments: list[str], says: str) -> None:
    write_recipe()
    refused(edgec(*arguments), says)


def test_a_misspelt_option_is_one_document_under_json(edgec: Edgec) -> None:
    done = edgec("build", "recipe.yaml", "--json", "--tagret", "copy")
    assert done.code == 2
    assert done.json["error"]["reason"] == "bad-option"
    assert "`--target`" in done.json["error"]["message"]


def test_no_command_shows_what_there_is(edgec: Edgec) -> None:
    done = edgec()
    assert done.code == 2
    assert "Commands" in done.stdout and "a command is needed" in done.stderr


def test_an_output_folder_that_is_a_file(edgec: Edgec, write_recipe: Write) -> None:
    path = write_recipe()
    (edgec.folder / "file").write_text("")
    for folder in ("file", "file/below"):
        refused(edgec("build", path, "--out", folder), folder, "[store]", "--out")


def test_an_output_folder_that_is_read_only_is_found_before_the_work(edgec: Edgec, write_recipe: Write) -> None:
    path = write_recipe()
    folder = edgec.folder / "fixed"
    folder.mkdir()
    folder.chmod(0o555)
    if os.access(folder, os.W_OK):  # root may write anywhere but here
        folder = Path("/proc/sys/kernel")
    refused(edgec("build", path, "--out", folder), str(folder), "[store]", "--out")
