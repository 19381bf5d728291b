"""What a bundle's draft head is worth: size, cost, acceptance by kind of prompt, and the speed-up that it predicts.

    python benchmarks/draft_head.py out/smollm2-135m [--head other.safetensors …] [--rows 4] [--length 160]

The bundle's model answers held-out prompts of five kinds at temperatures 0 and 1, once; every head is then measured on
the same answers, its activations rounded to INT8 as the engine rounds them. Printed for each kind:

* acceptance of each draft of a run, given that those before it were accepted (temperature 1: Σ min(p, q));
* tokens that a step with γ drafts yields, and the speed-up: that over cγ + 1, where c is the head's share of the bytes
  and a fixed overhead (`--overhead`), and a verifying pass is taken to cost a decode step; beside it the formula of
  Leviathan et al. (2023), (1 − α^(γ+1)) / ((1 − α)(cγ + 1)), with the mean α.

`--head` takes what the pass left in the store (draft.safetensors), so designs can be compared on one text.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from edgec.passes.draft_head_prompts import Prompts
from edgec.passes.draft_head_text import Streams, dense_copy, write_streams
from edgec.passes.draft_head_train import Acceptance, Frozen, measure
from edgec.passes.draft_head_writers import TorchWriter
from torch import nn

from edgec.architectures.draft_head import DraftShape, unpack
from edgec.draft import Draft
from edgec.reference.load import dequantised
from edgec.reference.native_weights import read_native
from edgec.reference.quantised import round_activations
from edgec.reference.tokenizer import ReferenceTokenizer
from edgec.runtime.chat import Message
from edgec.runtime.locate import native_folder

PLACES = 6
REPETITIVE = (
    "Write the numbers from 1 to 60, one on each line.",
    "Repeat the sentence 'The early bird catches the worm.' twenty times.",
    "Write a multiplication table of 7, from 7 x 1 to 7 x 30.",
    "List the days of the week, then list them again, five times over.",
    "Write a JSON array of ten people with the keys name, age and city.",
    "Write an HTML table with the columns id, name and price and fifteen rows.",
)
PROSE = (
    "The old lighthouse stood at the edge of the cliff, and every evening the keeper climbed its narrow stairs",
    "It was the winter of the great storm, when the river froze and the children of the village",
    "The committee met on Tuesday to discuss the new bridge. After a long debate, the members",
    "Most people who move to the countryside soon discover that",
    "In the beginning of the nineteenth century, the trade between the two cities was",
    "She had never seen the sea before. When the train came out of the tunnel,",
)


def prompts_of(kind: str, drawn: Prompts, tokenizer: ReferenceTokenizer) -> Iterator[list[int]]:
    """Held-out prompts of a kind, without end."""
    if kind == "prose":
        return (tokenizer.encode(text) for text in itertools.cycle(PROSE))
    if kind == "repetitive":
        ask = tokenizer.chat.tokens if tokenizer.chat.available else lambda m: tokenizer.encode(m[0].content)
        return (ask([Message("user", text)]) for text in itertools.cycle(REPETITIVE))
    return drawn.draw(12345, held_out=True, kinds=[kind])  # type: ignore[list-item]


def as_the_engine(head: nn.Module) -> nn.Module:
    """Every linear layer sees its input rounded in groups of 32, as the native engine's kernels do."""
    for layer in head.modules():
        if isinstance(layer, nn.Linear):
            layer.register_forward_pre_hook(lambda _, inputs: (round_activations(inputs[0]),))
    return head


