"""INT8 activations: the reference's arithmetic is the native engine's, to the last bit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from edgec.targets.native import NativeOptions, convert
from safetensors.torch import load_file, save_file

from edgec.architectures.llama import Llama
from edgec.architectures.rope import inverse_frequencies
from edgec.context import Context
from edgec.model import Program
from edgec.plan import make_plan
from edgec.recipe import load_recipe
from edgec.reference.engine import ReferenceEngine
from edgec.reference.exact import Int8Linear, exp, integers_of, lane_sum, sum_of_products
from edgec.reference.load import load as load_reference
from edgec.reference.options import ReferenceOptions
from edgec.reference.quantised import round_activations
from edgec.registry import get_target
from edgec.runtime.abi import KvType
from edgec.runtime.compile import host
from edgec.runtime.engine import Engine, EngineOptions
from edgec.runtime.failures import EngineError
from edgec.runtime.sampling import Sampling
from edgec.sources.fetch import fetch
from edgec.store import Store, default_root
from edgec.tasks.causal_lm import CausalLmOptions
from tests import tiny_bundle
from tests.reference.tiny import tiny_model
from tests.runtime.test_emulation import load
from tests.tiny_bundle import write_tiny_bundle

ROOT = Path(__file__).parent.parent.parent
TOKENS = (np.arange(150) * 37 % 250).tolist()


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny bundle, with the frequencies that PyTorch gives: NumPy's powers differ in the last bit."""
    made = write_tiny_bundle(tmp_path_factory.mktemp("exact"))
    path = made / "bundle/native/model.safetensors"
    tensors = load_file(path)
    tensors["rope.frequencies"] = inverse_frequencies(tiny_bundle.HEAD, 10000.0, None)[0]
    save_file(tensors, path)
    return made


def linear_layers(model: Llama) -> list[str]:
    return [name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)]


def reference(model: Llama, kv: KvType, **options: int) -> ReferenceEngine:
    chosen = ReferenceOptions(
        kv="int8" if kv is KvType.INT8 else "float", activations="int8", context=512, blocks=128, **options
    )
    return ReferenceEngine(model, None, chosen, eos=(tiny_bundle.END,), quantised=linear_layers(model))


