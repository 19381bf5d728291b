"""The pass draft_head on a tiny decoder: what the model writes, what the head learns, and how it travels."""

from __future__ import annotations

import dataclasses
import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from edgec.passes.draft_head import DraftHeadOptions, draft_head
from edgec.passes.draft_head_prompts import KOREAN, SUBJECTS, TASKS, Prompts
from edgec.passes.draft_head_text import Streams, _draw, dense_copy, write_streams
from edgec.passes.draft_head_train import Frozen, _loss, choose_vocabulary, measure, start_from, train_head
from edgec.passes.draft_head_writers import EngineWriter, TorchWriter, Writer, native_files
from edgec.passes.quantize_weights import quantizable, quantize_layers

from edgec.architectures.draft_head import DraftShape, Head, RecurrentHead, build, pack, unpack
from edgec.architectures.llama import Llama
from edgec.checkpoint import load_model, model_bytes, save_model
from edgec.context import Context
from edgec.draft import Draft
from edgec.errors import ConversionError, Reason
from edgec.model import LayerScheme, Model, Quantization
from tests.tasks.tiny_lm import VOCAB, llama, task, write_tokenizer

RECURRENT, ATTENTIVE = DraftShape("recurrent", (64, 32), 96), DraftShape("attentive", (64,), 96)
DESIGNS = pytest.mark.parametrize("shape", [RECURRENT, ATTENTIVE], ids=["recurrent", "attentive"])
SMALL = {"widths": (64,), "vocabulary": 256, "tokens": 2048, "rows": 8, "length": 64, "held_out": 8, "epochs": 4}
SMALL |= {"window": 32, "batch": 4, "max_share": 1.0, "longest": 20, "precision": "float32", "unroll": 2}


@pytest.fixture(scope="module")
def target() -> Llama:
    return llama(layers=1, hidden_size=64, heads=4, kv_heads=2, head_dim=16)


@pytest.fixture(scope="module")
def streams(target: Llama) -> Streams:
    return written(target)


TEMPERATURES = (0.0, 1.0, 0.7, 1.0) * 2


def written(target: Llama, seed: int = 0, temperatures: tuple[float, ...] = TEMPERATURES) -> Streams:
    return written_by(TorchWriter(dense_copy(target, torch.float32), 64), seed, temperatures)


def written_by(writer: Writer, seed: int = 0, temperatures: tuple[float, ...] = TEMPERATURES) -> Streams:
    random = np.random.default_rng(seed)
    prompts = (random.integers(2, VOCAB, size=random.integers(1, 9)).tolist() for _ in itertools.count())
    sizes = {"length": 64, "longest": 15}
    return write_streams(writer, prompts, temperatures=temperatures, ends=(7, 8), seed=seed, **sizes)


def randomised(head: Head) -> Head:
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.normal_(std=0.1) if parameter.dim() > 1 else parameter.uniform_(0.5, 1.5)
    head.token_map.copy_(torch.arange(0, 2 * head.shape.vocab, 2))
    return head.eval()


# The heads


@DESIGNS
def test_a_run_of_drafts_depends_on_its_own_past_only(target: Llama, shape: DraftShape) -> None:
    head = randomised(build(target.config, shape))
    hidden, embedded = torch.randn(2, 9, 64), torch.randn(2, 9, 64)
    states = head.unroll(hidden, embedded, 3)
    assert [s.shape[1] for s in states] == [9, 8, 7]
    for t in range(7):
        # h_t is the last hidden state that a run from t may use, and x_{t+i} its last token at step i.
        later_hidden, later_embedded = hidden.clone(), embedded.clone()
        later_hidden[:, t + 1 :] += 1
        later_embedded[:, t + 3 :] += 1
        changed = head.unroll(later_hidden, later_embedded, 3)
        for i in range(3):
            assert torch.allclose(changed[i][:, t], states[i][:, t], atol=1e-5)
    earlier = embedded.clone()
    earlier[:, 4] += 1
    assert not torch.allclose(head.unroll(hidden, earlier, 3)[2][:, 4], states[2][:, 4], atol=1e-3)


