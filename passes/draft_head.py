"""Train a tiny head that drafts what the model will say next, for lossless speculative decoding on the device.

The frozen model writes the text itself (Leviathan et al., 2023, need nothing but its own distribution), so no data is
needed; the recipe may give prompts, and texts to go on with. The head travels as INT8 in the bundle. Metrics are the
acceptance of each draft of a run, on prompts that were held out.
"""

from __future__ import annotations

import shutil
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

from pydantic import Field

from edgec.draft import Draft
from edgec.errors import ConversionError, Reason, SourceError, ToolMissing
from edgec.registry import Options, register_pass
from edgec.tasks.text import TextOptions, load_tokenizer, load_tokens

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

    from edgec.architectures.draft_head import Head
    from edgec.architectures.llama import Llama
    from edgec.context import Context
    from edgec.model import Model
    from edgec.tasks.causal_lm import CausalLm

    from .draft_head_prompts import Prompts
    from .draft_head_text import Streams
    from .draft_head_train import Acceptance, Precision
    from .draft_head_writers import Writer

TEMPERATURES = (0.0, 1.0, 0.7, 1.0)  # of the rows in turn: half of what is written is the model's own distribution
PLACES = 5  # drafts of a run whose acceptance is reported


class DraftHeadOptions(Options):
    """The head's sizes, and how much it learns."""

    design: Literal["recurrent", "attentive"] = Field(
        "recurrent",
        description="recurrent: one state, no cache, what the native engine runs; attentive: to compare with",
    )
    widths: tuple[int, ...] = Field((1024, 1024), min_length=1, description="inner widths of its blocks, in order")
    vocabulary: int = Field(6144, description="tokens that it can propose: the most frequent ones")
    max_share: float = Field(0.08, gt=0, le=1, description="the greatest share of the model's bytes that it may take")
    tokens: int = Field(1_048_576, ge=1024, description="tokens that the model writes for it to learn from")
    rows: int = Field(128, ge=4, description="texts that the model writes side by side")
    length: int = Field(256, ge=32, description="tokens of such a text's row, of several prompts and answers")
    longest: int = Field(200, ge=1, description="tokens of an answer, at most")
    prompts: str | None = Field(None, description="a file of prompts to ask as well, one a line")
    texts: tuple[TextOptions, ...] = Field((), description="texts to go on with, from anywhere in them")
    held_out: int = Field(40, ge=4, description="rows of held-out prompts that acceptance is measured on")
    epochs: int = Field(2, ge=1, description="passes over what was written")
    lr: float = Field(1.5e-3, gt=0, description="the greatest learning rate")
    unroll: int = Field(3, ge=1, le=8, description="drafts of a run that are trained")
    feature: float = Field(
        0.0, ge=0, description="weight of guessing the model's next hidden states, too, as EAGLE does"
    )
    window: int = Field(128, ge=16, description="tokens of a piece in training; at most `length`")
    batch: int = Field(4, ge=1, description="pieces of a training step")
    writer: Literal["auto", "engine", "torch"] = Field(
        "auto",
        description="what the model writes on: the native engine, or PyTorch; auto is the engine for INT8 weights "
        "where there is a C++ compiler and no GPU",
    )
    precision: Literal["auto", "float32", "bfloat16"] = Field(
        "auto", description="in PyTorch; auto is bfloat16 where the processor multiplies it natively"
    )

    def references(self) -> list[tuple[str, str | None]]:
        prompts: list[tuple[str, str | None]] = [] if self.prompts is None else [(self.prompts, None)]
        return [*prompts, *((t.source, t.sha256) for t in self.texts)]


@register_pass("draft_head")
def draft_head(model: Model, options: DraftHeadOptions, context: Context) -> Model:
    """Let the model write, train a head on it, measure it, and give the model with the head in INT8.

    Raises:
        ConversionError: not a language model of the Llama family, or the head would take more than `max_share`.
        SourceError: the model came without a tokenizer, or a text can't be had.
    """
    import torch

    from edgec.architectures.draft_head import DraftShape, build, pack, unpack
    from edgec.checkpoint import model_bytes

    from .draft_head_text import dense_copy
    from .draft_head_train import Frozen, choose_vocabulary, measure, start_from, train_head

    task = _language_task(model)
    llama: Llama = model.module  # type: ignore[assignment]
    shape = DraftShape(options.design, options.widths, min(options.vocabulary, llama.config.vocab_size // 32 * 32))
    own_bytes = model_bytes(model)
    _check_share(build(llama.config, shape), own_bytes, options)
    torch.set_num_threads(max(1, context.threads))
    device, asking = _device(), _asking(task, options)
    with context.timed("writing"):
        texts, held = _write(llama, asking, options, context)
    exact = dense_copy(llama, torch.float32).to(device)
    frozen = Frozen.of(exact, choose_vocabulary(texts, shape.vocab, asking.ends, llama.config.vocab_size))
    torch.manual_seed(context.seed)
    head = build(llama.config, shape).to(device)
    start_from(head, frozen, texts)
    with context.timed("training"):
        losses = train_head(
            head, frozen, texts,
            epochs=options.epochs, lr=options.lr, unroll=options.unroll, window=min(options.window, options.length),
            batch=options.batch, precision=_precision(options), feature=options.feature, seed=context.seed,
            file=context.work / "draft_head.training.pt",
            on_step=lambda done, total, loss: context.progress(done, total, f"training the head, loss {loss:.3f}"),
        )  # fmt: skip
    tensors = pack(head)
    with context.timed("measuring"):
        found = measure(unpack(llama.config, shape, tensors).to(device), frozen, held, PLACES)
    draft = Draft(shape.to_dict(), tensors)
    _report(found, draft, own_bytes, losses, context)
    return replace(model, draft=draft)


def _language_task(model: Model) -> CausalLm:
    from edgec.architectures.llama import Llama
    from edgec.tasks.causal_lm import CausalLm

    if not isinstance(model.task, CausalLm) or not isinstance(model.module, Llama):
        raise ConversionError(
            f"draft_head: drafts are for language models of the Llama family; this is a {type(model.module).__name__} "
            f"for the task `{model.task.kind}`",
            hint="remove `draft_head` from the passes",
            reason=Reason.UNSUPPORTED_SCHEME,
        )
    return model.task


def _check_share(head: Head, own_bytes: int, options: DraftHeadOptions) -> None:
    from edgec.architectures.draft_head import pack

    size = sum(t.numel() * t.element_size() for t in pack(head).values())
    if size > options.max_share * own_bytes:
        raise ConversionError(
            f"draft_head: the head would take {size / own_bytes:.1%} of the model's {own_bytes / 1e6:.1f} MB, and "
            f"`max_share` is {options.max_share:.1%}",
            hint="give smaller `widths`, or a smaller `vocabulary`",
            reason=Reason.BAD_OPTION,
        )


def _device() -> torch.device:
    import torch

    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _precision(options: DraftHeadOptions) -> Precision:
    """`auto`: bfloat16 where it is multiplied in hardware; elsewhere PyTorch emulates it, far slower than float32."""
    import torch

    if options.precision != "auto":
        return options.precision
    if torch.cuda.is_available():
        return "bfloat16" if torch.cuda.is_bf16_supported() else "float32"
    capable = getattr(torch.cpu, "_is_avx512_bf16_supported", None)
    return "bfloat16" if capable is not None and capable() else "float32"


class _Asking(NamedTuple):
    """What draws prompts, the tokens that end an answer, and the folder of the tokenizer's files."""

    prompts: Prompts
    ends: tuple[int, ...]
    tokenizer: Path


def _asking(task: CausalLm, options: DraftHeadOptions) -> _Asking:
    import json

    from edgec.decoder import turn_ends
    from edgec.runtime.settings import read_settings
    from edgec.sources.fetch import fetch

    from .draft_head_prompts import Prompts

    plain, special = load_tokenizer(task.context), load_tokenizer(task.context)
    plain.encode_special_tokens = True  # what a user types stays text

    def encode(text: str, *, special_tokens: bool = False) -> list[int]:
        ids: list[int] = (special if special_tokens else plain).encode(text, add_special_tokens=False).ids
        return ids

    folder = task.context.model_dir
    assert folder is not None  # load_tokenizer has read it
    settings = read_settings(folder)
    listed: list[str] = []
    if options.prompts is not None:
        path = fetch(options.prompts, None, recipe_dir=task.context.recipe_dir, cache=task.context.cache)
        listed = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
        if not listed:
            raise SourceError(f"{path} holds no prompts", reason=Reason.EMPTY_DATA)
    prompts = Prompts(
        folder,
        settings,
        lambda text, *, special=False: encode(text, special_tokens=special),
        texts=[load_tokens(text, task.context) for text in options.texts],
        listed=listed,
    )
    added = json.loads((folder / "tokenizer.json").read_bytes()).get("added_tokens", ())
    return _Asking(prompts, turn_ends(added, settings), folder)


def _write(
    llama: Llama, asking: _Asking, options: DraftHeadOptions, context: Context
) -> tuple[list[Streams], list[Streams]]:
    """(texts to learn from, held-out ones). Each piece is kept, so that a killed build goes on behind it."""
    from .draft_head_text import write_streams

    pieces = max(1, round(options.tokens / (options.rows * options.length)))
    sizes = [options.rows] * pieces + [options.held_out]
    total = sum(sizes) * options.length
    files = [context.work / f"text-{index}.safetensors" for index in range(len(sizes))]

    def progress(before: int, rows: int, position: int) -> None:
        context.progress(before * options.length + rows * position, total, "the model writes")

    if not all(file.is_file() for file in files):
        with _writer(llama, asking, max(sizes), options, context) as writer:
            for index, (rows, file) in enumerate(zip(sizes, files, strict=True)):
                if file.is_file():
                    continue
                seed = context.seed * (pieces + 1) + index
                streams = write_streams(
                    writer,
                    asking.prompts.draw(seed, held_out=index == pieces),
                    length=options.length,
                    temperatures=[TEMPERATURES[i % len(TEMPERATURES)] for i in range(rows)],
                    ends=asking.ends,
                    longest=options.longest,
                    seed=seed,
                    on_step=partial(progress, sum(sizes[:index]), rows),
                )
                _keep(streams, file)
    found = [_kept(file) for file in files]
    return found[:pieces], found[pieces:]


@contextmanager
def _writer(llama: Llama, asking: _Asking, rows: int, options: DraftHeadOptions, context: Context) -> Iterator[Writer]:
    """What the model writes on, for up to `rows` rows.

    Raises:
        ConversionError: the engine is asked for, and the model's weights are not INT8.
        ToolMissing: the engine is asked for, and can't be compiled here.
    """
    import torch

    from edgec.runtime.library import compiled

    from .draft_head_text import dense_copy
    from .draft_head_writers import EngineWriter, TorchWriter, native_files

    quantized = any(value.dtype == torch.int8 for value in llama.state_dict().values())
    if options.writer == "engine" and not quantized:
        raise ConversionError(
            "draft_head: the engine writes with INT8 weights, and this model's are not",
            hint="put `quantize: {scheme: weight-only}` before draft_head, or give it `writer: torch`",
            reason=Reason.BAD_OPTION,
        )
    on_engine = options.writer == "engine" or (options.writer == "auto" and quantized and _device().type == "cpu")
    if on_engine and options.writer == "auto":
        try:
            compiled()
        except ToolMissing as error:
            on_engine = False
            context.note(f"the model writes in PyTorch, which takes longer: {error.message}")
    if not on_engine:
        dtype = torch.bfloat16 if _precision(options) == "bfloat16" else torch.float32
        yield TorchWriter(dense_copy(llama, dtype).to(_device()), options.length)
        return
    folder = context.work / "writer"
    if folder.exists():  # of a build that was killed
        shutil.rmtree(folder)
    try:
        native_files(llama, asking.ends, asking.tokenizer, folder)
        with EngineWriter(folder, rows, options.length, context.threads) as writer:
            yield writer
    finally:
        shutil.rmtree(folder)


def _keep(streams: Streams, path: Path) -> None:
    """Whole or not at all. The work folder is this very stage's, options and all."""
    from safetensors.torch import save_file

    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_suffix(".tmp")
    save_file(streams.tensors(), aside)
    aside.replace(path)


def _kept(path: Path) -> Streams:
    from safetensors.torch import load_file

    from .draft_head_text import Streams

    return Streams(**load_file(path))


def _report(found: Acceptance, draft: Draft, own_bytes: int, losses: list[float], context: Context) -> None:
    share = draft.bytes / own_bytes
    rows = []
    for place, (greedy, sampled) in enumerate(zip(found.greedy, found.sampled, strict=True), 1):
        context.metric(f"draft_greedy_{place}", greedy)
        context.metric(f"draft_sampled_{place}", sampled)
        rows.append((place, round(greedy, 3), round(sampled, 3)))
    context.metric("draft_bytes", draft.bytes)
    context.metric("draft_covered", found.covered)
    context.table(
        "Draft head: acceptance by place, on held-out prompts", ("draft", "temperature 0", "temperature 1"), rows
    )
    at_0, at_1 = (found.per_step(rates, 3) for rates in (found.greedy, found.sampled))
    context.note(
        f"a head of {draft.bytes / 1e6:.1f} MB ({share:.1%} of the model) in {len(losses)} steps; with 3 drafts a step "
        f"yields {at_0:.2f} tokens at temperature 0 and {at_1:.2f} at 1; it can propose {found.covered:.1%} of the text"
    )
