"""Distillation: a small student learns from a large teacher's answers as well as from the labels.

Follows Hinton, Vinyals and Dean, "Distilling the Knowledge in a Neural Network" (2015): with teacher logits t, student
logits s and temperature T

    loss = α · T² · KL(softmax(t/T) ‖ softmax(s/T)) + (1 − α) · task loss

and, for hidden states, Romero et al., "FitNets" (2015): the mean squared difference of a student's layer, brought to
the teacher's width by a learnt projection, from the teacher's layer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pydantic import Field

from edgec.errors import ConversionError, Reason, RecipeError
from edgec.model import Model
from edgec.registry import Options, register_pass, suggest

from .training_options import TrainingOptions

if TYPE_CHECKING:
    import torch
    from torch import nn

    from edgec.context import Context
    from edgec.tasks.base import Task

    from .training import Loss


class StudentOptions(Options):
    """What learns."""

    factory: str = Field(
        pattern=r"^[^:]+:[A-Za-z_][A-Za-z0-9_.]*$",
        description="builds the student: `file.py:function` (relative to the recipe) or `package.module:function`",
    )
    args: dict[str, Any] = Field(default_factory=dict, description="keyword arguments of the factory")


class HiddenOptions(Options):
    """A pair of layers whose outputs are to be alike."""

    teacher: str = Field(description="path of a module of the teacher")
    student: str = Field(description="path of a module of the student")
    weight: float = Field(1.0, gt=0, description="weight of this difference in the loss")


class DistillOptions(TrainingOptions):
    """Teacher (the model so far) → student."""

    student: StudentOptions = Field(description="the student's architecture")
    temperature: float = Field(4.0, gt=0, description="T: softens both sides; above 1 small probabilities count more")
    alpha: float = Field(0.9, ge=0, le=1, description="α: share of the teacher in the loss; the rest is the labels'")
    hidden: list[HiddenOptions] = Field(default_factory=list, description="pairs of layers to be alike, too")
    baseline: bool = Field(
        True, description="also train the same student without the teacher, and report its metrics as `alone_…`"
    )

    def references(self) -> list[tuple[str, str | None]]:
        """The student's factory: another one makes another student."""
        return [(self.student.factory, None)]


@register_pass("distill", distributed=True)
def distill(model: Model, options: DistillOptions, context: Context) -> Model:
    """Raises RecipeError for layers that aren't there, ConversionError for outputs that can't be compared."""
    from edgec.ranks import rank

    from .training import require_float, train

    require_float(model, "distill")
    teacher = frozen(model.module)
    metrics: dict[str, dict[str, float]] = {"teacher": dict(model.metrics)}
    if options.baseline:
        alone = _build_student(options.student, context)
        train(alone, model.task, context=context, name="alone", **options.arguments())
        if rank() == 0:
            metrics["alone"] = _evaluate(alone, model)
            for name, value in metrics["alone"].items():
                context.metric(f"alone_{name}", value)

    student = _build_student(options.student, context)
    with HiddenPairs(options.hidden, teacher, student, model.task) as pairs:
        history = train(
            student,
            model.task,
            loss=distillation_loss(
                teacher, model.task, temperature=options.temperature, alpha=options.alpha, hidden=pairs
            ),
            extra=pairs.projections,
            context=context,
            name="distill",
            **options.arguments(),
        )
    source = {"kind": "factory", "factory": options.student.factory, "args": options.student.args}
    result = Model(student, model.task, source)
    if rank() == 0:
        metrics["distilled"] = _evaluate(student, model)
        _report(metrics, model, result, context)
    context.note(f"mean loss {history.losses[0]:.3f} → {history.losses[-1]:.3f} in {options.epochs} epochs")
    return result


def frozen(teacher: nn.Module) -> nn.Module:
    """The teacher in evaluation mode and without gradients: dropout off, BatchNorm's statistics as they were learnt."""
    return teacher.eval().requires_grad_(False)


def assert_frozen(teacher: nn.Module) -> None:
    """Raises ConversionError when a part of the teacher is in training mode, or may be changed by it."""
    for name, part in teacher.named_modules():
        if part.training:
            raise ConversionError(
                f"`{name or type(part).__name__}` of the teacher is in training mode, so its answers are noise",
                hint="something put it back while the student was trained; that is a bug in what did",
                reason=Reason.INVARIANT_BROKEN,
            )
    learns = next((name for name, p in teacher.named_parameters() if p.requires_grad), None)
    if learns is not None:
        raise ConversionError(f"`{learns}` of the teacher would learn", reason=Reason.INVARIANT_BROKEN)


def distillation_loss(
    teacher: nn.Module, task: Task, *, temperature: float, alpha: float, hidden: HiddenPairs | None = None
) -> Loss:
    """The loss in the module's text, as `training.train` takes it."""
    from torch.nn import functional

    from .teacher import Answers

    # Hidden states are seen by hooks while the teacher computes, so with them it has to, every time.
    answers = Answers(teacher, remember=hidden is None or not hidden.pairs)

    def loss(inputs: Any, outputs: Any, labels: Any) -> torch.Tensor:
        assert_frozen(teacher)
        wanted = answers(inputs)  # (…, classes)
        got = _logits(outputs)  # (…, classes)
        if got.shape != wanted.shape:
            raise ConversionError(
                f"the student gives {tuple(got.shape)} where the teacher gives {tuple(wanted.shape)}",
                hint="both need the same classes (or vocabulary); see `student: args:`",
                reason=Reason.INVARIANT_BROKEN,
            )
        soft = functional.kl_div(
            functional.log_softmax(got / temperature, dim=-1).flatten(0, -2),
            functional.log_softmax(wanted / temperature, dim=-1).flatten(0, -2),
            reduction="batchmean",
            log_target=True,
        )
        total = alpha * temperature**2 * soft
        if alpha < 1:
            total = total + (1 - alpha) * task.loss(outputs, labels)
        return total if hidden is None else total + hidden.loss()

    return loss


