"""Distillation: the teacher teaches, and stays what it was."""

from __future__ import annotations

from collections.abc import Iterator
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
from edgec.passes.teacher import Answers
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


@pytest.mark.slow
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


class Counting(nn.Module):
    """A teacher that counts the inputs it is shown."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = tiny_cnn(1)
        self.seen = 0

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        self.seen += len(images)
        return self.inner(images)


def test_the_teacher_is_asked_once_for_an_input_and_its_answers_are_its_own() -> None:
    teacher = Counting().eval()
    answers = Answers(teacher)
    images = torch.randn(48, 3, 16, 16)
    with torch.no_grad():
        wanted = teacher.inner(images)
    answers(images[:32])
    teacher.seen = 0
    assert torch.allclose(answers(images[8:40]), wanted[8:40], atol=1e-6)
    assert teacher.seen == 16, "eight are new, in a batch of a round size"
    order = torch.randperm(32)
    assert torch.allclose(answers(images[order]), wanted[order], atol=1e-6)
    assert teacher.seen == 16, "nothing is new"
    mirrored = images[:32].flip(-1)
    with torch.no_grad():
        assert torch.allclose(answers(mirrored), teacher.inner(mirrored), atol=1e-6)
    assert teacher.seen == 48, "a mirrored image is another one"


def test_answers_that_memory_has_no_room_for_are_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edgec.passes.teacher.LARGEST_TOTAL", 0)  # the first 1024 rows are all there will be
    teacher = Counting().eval()
    answers = Answers(teacher)
    images = torch.randn(1040, 3, 16, 16)
    answers(images)
    teacher.seen = 0
    with torch.no_grad():
        assert torch.allclose(answers(images), teacher.inner(images), atol=1e-6)
    assert teacher.seen == 16


@pytest.mark.parametrize("answer", [lambda x: x.flatten(1).sum(0), lambda x: x.repeat(1, 1, 8, 8).flatten(1)])
def test_a_teacher_without_an_answer_for_every_input_is_asked_each_time(answer: Any) -> None:
    class Odd(nn.Module):
        def forward(self, images: torch.Tensor) -> torch.Tensor:
            return answer(images)

    answers = Answers(Odd().eval())
    images = torch.randn(4, 3, 16, 16)
    for _ in range(2):
        assert torch.equal(answers(images), answer(images))
    assert not answers.known


class Shuffled(ShardedTask):
    """The same images in each epoch in another order, some of them mirrored."""

    def training(self, epoch: int, *, rank: int = 0, world: int = 1) -> Iterator[tuple[Any, Any]]:
        batches = list(super().training(0))
        images, labels = torch.cat([b[0] for b in batches]), torch.cat([b[1] for b in batches])
        random = torch.Generator().manual_seed(epoch)
        images = torch.where(torch.rand(128, 1, 1, 1, generator=random) < 0.5, images.flip(-1), images)
        for index in torch.randperm(128, generator=random).split(32):
            yield images[index], labels[index]

    def training_batches(self, *, world: int = 1) -> int:
        return 4


def test_remembering_the_teacher_changes_no_weight(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "student.py").write_text(STUDENT)
    digests, seen = [], []
    for largest in (8192, 0):
        monkeypatch.setattr("edgec.passes.teacher.LARGEST_ROW", largest)
        teacher = Counting()
        stage = context(tmp_path / str(largest))
        stage.recipe_dir = tmp_path
        digests.append(digest(distill(Model(teacher, Shuffled(), {}), options(epochs=4), stage).module))
        seen.append(teacher.seen)
    assert digests[0] == digests[1]
    assert seen[0] < 0.8 * seen[1]


@pytest.mark.slow
def test_distillation_under_torchrun_is_deterministic(tmp_path: Path) -> None:
    first = script(tmp_path / "a", "--distill", processes=2)
    second = script(tmp_path / "b", "--distill", processes=2)
    assert first[0] == first[1] == second[0]
