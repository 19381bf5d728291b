"""Train a draft head on what its target has written: soft cross-entropy, unrolled along the text.

At step i the head's distribution q_i is held to the target's own p(· | x_≤t+i), restricted to the draft vocabulary but
not renormalised: where the target wants a token that can't be drafted, there is nothing to learn. Tokens are the
text's, since a draft that was wrong ends its run anyway; later steps weigh less, as they are reached less often.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

from edgec.errors import ConversionError, Reason

from .training_checkpoint import Checkpoint, fingerprint

if TYPE_CHECKING:
    from pathlib import Path

    import torch

    from edgec.architectures.draft_head import Head
    from edgec.architectures.llama import Llama

    from .draft_head_text import Streams

Precision = Literal["float32", "bfloat16"]
STEP_WEIGHT = 0.8  # of each step against the one before it
WEIGHT_DECAY = 0.01
WARM_UP = 0.05  # share of the steps
CHECKPOINT_EVERY = 50


@dataclass(frozen=True)
class Frozen:
    """What a head needs of its target.

    Attributes:
        embedding: (vocab, hidden).
        rows: (V_d, hidden), the output layer's rows of the draft vocabulary.
        token_map: (V_d) int32 ascending.
        places: (vocab) int64: a token's number in the draft vocabulary, or −1.
    """

    embedding: torch.Tensor
    rows: torch.Tensor
    token_map: torch.Tensor
    places: torch.Tensor

    @staticmethod
    def of(model: Llama, token_map: torch.Tensor) -> Frozen:
        """`model` as `dense_copy` makes it."""
        import torch

        device = model.lm_head.weight.device
        places = torch.full((model.config.vocab_size,), -1, dtype=torch.int64, device=device)
        places[token_map.long().to(device)] = torch.arange(len(token_map), device=device)
        rows = model.lm_head.weight[token_map.long().to(device)].float()
        return Frozen(model.embed_tokens.weight, rows, token_map, places)


def choose_vocabulary(texts: Sequence[Streams], size: int, always: Sequence[int], vocab: int) -> torch.Tensor:
    """The most frequent tokens, ascending, (size,) int32. Ties go to the smaller number, which BPE learnt earlier."""
    import torch

    counts = np.zeros(vocab, np.int64)
    for text in texts:
        counts += np.bincount(text.tokens.numpy().ravel(), minlength=vocab)
    counts[list(always)] = counts.max() + 1
    order = np.argsort(-counts, kind="stable")[: min(size, vocab)]
    return torch.from_numpy(np.sort(order).astype(np.int32))


def start_from(head: Head, frozen: Frozen, texts: Sequence[Streams]) -> None:
    """Let a new head begin with the target's own output rows, its last norm scaled as the target's states are."""
    import torch

    with torch.no_grad():
        head.token_map.copy_(frozen.token_map)
        head.head.weight.copy_(frozen.rows)
        sample = texts[0].hidden[: min(8, len(texts[0].hidden))].float()
        head.norm.weight.fill_(float(sample.pow(2).mean(-1).sqrt().mean()))


def train_head(
    head: Head,
    frozen: Frozen,
    texts: Sequence[Streams],
    *,
    epochs: int,
    lr: float,
    unroll: int,
    window: int,
    batch: int,
    precision: Precision,
    feature: float,
    seed: int,
    file: Path,
    on_step: Callable[[int, int, float], None] = lambda *_: None,
) -> list[float]:
    """Train `head` in place; gives each step's loss. Goes on from `file` when it holds this run's checkpoint.

    Args:
        epochs: passes over the texts.
        lr: the greatest learning rate; half a cosine takes it to zero.
        unroll: steps that are trained from every position.
        window: tokens of a piece of text.
        batch: pieces of a training step.
        feature: weight of the distance between s_i and the target's own h_{t+i} (EAGLE's regression), 0 for none.
        file: where checkpoints go.
        on_step: called as `on_step(done, total, loss)`.

    Raises:
        ConversionError: the loss is not finite.
    """
    import torch

    from .training import _lr_factor

    device = frozen.rows.device
    decaying = [p for p in head.parameters() if p.dim() > 1]
    others = [p for p in head.parameters() if p.dim() <= 1]
    groups = [{"params": decaying, "weight_decay": WEIGHT_DECAY}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), fused=True)
    per_epoch = sum(t.tokens.shape[0] * (t.tokens.shape[1] // window) for t in texts) // batch
    if not per_epoch:
        raise ConversionError("draft_head: there is less text than one training step takes", reason=Reason.EMPTY_DATA)
    options = ["draft_head", epochs, lr, unroll, window, batch, precision, feature, per_epoch]
    checkpoint = Checkpoint(file, fingerprint(head, options, [seed]), 0, 1)
    step, losses = checkpoint.load(head, optimizer)
    total = epochs * per_epoch
    head.train()
    for epoch in range(step // per_epoch, epochs):
        for hidden, tokens, valid, normalisers in _windows(texts, window, batch, seed, epoch, step % per_epoch):
            for group in optimizer.param_groups:
                group["lr"] = lr * _lr_factor(step, total, "cosine", WARM_UP)
            optimizer.zero_grad(set_to_none=True)
            with torch.autocast(device.type, torch.bfloat16, enabled=precision == "bfloat16"):
                loss = _loss(head, frozen, hidden, tokens, valid, normalisers, unroll, feature)
            value = float(loss.detach())
            if not np.isfinite(value):
                raise ConversionError(
                    f"draft_head: the loss became {value} in step {step}",
                    hint=f"lower `lr` (now {lr:g})",
                    reason=Reason.NOT_FINITE,
                )
            loss.backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(head.parameters(), 1.0)
            optimizer.step()
            step += 1
            losses.append(value)
            if step % CHECKPOINT_EVERY == 0 or step == total:
                checkpoint.save(head, optimizer, step, losses)
            on_step(step, total, value)
    head.eval()
    return losses


def _windows(
    texts: Sequence[Streams], window: int, batch: int, seed: int, epoch: int, skip: int
) -> Iterator[tuple[torch.Tensor, ...]]:
    """Batches of an epoch from number `skip` on: hidden (B, W, hidden), tokens, starts and normalisers (B, W)."""
    import torch

    places = [
        (i, row, at)
        for i, text in enumerate(texts)
        for row in range(text.tokens.shape[0])
        for at in range(0, text.tokens.shape[1] - window + 1, window)
    ]
    order = np.random.default_rng((seed, epoch)).permutation(len(places))
    for first in range(skip * batch, len(order) - batch + 1, batch):
        chosen = [places[k] for k in order[first : first + batch]]

        def cut(name: str, chosen: list[tuple[int, int, int]] = chosen) -> torch.Tensor:
            return torch.stack([getattr(texts[i], name)[row, at : at + window] for i, row, at in chosen])

        yield cut("hidden").float(), cut("tokens").long(), cut("starts"), cut("normalisers")


def _loss(
    head: Head,
    frozen: Frozen,
    hidden: torch.Tensor,
    tokens: torch.Tensor,
    starts: torch.Tensor,
    normalisers: torch.Tensor,
    unroll: int,
    feature: float,
) -> torch.Tensor:
    """The weighted mean over steps of −Σ p log q, and of `feature` times |s_i − h_{t+i}|² over the mean |h|²."""
    import torch
    from torch.nn import functional

    device = frozen.rows.device
    hidden, tokens, starts, normalisers = (t.to(device) for t in (hidden, tokens, starts, normalisers))
    embedded = functional.embedding(tokens[:, 1:], frozen.embedding).float()  # of x_{t+1}
    with torch.no_grad():
        wanted = (functional.linear(hidden, frozen.rows).float() - normalisers[..., None]).exp()  # (B, W, V_d)
    total, weights = torch.zeros((), device=device), 0.0
    for i, state in enumerate(head.unroll(hidden[:, :-1], embedded, unroll), 1):
        # The state of position t after step i answers for position t + i, if both are of one text.
        count = state.shape[1]
        same = (starts[:, i:] == starts[:, : starts.shape[1] - i])[:, :count]
        log_q = functional.log_softmax(head.logits(state[same]).float(), -1)
        cross = -(wanted[:, i : i + count][same] * log_q).sum(-1)
        step = cross.mean()
        if feature:
            ahead = hidden[:, i : i + count][same]
            step = step + feature * (state[same].float() - ahead).pow(2).mean() / ahead.pow(2).mean()
        total = total + STEP_WEIGHT ** (i - 1) * step
        weights += STEP_WEIGHT ** (i - 1)
    return total / weights


@dataclass(frozen=True)
class Acceptance:
    """How often the target takes a head's drafts, by their place in a run: each given that those before were taken.

    Attributes:
        greedy: at temperature 0.
        sampled: at temperature 1 (Leviathan et al., 2023: Σ min(p, q)).
        covered: share of the text's tokens that are in the draft vocabulary.
        tokens: how many tokens it was measured over, at temperature 0 and at 1.
    """

    greedy: tuple[float, ...]
    sampled: tuple[float, ...]
    covered: float
    tokens: tuple[int, int]

    @staticmethod
    def per_step(rates: Sequence[float], drafts: int) -> float:
        """Tokens that a step of `drafts` drafted tokens yields: those accepted, and the target's own after them."""
        return 1.0 + float(np.cumprod(rates[:drafts]).sum())