def report(name: str, draft: Draft, model_bytes: int, found: dict[str, Acceptance], overhead: float) -> None:
    cost = draft.bytes / model_bytes + overhead
    share = draft.bytes / model_bytes
    print(f"\n{name}: {draft.shape}, {draft.bytes / 1e6:.2f} MB, {share:.1%} of the model, c = {cost:.3f}")
    print(
        f"{'prompts':<11} {'T':>2} {'tokens':>7} {'α by place':<38} {'mean α':>7} {'best γ':>7} {'tokens/step':>12} "
        f"{'speed-up':>9} {'paper':>7}"
    )
    for kind, acceptance in found.items():
        for temperature, rates in enumerate((acceptance.greedy, acceptance.sampled)):
            speeds = [acceptance.per_step(rates, g) / (cost * g + 1) for g in range(1, PLACES + 1)]
            best = int(np.argmax(speeds)) + 1
            yielded = acceptance.per_step(rates, best)
            mean = float(np.average(rates[:best], weights=np.cumprod([1.0, *rates[: best - 1]])))
            paper = (1 - mean ** (best + 1)) / ((1 - mean) * (cost * best + 1)) if mean < 1 else yielded
            places = " ".join(f"{rate:.3f}" for rate in rates)
            print(
                f"{kind:<11} {temperature:>2} {acceptance.tokens[temperature]:>7} {places:<38} {mean:>7.3f} {best:>7} "
                f"{yielded:>12.2f} {speeds[best - 1]:>8.2f}× {paper:>6.2f}×"
            )
        print(f"{'':<11}    {acceptance.covered:.1%} of the answers' tokens are in the draft vocabulary")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--head", type=Path, action="append", default=[], help="more heads to measure")
    parser.add_argument("--rows", type=int, default=4, help="texts of each kind at each temperature")
    parser.add_argument("--length", type=int, default=160, help="tokens of a text's row")
    parser.add_argument("--overhead", type=float, default=0.03, help="of a draft step, in target steps")
    parser.add_argument("--texts", type=Path, help="keep the answers here, and take them from here")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    folder = native_folder(arguments.bundle)
    weights = read_native(folder)
    target, _ = dequantised(weights.config, weights.state, str(folder))
    model_bytes = sum(t.numel() * t.element_size() for t in weights.state.values())
    heads = {str(path): Draft.load(path) for path in arguments.head}
    if weights.draft is not None:
        heads = {str(arguments.bundle): weights.draft} | heads
    if not heads:
        print(f"{arguments.bundle} has no draft head", file=sys.stderr)
        return 2
    texts = {kind: texts_of(kind, folder, target, weights.eos, arguments) for kind in KINDS}
    results: dict[str, dict[str, Acceptance]] = {}
    for name, draft in heads.items():
        shape = DraftShape.from_dict(draft.shape)
        head = as_the_engine(unpack(weights.config, shape, draft.tensors))
        frozen = Frozen.of(target, draft.tensors["draft.token_map"])
        results[name] = {kind: measure(head, frozen, [text], PLACES) for kind, text in texts.items()}  # type: ignore[arg-type]
        report(name, draft, model_bytes, results[name], arguments.overhead)
    if arguments.json:
        plain = {n: {k: [list(a.greedy), list(a.sampled), a.covered] for k, a in r.items()} for n, r in results.items()}
        arguments.json.write_text(json.dumps(plain, indent=1))
    return 0


KINDS = ("chat", "prose", "code", "korean", "repetitive")


def texts_of(kind: str, folder: Path, target: object, ends: tuple[int, ...], arguments: argparse.Namespace) -> Streams:
    """Answers to prompts of a kind: half of the rows at temperature 0, half at 1."""
    from safetensors.torch import load_file, save_file

    kept = None if arguments.texts is None else arguments.texts / f"{kind}.safetensors"
    if kept is not None and kept.is_file():
        return Streams(**load_file(kept))
    tokenizer = ReferenceTokenizer.open(folder)
    assert tokenizer is not None
    drawn = Prompts(folder, tokenizer.settings, tokenizer.encode)
    streams = write_streams(
        TorchWriter(dense_copy(target, torch.float32), arguments.length),  # type: ignore[arg-type]
        prompts_of(kind, drawn, tokenizer),
        length=arguments.length,
        temperatures=[0.0] * arguments.rows + [1.0] * arguments.rows,
        ends=ends,
        longest=arguments.length,
        seed=1,
    )
    if kept is not None:
        kept.parent.mkdir(parents=True, exist_ok=True)
        save_file(streams.tensors(), kept)
    return streams


if __name__ == "__main__":
    sys.exit(main())
