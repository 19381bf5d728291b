"""Which device the reference computes on."""

from __future__ import annotations

import importlib.util

import torch

from edgec.errors import ToolMissing, UsageError


def choose_device(asked: str | None) -> str:
    """The device to use: the one that was asked for, or CUDA where it works, else the CPU.

    Raises:
        UsageError: no kind of device that the reference has.
        ToolMissing: that device, or what its kernels need, is not on this machine.
    """
    if asked is None:
        return "cuda" if torch.cuda.is_available() and _has_triton() else "cpu"
    try:
        device = torch.device(asked)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise UsageError(f"--device {asked}: there is no such device", hint="known: cpu, cuda, cuda:1 and so on")
    if device.type == "cuda":
        _check_cuda(device)
    return asked


def _check_cuda(device: torch.device) -> None:
    if not torch.cuda.is_available():
        built = "this PyTorch was built without CUDA" if torch.version.cuda is None else "no GPU was found"
        raise ToolMissing(
            f"--device {device}: there is no CUDA here ({built}, torch {torch.__version__})",
            hint="install a CUDA build of PyTorch on a machine with an NVIDIA GPU; or leave out --device",
        )
    if device.index is not None and device.index >= torch.cuda.device_count():
        raise ToolMissing(
            f"--device {device}: this machine has {torch.cuda.device_count()} CUDA devices, counted from 0",
            hint="choose another one",
        )
    if not _has_triton():
        raise ToolMissing(
            f"--device {device}: attention on CUDA needs Triton, which is not installed",
            hint="pip install triton, in the version that this PyTorch asks for",
        )


def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None
