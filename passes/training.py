"""The one training loop, shared by training, distillation, fine-tuning after pruning, and quantisation-aware training.

Same seed, same bytes: batches come from the task in an order fixed by seed and epoch, and random numbers are seeded
anew at each step, so a run that was killed and resumed ends with the very weights of one that was not. Launched under
`torchrun` (WORLD_SIZE > 1), the same call trains data-parallel through DistributedDataParallel.
"""

from __future__ import annotations

import hashlib
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from edgec.errors import ConversionError, Reason, SourceError

if TYPE_CHECKING:
    import torch
    from torch import nn

    from edgec.context import Context
    from edgec.model import Model
    from edgec.tasks.base import Task

Loss = Callable[[Any, Any, Any], "torch.Tensor"]
"""`loss(inputs, outputs, labels)` → scalar; `inputs` and `labels` as `task.training` gave them, on the right device."""
Schedule = Literal["cosine", "constant"]
Optimizer = Literal["adamw", "sgd"]
Precision = Literal["float32", "bfloat16"]


@dataclass(frozen=True)
class History:
    """What a training run did: the mean loss of each epoch, and the step it resumed at (0: it ran through)."""

    losses: tuple[float, ...]
    steps: int
    resumed_at: int


@dataclass(frozen=True)
class World:
    """This process among those that train together."""

    rank: int = 0
    size: int = 1


def train(
    module: nn.Module,
    task: Task,
    *,
    epochs: int,
    lr: float,
    context: Context,
    loss: Loss | None = None,
    name: str = "train",
    optimizer: Optimizer = "adamw",
    weight_decay: float = 1e-4,
    schedule: Schedule = "cosine",
    warmup: float = 0.05,
    clip: float | None = None,
    checkpoint_every: int = 200,
    precision: Precision = "float32",
    extra: Sequence[nn.Module] = (),
    before_epoch: Callable[[int], None] | None = None,
    after_step: Callable[[], None] | None = None,
    train_mode: Callable[[nn.Module], object] | None = None,
    eval_mode: Callable[[nn.Module], object] | None = None,
) -> History:
    """Train `module` in place on `task.training` and leave it in evaluation mode.

    Args:
        module: called as `module(inputs)`, or `module(*inputs)` when the task's inputs are a tuple.
        epochs: passes over the training data.
        lr: the greatest learning rate; `schedule` takes it to zero ("cosine") or keeps it.
        loss: in place of `task.loss(outputs, labels)`.
        name: tells this run's checkpoint from others of the same stage.
        warmup: share of all steps over which the learning rate rises from zero.
        clip: the greatest norm of the gradients, or None.
        checkpoint_every: steps between checkpoints in `context.work`; one is also written after each epoch.
        precision: "bfloat16" computes the forward pass under autocast; weights stay float32.
        extra: modules that `loss` uses and that learn too (projections), but aren't part of the result.
        before_epoch: called with each epoch's number before it starts; QAT freezes its observers here. It must depend
            on that number only, so that a resumed run does the same; it is called for every earlier epoch on resuming.
        after_step: called after each update; pruning masks are applied again here.
        train_mode, eval_mode: in place of `module.train()` and `module.eval()`, which exported modules don't have.

    Raises:
        SourceError: the task has no training data.
        ConversionError: the loss is not finite.
    """
    import torch

    from .training_checkpoint import Checkpoint, fingerprint

    torch.set_num_threads(max(1, context.threads))
    to_train = train_mode or (lambda m: m.train())
    to_eval = eval_mode or (lambda m: m.eval())
    with _deterministic(), _process_group(context, name) as world:
        per_epoch = task.training_batches(world=world.size)
        if per_epoch < 1:
            raise SourceError("the training data of the task is empty", reason=Reason.EMPTY_DATA)
        images = _channels_last(module)
        objective = _make_objective(
            module, extra, loss or (lambda _, outputs, labels: task.loss(outputs, labels)), precision
        )
        step_module = _distributed(objective, world)
        update = _make_optimizer(objective, optimizer, lr, weight_decay)
        digest = fingerprint(
            objective, [name, epochs, lr, optimizer, weight_decay, schedule, warmup, clip, precision, per_epoch],
            [context.seed, world.size],
        )  # fmt: skip
        checkpoint = Checkpoint(context.work / f"{name}.training.pt", digest, world.rank, world.size)
        start, losses = checkpoint.load(objective, update)
        total = epochs * per_epoch
        if start:
            context.note(f"{name}: goes on at step {start} of {total}, where an earlier build was stopped")
        clock = _Clock(context, name, start, total)
        step = start
        for epoch in range(epochs):
            to_train(module)
            if before_epoch:
                before_epoch(epoch)
            if step >= (epoch + 1) * per_epoch:
                continue  # done before the build was killed
            for inputs, labels in _batches(task, epoch, world, per_epoch, skip=step - epoch * per_epoch):
                # Seeding each step makes dropout and the like depend on the step alone: resuming needs no RNG state.
                torch.manual_seed(_mix(context.seed, step, world.rank))
                _set_lr(update, lr * _lr_factor(step, total, schedule, warmup))
                update.zero_grad(set_to_none=True)
                with torch.enable_grad():  # a data generator may have left no_grad open around its yield
                    value = step_module(inputs, labels)
                if not math.isfinite(value.item()):
                    raise ConversionError(
                        f"{name}: the loss became {value.item()} in epoch {epoch + 1}, step {step - epoch * per_epoch}",
                        hint=f"lower `lr` (now {lr:g}), or look at the training data",
                        reason=Reason.NOT_FINITE,
                    )
                value.backward()
                if clip is not None:
                    torch.nn.utils.clip_grad_norm_(objective.parameters(), clip)
                update.step()
                if after_step:
                    after_step()
                losses.append(value.item())
                step += 1
                if step % per_epoch == 0:
                    # One number per finished epoch, the running losses of the unfinished one after them.
                    losses[epoch:] = [sum(losses[epoch:]) / per_epoch]
                if step % checkpoint_every == 0 or step % per_epoch == 0:
                    checkpoint.save(objective, update, step, losses)
                clock.tick(step, epoch, epochs, losses[-1])
        to_eval(module)
        _share_buffers(module, world)
        if images:
            module.to(memory_format=torch.contiguous_format)  # type: ignore[call-overload]
    return History(tuple(losses), total, start)


