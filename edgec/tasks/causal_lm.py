"""Task `causal-lm`: predict the next token. Perplexity on held-out text, and divergence from the float model.

The module is a `Llama`; what is exported is its paged step graph in two shapes, `prefill` (a chunk of one sequence) and
`decode` (one token for each of a batch). Torch modules are evaluated densely, artefacts through the paged graph, over
the same windows: every window starts with nothing before it, so the two agree.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from pydantic import Field, model_validator

from edgec.errors import Reason, RecipeError, SourceError
from edgec.model import DECODER_FILE, Signature, TensorSpec
from edgec.registry import Options, register_task
from edgec.tasks.base import Arrays, Task, TaskContext
from edgec.tasks.paged_driver import PagedShape, Placed, decode_feed, free_blocks, prefill_feed, score
from edgec.tasks.text import TOKENIZER_FILE, TOKENIZER_SETTINGS, TextOptions, load_tokens, windows

if TYPE_CHECKING:
    import torch

    from edgec.architectures.llama import Llama
    from edgec.golden import Step
    from edgec.model import Runner


class CausalLmOptions(Options):
    """Held-out text, and the sizes of the paged step graph."""

    evaluation: TextOptions = Field(description="text that perplexity is measured on")
    calibration: TextOptions | None = Field(None, description="another text, for passes that calibrate")
    train: TextOptions | None = Field(None, description="text for passes that train")
    context: int = Field(256, ge=8, description="positions a sequence can have in the exported graph; also the window")
    windows: int = Field(16, ge=1, description="windows of `context` tokens to evaluate on, at most")
    reference_windows: int = Field(2, ge=0, description="windows whose float log-probabilities are kept, for KL")
    decode_tokens: int = Field(16, ge=0, description="tokens at a window's end that artefacts decode one by one")
    block_size: int = Field(16, ge=1, description="positions in a block of the KV pools")
    blocks: int = Field(64, ge=2, description="blocks in each pool; the first only takes padding")
    batch: int = Field(4, ge=2, description="sequences in a decode step")
    chunk: int = Field(64, ge=2, description="tokens in a prefill step")
    train_batch: int = Field(8, ge=1, description="windows in a training batch, on each rank")

    @model_validator(mode="after")
    def _fits(self) -> CausalLmOptions:
        if self.context % self.block_size:
            raise ValueError(f"context {self.context} is not a multiple of block_size {self.block_size}")
        if self.shape.sequences < 2:
            need = 1 + 2 * self.shape.blocks_per_sequence
            raise ValueError(f"blocks {self.blocks} can't hold two sequences of {self.context}: at least {need}")
        if self.decode_tokens > self.context - 2:
            raise ValueError(f"decode_tokens {self.decode_tokens} leaves nothing of a window of {self.context}")
        if self.calibration is not None and self.calibration.source == self.evaluation.source:
            raise ValueError("calibration and evaluation are the same text")
        return self

    @property
    def shape(self) -> PagedShape:
        return PagedShape(self.block_size, self.blocks, self.context // self.block_size, self.batch, self.chunk)


@register_task("causal-lm")
class CausalLm(Task):
    """Predict the next token: perplexity, KL to the float model, top-1 agreement."""

    kind = "causal-lm"
    metric = "perplexity"
    higher_is_better = False

    def __init__(self, options: CausalLmOptions, context: TaskContext) -> None:
        self.options = options
        self.context = context
        self.shape = options.shape
        self._windows: dict[str, np.ndarray] = {}
        self._prefill: Signature | None = None

    def data_references(self) -> list[tuple[str, str | None]]:
        texts = (self.options.evaluation, self.options.calibration, self.options.train)
        return [(t.source, t.sha256) for t in texts if t is not None]

    # What is exported

    def signatures(self, module: torch.nn.Module) -> tuple[Signature, ...]:
        model, shape = _llama(module), self.shape
        vocab, hidden = model.config.vocab_size, model.config.hidden_size
        pools: list[tuple[str, tuple[int, int, int]]] = []
        for i, layer in enumerate(model.blocks()):
            size = (shape.slots, layer.self_attn.kv_heads, layer.self_attn.head_dim)
            pools += [(f"k_{i}", size), (f"v_{i}", size)]

        def signature(name: str, batch: int, length: int) -> Signature:
            new = [TensorSpec(n, (batch, length), "int32") for n in ("tokens", "positions", "slot_mapping")]
            table = TensorSpec("block_table", (batch, shape.blocks_per_sequence), "int32")
            logits = TensorSpec("logits", (batch, length, vocab), "float32")
            last = TensorSpec("hidden", (batch, length, hidden), "float32")
            return Signature(
                name,
                (*new, table, *(TensorSpec(n, size, "float32") for n, size in pools)),
                (logits, last, *(TensorSpec(f"{n}_out", size, "float32") for n, size in pools)),
                state=tuple((n, f"{n}_out") for n, _ in pools),
            )

        self._prefill = signature("prefill", 1, shape.chunk)
        return self._prefill, signature("decode", shape.batch, 1)

    def example(self, signature: Signature) -> tuple[torch.Tensor, ...]:
        import torch

        return tuple(torch.zeros(t.sized({}), dtype=getattr(torch, t.dtype)) for t in signature.inputs)

    def bind(self, module: torch.nn.Module, signature: Signature) -> torch.nn.Module:
        from edgec.architectures.paged import PagedStep

        return PagedStep(_llama(module), self.shape.block_size, self.shape.blocks_per_sequence).eval()

    def companions(self, module: torch.nn.Module) -> dict[str, bytes]:
        """`decoder.json` (the architecture, and the sizes of the step graph) and the tokenizer's files."""
        files = {}
        for name in (TOKENIZER_FILE, TOKENIZER_SETTINGS):
            path = (self.context.model_dir or Path()) / name
            if self.context.model_dir is not None and path.is_file():
                files[name] = path.read_bytes()
        sizes = {"architecture": _llama(module).config.to_dict(), "shape": asdict(self.shape)}
        return files | {DECODER_FILE: json.dumps(sizes, indent=1, sort_keys=True).encode()}

    # Data

    def calibration(self) -> Iterator[tuple[torch.Tensor, ...]]:
        """First chunks of the calibration text's windows, as inputs of `prefill`; the pools are empty."""
        import torch

        from edgec.golden import zero_state

        if self._prefill is None:
            raise RuntimeError("calibration() before signatures(): the shapes of the pools are the module's")
        pools = tuple(torch.from_numpy(pool) for pool in zero_state(self._prefill).values())
        for window in self._text("calibration", self.options.calibration):
            feed = prefill_feed(self.shape, Placed(self.shape), window[: self.shape.chunk], free_blocks(self.shape))
            yield (*(torch.from_numpy(feed[t.name]) for t in self._prefill.inputs[: len(feed)]), *pools)

    def training(self, epoch: int, *, rank: int = 0, world: int = 1) -> Iterator[tuple[Any, Any]]:
        """(ids, next ids), each (train_batch, context − 1) int64."""
        if self.options.train is None:
            yield from super().training(epoch, rank=rank, world=world)
            return
        import torch

        text = self._text("train", self.options.train)
        order = np.random.default_rng((self.context.seed, epoch)).permutation(len(text))
        size = self.options.train_batch
        for start in range(0, len(order) - size * world + 1, size * world):
            rows = torch.from_numpy(text[order[start + rank * size : start + (rank + 1) * size]]).long()
            yield rows[:, :-1], rows[:, 1:]

    def loss(self, outputs: Any, labels: Any) -> torch.Tensor:
        from torch.nn.functional import cross_entropy

        return cross_entropy(outputs.flatten(0, 1), labels.flatten())

    def record(self) -> list[Step]:
        """Two sequences of real text in shared pools: chunked prefill and batched decode, interleaved."""
        from edgec.golden import Step

        shape = self.shape
        text = self._text("evaluation", self.options.evaluation)
        first, second = text[0], text[-1] if len(text) > 1 else text[0][::-1].copy()
        a, b = Placed(shape), Placed(shape)
        # Blocks in no order: a pool that has been in use hands them out so.
        free = [int(i) for i in np.random.default_rng(self.context.seed).permutation(free_blocks(shape))]
        steps: list[Step] = []

        def prefill(sequence: Placed, tokens: np.ndarray, count: int) -> None:
            new = tokens[sequence.length : sequence.length + count]
            steps.append(Step("prefill", prefill_feed(shape, sequence, new, free)))

        def decode(times: int) -> None:
            for _ in range(times):
                rows = [(a, int(first[a.length])), (b, int(second[b.length]))]
                steps.append(Step("decode", decode_feed(shape, rows, free)))

        # Sizes that fit the smallest context: two chunks and six decoded tokens of a sequence.
        chunk = min(shape.chunk, (shape.context - 6) // 2)
        prefill(a, first, chunk)
        prefill(b, second, chunk - chunk // 4)  # a chunk that isn't full
        decode(4)
        prefill(a, first, chunk)
        decode(2)
        return steps

    # Measuring

    def reference(self, runner: Runner) -> Arrays:
        """Float log-probabilities of the first windows, (N, context − 1, vocab) float16, and each window's loss."""
        losses, kept = [], []
        for index, logits in self._scores(runner, self.options.windows):
            log_probs = _log_softmax(logits)
            losses.append(self._loss(index, log_probs))
            if index < self.options.reference_windows:
                kept.append(log_probs.astype(np.float16))
        arrays = {"losses": np.array(losses, np.float64)}
        return arrays | ({"log_probs": np.stack(kept)} if kept else {})

    def evaluate(self, runner: Runner, reference: Arrays | None, *, limit: int | None = None) -> dict[str, float]:
        """Perplexity; with a reference also, over the first `limit` windows:

        * `perplexity_ratio`: to the float model's perplexity on the same windows;
        * `kl`: mean KL(float ‖ this) in nats per token, over those windows whose log-probabilities it has;
        * `top1_agreement`: share of their tokens whose most likely successor is the float model's.

        Windows differ more from each other than models do. So with a reference, the loss over few windows is corrected
        by what the float model's loss over them differs from its loss over all (a control variate), and perplexities
        measured with different limits can be compared.
        """
        limit = min(limit or self.options.windows, self.options.windows)
        expected = (reference or {}).get("log_probs", np.empty((0,)))
        losses, divergences, agreements = [], [], []
        for index, logits in self._scores(runner, limit):
            log_probs = _log_softmax(logits)
            losses.append(self._loss(index, log_probs))
            if index < len(expected):
                theirs = _log_softmax(expected[index].astype(np.float32))
                divergences.append(float((np.exp(theirs) * (theirs - log_probs)).sum(-1).mean()))
                agreements.append(float((theirs.argmax(-1) == log_probs.argmax(-1)).mean()))
        loss, metrics = np.mean(losses), {}
        if reference and "losses" in reference:
            worse = loss - reference["losses"][: len(losses)].mean()
            loss = reference["losses"].mean() + worse
            metrics["perplexity_ratio"] = float(np.exp(worse))
        metrics["perplexity"] = float(np.exp(loss))
        if divergences:
            metrics["kl"] = float(np.mean(divergences))
            metrics["top1_agreement"] = float(np.mean(agreements))
        return metrics

    def _scores(self, runner: Runner, limit: int) -> Iterator[tuple[int, np.ndarray]]:
        """(index, logits (context − 1, vocab) float32) of the evaluation windows."""
        text = self._text("evaluation", self.options.evaluation)[: min(limit, self.options.windows)]
        dense = _dense(runner)
        if dense is not None:
            import torch

            for index, window in enumerate(text):
                with torch.no_grad():
                    yield index, dense(torch.from_numpy(window[None, :-1]).long())[0].float().numpy()
            return
        for start in range(0, len(text), self.shape.sequences):
            runner.reset()
            group = text[start : start + self.shape.sequences]
            yield from enumerate(score(runner, self.shape, group, self.options.decode_tokens), start)

    def _loss(self, index: int, log_probs: np.ndarray) -> float:
        """Mean negative log-likelihood of a window's tokens but the first, in nats."""
        labels = self._text("evaluation", self.options.evaluation)[index, 1:]
        return -float(log_probs[np.arange(len(labels)), labels].mean(dtype=np.float64))

    def _text(self, role: str, text: TextOptions | None) -> np.ndarray:
        """Windows of one of the task's texts, (N, context) int32; read once."""
        if text is None:
            raise RecipeError(f"task `causal-lm` has no {role} text", hint=f"give the task a `{role}:` text")
        if role not in self._windows:
            self._windows[role] = windows(load_tokens(text, self.context), self.options.context, role)
        return self._windows[role]


def _log_softmax(logits: np.ndarray) -> np.ndarray:
    """Over the last axis, in float32."""
    shifted = logits - logits.max(-1, keepdims=True)
    return cast(np.ndarray, shifted - np.log(np.exp(shifted).sum(-1, keepdims=True)))


def _llama(module: torch.nn.Module) -> Llama:
    from edgec.architectures.llama import Llama

    if not isinstance(module, Llama):
        raise SourceError(
            f"task `causal-lm` exports Llama models, and this one is a {type(module).__name__}",
            hint="take the model from a GGUF file or a Hugging Face folder of the Llama family; quantise weights only",
            reason=Reason.BAD_CHECKPOINT,
        )
    return module


def _dense(runner: Runner) -> torch.nn.Module | None:
    """The dense model behind a runner of torch modules, which evaluates a window in one go."""
    from edgec.architectures.paged import PagedStep
    from edgec.golden import TorchRunner

    if isinstance(runner, TorchRunner):
        module = runner.modules.get("prefill")
        if isinstance(module, PagedStep):
            return module.model
    return None
