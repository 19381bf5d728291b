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

_ADDR_NO_RANDOMIZE = 0x0040000  # linux/personality.h

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
    done = subprocess.run(
        [sys.executable, "-I", "-c", _SCRIPT, source, written, level],
        cwd=folder,
        env={"PATH": os.defpath, "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"},
        preexec_fn=_same_addresses if sys.platform == "linux" else None,
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


def _same_addresses() -> None:
    """Turn off address randomisation for the program that this process becomes; where it is refused, bytes differ."""
    import ctypes

    ctypes.CDLL(None).personality(_ADDR_NO_RANDOMIZE)