def _logits(outputs: Any) -> torch.Tensor:
    """The first output, in float32."""
    first: torch.Tensor = outputs[0] if isinstance(outputs, tuple | list) else outputs
    return first.float()


class HiddenPairs:
    """Watches pairs of layers through forward hooks while it is open; `loss` compares what the last call left."""

    def __init__(self, pairs: list[HiddenOptions], teacher: nn.Module, student: nn.Module, task: Task) -> None:
        self.pairs = pairs
        self.seen: dict[tuple[str, int], torch.Tensor] = {}
        self.handles: list[Any] = []
        self.projections: list[nn.Module] = []
        if not pairs:
            return
        for i, pair in enumerate(pairs):
            for side, module, path in (("teacher", teacher, pair.teacher), ("student", student, pair.student)):
                self.handles.append(_part(module, path, side).register_forward_hook(self._keep(side, i)))
        self._dry_run(teacher, student, task)
        self.projections = [self._projection(i) for i in range(len(pairs))]

    def __enter__(self) -> HiddenPairs:
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self.handles:
            handle.remove()

    def loss(self) -> torch.Tensor | float:
        """Σ weight · mean((projection(student) − teacher)²), over the pairs."""
        from torch.nn import functional

        total: torch.Tensor | float = 0.0
        for i, (pair, projection) in enumerate(zip(self.pairs, self.projections, strict=True)):
            student, teacher = self.seen["student", i].float(), self.seen["teacher", i].float()
            total = total + pair.weight * functional.mse_loss(projection(student), teacher)
        return total

    def _keep(self, side: str, index: int) -> Any:
        def hook(_module: nn.Module, _inputs: Any, output: Any) -> None:
            self.seen[side, index] = output[0] if isinstance(output, tuple) else output

        return hook

    def _dry_run(self, teacher: nn.Module, student: nn.Module, task: Task) -> None:
        """One batch through both, to see the shapes."""
        import torch

        from .training import forward

        inputs, _ = next(iter(task.training(0)))
        student.eval()  # BatchNorm must not learn from this
        with torch.no_grad():
            forward(teacher, inputs)
            forward(student, inputs)

    def _projection(self, index: int) -> nn.Module:
        """1×1 convolution for images (channels in dimension 1), linear for the rest (channels last); or nothing."""
        from torch import nn

        student, teacher = self.seen["student", index], self.seen["teacher", index]
        axis = 1 if student.dim() == 4 else student.dim() - 1
        rest = [(a, b) for d, (a, b) in enumerate(zip(student.shape, teacher.shape, strict=False)) if d != axis]
        if student.dim() != teacher.dim() or any(a != b for a, b in rest):
            raise RecipeError(
                f"hidden states of `{self.pairs[index].student}` {tuple(student.shape)} and "
                f"`{self.pairs[index].teacher}` {tuple(teacher.shape)} differ in more than their width",
                hint="choose layers of one resolution (or sequence length)",
            )
        narrow, wide = student.shape[axis], teacher.shape[axis]
        if narrow == wide:
            return nn.Identity()
        return nn.Conv2d(narrow, wide, 1, bias=False) if axis == 1 and student.dim() == 4 else nn.Linear(narrow, wide)


def _part(module: nn.Module, path: str, side: str) -> nn.Module:
    try:
        return module.get_submodule(path)
    except AttributeError as cause:
        known = [name for name, _ in module.named_modules() if name]
        raise RecipeError(
            f"distill: the {side} has no module `{path}`{suggest(path, known)}", hint=f"it has {', '.join(known[:8])} …"
        ) from cause


def _build_student(options: StudentOptions, context: Context) -> nn.Module:
    """The same initial weights each time: the seed is set before the factory draws them."""
    import torch

    from edgec.sources.factory import build

    torch.manual_seed(context.seed)
    return build(options.factory, options.args, context.recipe_dir).float()


def _evaluate(module: nn.Module, model: Model) -> dict[str, float]:
    from edgec.golden import TorchRunner

    task = model.task
    signatures = task.signatures(module)
    runner = TorchRunner({s.name: task.bind(module, s) for s in signatures}, signatures)
    return task.evaluate(runner, None)


def _report(metrics: dict[str, dict[str, float]], teacher: Model, student: Model, context: Context) -> None:
    sizes = {"teacher": teacher.parameters, "alone": student.parameters, "distilled": student.parameters}
    name = teacher.task.metric
    rows = [(who, sizes[who], values.get(name, float("nan"))) for who, values in metrics.items()]
    context.table("Distillation", ("model", "parameters", name), rows)
    if "alone" in metrics:
        gain = metrics["distilled"][name] - metrics["alone"][name]
        context.note(
            f"{name}: distilled {metrics['distilled'][name]:.4f}, alone {metrics['alone'][name]:.4f} ({gain:+.4f})"
        )
