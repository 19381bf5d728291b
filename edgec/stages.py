"""What each kind of stage does, inside its own process: source, pass, export, target.

A stage reads its inputs from folders of the store, fills `request.out`, and gives back what it measured. All policy
about *when* stages run is in build.py; the process around them is worker.py.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from edgec import registry
from edgec.context import Context
from edgec.errors import ConversionError, Reason
from edgec.golden import TorchRunner
from edgec.model import Model, Program
from edgec.ranks import rank
from edgec.tasks.base import Arrays, Task, TaskContext


@dataclass(frozen=True)
class Request:
    """One stage to run; JSON-able, with paths as strings.

    `inputs` names folders of the store: "model" (the model so far), "baseline" (the last float model), "source" (the
    source stage, with the reference outputs and the tokenizer) and "program".
    """

    id: str
    kind: str  # source | import | pass | export | target
    name: str
    options: dict[str, Any]
    task: str
    task_options: dict[str, Any]
    measure: dict[str, Any]
    seed: int
    threads: int
    recipe_dir: str
    cache: str
    out: str
    work: str
    inputs: dict[str, str] = field(default_factory=dict)
    distributed: bool = False  # every rank runs it (edgec/ranks.py)


def run(request: Request, context: Context) -> dict[str, Any]:
    """Run the stage; gives `{"bytes", "parameters", "metrics", …}` for the ledger."""
    work: dict[str, Any] = {
        "source": _source,
        "import": _import,
        "pass": _pass,
        "export": _export,
        "target": _target,
    }
    result: dict[str, Any] = work[request.kind](request, context)
    if rank() == 0 and not any(Path(request.out).iterdir()):
        raise ConversionError(
            f"stage `{request.id}` produced nothing",
            hint="this stage reported success without writing a file; that is a bug in it",
            reason=Reason.EMPTY_OUTPUT,
        )
    return result


def make_task(request: Request, source: Path | None) -> Task:
    """The recipe's task. `source` is where the source stage left files that belong to the model (a tokenizer)."""
    entry = registry.get_task(request.task)
    options = entry.options.model_validate(request.task_options)
    context = TaskContext(Path(request.recipe_dir), Path(request.cache), request.seed, source)
    return entry.create(options, context)


def _source(request: Request, context: Context) -> dict[str, Any]:
    from edgec.sources.models import load
    from edgec.sources.section import ModelSection

    out = Path(request.out)
    section = ModelSection.model_validate(request.options)
    loaded = load(section, recipe_dir=context.recipe_dir, cache=context.cache)
    for name, content in loaded.extra_files.items():
        if isinstance(content, bytes):
            (out / name).write_bytes(content)
        else:
            shutil.copyfile(content, out / name)
    task = make_task(request, out)
    model = Model(loaded.module.eval(), task, loaded.source)
    runner = _torch_runner(model)
    reference = task.reference(runner)
    _save_reference(out, reference)
    return _finish(model, request, reference, context, runner)


def _import(request: Request, context: Context) -> dict[str, Any]:
    """An ONNX file becomes a Program as it is: there is no torch module for passes to work on."""
    from edgec.golden import OnnxRunner, carrying
    from edgec.sources.onnx_program import import_program
    from edgec.sources.section import ModelSection

    section = ModelSection.model_validate(request.options)
    task = make_task(request, None)
    program = import_program(section, task, context)
    context.progress(0, 0, "evaluating")
    paths = {s.name: program.onnx_path(s.name) for s in program.signatures}
    runner = carrying(OnnxRunner(paths, threads=request.threads), program.signatures)
    reference = _load_reference(program.path) or None
    sizes = _subsets(request.measure)
    return {
        "bytes": program_bytes(program),
        "parameters": program.parameters,
        "metrics": dict(task.evaluate(runner, reference, limit=request.measure["samples"])),
        "subset_metrics": {str(n): dict(task.evaluate(runner, reference, limit=n)) for n in sorted(sizes)},
    }


