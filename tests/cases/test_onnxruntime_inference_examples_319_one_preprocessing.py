"""onnxruntime-inference-examples#319: calibration was preprocessed otherwise than evaluation, and accuracy was 0.1 %.

Right behaviour: the task declares preprocessing once, and there is no second place to declare it; the same photograph
reaches calibration, training, evaluation, the example for tracing and the golden's recording as the same numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from pydantic import ValidationError

from edgec.tasks.base import TaskContext
from edgec.tasks.image_classification import ImageClassificationOptions, ImageClassificationTask
from tests.tasks.test_image_classification import write_idx


class Recorder:
    """A runner that keeps what it is given."""

    stateful = False

    def __init__(self) -> None:
        self.seen: list[np.ndarray] = []

    def run(self, signature: str, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        self.seen.append(inputs["image"])
        return {"logits": np.zeros((len(inputs["image"]), 3), np.float32)}

    def reset(self) -> None:
        """Nothing is kept between runs."""


def make(folder: Path) -> ImageClassificationTask:
    pixels = np.random.default_rng(0).integers(0, 256, (1, 20, 30, 3), dtype=np.uint8)
    write_idx(folder / "images", pixels)
    write_idx(folder / "labels", np.zeros(1, np.uint8))
    data = {"images": [{"from": "images"}], "labels": {"from": "labels"}}
    how = {"size": [16, 16], "order": "bgr", "mean": [120, 110, 100], "std": [60, 50, 40], "fit": "crop"}
    options = {"classes": 3, "preprocessing": how, "evaluation": data, "calibration": data, "train": data}
    return ImageClassificationTask(
        ImageClassificationOptions.model_validate(options), TaskContext(folder, folder / "cache", 0)
    )


def test_every_use_of_an_image_sees_the_same_numbers(tmp_path: Path) -> None:
    task, recorder = make(tmp_path), Recorder()
    task.evaluate(recorder, None)
    evaluated = recorder.seen[0]
    assert evaluated.shape == (1, 3, 16, 16) and evaluated.std() > 0.5
    (calibrated,) = next(iter(task.calibration()))
    trained, _ = next(iter(task.training(0)))
    (traced,) = task.example(task.signatures(None)[0])  # type: ignore[arg-type]
    recorded = task.record()[0].inputs["image"]
    for other in (calibrated.numpy(), trained.numpy(), traced.numpy(), recorded):
        assert np.array_equal(other, evaluated)


def test_there_is_no_second_place_to_declare_it(tmp_path: Path) -> None:
    options = make(tmp_path).options.model_dump(by_alias=True)
    options["calibration"]["mean"] = [0]
    with pytest.raises(ValidationError, match="Extra inputs"):
        ImageClassificationOptions.model_validate(options)
