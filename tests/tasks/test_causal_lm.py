"""Task causal-lm: what it exports, records and measures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from edgec.errors import Reason, RecipeError, SourceError
from edgec.golden import TorchRunner, carrying, replay
from edgec.tasks.causal_lm import CausalLm, CausalLmOptions
from tests.tasks.tiny_lm import SIZES, llama, task


class Opaque:
    """A runner that is not recognised as torch's, so that evaluation has to go through the paged graph."""

    stateful = False

    def __init__(self, runner: TorchRunner) -> None:
        self.runner, self.calls = runner, {"prefill": 0, "decode": 0}

    def run(self, signature: str, inputs: Any) -> dict[str, np.ndarray]:
        self.calls[signature] += 1
        return self.runner.run(signature, inputs)

    def reset(self) -> None:
        self.runner.reset()


def torch_runner(causal: CausalLm, module: torch.nn.Module) -> TorchRunner:
    signatures = causal.signatures(module)
    return TorchRunner({s.name: causal.bind(module, s) for s in signatures}, signatures)


def noisy(scale: float) -> torch.nn.Module:
    module = llama()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter += scale * torch.randn(parameter.shape, generator=generator)
    return module


def test_paged_evaluation_equals_dense_evaluation(tmp_path: Path) -> None:
    causal = task(tmp_path)
    runner = torch_runner(causal, llama())
    reference = causal.reference(runner)
    dense = causal.evaluate(runner, reference)
    opaque = Opaque(runner)
    paged = causal.evaluate(carrying(opaque, causal.signatures(llama())), reference)
    assert dense.keys() == paged.keys()
    for name, value in dense.items():
        assert paged[name] == pytest.approx(value, rel=1e-4, abs=1e-5)
    # 6 windows in two groups of 2 and 4 … each of 26 tokens in chunks of 6 and 5 decoded tokens.
    assert opaque.calls == {"prefill": 6 * 5, "decode": 3 * 5}