def _channels_last(module: nn.Module) -> bool:
    """Put a convolutional module into channels-last layout while it trains: a third to a half faster on CPUs."""
    import torch

    if isinstance(module, torch.fx.GraphModule) or not any(isinstance(m, torch.nn.Conv2d) for m in module.modules()):
        return False
    module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return True


def require_float(model: Model, what: str) -> None:
    """Raises ConversionError for a quantised model, whose weights can't learn any more."""
    if model.quantization is not None:
        raise ConversionError(
            f"{what}: the model is already quantised", hint=f"put `{what}` before `quantize` in the recipe"
        )


def forward(module: nn.Module, inputs: Any) -> Any:
    """Call a module on a task's inputs: one tensor, or a tuple of positional ones."""
    return module(*inputs) if isinstance(inputs, tuple) else module(inputs)


def _objective_class() -> type[nn.Module]:
    """The module that DDP wraps; made here because torch is imported late."""
    import torch
    from torch import nn

    class Objective(nn.Module):
        """Inputs and labels → loss, so that everything that learns lies inside one DDP module."""

        def __init__(self, module: nn.Module, extra: Sequence[nn.Module], loss: Loss, precision: Precision) -> None:
            super().__init__()
            self.module = module
            self.extra = nn.ModuleList(extra)
            self.loss = loss
            self.precision = precision

        def forward(self, inputs: Any, labels: Any) -> torch.Tensor:
            with torch.autocast("cpu", torch.bfloat16, enabled=self.precision == "bfloat16"):
                outputs = forward(self.module, inputs)
            if isinstance(outputs, torch.Tensor):
                outputs = outputs.float()  # losses are always computed in float32
            return self.loss(inputs, outputs, labels)

    return Objective


def _make_objective(module: nn.Module, extra: Sequence[nn.Module], loss: Loss, precision: Precision) -> nn.Module:
    return _objective_class()(module, extra, loss, precision)


def _distributed(objective: nn.Module, world: World) -> nn.Module:
    if world.size == 1:
        return objective
    from torch.nn.parallel import DistributedDataParallel

    return DistributedDataParallel(objective)


