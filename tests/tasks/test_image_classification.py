"""Images in, logits out: one preprocessing for every use, and clear words for bad data."""

from __future__ import annotations

import gzip
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from torch import nn

from edgec.errors import EdgecError, Reason, RecipeError, SourceError
from edgec.golden import TorchRunner
from edgec.graphs import capture, capture_batch
from edgec.tasks.base import TaskContext
from edgec.tasks.image_classification import ImageClassificationOptions, ImageClassificationTask
from edgec.tasks.images import Preprocessing, read_idx


def write_idx(path: Path, array: np.ndarray) -> None:
    data = struct.pack(">HBB", 0, 8, array.ndim) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)


def digits(folder: Path, count: int = 40, classes: int = 4, seed: int = 0) -> None:
    random = np.random.default_rng(seed)
    write_idx(folder / "images.gz", random.integers(0, 256, (count, 8, 8), dtype=np.uint8))
    write_idx(folder / "labels.gz", random.integers(0, classes, count, dtype=np.uint8))


def task(folder: Path, seed: int = 0, **changes: Any) -> ImageClassificationTask:
    labelled = {"images": [{"from": "images.gz"}], "labels": {"from": "labels.gz"}}
    options = {
        "classes": 4,
        "preprocessing": {"size": [8, 8], "channels": 1, "mean": [100], "std": [50]},
        "evaluation": labelled,
        "train": {**labelled, "batch": 8},
    }
    checked = ImageClassificationOptions.model_validate({**options, **changes})
    return ImageClassificationTask(checked, TaskContext(folder, folder / "cache", seed))


def photos(folder: Path, count: int = 3, size: tuple[int, int] = (60, 40)) -> dict[str, Any]:
    from PIL import Image

    (folder / "photos").mkdir(exist_ok=True)
    for i in range(count):
        pixels = np.random.default_rng(i).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / "photos" / f"{i}.png")
    return {"images": [{"from": "photos/*.png"}]}


def photo_task(folder: Path, **changes: Any) -> ImageClassificationTask:
    found = photos(folder)
    options = {
        "classes": 4,
        "preprocessing": {"size": [16, 16], "mean": [127], "std": [128]},
        "evaluation": {**found, "crops": 4},
        "calibration": {**found, "crops": 2},
    }
    checked = ImageClassificationOptions.model_validate({**options, **changes})
    return ImageClassificationTask(checked, TaskContext(folder, folder / "cache", 0))


def runner(used: ImageClassificationTask, module: nn.Module) -> TorchRunner:
    return TorchRunner({"main": module}, used.signatures(module))


class Constant(nn.Module):
    """Says the same class for every image."""

    def __init__(self, answer: int, classes: int = 4) -> None:
        super().__init__()
        self.register_buffer("logits", nn.functional.one_hot(torch.tensor(answer), classes).float())

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return self.logits.expand(len(image), -1)


def test_top1_counts_labels(tmp_path: Path) -> None:
    digits(tmp_path)
    used = task(tmp_path)
    labels = read_idx(tmp_path / "labels.gz")
    assert used.metric == "top1"
    assert used.evaluate(runner(used, Constant(2)), None) == {"top1": float((labels == 2).mean())}
    assert used.evaluate(runner(used, Constant(2)), None, limit=10) == {"top1": float((labels[:10] == 2).mean())}


def test_without_labels_the_metric_is_agreement_with_the_source(tmp_path: Path) -> None:
    used = photo_task(tmp_path)
    source = nn.Sequential(nn.Flatten(), nn.Linear(3 * 16 * 16, 4)).eval()
    reference = used.reference(runner(used, source))
    assert used.metric == "agreement"
    assert reference["logits"].shape == (12, 4)
    assert used.evaluate(runner(used, source), reference) == {"agreement": 1.0, "cosine": pytest.approx(1.0)}
    answers = reference["logits"].argmax(1)
    got = used.evaluate(runner(used, Constant(int(answers[0]))), reference)
    assert got["agreement"] == float((answers == answers[0]).mean())
    assert got["cosine"] < 1.0