def _pass(request: Request, context: Context) -> dict[str, Any]:
    from edgec.checkpoint import load_model

    source = Path(request.inputs["source"])
    task = make_task(request, source)
    model = load_model(Path(request.inputs["model"]), task, context.recipe_dir)
    entry = registry.get_pass(request.name)
    if model.draft is not None:
        raise ConversionError(
            f"{request.name}: the draft head was trained on the model as it is, and would no longer know it",
            hint="put `draft_head` behind every other pass",
            reason=Reason.BAD_OPTION,
        )
    model = entry.run(model, entry.options.model_validate(request.options), context)
    if rank() > 0:  # it has trained along; the first rank keeps the result
        return {}
    return _finish(model, request, _load_reference(source), context)


def _export(request: Request, context: Context) -> dict[str, Any]:
    from edgec.checkpoint import load_model
    from edgec.passes.export import ExportOptions, export_program

    task = make_task(request, Path(request.inputs["source"]))
    model = load_model(Path(request.inputs["model"]), task, context.recipe_dir)
    baseline = None
    if "baseline" in request.inputs:
        baseline = load_model(Path(request.inputs["baseline"]), task, context.recipe_dir)
    program = export_program(model, ExportOptions.model_validate(request.options), context, baseline=baseline)
    return {"bytes": program_bytes(program), "parameters": program.parameters, "metrics": dict(model.metrics)}


def _target(request: Request, context: Context) -> dict[str, Any]:
    from edgec.measure import measure_target

    source = Path(request.inputs.get("source", request.inputs["program"]))
    task = make_task(request, source)
    return measure_target(
        registry.get_target(request.name),
        Program.open(Path(request.inputs["program"])),
        request.options,
        context,
        task=task,
        reference=_load_reference(source),
        measure=request.measure,
    )


def _finish(
    model: Model, request: Request, reference: Arrays, context: Context, runner: TorchRunner | None = None
) -> dict[str, Any]:
    """Evaluate and save a model; the ledger's line for it. `runner` may remember earlier outputs of the model."""
    from edgec.checkpoint import model_bytes, save_model

    model.module.eval()
    runner = runner or _torch_runner(model)
    if context.log.verdict == "unchanged" and model.metrics:
        metrics = model.metrics
    else:
        context.progress(0, 0, "evaluating")
        with context.timed("evaluating"):
            metrics = model.task.evaluate(runner, reference or None, limit=request.measure["samples"])
    model.metrics = dict(metrics)
    save_model(model, Path(request.out))
    result = {"bytes": model_bytes(model), "parameters": model.parameters, "metrics": model.metrics}
    if request.kind == "source" or request.name == "train":
        # What drops are counted from. Artefacts are evaluated on fewer samples, and only on the same ones does a drop
        # mean something.
        result["subset_metrics"] = {
            str(n): model.task.evaluate(runner, reference or None, limit=n) for n in sorted(_subsets(request.measure))
        }
    return result


def _torch_runner(model: Model) -> TorchRunner:
    signatures = model.task.signatures(model.module)
    modules = {s.name: model.task.bind(model.module, s) for s in signatures}
    return TorchRunner(modules, signatures, remember=True)


def _save_reference(folder: Path, reference: Arrays) -> None:
    from safetensors.numpy import save_file

    if reference:
        save_file(reference, folder / "reference.safetensors")


def _load_reference(folder: Path) -> Arrays:
    from safetensors.numpy import load_file

    path = folder / "reference.safetensors"
    return load_file(path) if path.is_file() else {}


def program_bytes(program: Program) -> int:
    """Bytes of a program's ONNX form: the graphs and the weights that they share."""
    names = {f"{s.name}.onnx" for s in program.signatures}
    return sum(
        p.stat().st_size
        for p in program.path.iterdir()
        if p.is_file() and (p.name in names or p.suffix in (".data", ".weights"))
    )


def prepare_torch(seed: int, threads: int) -> None:
    """Make torch deterministic: one seed, a fixed number of threads, deterministic kernels only."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    import torch

    torch.manual_seed(seed)
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(True)


def _subsets(measure: dict[str, Any]) -> set[int]:
    """The numbers of samples that artefacts are evaluated on, where a pass is evaluated on another."""
    return {*measure["target_samples"].values(), measure["evaluated_samples"]} - {0, measure["samples"]}