def test_attentive_head_is_causal_attention_over_one_text(target: Llama) -> None:
    """Running the head over the text up to t, then over its own drafts, one position after the other."""
    head = randomised(build(target.config, ATTENTIVE))
    hidden, embedded = torch.randn(1, 8, 64), torch.randn(1, 8, 64)
    states = head.unroll(hidden, embedded, 3)
    t = 4
    inputs, tokens = hidden[:, : t + 1], embedded[:, : t + 1]
    for i in range(3):
        # A text whose last positions are the run itself: its causal first step is step i + 1 of the run.
        state = head.unroll(inputs, tokens, 1)[0][:, -1]
        assert torch.allclose(state, states[i][:, t], atol=1e-4)
        inputs = torch.cat((inputs, state[:, None]), 1)
        tokens = embedded[:, : t + 2 + i]


def test_recurrent_head_is_the_formula(target: Llama) -> None:
    head = randomised(build(target.config, RECURRENT))
    assert isinstance(head, RecurrentHead)
    w = {name: value.detach() for name, value in head.named_parameters()}
    state, embedded = torch.randn(64), torch.randn(64)

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return x / torch.sqrt((x * x).mean() + target.config.norm_eps) * w[f"{name}.weight"]

    def gated(u: torch.Tensor, block: str) -> torch.Tensor:
        inner = torch.nn.functional.silu(w[f"{block}.gate_proj.weight"] @ u) * (w[f"{block}.up_proj.weight"] @ u)
        return w[f"{block}.down_proj.weight"] @ inner

    s = state + gated(torch.cat((norm(state, "blocks.0.norm"), norm(embedded, "embed_norm"))), "blocks.0")
    s = s + gated(norm(s, "blocks.1.norm"), "blocks.1")
    assert torch.allclose(head.step(state, embedded), s, atol=1e-5)
    assert torch.allclose(head.logits(s), w["head.weight"] @ norm(s, "norm"), atol=1e-5)


def test_packed_weights_are_those_that_the_engine_reads(target: Llama) -> None:
    tensors = pack(randomised(build(target.config, RECURRENT)))
    found = {name: (str(t.dtype).removeprefix("torch."), tuple(t.shape)) for name, t in tensors.items()}
    expected: dict[str, Any] = {
        "draft.embed_norm.weight": ("float32", (64,)),
        "draft.norm.weight": ("float32", (64,)),
        "draft.head.weight": ("int8", (96, 64)),
        "draft.head.scale": ("float32", (96,)),
        "draft.token_map": ("int32", (96,)),
    }
    for b, (width, inputs) in enumerate(((64, 128), (32, 64))):
        expected[f"draft.blocks.{b}.norm.weight"] = ("float32", (64,))
        for name, rows, columns in (("gate_proj", width, inputs), ("up_proj", width, inputs), ("down_proj", 64, width)):
            expected[f"draft.blocks.{b}.{name}.weight"] = ("int8", (rows, columns))
            expected[f"draft.blocks.{b}.{name}.scale"] = ("float32", (rows,))
    assert found == expected


@DESIGNS
def test_a_packed_head_computes_what_the_head_computes(target: Llama, shape: DraftShape) -> None:
    head = randomised(build(target.config, shape))
    back = unpack(target.config, shape, pack(head))
    hidden, embedded = torch.randn(1, 6, 64), torch.randn(1, 6, 64)
    for a, b in zip(head.unroll(hidden, embedded, 2), back.unroll(hidden, embedded, 2), strict=True):
        assert torch.nn.functional.cosine_similarity(head.logits(a), back.logits(b), -1).min() > 0.999
    assert torch.equal(head.token_map, back.token_map)
    damaged = pack(head)
    del damaged["draft.norm.weight"]
    with pytest.raises(ConversionError, match=r"norm\.weight"):
        unpack(target.config, shape, damaged)


@pytest.mark.parametrize("sizes", [((48,), 64), ((64,), 65), ((), 64)])
def test_sizes_that_the_engine_has_no_kernel_for_are_refused(sizes: tuple[tuple[int, ...], int]) -> None:
    with pytest.raises(ConversionError) as caught:
        DraftShape("recurrent", *sizes)
    assert caught.value.reason is Reason.BAD_OPTION


# What the target writes


