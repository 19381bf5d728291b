"""State dicts: safe, whole, finite, and of the right architecture."""

from __future__ import annotations

import json
import os
import pickle
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from edgec.errors import Reason, SourceError
from edgec.sources.checkpoints import header_parameters, load_into, load_state_dict, read_safetensors_header
from edgec.sources.section import ModelSection


def net() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4, 2))


@pytest.mark.parametrize("wrap", [lambda s: s, lambda s: {"epoch": 3, "state_dict": s}, lambda s: {"model": s}])
@pytest.mark.parametrize("legacy", [False, True])
def test_a_state_dict_is_found_inside_what_training_saves(
    tmp_path: Path, wrap: Callable[..., Any], legacy: bool
) -> None:
    state = net().state_dict()
    torch.save(wrap(state), tmp_path / "a.pth", _use_new_zipfile_serialization=not legacy)
    loaded = load_state_dict(tmp_path / "a.pth")
    assert {k: v.tolist() for k, v in loaded.items()} == {k: v.tolist() for k, v in state.items()}


class Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("touch pwned",)


@pytest.mark.parametrize("legacy", [False, True])
def test_a_pickle_that_would_run_code_is_refused_and_runs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, legacy: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"w": Evil()}, "evil.pth", _use_new_zipfile_serialization=not legacy)
    with pytest.raises(SourceError) as caught:
        load_state_dict(tmp_path / "evil.pth")
    assert caught.value.reason == Reason.UNSAFE_FILE
    assert "system" in caught.value.message and "\n" not in caught.value.message
    assert not (tmp_path / "pwned").exists()


def test_a_bare_pickle_and_a_whole_module_are_refused(tmp_path: Path) -> None:
    (tmp_path / "bare.pth").write_bytes(pickle.dumps(Evil()))
    torch.save(net(), tmp_path / "module.pth")
    for name in ("bare.pth", "module.pth"):
        with pytest.raises(SourceError) as caught:
            load_state_dict(tmp_path / name)
        assert caught.value.reason == Reason.UNSAFE_FILE, name


def test_a_truncated_file_is_damaged_wherever_it_is_cut(tmp_path: Path) -> None:
    torch.save(net().state_dict(), tmp_path / "a.pth")
    save_file(net().state_dict(), tmp_path / "a.safetensors")
    for name in ("a.pth", "a.safetensors"):
        whole = (tmp_path / name).read_bytes()
        for length in (0, 4, 100, len(whole) // 2, len(whole) - 1):
            (tmp_path / name).write_bytes(whole[:length])
            with pytest.raises(SourceError) as caught:
                load_state_dict(tmp_path / name)
            assert caught.value.reason == Reason.BAD_CHECKPOINT, (name, length)
            assert "\n" not in caught.value.message


def test_a_torchscript_archive_is_named_as_one(tmp_path: Path) -> None:
    torch.jit.script(nn.Linear(2, 2)).save(str(tmp_path / "script.pt"))
    with pytest.raises(SourceError, match="TorchScript"):
        load_state_dict(tmp_path / "script.pt")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["a.pth", "a.safetensors"])
def test_weights_that_are_not_finite_are_refused_by_name(tmp_path: Path, value: float, name: str) -> None:
    state = net().state_dict()
    state["3.weight"][1, 2] = value
    save_file(state, tmp_path / name) if name.endswith("s") else torch.save(state, tmp_path / name)
    with pytest.raises(SourceError, match=r"1 of 8 values of `3.weight`") as caught:
        load_state_dict(tmp_path / name)
    assert caught.value.reason == Reason.NOT_FINITE


@pytest.mark.parametrize("prefix", ["", "module.", "_orig_mod.", "model."])
def test_a_wrappers_prefix_is_taken_off(prefix: str) -> None:
    source, target = net(), net()
    state = {f"{prefix}{k}": v for k, v in source.state_dict().items()}
    assert load_into(target, state, "a.pth") == prefix
    assert torch.equal(target[3].weight, source[3].weight)  # type: ignore[index]


def test_a_module_whose_own_names_begin_like_a_prefix_keeps_them() -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = nn.Linear(2, 2)

    assert load_into(Outer(), Outer().state_dict(), "a.pth") == ""


def test_what_does_not_fit_is_told_in_one_line() -> None:
    state = net().state_dict()
    del state["0.bias"]
    state["extra"] = torch.zeros(1)
    state["3.weight"] = torch.zeros(2, 5)
    with pytest.raises(SourceError) as caught:
        load_into(net(), state, "a.pth")
    message = caught.value.message
    assert "1 missing: 0.bias" in message
    assert "1 unexpected: extra" in message
    assert "3.weight [2, 5] for [2, 4]" in message
    assert "\n" not in message


def test_the_counter_of_old_batch_norms_may_be_absent_and_nothing_else() -> None:
    state = net().state_dict()
    del state["1.num_batches_tracked"]
    load_into(net(), state, "a.pth")
    del state["1.running_mean"]
    with pytest.raises(SourceError, match="running_mean"):
        load_into(net(), state, "a.pth")


def test_a_header_gives_the_parameters_without_loading(tmp_path: Path) -> None:
    state = {"a": torch.zeros(3, 5), "b": torch.zeros(7, dtype=torch.float16)}
    save_file(state, tmp_path / "a.safetensors", metadata={"format": "pt"})
    header = read_safetensors_header(tmp_path / "a.safetensors")
    assert (header.parameters, header.bytes, header.metadata) == (22, 74, {"format": "pt"})
    section = ModelSection.model_validate({"from": "a.safetensors", "factory": "m.py:f"})
    assert header_parameters(section, recipe_dir=tmp_path, cache=tmp_path) == 22
    missing = ModelSection.model_validate({"from": "pypi:x==1/a.safetensors", "sha256": "0" * 64, "factory": "m.py:f"})
    assert header_parameters(missing, recipe_dir=tmp_path, cache=tmp_path) is None


@pytest.mark.parametrize(
    "header",
    [
        b"[]",
        b"{not json",
        json.dumps({"a": {"dtype": "F32"}}).encode(),
        json.dumps({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 999]}}).encode(),
        json.dumps({"a": 3}).encode(),
    ],
)
def test_damaged_headers_are_damaged_checkpoints(tmp_path: Path, header: bytes) -> None:
    (tmp_path / "a.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(8))
    with pytest.raises(SourceError) as caught:
        read_safetensors_header(tmp_path / "a.safetensors")
    assert caught.value.reason == Reason.BAD_CHECKPOINT
