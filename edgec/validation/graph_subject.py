"""A target's paged step graph as a subject: ONNX Runtime, LiteRT or TVM, driven as a host would drive it.

Such an artefact has neither a scheduler nor a sampler of its own, so what can be said about it is what its logits say:
scores, and greedy answers, through chunked prefill and batched decode in shared pools.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from edgec.errors import Reason, UsageError
from edgec.golden import carrying
from edgec.model import Artifact
from edgec.registry import get_target
from edgec.runtime.sampling import Sampling
from edgec.tasks.paged_driver import PagedShape, Placed, decode_feed, free_blocks, prefill_feed, score
from edgec.validation.scores import Scores
from edgec.validation.subjects import Generated, NotOffered

_DECODED = 16  # tokens at a window's end that are decoded one by one, as the task's evaluation does


class GraphSubject:
    """An artefact with the signatures `prefill` and `decode` of the task `causal-lm`."""

    def __init__(self, folder: Path, shape: PagedShape | None = None) -> None:
        """Open an artefact. `shape`: its sizes; read from the bundle's recipe when not given.

        Raises:
            UsageError: it is no language model's step graph.
            ToolMissing: its engine isn't here.
        """
        artifact = Artifact.open(folder)
        self.target = artifact.target
        self.shape = shape or _shape(artifact)
        self.context, self.batch = self.shape.context, 1
        self.label = f"{self.target}'s step graph"
        self._runner = carrying(get_target(self.target).open(artifact), artifact.signatures)

    def score(self, tokens: Sequence[int]) -> Scores:
        self._runner.reset()
        decoded = min(_DECODED, max(len(tokens) - 2, 0))
        logits = score(self._runner, self.shape, np.asarray(tokens, np.int32)[None], decoded)[0]
        return Scores.whole(logits, tokens)

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sequence[Sampling]) -> list[Generated]:
        """Greedy answers, as many at a time as the pools hold."""
        if any(s.temperature != 0 or s.n != 1 for s in sampling):
            raise NotOffered(f"{self.target}'s artefact is a graph, without a sampler of its own")
        made: list[Generated] = []
        group = min(self.shape.sequences, self.shape.batch)
        for start in range(0, len(prompts), group):
            lengths = [s.max_tokens for s in sampling[start : start + group]]
            made += self._together(prompts[start : start + group], lengths)
        return made

    def _together(self, prompts: Sequence[Sequence[int]], lengths: Sequence[int]) -> list[Generated]:
        self._runner.reset()
        free = free_blocks(self.shape)
        placed = [Placed(self.shape) for _ in prompts]
        made = [Generated() for _ in prompts]
        for sequence, prompt, out in zip(placed, prompts, made, strict=True):
            tokens = np.asarray(prompt, np.int32)
            for at in range(0, len(tokens), self.shape.chunk):
                chunk = tokens[at : at + self.shape.chunk]
                logits = self._runner.run("prefill", prefill_feed(self.shape, sequence, chunk, free))["logits"]
                last = logits[0, len(chunk) - 1]
            out.tokens.append(int(last.argmax()))
            out.logprobs.append(None)
        while open_ := [i for i, out in enumerate(made) if len(out.tokens) < lengths[i]]:
            rows = [(placed[i], made[i].tokens[-1]) for i in open_]
            logits = self._runner.run("decode", decode_feed(self.shape, rows, free))["logits"]  # (batch, 1, vocab)
            for row, i in enumerate(open_):
                made[i].tokens.append(int(logits[row, 0].argmax()))
                made[i].logprobs.append(None)
        return made

    def close(self) -> None:
        self._runner.reset()


def _shape(artifact: Artifact) -> PagedShape:
    """The sizes of the step graph, from its signatures; the size of a block stands in the bundle's recipe.

    Raises:
        UsageError: it is no language model's step graph.
    """
    by_name = {s.name: {t.name: t.shape for t in (*s.inputs, *s.outputs)} for s in artifact.signatures}
    try:
        prefill, decode = by_name["prefill"], by_name["decode"]
        chunk, batch = int(prefill["tokens"][1]), int(decode["tokens"][0])
        slots, per_sequence = int(prefill["k_0"][0]), int(prefill["block_table"][1])
        recipe = json.loads((artifact.path.parent / "recipe.json").read_text())
        block_size = int(recipe["task"]["causal-lm"]["block_size"])
    except (KeyError, OSError, ValueError) as error:
        raise UsageError(
            f"{artifact.path} is no paged step graph of the task `causal-lm` with its recipe beside it",
            hint="`edgec validate` is for language models; a build's parity gate holds for the others",
            reason=Reason.UNSUPPORTED_MODEL,
        ) from error
    return PagedShape(block_size, slots // block_size, per_sequence, batch, chunk)