def test_every_text_of_a_row_is_what_the_dense_model_computes(target: Llama, streams: Streams) -> None:
    texts = 0
    for row in range(len(streams.tokens)):
        for start in streams.starts[row].unique().tolist():
            own = torch.nonzero(streams.starts[row] == start).flatten()
            ids = streams.tokens[row, own].long()
            with torch.no_grad():
                hidden = target.hidden_states(ids[None])[0]
                logits = target.lm_head(hidden)
            assert torch.allclose(streams.hidden[row, own].float(), hidden, atol=2e-2, rtol=2e-3)
            assert torch.allclose(streams.normalisers[row, own], logits.logsumexp(-1), atol=1e-3)
            if streams.temperatures[row] == 0:
                says = streams.written[row, own][1:]
                assert torch.equal(ids[1:][says], logits.argmax(-1)[:-1][says])
            texts += 1
    assert texts > 3 * len(streams.tokens)  # answers end, and others begin behind them


def test_the_engine_writes_what_it_computes_of_each_text_alone(tmp_path: Path) -> None:
    """Placed blocks, texts that follow one another in them, and rows side by side change no bit."""
    from edgec.runtime.engine import Engine, EngineOptions

    module = tiny_model(tmp_path).module
    assert isinstance(module, Llama)
    native_files(module, (7, 8), tmp_path, tmp_path / "native")
    with EngineWriter(tmp_path / "native", len(TEMPERATURES), 64, threads=1) as writer:
        streams = written_by(writer)
        assert torch.equal(written_by(writer).tokens, streams.tokens)  # new rows in the blocks of others
    texts = 0
    with Engine(tmp_path / "native", EngineOptions(threads=1, context=64, block_size=16)) as engine:
        table = np.arange(1, 5, dtype=np.int32)[None]
        for row, column in itertools.product(range(len(streams.tokens)), range(64)):
            if streams.starts[row, column] != column:
                continue
            own = torch.nonzero(streams.starts[row] == column).flatten()
            at = np.arange(len(own), dtype=np.int32)
            ids = streams.tokens[row, own].numpy()
            logits, hidden = engine.forward(ids, at, at + 16, np.zeros_like(at), table, hidden_size=64)
            assert torch.equal(torch.tensor(hidden).half(), streams.hidden[row, own])
            assert torch.allclose(torch.tensor(logits).logsumexp(-1), streams.normalisers[row, own], atol=1e-5)
            if streams.temperatures[row] == 0:
                says = streams.written[row, own].numpy()[1:]
                assert np.array_equal(ids[1:][says], logits.argmax(-1)[:-1][says])
            texts += 1
    assert texts > 3 * len(streams.tokens)


def test_tokens_are_drawn_from_the_distribution() -> None:
    torch.manual_seed(0)
    logits = torch.randn(300) * 2
    logits[128:256] = float("-inf")  # a block without weight
    probability = torch.softmax(logits, -1).numpy()
    drawn = _draw(logits.exp().expand(40_000, -1), torch.Generator().manual_seed(1)).numpy()
    counts = np.bincount(drawn, minlength=300)
    assert counts[128:256].sum() == 0
    expected = probability * counts.sum()
    usual = expected >= 5
    chi = float((((counts - expected) ** 2)[usual] / expected[usual]).sum())
    assert chi < usual.sum() + 5 * np.sqrt(2 * usual.sum())


def test_an_answer_ends_where_the_model_ends_it_or_at_the_longest(streams: Streams) -> None:
    ended = 0
    for row in range(len(streams.tokens)):
        for start in streams.starts[row].unique().tolist()[:-1]:
            own = streams.starts[row] == start
            said = streams.tokens[row][own & streams.written[row]].tolist()
            assert 1 <= len(said) <= 15
            assert not set(said[:-1]) & {7, 8}
            assert said[-1] in (7, 8) or len(said) == 15
            ended += said[-1] in (7, 8)
    assert ended


def test_sampled_rows_follow_the_temperature(target: Llama) -> None:
    hot, cold = written(target, 3, (1.0,) * 8), written(target, 3, (0.0,) * 8)

    def likelihood(s: Streams) -> float:
        logits = target.lm_head(s.hidden.float()) - s.normalisers[..., None]
        of_next = logits[:, :-1].gather(-1, s.tokens[:, 1:, None].long()).squeeze(-1)
        return float(of_next[s.written[:, 1:]].mean().detach())

    def entropy(s: Streams) -> float:
        log_p = target.lm_head(s.hidden.float()) - s.normalisers[..., None]
        return float((log_p.exp() * log_p).sum(-1)[:, :-1][s.written[:, 1:]].mean().detach())

    assert likelihood(hot) == pytest.approx(entropy(hot), abs=0.25)  # E log p(x) over x ~ p
    assert likelihood(cold) > likelihood(hot) + 0.3


