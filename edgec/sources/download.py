"""Download a package with its own client: pip for PyPI, npm, apt-get, huggingface_hub. Nothing downloaded is run.

pip is asked for wheels only: to fetch a source distribution it would run that distribution's build code.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from edgec.errors import SourceError, ToolMissing
from edgec.sources.reference import Reference

# What a checkpoint on the Hub needs; pickled weights and repository furniture are left there.
_HUB_FILES = ["*.json", "*.safetensors", "*.gguf", "*.onnx", "*.model", "*.txt", "*.jinja"]


def download(reference: Reference, out: Path) -> Path:
    """Fetch the package into the empty folder `out`; gives the archive, or `out` itself for `hf:`.

    Raises:
        SourceError: the client could not get it; its own last words are in the message.
        ToolMissing: the client is not on this machine.
    """
    if reference.kind == "hf":
        _hub(reference, out)
        return out
    command = {
        "pypi": [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--dest", str(out)],
        "npm": ["npm", "pack", "--ignore-scripts", "--silent", "--pack-destination", str(out)],
        "deb": ["apt-get", "download"],
    }[reference.kind]
    program = shutil.which(command[0])
    if program is None:
        raise ToolMissing(
            f"`{reference.text}` needs {command[0]}, which is not on this machine",
            hint=f"install {command[0]}, or download the file yourself and give its path",
        )
    # pip on its way to a wheel must not read this process's PYTHONPATH; npm and apt-get write where they stand.
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = subprocess.run(
        [program, *command[1:], reference.package],
        cwd=out,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    files = [p for p in out.iterdir() if p.is_file()]
    if done.returncode or len(files) != 1:
        said = [line.strip() for line in (done.stderr + done.stdout).splitlines() if line.strip()]
        errors = [line for line in said if line.upper().startswith(("ERROR", "E:", "NPM ERR"))] or said[-1:]
        raise SourceError(
            f"`{reference.text}` can't be downloaded: {' '.join(errors[:2]) or 'nothing came'}",
            hint="check the name, the version and the network; a file fetched once is used from the cache"
            + ("; only wheels are taken, since fetching an sdist runs its code" if reference.kind == "pypi" else ""),
        )
    return files[0]


def _hub(reference: Reference, out: Path) -> None:
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
    except ImportError as cause:
        raise ToolMissing(f"`{reference.text}` needs huggingface_hub", hint="pip install huggingface_hub") from cause
    patterns = [reference.path, f"{reference.path}/*"] if reference.path else _HUB_FILES
    try:
        snapshot_download(reference.name, revision=reference.version or None, local_dir=out, allow_patterns=patterns)
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as cause:
        words = str(cause).strip().splitlines()
        raise SourceError(
            f"`{reference.text}` can't be had from the Hugging Face Hub: {words[0] if words else type(cause).__name__}",
            hint="check the id and the network, or download the folder elsewhere and give its path",
        ) from cause
    shutil.rmtree(out / ".cache", ignore_errors=True)
