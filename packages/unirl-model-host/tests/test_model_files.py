"""Files of checkpoints."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file
from unirl.model_host.model_files import checkpoint_version


def write(folder: Path, *, name: str = "b", last: float = 1.0, wide: int = 5000) -> Path:
    """A checkpoint of two tensors, of which the second has this value."""
    (folder / "part").mkdir(parents=True)
    (folder / "part" / "config.json").write_text(json.dumps({"width": wide}))
    (folder / "README.md").write_text(f"{folder}")
    tensors = {"a": torch.zeros(3), name: torch.full((5000,), last)}
    save_file(tensors, folder / "part" / "model.safetensors")
    return folder


def test_the_version_of_a_checkpoint_is_that_of_its_tensors_and_configs(tmp_path: Path) -> None:
    first = checkpoint_version(str(write(tmp_path / "first")))
    assert checkpoint_version(str(write(tmp_path / "same"))) == first
    others = {
        "value": write(tmp_path / "value", last=1.5),
        "name": write(tmp_path / "name", name="c"),
        "config": write(tmp_path / "config", wide=5001),
    }
    (others["value"] / "README.md").unlink()
    versions = {name: checkpoint_version(str(folder)) for name, folder in others.items()}
    assert len({first, *versions.values()}) == 4
    shutil.move(tmp_path / "same" / "part", tmp_path / "same" / "elsewhere")
    assert checkpoint_version(str(tmp_path / "same")) != first


def test_a_checkpoint_that_is_cut_off_has_another_version(tmp_path: Path) -> None:
    folder = write(tmp_path / "one")
    whole, file = checkpoint_version(str(folder)), folder / "part" / "model.safetensors"
    for size in (15000, 100, 8, 0):
        file.write_bytes(file.read_bytes()[:size])
        assert checkpoint_version(str(folder)) not in ("", whole)
    for header in (b"[1]", b'{"a": 1}', b'{"a": {"data_offsets": [-9, "b"]}}', b"\xff"):
        file.write_bytes(len(header).to_bytes(8, "little") + header)
        assert checkpoint_version(str(folder)) not in ("", whole)


def test_a_hub_id_has_no_version(tmp_path: Path) -> None:
    assert checkpoint_version("acme/tiny") == checkpoint_version(str(tmp_path)) == ""
