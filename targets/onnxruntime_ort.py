"""The ORT format, with the same bytes each time.

ONNX Runtime writes a model's constants in the order of a hash table whose order depends on the addresses it got, so two
conversions differ in every byte. Hence a fresh process for each file, with the kernel's address randomisation off, a
fixed environment, and relative paths: the same addresses, the same order.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from edgec.errors import ConversionError

# Turns address randomisation off (linux/personality.h: ADDR_NO_RANDOMIZE) and becomes the command that follows. Where
# the kernel refuses, the file is as good, only not the same each time.
_LAUNCHER = """
import ctypes, os, sys

if sys.platform == "linux":
    ctypes.CDLL(None).personality(0x0040000)
os.execv(sys.argv[1], sys.argv[1:])
"""

_SCRIPT = """
import sys
import onnxruntime as ort

source, written, level = sys.argv[1:]
ort.set_default_logger_severity(3)
options = ort.SessionOptions()
options.graph_optimization_level = getattr(ort.GraphOptimizationLevel, level)
options.intra_op_num_threads = 1
options.optimized_model_filepath = written
options.add_session_config_entry("session.save_model_format", "ORT")
ort.InferenceSession(source, options, providers=["CPUExecutionProvider"])
"""


def write_ort(folder: Path, source: str, written: str, level: str) -> None:
    """Optimise the model `source` at a GraphOptimizationLevel and write it as `written`, both relative to `folder`.

    Raises:
        ConversionError: ONNX Runtime refuses the model.
    """
    python = [sys.executable, "-I", "-c"]
    done = subprocess.run(
        [*python, _LAUNCHER, *python, _SCRIPT, source, written, level],
        cwd=folder,
        env={"PATH": os.defpath, "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        raise ConversionError(
            f"onnxruntime: {source} can't be written in the ORT format: {last[:300]}",
            hint="set `ort_format: false` if no minimal build needs it",
        )