def test_int8_weights_count_as_scale_times_q(target: Llama) -> None:
    module = llama(layers=1)
    quantize_layers(module, list(quantizable(module, embeddings=True)))
    ids = torch.arange(2, 20)[None]
    with torch.no_grad():
        assert torch.allclose(dense_copy(module, torch.float32)(ids), module(ids), atol=1e-5)


# Prompts


def prompts(folder: Path, template: str | None = None, **options: Any) -> tuple[Prompts, Any]:
    from tokenizers import Tokenizer

    write_tokenizer(folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))

    def encode(text: str, *, special: bool = False) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False).ids)

    settings = {} if template is None else {"chat_template": template}
    return Prompts(folder, settings, encode, **options), lambda ids: tokenizer.decode(ids, skip_special_tokens=False)


def test_held_out_subjects_and_text_are_never_drawn_to_learn_from(tmp_path: Path) -> None:
    text = np.concatenate([np.full(9000, 50, np.int32), np.full(1000, 60, np.int32)])
    made, decode = prompts(tmp_path, texts=[text])
    seen = {held: [decode(p) for p in itertools.islice(made.draw(0, held_out=held), 600)] for held in (False, True)}
    for subjects in (SUBJECTS, TASKS, KOREAN):
        held = subjects.split("|")[9::10]
        assert not [p for p in seen[False] for s in held if s in p and len(s) > 8]
        assert [p for p in seen[True] for s in held if s in p]
    assert not any(decode([60] * 8) in p for p in seen[False]) and any(decode([60] * 8) in p for p in seen[True])


def test_the_same_seed_draws_the_same_prompts_and_another_does_not(tmp_path: Path) -> None:
    made, _ = prompts(tmp_path)
    first, again, other = (list(itertools.islice(made.draw(s), 20)) for s in (0, 0, 1))
    assert first == again != other


def test_questions_are_asked_in_the_chat_template_and_the_model_may_ask_its_own(tmp_path: Path) -> None:
    template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</>{% endfor %}<assistant>"
    made, decode = prompts(tmp_path, template, listed=["why?"])
    assert set(made.kinds) == {"own", "chat", "code", "korean", "prose", "listed"}
    listed, own = (decode(next(made.draw(0, kinds=[kind]))) for kind in ("listed", "own"))
    assert (listed, own) == ("<user>why?</><assistant>", "<user>")


# Learning


def learn(head: Head, frozen: Frozen, texts: list[Streams], file: Path, stop: int | None = None) -> list[float]:
    def on_step(done: int, total: int, loss: float) -> None:
        if done == stop:
            raise KeyboardInterrupt

    return train_head(
        head, frozen, texts,
        epochs=26, lr=1e-2, unroll=2, window=32, batch=4, precision="float32", feature=0.1, seed=0, file=file,
        on_step=on_step,
    )  # fmt: skip


@DESIGNS
def test_the_loss_is_cross_entropy_by_step_the_later_ones_weighing_less(
    target: Llama, streams: Streams, shape: DraftShape
) -> None:
    shape = dataclasses.replace(shape, vocab=224)
    frozen = Frozen.of(target, choose_vocabulary([streams], 224, (7, 8), VOCAB))
    head = randomised(build(target.config, shape))
    pieces = [t[:4, :32] for t in (streams.hidden.float(), streams.tokens.long(), streams.starts, streams.normalisers)]
    with torch.no_grad():
        given = float(_loss(head, frozen, *pieces, unroll=3, feature=0.5))
        wanted = 0.0
        for step, share in ((1, 1.0), (2, 0.8), (3, 0.64)):
            crosses, distances, lengths = [], [], []
            for hidden, tokens, starts, normalisers in zip(*pieces, strict=True):
                states = head.unroll(hidden[None, :-1], target.embed_tokens.weight[tokens[None, 1:]], step)[-1][0]
                for t in range(32 - step):
                    if starts[t] != starts[t + step]:
                        continue
                    p = (frozen.rows @ hidden[t + step] - normalisers[t + step]).exp()
                    crosses.append(-(p * torch.log_softmax(head.logits(states[t]), -1)).sum())
                    distances.append((states[t] - hidden[t + step]).pow(2).mean())
                    lengths.append(hidden[t + step].pow(2).mean())
            apart = sum(distances) / sum(lengths)
            wanted += share * (float(sum(crosses)) / len(crosses) + 0.5 * float(apart))
    assert given == pytest.approx(wanted / 2.44, rel=1e-4)


