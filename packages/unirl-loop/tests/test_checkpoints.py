"""Checkpoints: complete or not there, verified when read, and never at the cost of older ones."""

from __future__ import annotations

import errno
import hashlib
import json
import resource
import shutil
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from bad_input_page import answer
from unirl.core.errors import CheckpointError, RunFailed
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


def names(checkpoints: Checkpoints) -> list[str]:
    return sorted(path.name for path in checkpoints.folder.iterdir())


def test_a_full_disk_leaves_the_older_ones_whole(checkpoints: Checkpoints, small_files: None) -> None:
    with pytest.raises(
        CheckpointError, match=r"could not be written: .*Earlier checkpoints are intact: step-000002, step-000004"
    ):
        checkpoints.save(6, write=write, state={})
    assert checkpoints.load().step == 4
    assert names(checkpoints) == ["step-000002", "step-000004"]


TORCH = "[enforce fail at inline_container.cc:664] . unexpected pos 704 vs 598\nframe #0: c10::ThrowEnforceNotMet"
"""From torch's writer of zip files, when the disk is full."""


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (RuntimeError(TORCH), r"unexpected pos 704 vs 598\. Earlier"),
        (OSError(errno.ENOSPC, "No space left on device"), r"No space left on device\. Earlier"),
        (MemoryError(), r"MemoryError\(\)\. Earlier"),
        (KeyError("weights"), r"'weights'\. Earlier"),
    ],
    ids=["torch", "disk", "memory", "bug"],
)
def test_whatever_a_writer_raises_says_what_is_whole_and_removes_what_is_not(
    checkpoints: Checkpoints, error: Exception, says: str
) -> None:
    def fail(folder: Path) -> None:
        write(folder)
        raise error

    pattern = (
        rf"^\S*step-000006: the checkpoint could not be written: .*{says} checkpoints are intact: step-000002, step-"
    )
    with pytest.raises(
        CheckpointError, match=pattern + r"000004\. When it failed, [\d.]+ MiB of \d+ MiB of the disk were free; "
    ) as e:
        checkpoints.save(6, write=fail, state={})
    assert e.value.__cause__ is error
    assert names(checkpoints) == ["step-000002", "step-000004"]
    checkpoints.save(6, write=write, state={})
    assert checkpoints.load().step == 6


@pytest.mark.parametrize("error", [RunFailed("worker 'train-0' died.", phase="checkpoint"), KeyboardInterrupt()])
def test_an_error_that_already_has_its_words_keeps_its_type(checkpoints: Checkpoints, error: BaseException) -> None:
    def fail(folder: Path) -> None:
        write(folder)
        raise error

    with pytest.raises(type(error)) as caught:
        checkpoints.save(6, write=fail, state={})
    assert caught.value is error
    (note,) = error.__notes__
    assert note.endswith("was not written. Earlier checkpoints are intact: step-000002, step-000004.")
    assert names(checkpoints) == ["step-000002", "step-000004"]


def test_a_state_that_is_no_json_is_a_failed_write(checkpoints: Checkpoints) -> None:
    with pytest.raises(CheckpointError, match=r"not JSON serializable.*Earlier checkpoints are intact"):
        checkpoints.save(6, write=write, state={"a": object()})
    assert names(checkpoints) == ["step-000002", "step-000004"]


def test_a_deleted_run_folder_does_not_come_back_with_a_checkpoint_alone(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="No such file or directory"):
        Checkpoints(tmp_path / "run" / "checkpoints").save(1, write=write, state={})
    assert list(tmp_path.iterdir()) == []