def test_training_batches_are_shuffled_by_seed_and_epoch(tmp_path: Path) -> None:
    digits(tmp_path)
    used = task(tmp_path)

    def labels(epoch: int, chosen: ImageClassificationTask = used) -> list[int]:
        return [int(v) for _, batch in chosen.training(epoch) for v in batch]

    assert labels(0) == labels(0) != labels(1)
    assert labels(0) != labels(0, task(tmp_path, seed=1))
    assert sorted(labels(0)) == sorted(labels(1)) == sorted(read_idx(tmp_path / "labels.gz").tolist())


def test_ranks_share_an_epoch_without_overlap(tmp_path: Path) -> None:
    write_idx(tmp_path / "images.gz", np.arange(40, dtype=np.uint8)[:, None, None].repeat(8, 1).repeat(8, 2))
    write_idx(tmp_path / "labels.gz", np.zeros(40, np.uint8))
    used = task(tmp_path)
    seen = [[float(x[0, 0, 0]) for images, _ in used.training(0, rank=r, world=2) for x in images] for r in (0, 1)]
    assert len(seen[0]) == len(seen[1]) == 8 * used.training_batches(world=2)
    assert not set(seen[0]) & set(seen[1])


def test_augmentation_shifts_and_mirrors_without_changing_the_rest(tmp_path: Path) -> None:
    image = np.zeros((16, 8, 8), np.uint8)
    image[:, 3, 2] = 200  # one bright pixel
    write_idx(tmp_path / "images.gz", image)
    write_idx(tmp_path / "labels.gz", np.zeros(16, np.uint8))
    labelled = {"images": [{"from": "images.gz"}], "labels": {"from": "labels.gz"}}
    used = task(tmp_path, train={**labelled, "batch": 16, "augment": {"shift": 1, "flip": True}})
    images, _ = next(iter(used.training(0)))
    places = {tuple(int(v) for v in (x[0] == x[0].max()).nonzero()[0]) for x in images}
    assert len(places) > 3
    assert all(2 <= row <= 4 and (1 <= column <= 3 or 4 <= column <= 6) for row, column in places)


def test_crops_are_the_same_each_time_and_differ_from_each_other(tmp_path: Path) -> None:
    first = [x.numpy() for (x,) in photo_task(tmp_path).calibration()]
    second = [x.numpy() for (x,) in photo_task(tmp_path).calibration()]
    assert len(first) == 6
    assert all(np.array_equal(a, b) for a, b in zip(first, second, strict=True))
    assert not np.array_equal(first[0], first[3]), "the central crop and a random one of the same photograph"


def test_the_first_samples_show_every_photograph(tmp_path: Path) -> None:
    found = photos(tmp_path)
    few = photo_task(tmp_path, calibration={**found, "crops": 4, "samples": 3})
    central = photo_task(tmp_path, calibration={**found, "crops": 1})
    pairs = zip(few.calibration(), central.calibration(), strict=True)
    assert all(torch.equal(a, b) for (a,), (b,) in pairs)


def test_the_central_crop_keeps_its_share_of_the_shorter_side(tmp_path: Path) -> None:
    from PIL import Image

    pixels = np.zeros((32, 64, 3), np.uint8)
    pixels[8:24, 24:40] = 255  # the middle 16 × 16
    Image.fromarray(pixels).save(tmp_path / "photo.png")
    how = {"size": [16, 16], "crop_share": 0.5, "mean": [0], "std": [255]}
    used = photo_task(tmp_path, preprocessing=how, evaluation={"images": [{"from": "photo.png"}]})
    assert used.record()[0].inputs["image"].min() == 1.0


def test_channel_order_mean_and_std() -> None:
    pixels = np.array([10, 20, 30], np.uint8).reshape(3, 1, 1)
    how = Preprocessing(size=(1, 1), order="bgr", mean=[0.0], std=[10.0])
    assert how.normalise(pixels).ravel().tolist() == [3.0, 2.0, 1.0]
    how = Preprocessing(size=(1, 1), mean=[10.0, 10.0, 10.0], std=[1.0, 10.0, 20.0])
    assert how.normalise(pixels).ravel().tolist() == [0.0, 1.0, 1.0]