@pytest.mark.slow
@DESIGNS
def test_a_head_learns_what_its_target_writes(target: Llama, shape: DraftShape, tmp_path: Path) -> None:
    texts = [written(target, s) for s in range(2)]  # a random target's text can be learnt by heart, and no more
    shape = dataclasses.replace(shape, vocab=224)
    frozen = Frozen.of(target, choose_vocabulary(texts, 224, (7, 8), VOCAB))
    torch.manual_seed(0)
    head = build(target.config, shape)
    start_from(head, frozen, texts)
    before = measure(head, frozen, texts, 2)
    losses = learn(head, frozen, texts, tmp_path / "x.pt")
    after = measure(head, frozen, texts, 2)
    assert np.mean(losses[-10:]) < np.mean(losses[:10])
    assert after.greedy[0] > before.greedy[0] + 0.2
    assert all(new > old + 0.1 for new, old in zip(after.sampled, before.sampled, strict=True))


@pytest.mark.slow
def test_a_stopped_run_ends_with_the_weights_of_one_that_was_not(target: Llama, tmp_path: Path) -> None:
    texts = [written(target, s) for s in range(2)]
    frozen = Frozen.of(target, choose_vocabulary(texts, 96, (), VOCAB))

    def fresh() -> Head:
        torch.manual_seed(0)
        head = build(target.config, RECURRENT)
        start_from(head, frozen, texts)
        return head

    whole, stopped, resumed = fresh(), fresh(), fresh()
    expected = learn(whole, frozen, texts, tmp_path / "a.pt")
    with pytest.raises(KeyboardInterrupt):
        learn(stopped, frozen, texts, tmp_path / "b.pt", stop=60)  # after the checkpoint of step 50
    assert learn(resumed, frozen, texts, tmp_path / "b.pt") == expected
    for (name, a), b in zip(whole.state_dict().items(), resumed.state_dict().values(), strict=True):
        assert torch.equal(a, b), name


def test_the_draft_vocabulary_is_of_the_most_frequent_tokens(streams: Streams) -> None:
    chosen = choose_vocabulary([streams], 96, (0, 1), VOCAB).tolist()
    assert chosen == sorted(set(chosen)) and {0, 1} <= set(chosen)
    counts = np.bincount(streams.tokens.numpy().ravel(), minlength=VOCAB)
    left_out = sorted(set(range(VOCAB)) - set(chosen))
    assert counts[left_out].max() <= min(counts[t] for t in chosen if t > 1)


# Acceptance


class Oracle(RecurrentHead):
    """Knows every hidden state that is to come, and says of the target's logits what `spoil` makes of them."""

    def __init__(self, target: Llama, streams: Streams, spoil: Any) -> None:
        super().__init__(target.config, DraftShape("recurrent", (32,), 256))
        self.target, self.spoil, self.streams = target, spoil, streams

    def unroll(self, hidden: torch.Tensor, embedded: torch.Tensor, steps: int) -> list[torch.Tensor]:
        row = next(i for i, h in enumerate(self.streams.hidden) if torch.equal(h[:-1].float(), hidden[0]))
        return [self.streams.hidden[row, i:].float()[None] for i in range(1, steps + 1)]

    def logits(self, state: torch.Tensor) -> torch.Tensor:
        return self.spoil(self.target.lm_head(state)[..., :256])


def acceptance(target: Llama, spoil: Any) -> Any:
    streams = written(target, 5, (0.0, 1.0) * 8)
    frozen = Frozen.of(target, torch.arange(256, dtype=torch.int32))
    return measure(Oracle(target, streams, spoil), frozen, [streams], 3)


def test_a_head_that_is_the_target_is_always_accepted(target: Llama) -> None:
    found = acceptance(target, lambda logits: logits)
    assert min(found.greedy) > 0.99
    assert min(found.sampled) > 0.97  # all but the two tokens that it can't say
    assert found.per_step(found.greedy, 3) == pytest.approx(4, abs=0.05)


