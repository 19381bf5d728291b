"""Prove an artefact on the machine at hand: `python -m edgec.prove FOLDER`.

Some engines exist on some systems only (Core ML on Apple's), so a build elsewhere can't run what it made. Such a target
puts the recording into its artefact, and this replays it there: every step through the artefact's own Runner, compared
with the golden outputs that the build recorded. Exit codes as everywhere: 0 equal enough, 6 not.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from edgec.errors import EdgecError, ParityError, SourceError, UsageError
from edgec.golden import Recording, replay
from edgec.model import Artifact
from edgec.parity import Parity, compare
from edgec.registry import get_target


def prove(folder: Path) -> tuple[str, Parity]:
    """Replay an artefact's recording on this machine. Gives how it ran ("executed", "evaluated") and the parity.

    Raises:
        SourceError: the folder isn't an artefact, or carries no recording.
        ToolMissing: the target's engine isn't here at all.
        ParityError: outputs are missing, of another shape, or not finite.
    """
    try:
        artifact = Artifact.open(folder)
        recording = Recording.load(artifact.file("recording"))
    except (OSError, StopIteration, ValueError, KeyError) as error:
        raise SourceError(
            f"{folder}: not an artefact with a recording",
            hint="give a target's folder of a bundle, for example `bundle/coreml`",
        ) from error
    runner = get_target(artifact.target).open(artifact)
    outputs = replay(runner, artifact.signatures, recording.steps)
    expected = [step.outputs for step in recording.steps]
    how = str(getattr(runner, "proof", artifact.proof))
    return how, compare(outputs, expected, dict(artifact.details.get("output_steps", ())))


def main(arguments: list[str] | None = None) -> int:
    """The command. Prints one line a measure, and returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m edgec.prove", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("folder", type=Path, help="a target's folder of a bundle")
    parser.add_argument("--min-cosine", type=float, default=0.99, help="fail below this cosine")
    parser.add_argument("--min-sqnr-db", type=float, default=20.0, help="fail below this signal-to-noise ratio")
    given = parser.parse_args(arguments)
    try:
        if not given.folder.is_dir():
            raise UsageError(f"{given.folder}: no such folder")
        how, parity = prove(given.folder)
        off_by = "" if parity.off_by_n is None else f", off by {parity.off_by_n} steps"
        print(
            f"{how}: cosine {parity.cosine:.6f}, SQNR {parity.sqnr_db:.1f} dB, relative error "
            f"{parity.relative_error:.2e}{off_by}; worst is `{parity.worst.output}` of step {parity.worst.step}"
        )
        if parity.cosine < given.min_cosine or parity.sqnr_db < given.min_sqnr_db:
            raise ParityError(
                f"{given.folder} is further from the golden than cosine {given.min_cosine} and {given.min_sqnr_db} dB",
                hint="`edgec diff` shows the first tensor at which two artefacts part",
            )
    except EdgecError as error:
        print(f"{error.message}\n  {error.hint}".rstrip(), file=sys.stderr)
        return int(error.exit_code)
    return 0


if __name__ == "__main__":
    sys.exit(main())
