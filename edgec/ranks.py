"""`torchrun … -m edgec build recipe.yaml`: the same command on every rank.

The first rank builds as always. The others take part in the passes that train (`register_pass(…, distributed=True)`),
and otherwise wait for the first rank's results in the store, which all ranks must share.
"""

from __future__ import annotations

import os

VARIABLES = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "ROLE_RANK",
    "ROLE_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
)
POLL_SECONDS = 0.2  # how often a waiting rank looks into the store


def rank() -> int:
    """This process's rank; 0 when not launched by torchrun."""
    return int(os.environ.get("RANK", "0")) if int(os.environ.get("WORLD_SIZE", "1")) > 1 else 0


def without_ranks(environment: dict[str, str]) -> dict[str, str]:
    """The environment of a stage that runs on one rank alone: nothing in it may wait for the others."""
    return {name: value for name, value in environment.items() if name not in VARIABLES}