def test_a_dynamic_batch_is_asked_for_by_name(tmp_path: Path) -> None:
    digits(tmp_path)
    signature = task(tmp_path, max_batch=8).signatures(nn.Identity())[0]
    assert signature.inputs[0].shape == ("batch", 1, 8, 8)
    assert signature.dynamic == (("batch", 1, 8),)
    assert task(tmp_path).signatures(nn.Identity())[0].inputs[0].shape == (1, 1, 8, 8)


def test_data_references_name_all_files_once(tmp_path: Path) -> None:
    digits(tmp_path)
    assert task(tmp_path).data_references() == [("images.gz", None), ("labels.gz", None)]


def bad(folder: Path, **changes: Any) -> EdgecError:
    with pytest.raises(EdgecError) as caught:
        used = task(folder, **changes)
        used.evaluate(runner(used, Constant(0)), None)
    return caught.value


def test_no_images_are_empty_data(tmp_path: Path) -> None:
    digits(tmp_path, count=0)
    assert bad(tmp_path).reason == Reason.EMPTY_DATA


def test_a_label_out_of_range_is_named(tmp_path: Path) -> None:
    digits(tmp_path, classes=9)
    error = bad(tmp_path)
    assert error.reason == Reason.BAD_DATA
    assert "out of range" in error.message and "4 classes" in error.message


def test_labels_and_images_must_be_as_many(tmp_path: Path) -> None:
    digits(tmp_path)
    write_idx(tmp_path / "labels.gz", np.zeros(39, np.uint8))
    assert "for 40 images" in bad(tmp_path).message


@pytest.mark.parametrize("keep", [0, 3, 10, -7])
def test_a_file_that_is_cut_short_is_named(tmp_path: Path, keep: int) -> None:
    digits(tmp_path)
    path = tmp_path / "images.gz"
    path.write_bytes(path.read_bytes()[:keep])
    error = bad(tmp_path)
    assert error.reason == Reason.BAD_DATA and "images.gz" in error.message


def test_a_damaged_photograph_is_named(tmp_path: Path) -> None:
    used = photo_task(tmp_path)
    (tmp_path / "photos" / "1.png").write_bytes(b"\x89PNG but no more")
    with pytest.raises(SourceError, match=r"1\.png"):
        used.record()


def test_a_model_of_other_classes_is_named(tmp_path: Path) -> None:
    digits(tmp_path)
    used = task(tmp_path)
    with pytest.raises(RecipeError, match=r"6,.* 4 classes"):
        used.evaluate(runner(used, Constant(0, classes=6)), None)


def test_training_without_training_data_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="no training data"):
        list(photo_task(tmp_path).training(0))


def test_training_needs_labels() -> None:
    with pytest.raises(ValidationError, match="needs `labels`"):
        ImageClassificationOptions.model_validate(
            {
                "classes": 2,
                "preprocessing": {"size": [8, 8]},
                "evaluation": {"images": [{"from": "a"}]},
                "train": {"images": [{"from": "a"}]},
            }
        )


def test_a_graph_that_takes_any_batch_is_evaluated_in_batches(tmp_path: Path) -> None:
    digits(tmp_path)
    used = task(tmp_path)
    torch.manual_seed(0)
    module = nn.Sequential(nn.Flatten(), nn.Linear(64, 4)).eval()
    (signature,) = used.signatures(module)
    example = used.example(signature)
    graphs = {
        "free": capture_batch(module, example, signature).module(check_guards=False),
        "fixed": capture(module, example, signature).module(check_guards=False),
    }
    results, calls = {}, {}
    for name, graph in graphs.items():
        runner = TorchRunner({"main": graph}, (signature,))
        sizes: list[int] = []
        graph.register_forward_pre_hook(lambda _, inputs, sizes=sizes: sizes.append(len(inputs[0])))
        results[name], calls[name] = used.evaluate(runner, None), sizes
    assert calls == {"free": [40], "fixed": [1] * 40}
    assert results["free"] == results["fixed"]
