"""A validation as the last stage of a build: over the artefacts and the program that the stages before it made.

Leaves `validation.json`, the document of `edgec validate` without its times. A finding beyond its limit is no error of
this stage: the build's gates judge it.
"""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgec.architectures.llama import LlamaConfig
from edgec.context import Context
from edgec.decoder import program_state, read_decoder
from edgec.errors import Reason, SourceError
from edgec.model import Program
from edgec.reference.load import Loaded, dequantised
from edgec.reference.tokenizer import ReferenceTokenizer
from edgec.stages import Request, make_task
from edgec.tasks.causal_lm import CausalLm
from edgec.validation.graph_subject import GraphSubject
from edgec.validation.material import read_text
from edgec.validation.native_subject import NativeSubject
from edgec.validation.options import ValidateOptions
from edgec.validation.validate import References, validate

if TYPE_CHECKING:
    from collections.abc import Callable

    from edgec.report.validation import Validation
    from edgec.validation.subjects import Subject


def run(request: Request, context: Context) -> dict[str, Any]:
    """Validate the targets that the recipe asks for; gives the ledger's line."""
    options = ValidateOptions.model_validate(request.options)
    task = make_task(request, Path(request.inputs["source"]))
    assert isinstance(task, CausalLm)  # the recipe's check has seen to it
    models = StageModels(request)
    text = options.text or task.options.evaluation
    tokens = read_text(text, models.tokenizer, recipe_dir=context.recipe_dir, cache=context.cache)

    def opener(target: str) -> Callable[[], Subject]:
        folder = Path(request.inputs[target])
        if target == "native":
            return lambda: NativeSubject(folder, threads=request.threads)
        return lambda: GraphSubject(folder, task.shape)

    chosen = [name for name in options.targets if name in request.inputs]
    references = References(models, options, note=context.note)
    document = validate(
        {name: opener(name) for name in chosen},
        references,
        tokens,
        options,
        text=text.source,
        progress=lambda what: context.progress(0, 0, what),
    )
    references.close()
    for name, target in document.targets.items():
        context.log.timings[f"validating {name}"] = target.seconds
        for line in target.diagnosis:
            context.warn(f"{name}: {line}")
    # Times would make the same validation another result each time.
    document.seconds = 0.0
    for target in document.targets.values():
        target.seconds = 0.0
    (context.out / "validation.json").write_text(document.model_dump_json(indent=1) + "\n")
    context.log.metrics |= numbers(document)
    return {"bytes": None, "parameters": models.program.parameters, "metrics": {}}


def numbers(document: Validation) -> dict[str, float]:
    """`native_kl`, `native_float_kl` and the like, for the ledger and for `compare:` gates."""
    found = {}
    for name, target in document.targets.items():
        for finding in target.findings:
            if finding.value is not None:
                kind = "float_" if finding.reference == "float" and finding.limit is None else ""
                found[f"{name}_{kind}{finding.check}"] = float(finding.value)
    return found


class StageModels:
    """The references' models, out of the build's own results."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.program = Program.open(Path(request.inputs["program"]))

    @cached_property
    def tokenizer(self) -> ReferenceTokenizer:
        """The model's.

        Raises:
            SourceError: it came without one.
        """
        found = ReferenceTokenizer.open(self.program.path / "companions")
        if found is None:
            raise SourceError("the model came without a tokenizer.json", reason=Reason.BAD_CHECKPOINT)
        return found

    def same(self) -> Loaded:
        """The exported program's weights."""
        decoder = read_decoder(self.program, "validate")
        config = LlamaConfig.from_dict(decoder.architecture)
        model, quantised = dequantised(config, program_state(self.program), "the exported program")
        kind = "INT8" if quantised else "float"
        origin = f"the exported program: {kind} weights"
        return Loaded(model, self.tokenizer, "program", decoder.eos, config.max_positions, quantised, origin)

    def float(self) -> Loaded:
        """The model that was quantised."""
        from edgec.architectures.llama import Llama
        from edgec.checkpoint import load_model

        task = make_task(self.request, Path(self.request.inputs["source"]))
        module = load_model(Path(self.request.inputs["float"]), task, Path(self.request.recipe_dir)).module
        assert isinstance(module, Llama)
        eos = read_decoder(self.program, "validate").eos
        origin = "the model before it was quantised: float weights"
        context = module.config.max_positions
        return Loaded(module.float().eval(), self.tokenizer, "float", eos, context, frozenset(), origin)