def _share_buffers(module: nn.Module, world: World) -> None:
    """DDP hands rank 0's BatchNorm statistics round before each step, so the last step's are still each rank's own."""
    if world.size == 1:
        return
    from torch import distributed

    for buffer in module.buffers():
        distributed.broadcast(buffer, src=0)


def _make_optimizer(objective: nn.Module, kind: Optimizer, lr: float, weight_decay: float) -> torch.optim.Optimizer:
    """Biases and norms (one dimension) don't decay: shrinking them regularises nothing."""
    import torch

    learnable = [p for p in objective.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in learnable if p.dim() > 1], "weight_decay": weight_decay},
        {"params": [p for p in learnable if p.dim() <= 1], "weight_decay": 0.0},
    ]
    groups = [g for g in groups if g["params"]]
    if kind == "sgd":
        return torch.optim.SGD(groups, lr=lr, momentum=0.9, nesterov=True)
    return torch.optim.AdamW(groups, lr=lr)


def _set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr


def _lr_factor(step: int, total: int, schedule: Schedule, warmup: float) -> float:
    """Share of the greatest learning rate at `step`: linear warm-up, then half a cosine (or level)."""
    rising = max(1, round(total * warmup))
    if step < rising:
        return (step + 1) / rising
    if schedule == "constant":
        return 1.0
    return 0.5 * (1.0 + math.cos(math.pi * (step - rising) / max(1, total - rising)))


def _batches(task: Task, epoch: int, world: World, count: int, *, skip: int) -> Iterator[tuple[Any, Any]]:
    """The epoch's batches from number `skip` on; exactly `count` in all, or DDP would wait for ever."""
    seen = 0
    for batch in task.training(epoch, rank=world.rank, world=world.size):
        if seen >= count:
            break
        if seen >= skip:
            yield batch
        seen += 1
    if seen < count:
        raise ConversionError(
            f"task `{task.kind}` gave {seen} training batches in epoch {epoch + 1} where it announced {count}",
            hint="`training_batches` and `training` of the task disagree",
            reason=Reason.INVARIANT_BROKEN,
        )


def _mix(*numbers: int) -> int:
    """One 63-bit seed from several numbers, without the collisions of adding them."""
    return int.from_bytes(hashlib.sha256(repr(numbers).encode()).digest()[:8], "little") >> 1


@contextmanager
def _deterministic() -> Iterator[None]:
    """Ask torch for deterministic kernels, and put its setting back."""
    import torch

    before = torch.are_deterministic_algorithms_enabled()
    fill = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
        torch.utils.deterministic.fill_uninitialized_memory = fill  # type: ignore[attr-defined]


@contextmanager
def _process_group(context: Context, name: str) -> Iterator[World]:
    """Join the processes that torchrun started, if it did; later runs of `train` in this process share their group."""
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1:
        yield World()
        return
    from torch import distributed
    from torch.distributed.rendezvous import rendezvous

    store, rank, size = next(rendezvous("env://"))
    # Stages are processes that come one after the other on torchrun's one store: keys of the last must not meet ours.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    store = distributed.distributed_c10d.PrefixStore(f"edgec/{context.work.name}/{name}/{attempt}", store)
    if not distributed.is_initialized():
        # Never destroyed: gloo's end can wait for ever for a peer that has left. A stage's process ends by `os._exit`.
        distributed.init_process_group("gloo", store=store, rank=rank, world_size=size)
    yield World(rank, size)
    # A rank that left first would take its end of the others' last messages with it; the store outlives them all.
    store.set(f"finished/{rank}", "")
    store.wait([f"finished/{r}" for r in range(size)])


class _Clock:
    """Progress at most twice a second, with the time that is left at the pace of this process."""

    def __init__(self, context: Context, name: str, start: int, total: int) -> None:
        self.context, self.name, self.start, self.total = context, name, start, total
        self.began = time.monotonic()
        self.last = 0.0

    def tick(self, step: int, epoch: int, epochs: int, loss: float) -> None:
        now = time.monotonic()
        if now - self.last < 0.5 and step < self.total:
            return
        self.last = now
        left = (now - self.began) / max(1, step - self.start) * (self.total - step)
        what = f"{self.name}: epoch {epoch + 1}/{epochs}, loss {loss:.3f}, {left / 60:.0f} min {left % 60:02.0f} s left"
        self.context.progress(step, self.total, what)
