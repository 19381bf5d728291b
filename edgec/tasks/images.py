"""Images as arrays: read from IDX files or photographs, cropped, and preprocessed, in one place for every use.

Calibration, training, evaluation and the golden's recording all go through `Preprocessing`; there is no second
declaration that could differ from the first.
"""

from __future__ import annotations

import gzip
import hashlib
import math
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
from pydantic import ConfigDict, Field, model_validator

from edgec.errors import Reason, RecipeError, SourceError
from edgec.registry import Options

if TYPE_CHECKING:
    from PIL.Image import Image

    from edgec.tasks.base import TaskContext

PHOTOS = (".png", ".jpg", ".jpeg", ".bmp", ".webp", ".tif", ".tiff")


class FileOptions(Options):
    """One reference."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, populate_by_name=True)

    source: str = Field(alias="from", description="reference to a file, or to several with wildcards")
    sha256: str | None = Field(
        None, description="SHA-256 of the file, or of the set; required unless the path is local"
    )


class ImageSetOptions(Options):
    """A set of images: one IDX file, or photographs."""

    images: list[FileOptions] = Field(min_length=1, description="one IDX file (may be .gz), or photographs")
    labels: FileOptions | None = Field(None, description="IDX file with one label per image")
    exclude: list[str] = Field(default_factory=list, description="names of photographs to leave out")
    crops: int = Field(1, ge=1, description="crops of each photograph: the central one, then random ones from the seed")
    samples: int | None = Field(None, ge=1, description="use only the first so many; all when not given")


class Preprocessing(Options):
    """From pixels to what the model takes."""

    size: tuple[int, int] = Field(description="height and width of the model's input")
    channels: Literal[1, 3] = Field(3, description="1: grey; 3: red, green, blue")
    order: Literal["rgb", "bgr"] = Field("rgb", description="order of the three channels")
    mean: list[float] = Field([0.0], description="subtracted from pixels of 0 to 255; one number, or one per channel")
    std: list[float] = Field([255.0], description="then divided by this; one number, or one per channel")
    fit: Literal["crop", "stretch", "exact"] = Field(
        "crop",
        description="crop: scale the shorter side, then cut the middle; stretch: scale both sides; exact: must fit",
    )
    crop_share: float = Field(
        0.875, gt=0, le=1, description="share of the scaled shorter side that the central crop keeps"
    )
    interpolation: Literal["bilinear", "bicubic"] = Field("bicubic", description="how photographs are scaled")

    @model_validator(mode="after")
    def _channels_agree(self) -> Preprocessing:
        for name in ("mean", "std"):
            if len(getattr(self, name)) not in (1, self.channels):
                raise ValueError(f"`{name}` needs 1 or {self.channels} numbers")
        if 0.0 in self.std:
            raise ValueError("`std` must not hold 0")
        if self.order == "bgr" and self.channels != 3:
            raise ValueError("`order: bgr` needs three channels")
        return self

    def normalise(self, pixels: np.ndarray) -> np.ndarray:
        """(…, C, H, W) uint8 or float pixels, RGB → float32 in the model's scale and channel order."""
        mean = np.asarray(self.mean, np.float32).reshape(-1, 1, 1)
        std = np.asarray(self.std, np.float32).reshape(-1, 1, 1)
        if self.order == "bgr":
            pixels = pixels[..., ::-1, :, :]
        return np.ascontiguousarray((pixels.astype(np.float32) - mean) / std)


@dataclass(frozen=True)
class ImageSet:
    """`pixels` is (N, C, H, W) uint8, RGB; `labels` (N,) int64, or None."""

    pixels: np.ndarray
    labels: np.ndarray | None


def load_images(options: ImageSetOptions, how: Preprocessing, classes: int, context: TaskContext) -> ImageSet:
    """Fetch and read an image set.

    Raises:
        SourceError: it can't be had, is empty (`empty-data`), damaged, or has labels out of range (`bad-data`).
        RecipeError: images that don't fit `size`, where `fit` is "exact".
    """
    files = [path for file in options.images for path in _fetch(file, context)]
    files = [p for p in files if p.name not in options.exclude and p.stem not in options.exclude]
    photos = [p for p in files if p.suffix.lower() in PHOTOS]
    if photos:
        pixels = _read_photos(photos, options, how, context.seed)
    elif len(files) == 1:
        pixels = _fit_idx(read_idx(files[0]), how, files[0])
    else:
        names = ", ".join(f.source for f in options.images)
        raise SourceError(
            f"no images in {names}",
            hint=f"an image set is one IDX file, or photographs ({', '.join(PHOTOS)})",
            reason=Reason.EMPTY_DATA,
        )
    labels = None
    if options.labels is not None:
        where = _fetch(options.labels, context)[0]
        labels = _checked_labels(read_idx(where), len(pixels), classes, where)
    if options.samples is not None:
        pixels, labels = pixels[: options.samples], labels[: options.samples] if labels is not None else None
    if len(pixels) == 0:
        raise SourceError(f"{files[0].name} holds no images", hint="name another file", reason=Reason.EMPTY_DATA)
    return ImageSet(pixels, labels)


def _fetch(file: FileOptions, context: TaskContext) -> list[Path]:
    from edgec.sources.fetch import fetch_all

    return fetch_all(file.source, file.sha256, recipe_dir=context.recipe_dir, cache=context.cache)


