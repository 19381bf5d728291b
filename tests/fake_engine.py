"""The fake core (tests/runtime/fake_core.c), compiled, and a bundle that it opens."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

from edgec.runtime.abi import ABI_VERSION
from edgec.runtime.compile import NATIVE

TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPECIAL = ("<|im_start|>", "<|im_end|>")


def compile_fake(folder: Path, *flags: str) -> Path:
    """The shared library, in a fifth of a second."""
    library = folder / "libfake.so"
    compiler = shutil.which("gcc") or "cc"
    source = Path(__file__).parent / "runtime/fake_core.c"
    command = [compiler, "-shared", "-fPIC", "-O1", "-pthread", f"-I{NATIVE / 'include'}", str(source), *flags]
    subprocess.run([*command, "-o", str(library), "-lm"], check=True)
    return library


def write_bundle(folder: Path, *, abi: int = ABI_VERSION, template: str | None = TEMPLATE) -> Path:
    """What `edgec build` leaves, as far as the host looks at it; gives the output folder."""
    native = folder / "bundle/native"
    native.mkdir(parents=True)
    (native / "manifest.json").write_text(json.dumps({"abi": abi}))
    (native.parent / "bundle.json").write_text(json.dumps({"name": "parrot"}))
    added = [{"id": 256 + i, "content": text, "special": True} for i, text in enumerate(SPECIAL)]
    (native / "tokenizer.json").write_text(json.dumps({"added_tokens": added}))
    settings: dict[str, Any] = {"eos_token": "<|im_end|>", "bos_token": "<|im_start|>", "add_bos_token": False}
    if template:
        settings["chat_template"] = template
    (native / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder
