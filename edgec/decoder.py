"""What an exported language model says of itself: its architecture, its weights, and the tokens that end an answer.

The native target writes it into its artefact, and the reference computes with it; both read it here.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from edgec.errors import ConversionError, Reason
from edgec.model import DECODER_FILE, Program
from edgec.runtime.settings import token_text

if TYPE_CHECKING:
    import torch

# Besides the tokenizer's own end-of-sequence token: what chat models end a turn with.
TURN_ENDS = ("<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|end_of_text|>", "<|end|>", "</s>", "<end_of_turn>")


@dataclass(frozen=True)
class Decoder:
    """A program's companion: the `LlamaConfig` as a dict, and the step graph's sizes."""

    architecture: dict[str, Any]
    shape: dict[str, int]
    eos: tuple[int, ...]


def read_decoder(program: Program, reader: str) -> Decoder:
    """What the export wrote down about the model.

    Args:
        reader: who asks, for the errors.

    Raises:
        ConversionError: the program is no language model's, or came without a tokenizer.
    """
    path = program.companion(DECODER_FILE)
    if path is None:
        raise ConversionError(
            f"{reader}: the engine runs language models of the Llama family, and this program is of the task "
            f"`{program.task_kind}`",
            hint=f"leave `{reader}` out of the targets" if reader == "native" else "",
            reason=Reason.UNSUPPORTED_SCHEME,
        )
    data = json.loads(path.read_text())
    tokenizer, settings = program.companion("tokenizer.json"), program.companion("tokenizer_config.json")
    if tokenizer is None:
        raise ConversionError(
            f"{reader}: the model came without a tokenizer.json, which the runtime needs",
            hint="take the model from a GGUF file or from a Hugging Face folder that holds tokenizer.json",
            reason=Reason.BAD_CHECKPOINT,
        )
    added = json.loads(tokenizer.read_text()).get("added_tokens", ())
    eos = turn_ends(added, {} if settings is None else json.loads(settings.read_text()))
    return Decoder(data["architecture"], data["shape"], eos)


def turn_ends(added_tokens: Iterable[Mapping[str, Any]], settings: Mapping[str, Any]) -> tuple[int, ...]:
    """The tokens that end an answer, in order.

    Args:
        added_tokens: of a tokenizer.json.
        settings: what tokenizer_config.json says.
    """
    ids = {t["content"]: int(t["id"]) for t in added_tokens if t.get("special")}
    return tuple(sorted({ids[text] for text in (token_text(settings.get("eos_token")), *TURN_ENDS) if text in ids}))


def program_state(program: Program) -> dict[str, torch.Tensor]:
    """Weights by their names in the model; a table that two layers share may stand under either's.

    `<layer>.weight` is int8 (out, in) where there is a `<layer>.scale` (out,) float32: w[o, i] = scale[o] · q[o, i].
    """
    exported = program.exported(program.signatures[-1].name)
    state: dict[str, torch.Tensor] = dict(exported.state_dict) | {
        name: value for name, value in exported.constants.items() if hasattr(value, "dtype")
    }
    state = {name.removeprefix("model."): value.detach() for name, value in state.items()}
    for leaf in ("weight", "scale"):
        if f"embed_tokens.{leaf}" not in state and f"lm_head.{leaf}" in state:
            state[f"embed_tokens.{leaf}"] = state[f"lm_head.{leaf}"]
    return state
