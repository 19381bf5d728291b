"""knowledge-distillation#2: the teacher was never put in evaluation mode, so dropout made noise of what it taught.

Right behaviour: `distill` puts it there, and every step asserts that it still is.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from edgec.passes.distill import DistillOptions, StudentOptions, distill, distillation_loss, frozen
from torch import nn

from edgec.errors import ConversionError, Reason
from edgec.model import Model
from tests.passes.tiny import context, tiny_cnn
from tests.passes.training_script import STUDENT, ShardedTask


def test_distill_puts_the_teacher_into_evaluation_mode(tmp_path: Path) -> None:
    seen: list[bool] = []
    teacher = nn.Sequential(tiny_cnn(1), nn.Dropout(0.5)).train()
    teacher.register_forward_hook(lambda module, *_: seen.append(any(m.training for m in module.modules())))
    (tmp_path / "student.py").write_text(STUDENT)
    options = DistillOptions(student=StudentOptions(factory="student.py:student"), epochs=1, baseline=False)
    distill(Model(teacher, ShardedTask(), {}), options, context(tmp_path))
    assert seen and not any(seen)


def test_a_teacher_put_back_into_training_mode_stops_the_stage() -> None:
    teacher = frozen(nn.Sequential(tiny_cnn(1), nn.Dropout(0.5)))
    loss = distillation_loss(teacher, ShardedTask(), temperature=4.0, alpha=0.9)
    teacher.train()
    with pytest.raises(ConversionError, match="training mode") as caught:
        loss(torch.randn(2, 3, 16, 16), torch.randn(2, 4), torch.randn(2, 4))
    assert caught.value.reason == Reason.INVARIANT_BROKEN