def test_a_checkpoint_that_is_not_replaced_stays(checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the two renames of a replacement, as an error and as a process that was killed there."""
    rename = Path.rename

    def fail(self: Path, target: Path) -> Path:
        if self.name == ".part-step-000004":
            raise OSError(errno.EIO, "Input/output error")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", fail)
    with pytest.raises(CheckpointError, match=r"Input/output error\. Earlier .*: step-000002, step-000004\."):
        checkpoints.save(4, write=write, state={})
    assert checkpoints.load().state == {"plan_hash": "abc"}
    monkeypatch.undo()
    (checkpoints.folder / "step-000004").rename(checkpoints.folder / ".replaced-step-000004")
    checkpoints.clear()
    assert checkpoints.load().step == 4
    checkpoints.save(4, write=write, state={"plan_hash": "new"})
    assert checkpoints.load().state == {"plan_hash": "new"}
    assert names(checkpoints) == ["step-000002", "step-000004"]


@pytest.mark.parametrize("rest", [".part-step-000003", ".old-step-000001", ".replaced-step-000002"])
def test_the_rests_of_a_killed_run_do_not_keep_the_disk_full(checkpoints: Checkpoints, rest: str) -> None:
    shutil.copytree(checkpoints.folder / "step-000002", checkpoints.folder / rest)
    assert checkpoints.steps() == [2, 4]
    checkpoints.save(6, write=write, state={})
    assert names(checkpoints) == ["step-000004", "step-000006"]


def test_a_run_that_resumed_from_an_older_one_keeps_what_it_saves(tmp_path: Path) -> None:
    result = Checkpoints(tmp_path, keep=0)
    for step in (2, 4, 6):
        result.save(step, write=write, state={})
    resumed = Checkpoints(tmp_path, keep=2)
    resumed.save(3, write=write, state={})
    assert resumed.steps() == [2, 3, 4, 6]
    resumed.save(4, write=write, state={"again": True})
    assert resumed.steps() == [3, 4, 6]
    assert resumed.load(tmp_path / "step-000004").state == {"again": True}


def test_readers_beside_a_run_always_get_a_whole_checkpoint(tmp_path: Path) -> None:
    """The newest is removed while it is read, over and over; the reader takes the next."""
    result, done, read = Checkpoints(tmp_path, keep=1), threading.Event(), list[int]()
    result.save(1, write=write, state={})

    def reader() -> None:
        while not done.is_set():
            read.append(Checkpoints(tmp_path).load().step)

    thread = threading.Thread(target=reader)
    thread.start()
    for step in range(2, 80):
        result.save(step, write=write, state={})
        if not thread.is_alive():
            break
    was_alive = thread.is_alive()
    done.set()
    thread.join()
    assert was_alive, "a reader failed"
    assert len(set(read)) > 2 and read == sorted(read)


def test_a_checkpoint_that_goes_while_it_is_read_gives_way_to_the_next(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    newest, is_file = checkpoints.folder / "step-000004", Path.is_file

    def rotate(self: Path) -> bool:
        if self.name == "weights.bin" and newest.exists():
            newest.rename(checkpoints.folder / ".old-step-000004")
        return is_file(self)

    monkeypatch.setattr(Path, "is_file", rotate)
    assert checkpoints.load().step == 2
    with pytest.raises(CheckpointError, match=r"step-000004: there is no such checkpoint; .*--resume \S*step-000002"):
        checkpoints.load(newest)


def sealed(manifest: dict[str, Any]) -> bytes:
    """A manifest with the digest of its values, in the order of their keys."""
    text = json.dumps(manifest, sort_keys=True)
    return json.dumps({"blake2b": hashlib.blake2b(text.encode(), digest_size=16).hexdigest(), **manifest}).encode()


def test_no_flipped_bit_of_a_manifest_changes_what_is_loaded(tmp_path: Path) -> None:
    result = Checkpoints(tmp_path)
    result.save(2, write=lambda folder: None, state={"plan_hash": "abc", "rate": 0.5, "steps": 4})
    path = tmp_path / "step-000002" / "manifest.json"
    whole, expected, refused = path.read_bytes(), result.load(), 0
    for place in range(len(whole)):
        for bit in range(8):
            path.write_bytes(whole[:place] + bytes([whole[place] ^ 1 << bit]) + whole[place + 1 :])
            try:
                assert result.load() == expected, (place, bit)
            except CheckpointError:
                refused += 1
    # White space may turn into other white space.
    assert refused > 0.95 * 8 * len(whole)
    path.write_bytes(whole.replace(b'"step": 2', b'"step": 3'))
    with pytest.raises(CheckpointError, match=answer("a checkpoint whose manifest was altered")):
        result.load()


def test_a_checkpoint_under_another_name_is_refused(checkpoints: Checkpoints) -> None:
    shutil.copytree(checkpoints.folder / "step-000002", checkpoints.folder / "step-000006")
    with pytest.raises(
        CheckpointError, match=r"step-000006: manifest\.json is of step-000002, so the folder was renamed"
    ):
        checkpoints.load()


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
    with pytest.raises(
        CheckpointError, match=r"format 99 .* reads format 2, " + answer("a checkpoint of an earlier version")
    ):
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
        b'{"format": 2}',
        b'{"format": 2, "step": 4, "state": {}, "files": {}}',
        sealed({"format": 2}),
        sealed({"format": 2, "step": "two", "state": {}, "files": {}}),
        sealed({"format": 2, "step": 4, "state": [], "files": {}}),
        sealed({"format": 2, "step": 4, "state": {}, "files": []}),
        sealed({"format": 2, "step": 4, "state": {}, "files": {"weights.bin": 3}}),
        sealed({"format": 2, "step": 4, "state": {}, "files": {"weights.bin": {"size": None, "blake2b": ""}}}),
        sealed({"format": 2, "step": 4, "state": {}, "files": {"../../other": {"size": 1, "blake2b": ""}}}),
    ],
)
def test_a_manifest_of_other_types_is_one_clear_error(checkpoints: Checkpoints, manifest: bytes) -> None:
    folder = checkpoints.folder / "step-000004"
    (folder / "manifest.json").write_bytes(manifest)
    with pytest.raises(CheckpointError, match=r"step-000004: manifest\.json .*--resume .*step-000002"):
        checkpoints.load()
    with pytest.raises(CheckpointError, match=r"cannot be read|names '\.\./"):
        checkpoints.load()