def test_acceptance_at_temperature_1_is_that_of_the_paper(target: Llama) -> None:
    """A flatter head: Σ min(p, q) over the text, next to what rejection sampling does with draws of q."""
    found = acceptance(target, lambda logits: 0.3 * logits)
    streams = written(target, 5, (0.0, 1.0) * 8)
    logits = target.lm_head(streams.hidden.float())[..., :256].detach()
    p, q = torch.softmax(logits, -1), torch.softmax(0.3 * logits, -1)
    random = torch.Generator().manual_seed(0)
    drawn = torch.multinomial(q.flatten(0, 1), 1, generator=random)
    ratio = (p.flatten(0, 1).gather(1, drawn) / q.flatten(0, 1).gather(1, drawn)).clamp(max=1)
    accepted = torch.rand(ratio.shape, generator=random) < ratio
    assert found.sampled[0] == pytest.approx(float(accepted.float().mean()), abs=0.06)
    assert found.sampled[0] < 0.9 and found.greedy[0] > 0.99  # the same argmax, another distribution


def test_a_head_that_is_wrong_is_not_accepted(target: Llama) -> None:
    assert max(acceptance(target, lambda logits: -logits).greedy) < 0.05


# The pass


def context(folder: Path) -> Context:
    return Context(seed=0, threads=1, work=folder / "work", recipe_dir=folder, cache=folder, out=folder / "out")


def tiny_model(folder: Path) -> Model:
    module = llama(layers=1, hidden_size=64, heads=4, kv_heads=2, head_dim=16)
    names = list(quantizable(module, embeddings=True))
    quantize_layers(module, names)
    quantization = Quantization("weight-only", tuple(LayerScheme(n, "linear", "int8", 0) for n in names))
    return Model(module, task(folder), {}, quantization)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Model, Model, Context]:
    folder = tmp_path_factory.mktemp("draft")
    model, surroundings = tiny_model(folder), context(folder)
    return model, draft_head(model, DraftHeadOptions.model_validate(SMALL), surroundings), surroundings


def test_the_pass_gives_a_head_and_leaves_the_model(trained: tuple[Model, Model, Context]) -> None:
    model, result, surroundings = trained
    assert result.module is model.module and result.draft is not None and model.draft is None
    assert result.draft.shape == {"design": "recurrent", "widths": [64], "vocab": 256}
    metrics = surroundings.log.metrics
    assert metrics["draft_bytes"] == result.draft.bytes == model_bytes(result) - model_bytes(model)
    assert all(0 <= metrics[f"draft_{kind}_{i}"] <= 1 for kind in ("greedy", "sampled") for i in range(1, 6))


def test_the_same_seed_trains_the_same_head(trained: tuple[Model, Model, Context], tmp_path: Path) -> None:
    again = draft_head(tiny_model(tmp_path), DraftHeadOptions.model_validate(SMALL), context(tmp_path))
    assert again.draft is not None and trained[1].draft is not None
    assert all(torch.equal(t, again.draft.tensors[name]) for name, t in trained[1].draft.tensors.items())


def test_a_head_survives_the_way_to_disk(trained: tuple[Model, Model, Context], tmp_path: Path) -> None:
    result = trained[1]
    save_model(result, tmp_path)
    sizes = {"layers": 1, "hidden_size": 64, "heads": 4, "kv_heads": 2, "head_dim": 16}
    back = load_model(tmp_path, result.task, tmp_path, architecture=lambda *_: llama(**sizes))
    assert back.draft is not None and result.draft is not None and back.draft.shape == result.draft.shape
    assert all(torch.equal(t, back.draft.tensors[name]) for name, t in result.draft.tensors.items())


@pytest.mark.slow
def test_a_head_travels_into_the_native_artefact(trained: tuple[Model, Model, Context], tmp_path: Path) -> None:
    from edgec.passes.export import ExportOptions, export_program
    from edgec.targets.native import NativeOptions
    from edgec.targets.native_model import MODEL_FILE, read_draft, write_manifest, write_model
    from safetensors.torch import load_file

    from edgec.decoder import program_state, read_decoder
    from edgec.model import artifact_file

    result, surroundings = trained[1], context(tmp_path)
    program = export_program(result, ExportOptions(), surroundings, baseline=None)
    decoder, draft = read_decoder(program, "native"), read_draft(program)
    assert draft is not None and result.draft is not None
    write_model(program_state(program), decoder, draft, tmp_path)
    write_manifest(tmp_path, decoder, draft, NativeOptions(context=16), [artifact_file(tmp_path, MODEL_FILE, "model")])
    tensors, manifest = load_file(tmp_path / MODEL_FILE), json.loads((tmp_path / "manifest.json").read_text())
    assert manifest["draft"] == {"design": "recurrent", "widths": [64], "vocab": 256}
    assert all(torch.equal(t, tensors[name]) for name, t in result.draft.tensors.items())
    attentive = dataclasses.replace(draft, shape={**draft.shape, "design": "attentive"})
    attentive.save(program.path / "companions/draft.safetensors")
    with pytest.raises(ConversionError, match="recurrent"):
        read_draft(program)


