"""Distillation: the teacher teaches, and stays what it was."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from edgec.passes.distill import (
    DistillOptions,
    HiddenOptions,
    StudentOptions,
    assert_frozen,
    distill,
    distillation_loss,
    frozen,
)
from torch import nn
from torch.nn import functional

from edgec.errors import ConversionError, RecipeError
from edgec.model import Model
from tests.passes.test_training import script
from tests.passes.tiny import context, tiny_cnn
from tests.passes.training_script import STUDENT, ShardedTask, digest


def options(**changes: Any) -> DistillOptions:
    student = StudentOptions(factory="student.py:student")
    return DistillOptions.model_validate(
        {"student": student, "epochs": 2, "lr": 1e-2, "alpha": 0.5, "baseline": False, **changes}
    )


def run(folder: Path, **changes: Any) -> tuple[Model, Any]:
    stage = context(folder)
    (folder / "student.py").write_text(STUDENT)
    return distill(Model(tiny_cnn(1), ShardedTask(), {}), options(**changes), stage), stage


def agreement(module: nn.Module) -> float:
    teacher = tiny_cnn(1)
    images = torch.randn((256, 3, 16, 16), generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        return float(functional.cosine_similarity(module(images), teacher(images)).mean())


def test_the_student_answers_like_its_teacher(tmp_path: Path) -> None:
    before, _ = run(tmp_path / "a", epochs=1, lr=1e-9)
    after, _ = run(tmp_path / "b", epochs=6)
    assert agreement(after.module) > agreement(before.module) + 0.1
    assert after.source == {"kind": "factory", "factory": "student.py:student", "args": {}}


def test_the_teacher_is_left_as_it_was(tmp_path: Path) -> None:
    teacher = tiny_cnn(1).train()  # as a careless caller hands it over
    before = digest(teacher)
    (tmp_path / "student.py").write_text(STUDENT)
    distill(Model(teacher, ShardedTask(), {}), options(), context(tmp_path))
    assert digest(teacher) == before, "BatchNorm's statistics would have moved in training mode"
    assert not any(part.training for part in teacher.modules())
    assert all(p.grad is None for p in teacher.parameters())


@pytest.mark.parametrize("spoil", [lambda t: t.features[1].train(), lambda t: t.head.weight.requires_grad_(True)])
def test_a_teacher_that_learns_is_caught(spoil: Any) -> None:
    teacher = frozen(tiny_cnn())
    assert_frozen(teacher)
    loss = distillation_loss(teacher, ShardedTask(), temperature=2.0, alpha=0.5)
    spoil(teacher)
    with pytest.raises(ConversionError, match="of the teacher"):
        loss(torch.randn(2, 3, 16, 16), torch.randn(2, 4), torch.randn(2, 4))


def test_the_loss_is_hintons() -> None:
    teacher, images = frozen(tiny_cnn()), torch.randn(5, 3, 16, 16)
    got, labels = torch.randn(5, 4), torch.randn(5, 4)
    loss = distillation_loss(teacher, ShardedTask(), temperature=3.0, alpha=0.7)(images, got, labels)
    p, q = (teacher(images) / 3).softmax(-1), (got / 3).softmax(-1)
    soft = (p * (p / q).log()).sum(-1).mean()
    expected = 0.7 * 9 * soft + 0.3 * functional.mse_loss(got, labels)
    assert float(loss) == pytest.approx(float(expected), rel=1e-4)


def test_the_same_seed_gives_the_same_student(tmp_path: Path) -> None:
    assert digest(run(tmp_path / "a")[0].module) == digest(run(tmp_path / "b")[0].module)


def test_the_student_alone_is_reported_beside(tmp_path: Path) -> None:
    _, stage = run(tmp_path, baseline=True)
    assert "alone_agreement" in stage.log.metrics
    rows = {row[0]: row for table in stage.log.tables for row in table.rows}
    assert set(rows) == {"teacher", "alone", "distilled"}
    assert rows["alone"][1] == rows["distilled"][1] < rows["teacher"][1]


def test_hidden_states_are_projected_to_the_teachers_width(tmp_path: Path) -> None:
    pair = HiddenOptions(teacher="features.2", student="2", weight=1.0)  # (N, 16, 8, 8) and (N, 8, 8, 8)
    with_hidden, _ = run(tmp_path / "a", hidden=[pair])
    without, _ = run(tmp_path / "b")
    assert digest(with_hidden.module) != digest(without.module)
    assert not any(module._forward_hooks for module in with_hidden.module.modules())


def test_hidden_states_of_other_sizes_are_refused(tmp_path: Path) -> None:
    pair = HiddenOptions(teacher="features.2", student="4")
    with pytest.raises(RecipeError, match="more than their width"):
        run(tmp_path, hidden=[pair])


def test_a_layer_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"teacher has no module `feature\.2`; did you mean `features\.2`"):
        run(tmp_path, hidden=[HiddenOptions(teacher="feature.2", student="2")])


def test_other_classes_than_the_teachers_are_refused(tmp_path: Path) -> None:
    (tmp_path / "other.py").write_text(STUDENT.replace("Linear(8, 4)", "Linear(8, 5)"))
    changed = options(student=StudentOptions(factory="other.py:student"))
    with pytest.raises(ConversionError, match="where the teacher gives"):
        distill(Model(tiny_cnn(1), ShardedTask(), {}), changed, context(tmp_path))


@pytest.mark.slow
def test_distillation_under_torchrun_is_deterministic(tmp_path: Path) -> None:
    first = script(tmp_path / "a", "--distill", processes=2)
    second = script(tmp_path / "b", "--distill", processes=2)
    assert first[0] == first[1] == second[0]