def measure(head: Head, frozen: Frozen, texts: Sequence[Streams], steps: int) -> Acceptance:
    """Acceptance of the first `steps` drafts, over the tokens that the target wrote itself.

    A draft at place i comes to be judged when those before it were accepted. At temperature 0 that is known; at 1 the
    text x is the target's own sample, and min(1, q(x)/p(x)) is how likely this very token would have come from an
    accepted draft: it weighs what follows.
    """
    import torch

    taken, reached = np.zeros((2, steps)), np.zeros((2, steps))
    known, written = 0, 0
    with torch.no_grad():
        for text in texts:
            for row in range(text.tokens.shape[0]):
                temperature = float(text.temperatures[row])
                own = text.written[row]
                known += int((frozen.places.cpu()[text.tokens[row][own].long()] >= 0).sum())
                written += int(own.sum())
                if temperature not in (0.0, 1.0):
                    continue
                kind = int(temperature)
                a, b = _judge(head, frozen, text, row, steps, greedy=kind == 0)
                taken[kind] += a
                reached[kind] += b
    rates = taken / np.maximum(reached, 1e-9)
    return Acceptance(
        tuple(float(r) for r in rates[0]),
        tuple(float(r) for r in rates[1]),
        known / max(1, written),
        (round(reached[0, 0]), round(reached[1, 0])),
    )


