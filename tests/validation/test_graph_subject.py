"""A paged step graph as a subject: ONNX Runtime's artefact of a small decoder against the reference engine."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from edgec.targets.onnxruntime import OnnxRuntimeOptions, convert

from edgec.architectures.llama import LlamaConfig
from edgec.context import Context
from edgec.decoder import program_state
from edgec.errors import UsageError
from edgec.model import Program
from edgec.reference.load import Loaded, dequantised
from edgec.runtime.sampling import Sampling
from edgec.tasks.paged_driver import PagedShape
from edgec.validation.check_text import compare_text
from edgec.validation.graph_subject import GraphSubject
from edgec.validation.options import ValidateOptions
from edgec.validation.reference_subject import EngineReference
from edgec.validation.subjects import NotOffered
from edgec.validation.validate import References, validate
from tests.targets.programs import BLOCK, BLOCKS, TABLE, decoder_config, decoder_program

pytestmark = pytest.mark.slow  # exports and converts
SHAPE = PagedShape(BLOCK, BLOCKS, TABLE, batch=2, chunk=8)
TOKENS = (np.arange(120) * 7 % 30).tolist()


class Models:
    """The program's weights, twice."""

    def __init__(self, program: Program) -> None:
        config = LlamaConfig.from_dict(decoder_config(2).to_dict())
        model, quantised = dequantised(config, program_state(program), "the program")
        self._loaded = Loaded(model, None, "small", (), SHAPE.context, quantised, "the program")

    def same(self) -> Loaded:
        return self._loaded

    def float(self) -> Loaded:
        return self._loaded


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Program:
    return decoder_program(tmp_path_factory.mktemp("decoder") / "program")


@pytest.fixture(scope="module")
def artifact(program: Program, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("graph") / "onnxruntime"
    folder.mkdir()
    context = Context(seed=0, threads=1, work=folder, recipe_dir=folder, cache=folder, out=folder)
    convert(program, OnnxRuntimeOptions.model_validate({"ort_format": False}), context)
    return folder


def test_a_graph_is_scored_and_answers_like_the_reference(program: Program, artifact: Path) -> None:
    subject = GraphSubject(artifact, SHAPE)
    reference = EngineReference(Models(program).same(), "int8", rounded=False, context=SHAPE.context)
    found = compare_text(subject, [reference], [TOKENS[:16], TOKENS[16:30]])["int8"]
    assert len(found.kl) == 15 + 13
    assert found.summary[0] < 0.02 and found.summary[2] > 0.8
    prompts = [TOKENS[:3], TOKENS[5:11], TOKENS[20:22]]  # more than the pools hold at a time
    greedy = [Sampling(max_tokens=5, ignore_eos=True)] * 3
    ours, theirs = subject.generate(prompts, greedy), reference.generate(prompts, greedy)
    assert [len(a.tokens) for a in ours] == [5, 5, 5]
    assert sum(a.tokens == b.tokens for a, b in zip(ours, theirs, strict=True)) >= 2
    with pytest.raises(NotOffered, match="sampler"):
        subject.generate(prompts, [Sampling(max_tokens=5, temperature=1.0)] * 3)


def test_a_wrong_graph_fails_and_what_it_lacks_is_unproven(program: Program, artifact: Path) -> None:
    options = ValidateOptions.model_validate(
        {"targets": ["onnxruntime"], "tokens": 60, "window": 16, "prompts": 2, "answer": 4, "samples": 8}
    )
    openers = {"onnxruntime": lambda: GraphSubject(artifact, SHAPE)}
    references = References(Models(program), options)
    right = validate(openers, references, TOKENS, options, text="numbers")
    assert right.exit_code == 0, right.error
    by_name = {f.check: f.verdict for f in right.targets["onnxruntime"].findings if f.reference != "float"}
    assert by_name["kl"] == by_name["greedy"] == "pass"
    assert by_name["draws"] == by_name["sampled"] == by_name["distribution"] == "unproven"

    models = Models(program)
    models.same().model.layers[0].self_attn.o_proj.weight.data *= -1
    wrong = validate(openers, References(models, options), TOKENS, options, text="numbers")
    assert wrong.exit_code == 6 and wrong.error is not None and "kl" in wrong.error.message
    assert wrong.targets["onnxruntime"].diagnosis


def test_sizes_are_read_from_the_bundle(artifact: Path, tmp_path: Path) -> None:
    bundle = tmp_path / "bundle"
    shutil.copytree(artifact, bundle / "onnxruntime")
    with pytest.raises(UsageError, match="no paged step graph"):
        GraphSubject(bundle / "onnxruntime")
    (bundle / "recipe.json").write_text(f'{{"task": {{"causal-lm": {{"block_size": {BLOCK}}}}}}}')
    assert GraphSubject(bundle / "onnxruntime").shape == SHAPE