def native_logits(bundle: Path, tokens: list[int], kv: KvType, *, rows: int = 64) -> np.ndarray:
    """Teacher-forced, some rows at a time."""
    table = np.arange(1, 2 + len(tokens) // 16, dtype=np.int32)[None]
    parts = []
    with Engine(bundle, EngineOptions(kv=kv, threads=1, context=512)) as engine:
        for start in range(0, len(tokens), rows):
            some = np.array(tokens[start : start + rows], np.int32)
            positions = np.arange(start, start + len(some), dtype=np.int32)
            slots = table[0, positions // 16] * 16 + positions % 16
            parts.append(engine.forward(some, positions, slots, np.zeros(len(some), np.int32), table)[0])
    return np.concatenate(parts)


@pytest.mark.slow  # the core has to be compiled
@pytest.mark.parametrize("kv", [KvType.INT8, KvType.FP32])
def test_logits_are_the_native_engines_to_the_last_bit(bundle: Path, kv: KvType) -> None:
    model = load(bundle, quantize=False)
    found = native_logits(bundle, TOKENS, kv)
    assert np.array_equal(reference(model, kv).logits(TOKENS), found)
    assert np.array_equal(reference(model, kv, block_size=4, step_tokens=64).logits(TOKENS), found)
    with torch.no_grad():
        model.layers[1].mlp.down_proj.weight[3] *= 2  # one channel of one layer: noticed
    assert not np.array_equal(reference(model, kv).logits(TOKENS), found)


@pytest.mark.slow
def test_answers_are_the_native_engines(bundle: Path) -> None:
    """Greedy and drawn, batched: the draws are the same, and so are the log-probabilities."""
    model = load(bundle, quantize=False)
    asked = [TOKENS[i : i + 5 + 7 * i] for i in range(6)]
    engine = reference(model, KvType.INT8)
    for sampling in (
        Sampling(max_tokens=20, logprobs=0, ignore_eos=True),
        Sampling(max_tokens=20, temperature=1.0, top_p=0.9, seed=3, n=2, ignore_eos=True),
        Sampling(max_tokens=20, temperature=0.8, top_k=20, repetition_penalty=1.2, ignore_eos=True),
    ):
        with Engine(bundle, EngineOptions(kv=KvType.INT8, threads=1, context=512)) as native:
            wanted = native.answer(asked, sampling)
            found = engine.answer(asked, sampling)
            if sampling.seed is None:  # drawn from the request's number: one engine, one count
                found = reference(model, KvType.INT8).answer(asked, sampling)
        assert [[a.tokens for a in answers] for answers in found] == [[a.tokens for a in row] for row in wanted]
        if sampling.logprobs is not None:
            own = [a.logprobs for answers in found for a in answers]
            theirs = [a.logprobs for answers in wanted for a in answers]
            assert np.allclose(np.float64(own), np.float64(theirs), atol=1e-5)
    engine.check()


def test_products_are_added_in_order() -> None:
    random = np.random.default_rng(0)
    a, b = random.normal(size=(100, 3, 1)).astype(np.float32), random.normal(size=(100, 1, 5)).astype(np.float32)
    wanted = np.zeros((3, 5), np.float32)
    for x, y in zip(a, b, strict=True):
        wanted += x * y
    assert np.array_equal(sum_of_products(torch.from_numpy(a), torch.from_numpy(b)).numpy(), wanted)
    large = torch.from_numpy(np.tile(b, (1, 1, 2000)))  # the other way of adding
    assert np.array_equal(sum_of_products(torch.from_numpy(a), large).numpy(), np.tile(wanted, (1, 2000)))
    turned = torch.from_numpy(a).permute(1, 2, 0).contiguous().permute(2, 0, 1)  # the summed axis lies fastest
    assert np.array_equal(sum_of_products(turned, torch.from_numpy(b)).numpy(), wanted)
    one = sum_of_products(torch.from_numpy(a[:, :1]), torch.from_numpy(b[:, :, :1]))  # a single column is contiguous
    assert one.item() == wanted[0, 0]


def test_lanes_are_added_in_order() -> None:
    x = np.random.default_rng(1).normal(size=(4, 77)).astype(np.float32)
    lanes = np.zeros((4, 8), np.float32)
    for start in range(0, 77, 8):
        lanes[:, : min(8, 77 - start)] += x[:, start : start + 8]
    four = lanes[:, :4] + lanes[:, 4:]
    two = four[:, :2] + four[:, 2:]
    assert np.array_equal(lane_sum(torch.from_numpy(x))[:, 0].numpy(), two[:, 0] + two[:, 1])


def test_exp_is_within_two_ulp_and_zero_below() -> None:
    x = torch.linspace(-87.3, 88, 20001)
    exact = x.double().exp()
    assert ((exp(x).double() - exact) / exact).abs().max() < 2.5e-7
    assert exp(torch.tensor([-88.0, float("-inf")])).tolist() == [0.0, 0.0]
    assert exp(torch.zeros(1)).item() == 1.0


def test_a_quantised_layer_is_its_rounding_in_float() -> None:
    generator = torch.Generator().manual_seed(0)
    layer = torch.nn.Linear(70, 20)
    q = torch.randint(-127, 128, (20, 70), generator=generator).float()
    q[:, 0] = 127
    scale = torch.rand(20, generator=generator) / 100
    with torch.no_grad():
        layer.weight.copy_(q * scale[:, None])
        x = torch.randn(5, 70, generator=generator)
        wanted = layer(round_activations(x))
        found = Int8Linear("layer", layer)(x)
    assert torch.allclose(found, wanted, rtol=1e-5, atol=1e-6)
    found_q, found_scale = integers_of("layer", layer.weight.detach())
    assert torch.equal(found_q, q)
    assert torch.equal(found_scale, scale)


def test_float_weights_are_no_int8_weights() -> None:
    model = tiny_model()
    with pytest.raises(EngineError, match=r"layers\.0\.self_attn\.q_proj has no INT8 weights"):
        ReferenceEngine(model, None, ReferenceOptions(blocks=8, activations="int8"), quantised=linear_layers(model))


def test_int8_activations_want_float32() -> None:
    with pytest.raises(EngineError, match="dtype"):
        ReferenceEngine(tiny_model(), None, ReferenceOptions(blocks=8, activations="int8", dtype="bfloat16"))


@pytest.mark.slow
@pytest.mark.network
def test_smollm2_is_the_native_engines_to_the_last_bit(tmp_path: Path) -> None:
    """On the recipe's evaluation text; `edgec validate` goes over thousands of tokens in the same way."""
    store, recipe = Store(default_root()), load_recipe(ROOT / "recipes/smollm2-135m.yaml")
    loaded = load_reference(recipe.path, weights="int8", store=store)
    assert loaded.tokenizer is not None
    # Of a build for all targets, or of one without float twins, which is what loading runs.
    alone = replace(recipe, targets=tuple(t for t in recipe.targets if not get_target(t.name).twin))
    entries = [make_plan(r, store, until="export").stages[-1].entry for r in (recipe, alone)]
    exported = entries[0] or entries[1]
    assert exported is not None
    folder = tmp_path / "native"
    folder.mkdir()
    context = Context(seed=0, threads=1, work=folder, recipe_dir=folder, cache=folder, out=folder)
    convert(Program.open(exported.out), NativeOptions.model_validate({"libraries": [host().name]}), context)

    assert isinstance(recipe.task.options, CausalLmOptions)
    text = recipe.task.options.evaluation
    path = fetch(text.source, text.sha256, recipe_dir=recipe.folder, cache=store.root)
    tokens = loaded.tokenizer.encode(path.read_text()[:4000])[:384]
    assert len(tokens) == 384
    chosen = ReferenceOptions(kv="int8", activations="int8", context=512, max_batch=1, step_tokens=128)
    engine = ReferenceEngine(loaded.model, None, chosen, quantised=loaded.quantised)
    assert np.array_equal(engine.logits(tokens), native_logits(folder, tokens, KvType.INT8))