def test_a_head_that_is_too_large_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    options = DraftHeadOptions.model_validate(SMALL | {"max_share": 0.08})
    with pytest.raises(ConversionError, match="max_share") as caught:
        draft_head(tiny_model(tmp_path), options, context(tmp_path))
    assert caught.value.reason is Reason.BAD_OPTION and not (tmp_path / "work").exists()


def test_a_killed_pass_keeps_what_the_model_has_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from edgec.passes import draft_head_text, draft_head_train

    def fail(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    options = DraftHeadOptions.model_validate(SMALL | {"epochs": 1})
    with monkeypatch.context() as patched:
        patched.setattr(draft_head_train, "train_head", fail)
        with pytest.raises(KeyboardInterrupt):
            draft_head(tiny_model(tmp_path), options, context(tmp_path))
    monkeypatch.setattr(draft_head_text, "write_streams", fail)  # nothing is written again
    assert draft_head(tiny_model(tmp_path), options, context(tmp_path)).draft is not None


def test_the_engine_is_refused_for_float_weights_and_replaced_where_it_cannot_be_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from edgec.errors import ToolMissing
    from edgec.runtime import library

    float_model = dataclasses.replace(
        tiny_model(tmp_path), module=llama(layers=1, hidden_size=64, heads=4, kv_heads=2, head_dim=16)
    )
    options = SMALL | {"epochs": 1, "tokens": 1024}
    with pytest.raises(ConversionError, match="INT8") as caught:
        draft_head(float_model, DraftHeadOptions.model_validate(options | {"writer": "engine"}), context(tmp_path))
    assert caught.value.reason is Reason.BAD_OPTION

    def missing() -> Path:
        raise ToolMissing("no compiler here")

    monkeypatch.setattr(library, "compiled", missing)
    surroundings = context(tmp_path / "other")
    assert draft_head(tiny_model(tmp_path), DraftHeadOptions.model_validate(options), surroundings).draft is not None
    assert any("no compiler here" in note for note in surroundings.log.notes)
    with pytest.raises(ToolMissing):
        asked = DraftHeadOptions.model_validate(options | {"writer": "engine"})
        draft_head(tiny_model(tmp_path), asked, context(tmp_path / "third"))


def test_what_is_no_language_model_is_refused(tmp_path: Path) -> None:
    model = dataclasses.replace(tiny_model(tmp_path), module=torch.nn.Linear(2, 2))
    with pytest.raises(ConversionError, match="Llama family"):
        draft_head(model, DraftHeadOptions.model_validate(SMALL), context(tmp_path))


def test_a_damaged_file_says_so(tmp_path: Path) -> None:
    from edgec.errors import StoreError

    (tmp_path / "draft.safetensors").write_bytes(b"no")
    with pytest.raises(StoreError, match="damaged"):
        Draft.load(tmp_path / "draft.safetensors")


def test_a_pass_behind_the_head_would_leave_it_behind(
    trained: tuple[Model, Model, Context], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from edgec import checkpoint, stages

    monkeypatch.setattr(stages, "make_task", lambda *_: trained[1].task)
    monkeypatch.setattr(checkpoint, "load_model", lambda *_: trained[1])
    empty: dict[str, Any] = {"options": {}, "task": "", "task_options": {}, "measure": {}, "seed": 0, "threads": 1}
    places = dict.fromkeys(("recipe_dir", "cache", "out", "work"), str(tmp_path))
    request = stages.Request("prune", "pass", "prune", **empty, **places, inputs={"source": "", "model": ""})
    with pytest.raises(ConversionError, match="draft head") as caught:
        stages.run(request, context(tmp_path))
    assert "`draft_head` behind" in caught.value.hint
