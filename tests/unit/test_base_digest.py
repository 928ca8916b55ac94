"""The digest of a base: the same for the same tensors, another one for any other base."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from inflight.base_digest import base_digest

TENSORS = {
    "a": torch.arange(12.0).reshape(3, 4).bfloat16(),
    "b": torch.arange(5.0),
    "scale": torch.tensor(2.0),
    "none": torch.zeros(0, 3),
}


def whole(folder: Path, tensors: dict[str, torch.Tensor], **metadata: str) -> Path:
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", metadata=metadata)
    return folder


def sharded(folder: Path) -> Path:
    """The same tensors in two files, beside a file that no loader reads."""
    folder.mkdir()
    shards = {"model-1.safetensors": ("b",), "model-2.safetensors": ("none", "a", "scale")}
    for file, names in shards.items():
        save_file({name: TENSORS[name] for name in names}, folder / file)
    index = {"weight_map": {name: file for file, names in shards.items() for name in names}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    save_file({"a": torch.zeros(3)}, folder / "consolidated.safetensors")
    return folder


def test_it_does_not_depend_on_files_or_metadata(tmp_path: Path) -> None:
    digest = base_digest(whole(tmp_path / "whole", TENSORS))
    assert len(digest) == 64
    assert base_digest(whole(tmp_path / "described", TENSORS, format="pt")) == digest
    assert base_digest(sharded(tmp_path / "sharded")) == digest


def test_any_other_base_has_another_one(tmp_path: Path) -> None:
    bit = TENSORS["a"].clone()
    bit.view(torch.uint8)[2, 3] ^= 1
    others = {
        "same": {},
        "bit": {"a": bit},
        "dtype": {"a": TENSORS["a"].view(torch.float16)},
        "shape": {"a": TENSORS["a"].reshape(4, 3)},
        "added": {"c": torch.zeros(1)},
        "exchanged": {"b": torch.arange(5.0).flip(0)},
    }
    digests = {name: base_digest(whole(tmp_path / name, TENSORS | changed)) for name, changed in others.items()}
    assert len(set(digests.values())) == len(others)


def test_other_formats_count_as_whole_files(tmp_path: Path) -> None:
    for name, content in (("one", b"12"), ("two", b"13"), ("three", b"12")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "pytorch_model.bin").write_bytes(content)
    one, two, three = (base_digest(tmp_path / name) for name in ("one", "two", "three"))
    assert one == three != two


def test_what_has_no_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds no weights"):
        base_digest(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": 3}')
    with pytest.raises(ValueError, match=r"index\.json can't be read"):
        base_digest(tmp_path)
