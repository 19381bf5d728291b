"""A bundle's tokenizer_config.json: special tokens by role, and the chat template."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from edgec.runtime.abi import Status
from edgec.runtime.failures import EngineError

FILE = "tokenizer_config.json"


def read_settings(folder: Path) -> dict[str, Any]:
    """What the file says; nothing when there is none.

    Raises:
        EngineError: it can't be read, or holds no object.
    """
    try:
        found = json.loads((folder / FILE).read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise EngineError(Status.CORRUPT, f"{folder / FILE}: {error}") from error
    if not isinstance(found, dict):
        raise EngineError(Status.CORRUPT, f"{folder / FILE} holds no object")
    return found


def token_text(token: Any) -> str:
    """A special token as the file has it, text or an object with `content`; "" when there is none."""
    if isinstance(token, Mapping):
        token = token.get("content")
    return token if isinstance(token, str) else ""
