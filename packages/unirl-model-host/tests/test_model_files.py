"""Files of checkpoints."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from unirl.core.errors import RecipeError
from unirl.model_host.lazy_weights import weight_files
from unirl.model_host.model_files import check_contained, checkpoint_version, find_checkpoint


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


def find(folder: Path) -> Path:
    return find_checkpoint(str(folder), layout="diffusers", example="acme/tiny", fetch=str)


@pytest.mark.parametrize(
    ("link", "to"),
    [
        ("LICENSE.txt", "../key"),
        ("part/model-00001-of-00002.safetensors", "../../key"),
        ("part/vae", "../../elsewhere"),
        ("tokenizer.json", "/etc/hostname"),
        ("gone.json", "../gone"),
        ("circle.json", "circle.json"),
        # By way of a link in the folder.
        ("second.txt", "first.txt"),
    ],
)
def test_a_link_out_of_a_checkpoint_is_refused_by_name(tmp_path: Path, link: str, to: str) -> None:
    folder = write(tmp_path / "one")
    (tmp_path / "key").write_text("secret")
    (tmp_path / "elsewhere").mkdir()
    if link == "second.txt":
        (folder / "first.txt").symlink_to("../key")
    (folder / link).symlink_to(to)
    name = "first.txt" if link == "second.txt" else link
    with pytest.raises(RecipeError, match=rf"^model\.path: '{folder / name}' is a link out of the checkpoint's folder"):
        find(folder)


def test_links_within_a_checkpoint_and_to_one_are_followed(tmp_path: Path) -> None:
    folder = write(tmp_path / "one")
    (folder / "model.safetensors").symlink_to("part/model.safetensors")
    (folder / "again").symlink_to(folder / "part")
    (folder / "part" / "up").symlink_to("..")
    (tmp_path / "two").symlink_to("one")
    assert find(folder) == folder and find(tmp_path / "two") == tmp_path / "two"
    assert weight_files(tmp_path / "two", "model") == [tmp_path / "two" / "model.safetensors"]


def cached(cache: Path, name: str = "models--acme--tiny") -> Path:
    """A snapshot as the hub's client lays it out: links to files that are named by their digests."""
    repository = cache / name
    folder = write(repository / "snapshots" / "0123456789abcdef")
    (repository / "blobs").mkdir()
    for number, file in enumerate(sorted(path for path in folder.rglob("*") if path.is_file())):
        blob = repository / "blobs" / f"{number:040x}"
        file.rename(blob)
        up = "../" * (len(file.relative_to(repository).parts) - 1)
        file.symlink_to(f"{up}blobs/{blob.name}")
    return folder


def test_links_of_the_hub_cache_lead_to_the_blobs_of_their_own_repository(tmp_path: Path) -> None:
    folder, other = cached(tmp_path / "hub"), cached(tmp_path / "hub", "models--acme--private")
    assert (folder / "part" / "model.safetensors").is_symlink()
    (tmp_path / "link").symlink_to(tmp_path / "hub" / "models--acme--tiny" / "snapshots")
    for place in (folder, tmp_path / "link" / folder.name):
        assert find(place) == place
        assert weight_files(place / "part", "model") == [place / "part" / "model.safetensors"]
    (folder / "LICENSE").symlink_to((other / "README.md").resolve())
    with pytest.raises(RecipeError, match="LICENSE' is a link out of"):
        find(folder)
    (folder / "LICENSE").unlink()
    (folder / "refs").symlink_to("../../refs")
    with pytest.raises(RecipeError, match="refs' is a link out of"):
        find(folder)


def test_a_copy_of_the_hub_cache_whose_blobs_are_elsewhere_is_refused(tmp_path: Path) -> None:
    folder = cached(tmp_path / "hub")
    blobs = folder.parent.parent / "blobs"
    blobs.rename(tmp_path / "keys")
    blobs.symlink_to(tmp_path / "keys")
    with pytest.raises(RecipeError, match="is a link out of"):
        find(folder)


@pytest.mark.parametrize(
    "name", ["../other/w.safetensors", "/etc/hostname", "a/../../w", "..", "w\0", "link.safetensors"]
)
def test_shards_elsewhere_are_refused_by_name(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "one"
    folder.mkdir()
    if name.startswith("link"):
        (folder / name).symlink_to("../w.safetensors")
    (folder / "w.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    for read in (find, lambda folder: weight_files(folder, "w"), check_contained):
        with pytest.raises(RecipeError, match=r"^model\.path: .*(expected a name in its own folder|is a link out of)"):
            read(folder)


@pytest.mark.parametrize("places", [3, ["a"], {"a": 1}, {"a": ["b"]}, None])
def test_an_index_without_names_of_shards_is_refused(tmp_path: Path, places: object) -> None:
    (tmp_path / "w.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    for read in (find, lambda folder: weight_files(folder, "w")):
        with pytest.raises(RecipeError, match=r"^model\.path: .*w\.safetensors\.index\.json' has no map to file names"):
            read(tmp_path)


def test_components_of_a_pipeline_elsewhere_are_refused_by_name(tmp_path: Path) -> None:
    folder = write(tmp_path / "one")
    (folder / "model_index.json").write_text(json.dumps({"_class_name": "P", "text_encoder/../../x": ["a", "B"]}))
    with pytest.raises(
        RecipeError, match=r"model_index\.json' names 'text_encoder/\.\./\.\./x', expected a name in its"
    ):
        find(folder)