def test_perplexity_is_that_of_the_definition(tmp_path: Path) -> None:
    causal, module = task(tmp_path), llama()
    text = (tmp_path / "held-out.txt").read_text()[: 6 * 32]
    from tokenizers import Tokenizer

    ids = torch.tensor(Tokenizer.from_file(str(tmp_path / "tokenizer.json")).encode(text).ids).view(6, 32)
    with torch.no_grad():
        loss = torch.nn.functional.cross_entropy(module(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
    metrics = causal.evaluate(torch_runner(causal, module), None)
    assert metrics == {"perplexity": pytest.approx(float(loss.exp()), rel=1e-5)}


def test_float_model_has_no_divergence_from_itself(tmp_path: Path) -> None:
    causal = task(tmp_path)
    runner = torch_runner(causal, llama())
    metrics = causal.evaluate(runner, causal.reference(runner))
    assert metrics["perplexity_ratio"] == pytest.approx(1, abs=1e-9)
    assert metrics["kl"] == pytest.approx(0, abs=1e-5)
    assert metrics["top1_agreement"] == pytest.approx(1, abs=0.01)  # float16 makes ties


def test_divergence_grows_with_damage(tmp_path: Path) -> None:
    causal = task(tmp_path)
    reference = causal.reference(torch_runner(causal, llama()))
    little, much = (causal.evaluate(torch_runner(causal, noisy(s)), reference) for s in (0.005, 0.1))
    assert 1e-6 < little["kl"] < much["kl"]
    assert much["top1_agreement"] < little["top1_agreement"] <= 1


def test_few_windows_estimate_the_perplexity_of_all(tmp_path: Path) -> None:
    causal = task(tmp_path)
    reference = causal.reference(torch_runner(causal, llama()))
    runner = torch_runner(causal, noisy(0.003))
    whole = causal.evaluate(runner, reference)["perplexity"]
    assert causal.evaluate(runner, reference, limit=2)["perplexity"] == pytest.approx(whole, rel=0.01)
    assert causal.evaluate(runner, None, limit=2)["perplexity"] != pytest.approx(whole, rel=0.01)


def test_recording_interleaves_two_sequences_in_shared_pools(tmp_path: Path) -> None:
    steps = task(tmp_path).record()
    assert [s.signature for s in steps] == ["prefill"] * 2 + ["decode"] * 4 + ["prefill"] + ["decode"] * 2
    first, second = steps[-1].inputs["block_table"][:2]
    owned = [set(row[row > 0]) for row in (first, second)]
    assert all(owned) and not owned[0] & owned[1]
    assert list(first[first > 0]) != sorted(first[first > 0])
    assert (steps[-1].inputs["block_table"][2:] == 0).all()
    # Each real position is written once, in order, to the slot that the block table says.
    for row, table in enumerate((first, second)):
        written = [
            (int(p), int(s))
            for step in steps
            for r in range(len(step.inputs["tokens"]))
            if np.isin(step.inputs["block_table"][r], [0, *owned[row]]).all() and step.inputs["block_table"][r].any()
            for p, s in zip(step.inputs["positions"][r], step.inputs["slot_mapping"][r], strict=True)
            if s
        ]
        assert [p for p, _ in written] == list(range(len(written)))
        assert all(s == table[p // 4] * 4 + p % 4 for p, s in written)


def test_recorded_steps_compute_what_the_dense_model_computes(tmp_path: Path) -> None:
    causal, module = task(tmp_path), llama()
    steps = causal.record()
    outputs = replay(torch_runner(causal, module), causal.signatures(module), steps)
    chunk = causal.shape.chunk
    ids = causal._text("evaluation", causal.options.evaluation)[0]
    with torch.no_grad():
        dense = module(torch.from_numpy(ids[None]).long())[0].numpy()
    np.testing.assert_allclose(outputs[0]["logits"][0], dense[:chunk], atol=1e-4)
    np.testing.assert_allclose(outputs[-1]["logits"][0, 0], dense[2 * chunk + 5], atol=1e-4)


def test_calibration_gives_inputs_of_the_first_signature(tmp_path: Path) -> None:
    causal, module = task(tmp_path), llama()
    signature = causal.signatures(module)[0]
    batches = list(causal.calibration())
    assert len(batches) == 150 // 32
    for batch in batches:
        assert [tuple(t.shape) for t in batch] == [t.shape for t in signature.inputs]
        logits = causal.bind(module, signature)(*batch)[0]
        assert logits.shape == (1, 6, 258)


def test_training_batches_are_seeded_and_sharded(tmp_path: Path) -> None:
    causal = task(tmp_path, train={"from": "other.txt"}, train_batch=1)
    ranks = [[x.numpy().tobytes() for x, _ in causal.training(0, rank=r, world=2)] for r in range(2)]
    assert len(ranks[0]) == len(ranks[1]) == 2
    assert not set(ranks[0]) & set(ranks[1])
    assert ranks[0] == [x.numpy().tobytes() for x, _ in causal.training(0, rank=0, world=2)]
    orders = {tuple(x.numpy().tobytes() for x, _ in causal.training(e)) for e in range(4)}
    assert len(orders) > 1
    inputs, labels = next(iter(causal.training(0)))
    assert torch.equal(inputs[:, 1:], labels[:, :-1])
    assert causal.loss(llama()(inputs), labels).item() > 0


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"context": 30}, "not a multiple of block_size"),
        ({"blocks": 16}, "can't hold two sequences of 32: at least 17"),
        ({"decode_tokens": 31}, "leaves nothing"),
        ({"calibration": {"from": "held-out.txt"}}, "same text"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(change: dict[str, Any], says: str) -> None:
    with pytest.raises(ValidationError, match=says):
        CausalLmOptions.model_validate({"evaluation": {"from": "held-out.txt"}, **SIZES, **change})


def test_empty_text_is_an_error(tmp_path: Path) -> None:
    causal = task(tmp_path)
    (tmp_path / "held-out.txt").write_text(" \n")
    with pytest.raises(SourceError, match="holds no text") as caught:
        causal.record()
    assert caught.value.reason is Reason.EMPTY_DATA


def test_short_text_is_an_error(tmp_path: Path) -> None:
    causal = task(tmp_path)
    (tmp_path / "held-out.txt").write_text("too short")
    with pytest.raises(SourceError, match="9 tokens, fewer than one window of 32"):
        causal.record()


def test_binary_text_is_an_error(tmp_path: Path) -> None:
    causal = task(tmp_path)
    (tmp_path / "held-out.txt").write_bytes(b"\xff\xfe" * 100)
    with pytest.raises(SourceError, match="not UTF-8"):
        causal.record()


def test_model_without_tokenizer_is_an_error(tmp_path: Path) -> None:
    causal = task(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(SourceError, match="without a tokenizer"):
        causal.record()


def test_damaged_tokenizer_is_an_error(tmp_path: Path) -> None:
    causal = task(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(SourceError, match="is not a tokenizer"):
        causal.record()


def test_missing_calibration_text_is_named(tmp_path: Path) -> None:
    causal, module = task(tmp_path, calibration=None), llama()
    causal.signatures(module)
    with pytest.raises(RecipeError, match="no calibration text"):
        next(causal.calibration())


def test_another_architecture_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="exports Llama models, and this one is a Linear"):
        task(tmp_path).signatures(torch.nn.Linear(2, 2))
