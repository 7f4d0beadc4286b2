"""Checkpoints: complete or not there, verified when read, and never at the cost of older ones."""

from __future__ import annotations

import json
import resource
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from unirl.core.errors import CheckpointError
from unirl.loop.checkpoints import Checkpoints

CONTENT = bytes(range(256)) * 64


def write(folder: Path) -> None:
    (folder / "weights.bin").write_bytes(CONTENT)


@pytest.fixture
def checkpoints(tmp_path: Path) -> Checkpoints:
    result = Checkpoints(tmp_path / "checkpoints", keep=2)
    for step in (2, 4):
        result.save(step, write=write, state={"plan_hash": "abc"})
    return result


@pytest.fixture
def small_files() -> Iterator[None]:
    """Writes past 4 KB fail in this process, as they do on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    signal.signal(signal.SIGXFSZ, handler)


def test_the_newest_comes_back_with_its_state(checkpoints: Checkpoints) -> None:
    result = checkpoints.load()
    assert result.step == 4
    assert result.state == {"plan_hash": "abc"}
    assert (result.backend_folder("") / "weights.bin").read_bytes() == CONTENT


def test_only_the_newest_are_kept(checkpoints: Checkpoints) -> None:
    checkpoints.save(10, write=write, state={})
    assert sorted(p.name for p in checkpoints.folder.iterdir()) == ["step-000004", "step-000010"]


def test_keep_zero_keeps_all(tmp_path: Path) -> None:
    result = Checkpoints(tmp_path, keep=0)
    for step in range(5):
        result.save(step, write=write, state={})
    assert len(list(tmp_path.iterdir())) == 5


def test_a_full_disk_leaves_the_older_ones_whole(checkpoints: Checkpoints, small_files: None) -> None:
    with pytest.raises(
        CheckpointError, match=r"could not be written: .*Earlier checkpoints are intact: step-000002, step-000004"
    ):
        checkpoints.save(6, write=write, state={})
    assert checkpoints.load().step == 4
    assert sorted(p.name for p in checkpoints.folder.iterdir()) == ["step-000002", "step-000004"]


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda f: f.write_bytes(CONTENT[:-1]), "weights.bin is truncated: 16383 bytes, 16384 were written"),
        (lambda f: f.write_bytes(CONTENT[:-1] + b"x"), "weights.bin was altered"),
        (lambda f: f.unlink(), "weights.bin is missing"),
        (lambda f: (f.parent.parent / "manifest.json").unlink(), "manifest.json is missing"),
        (lambda f: (f.parent.parent / "manifest.json").write_text("{"), "manifest.json cannot be read"),
    ],
)
def test_damage_is_named_with_the_way_out(checkpoints: Checkpoints, damage: object, says: str) -> None:
    assert callable(damage)
    damage(checkpoints.folder / "step-000004" / "backend" / "weights.bin")
    with pytest.raises(CheckpointError) as caught:
        checkpoints.load()
    assert says in str(caught.value)
    assert "--resume" in str(caught.value) and "step-000002" in str(caught.value)
    assert checkpoints.load(checkpoints.folder / "step-000002").step == 2


def test_no_checkpoint_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no checkpoint to resume from"):
        Checkpoints(tmp_path).load()


def test_another_format_is_refused(checkpoints: Checkpoints) -> None:
    path = checkpoints.folder / "step-000004" / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "format": 99}))
    with pytest.raises(CheckpointError, match="format 99 was found; this version reads format 1"):
        checkpoints.load()


def test_a_write_that_was_cut_off_is_not_taken_for_a_checkpoint(checkpoints: Checkpoints) -> None:
    part = checkpoints.folder / ".part-step-000006"
    (part / "backend").mkdir(parents=True)
    (part / "backend" / "weights.bin").write_bytes(b"half")
    assert checkpoints.load().step == 4
    checkpoints.save(6, write=write, state={})
    assert not part.exists()


@pytest.mark.parametrize(
    "manifest",
    [
        b"\xff",
        b"[]",
        b'{"format": 1}',
        b'{"format": 1, "step": "two", "state": {}, "files": {}}',
        b'{"format": 1, "step": 2, "state": [], "files": {}}',
        b'{"format": 1, "step": 2, "state": {}, "files": []}',
        b'{"format": 1, "step": 2, "state": {}, "files": {"weights.bin": 3}}',
        b'{"format": 1, "step": 2, "state": {}, "files": {"weights.bin": {"size": null, "blake2b": ""}}}',
        b'{"format": 1, "step": 2, "state": {}, "files": {"../../other": {"size": 1, "blake2b": ""}}}',
    ],
)
def test_a_manifest_of_other_types_is_one_clear_error(checkpoints: Checkpoints, manifest: bytes) -> None:
    folder = checkpoints.folder / "step-000004"
    (folder / "manifest.json").write_bytes(manifest)
    with pytest.raises(CheckpointError, match=r"step-000004: manifest\.json .*--resume .*step-000002"):
        checkpoints.load()