def read_idx(path: Path) -> np.ndarray:
    """An IDX file of unsigned bytes, gzipped or not (http://yann.lecun.com/exdb/mnist, "the IDX file format").

    Raises:
        SourceError: it is cut short, or isn't IDX (`bad-data`).
    """
    try:
        data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (OSError, EOFError, zlib.error) as cause:
        raise _bad(path, f"can't be unpacked: {cause}") from cause
    if len(data) < 4 or data[:2] != b"\0\0" or data[2] != 0x08:
        raise _bad(path, "is not an IDX file of unsigned bytes")
    dims = data[3]
    start = 4 + 4 * dims
    if len(data) < start:
        raise _bad(path, "is cut short in its header")
    shape = struct.unpack(f">{dims}I", data[4:start])
    if len(data) - start != math.prod(shape):
        raise _bad(path, f"announces {math.prod(shape)} values {shape} and holds {len(data) - start}")
    return np.frombuffer(data, np.uint8, offset=start).reshape(shape)


def _bad(path: Path, what: str) -> SourceError:
    return SourceError(f"{path.name} {what}", hint="download it again", reason=Reason.BAD_DATA)


def _checked_labels(labels: np.ndarray, images: int, classes: int, path: Path) -> np.ndarray:
    if labels.shape != (images,):
        raise _bad(path, f"holds labels of shape {labels.shape} for {images} images")
    if len(labels) and int(labels.max()) >= classes:
        at = int(labels.argmax())
        raise SourceError(
            f"{path.name}: label {int(labels[at])} of image {at} is out of range: the task has {classes} classes",
            hint="raise `classes`, or take the labels that belong to this model",
            reason=Reason.BAD_DATA,
        )
    return labels.astype(np.int64)


def _fit_idx(images: np.ndarray, how: Preprocessing, path: Path) -> np.ndarray:
    """(N, H, W) or (N, H, W, C) bytes → (N, C, height, width); sizes that differ are scaled like photographs."""
    if images.ndim not in (3, 4):
        raise _bad(path, f"holds arrays of shape {images.shape}, not images")
    pixels = images[:, None] if images.ndim == 3 else images.transpose(0, 3, 1, 2)
    if pixels.shape[1] not in (1, how.channels):
        raise _bad(path, f"has {pixels.shape[1]} channels where the model takes {how.channels}")
    if pixels.shape[2:] != how.size:
        if how.fit == "exact":
            raise RecipeError(f"{path.name} holds images of {pixels.shape[2:]}, the model takes {how.size}")
        from PIL import Image

        pixels = np.stack([_channels_first(_fit(Image.fromarray(_channels_last(p)), how)) for p in pixels])
    return np.repeat(pixels, how.channels, axis=1) if pixels.shape[1] != how.channels else pixels


def _channels_last(pixels: np.ndarray) -> np.ndarray:
    return pixels[0] if pixels.shape[0] == 1 else pixels.transpose(1, 2, 0)


def _channels_first(image: Image) -> np.ndarray:
    array = np.asarray(image)
    return array[None] if array.ndim == 2 else array.transpose(2, 0, 1)


def _read_photos(paths: Sequence[Path], options: ImageSetOptions, how: Preprocessing, seed: int) -> np.ndarray:
    """(N, C, H, W): the central crop of every photograph, then the first random crop of every one, and so on.

    Crops in the outer loop: the first few samples then show all photographs.
    """
    from PIL import Image

    images = []
    for path in paths:
        try:
            with Image.open(path) as file:
                images.append(file.convert("L" if how.channels == 1 else "RGB"))
        except (OSError, ValueError, Image.DecompressionBombError) as cause:
            raise _bad(path, f"is not a photograph that can be read: {cause}") from cause
    made: list[Image.Image] = []
    for crop in range(options.crops):
        for image in images:
            if options.samples is not None and len(made) >= options.samples:
                break
            made.append(_fit(image, how) if crop == 0 else _random_crop(image, how, crop, seed))
    return np.stack([_channels_first(image) for image in made])


def _filter(how: Preprocessing) -> int:
    from PIL.Image import Resampling

    return int(Resampling.BICUBIC if how.interpolation == "bicubic" else Resampling.BILINEAR)


def _fit(image: Image, how: Preprocessing) -> Image:
    height, width = how.size
    if image.size == (width, height):
        return image
    if how.fit == "exact":
        raise RecipeError(f"an image of {image.height}×{image.width} where the model takes {height}×{width}")
    if how.fit == "stretch":
        return image.resize((width, height), _filter(how))
    # The largest box of the model's aspect ratio in the middle, less the margin: the same as scaling first.
    scale = min(image.width / width, image.height / height) * how.crop_share
    w, h = width * scale, height * scale
    left, top = (image.width - w) / 2, (image.height - h) / 2
    return image.resize((width, height), _filter(how), box=(left, top, left + w, top + h))


def _random_crop(image: Image, how: Preprocessing, crop: int, seed: int) -> Image:
    """A crop of 20 to 80 % of the area at an aspect ratio of 3:4 to 4:3, flipped half of the times.

    It depends on the seed, the photograph and the crop's number, not on what else is in the set.
    """
    from PIL.Image import Transpose

    key = hashlib.sha256(f"{seed}/{crop}/".encode() + image.tobytes()).digest()
    random = np.random.default_rng(int.from_bytes(key[:8], "little"))
    area = image.width * image.height * random.uniform(0.2, 0.8)
    ratio = math.exp(random.uniform(math.log(3 / 4), math.log(4 / 3)))
    w = min(image.width, math.sqrt(area * ratio))
    h = min(image.height, math.sqrt(area / ratio))
    left, top = random.uniform(0, image.width - w), random.uniform(0, image.height - h)
    height, width = how.size
    made = image.resize((width, height), _filter(how), box=(left, top, left + w, top + h))
    return made.transpose(Transpose.FLIP_LEFT_RIGHT) if random.random() < 0.5 else made
