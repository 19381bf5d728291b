"""Fails in the way that it is told to."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from typing import Literal

from pydantic import Field

from edgec.context import Context
from edgec.model import Model
from edgec.registry import Options, register_pass


class MisbehaveOptions(Options):
    """Which way."""

    how: Literal["raise", "kill", "exit", "hang", "hang-once", "disk-full", "memory", "forget"] = Field(
        "raise",
        description="the way to fail; hang-once: in a program of its own; forget: new weights, and all looks well",
    )


@register_pass("misbehave")
def misbehave(model: Model, options: MisbehaveOptions, context: Context) -> Model:
    print("the tool's own last words", file=sys.stderr, flush=True)
    if options.how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if options.how == "exit":
        os._exit(7)
    if options.how == "hang":
        (context.work / "started").write_text(str(os.getpid()))
        time.sleep(600)
    if options.how == "hang-once":
        started = context.work / "started"
        if not started.exists():
            tool = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
            started.write_text(str(tool.pid))
            tool.wait()
        return model
    if options.how == "disk-full":
        raise OSError(28, "No space left on device", str(context.work / "checkpoint"))
    if options.how == "memory":
        raise MemoryError
    if options.how == "forget":
        import torch

        generator = torch.Generator().manual_seed(1)
        for parameter in model.module.parameters():
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator))
        return model
    raise ValueError("the converter choked on node_17")