def _judge(
    head: Head, frozen: Frozen, text: Streams, row: int, steps: int, *, greedy: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Accepted and judged drafts of one row by place, each (steps,)."""
    import torch
    from torch.nn import functional

    device = frozen.rows.device
    tokens, starts = text.tokens[row].long().to(device), text.starts[row].to(device)
    own, hidden = text.written[row].to(device), text.hidden[row].float().to(device)
    embedded = functional.embedding(tokens[1:], frozen.embedding).float()
    target = functional.linear(hidden, frozen.rows) - text.normalisers[row].to(device)[:, None]  # log p, (L, V_d)
    length = len(tokens)
    weight = torch.ones(length, device=device)
    taken, reached = np.zeros(steps), np.zeros(steps)
    for i, state in enumerate(head.unroll(hidden[None, :-1], embedded[None], steps), 1):
        count = length - 1 - i  # positions t whose draft for x_{t+i+1} can be judged
        if count < 1:
            break
        logits = head.logits(state[0, :count]).float()
        truth = tokens[i + 1 :]  # x_{t+i+1}
        live = (starts[i + 1 :] == starts[:count]) & own[i + 1 :] & own[1 : count + 1]
        weight = weight[:count] * live
        if greedy:
            accepted = (frozen.token_map.to(device).long()[logits.argmax(-1)] == truth).float()
            onward = accepted
        else:
            p, q = target[i : i + count].exp(), torch.softmax(logits, -1)
            accepted = torch.minimum(p, q).sum(-1)
            place = frozen.places[truth]
            at = place.clamp(min=0)[:, None]
            ratio = (q.gather(1, at) / p.gather(1, at).clamp(min=1e-9)).squeeze(1).clamp(max=1.0)
            onward = torch.where(place >= 0, ratio, torch.zeros_like(ratio))
        taken[i - 1] += float((weight * accepted).sum())
        reached[i - 1] += float(weight.sum())
        weight = weight * onward
    return taken, reached
