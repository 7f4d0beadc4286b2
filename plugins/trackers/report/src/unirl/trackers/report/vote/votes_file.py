"""The file of votes: appended to at each vote, read when voting continues, and pairs for training made from it."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from unirl.core.disk import replace_text
from unirl.core.errors import RecipeError
from unirl.core.observe.events import EventStream, read_events
from unirl.core.observe.recorded import Recorded
from unirl.core.strict_json import strict_json

from .pairs import Key, VotePair

__all__ = ["Vote", "VotedRun", "Votes", "VotesFile", "opened", "pairs_file", "read_votes"]

STORED_ROLES = ("target", "preferred", "rejected")


@dataclass(frozen=True, kw_only=True)
class VotedRun:
    """A run that is voted on."""

    folder: Path
    began: float
    """Seconds since the epoch of its start, which a moved folder keeps."""


@dataclass(frozen=True, kw_only=True)
class Vote:
    """One answer."""

    key: Key
    files: tuple[str, str]
    """Of the images, within their run folders."""
    left: int
    """Which image, 0 or 1, was on the left."""
    preferred: int | None
    """Which one was better; None for a tie."""
    number: int
    """Of the vote in the file, from 0; one that was undone keeps its own."""


@dataclass(frozen=True, kw_only=True)
class Votes:
    """The content of a file of votes."""

    runs: tuple[VotedRun, ...]
    """One, or two that are compared."""
    seed: int
    cast: tuple[Vote, ...]
    """Those that were not undone, in order."""
    num_recorded: int
    """With those that were undone."""


def read_votes(path: Path) -> Votes:
    """The votes of a file. Raises RecipeError, with file and line, for a file that is not one of votes."""
    try:
        events = read_events(path)
        if not events or events[0].kind != "voting":
            raise ValueError(f"{path}: it does not begin with the runs that were voted on.")
        begin = Recorded(where=events[0].read_from, values=events[0].data)
        seed = begin.count("seed")
        runs = tuple(
            VotedRun(folder=Path(run.text("folder")), began=run.number("began")) for run in begin.sections("runs")
        )
        if len(runs) not in (1, 2):
            raise ValueError(f"{begin.where}: runs: got {len(runs)}, expected 1 or 2.")
        cast, recorded = list[Vote](), 0
        for event in events[1:]:
            if event.kind == "vote":
                cast.append(_vote(Recorded(where=event.read_from, values=event.data), number=recorded))
                recorded += 1
            elif event.kind == "undone" and cast:
                cast.pop()
            else:
                raise ValueError(f"{event.read_from}: kind: got {event.kind!r}, expected a vote, or one to undo.")
    except FileNotFoundError as error:
        raise RecipeError(f"{path}: no such file of votes.") from error
    except (ValueError, OSError) as error:
        raise RecipeError(f"{path}: it cannot be read as votes: {error}") from error
    return Votes(runs=runs, seed=seed, cast=tuple(cast), num_recorded=recorded)


def pairs_file(path: Path) -> Path:
    """The prompt file of pairs beside a file of votes."""
    return path.with_name(f"{path.stem}-pairs.jsonl")


@contextmanager
def opened(path: Path, runs: Sequence[VotedRun], pairs: Sequence[VotePair], *, seed: int) -> Iterator[VotesFile]:
    """A file of votes on these runs, a new one or one that is continued, for this process alone.

    Raises RecipeError for a file of other runs or another seed, one that another process writes to, and one that cannot
    be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = path.open("ab")
    except OSError as error:
        raise RecipeError(f"--votes {path}: it cannot be written: {error.strerror}. Give another file.") from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise RecipeError(
                f"--votes {path}: another `unirl vote` is writing to it; end that one, or give another file."
            ) from error
        if lock.tell() == 0:
            begin = [{"folder": str(run.folder), "began": run.began} for run in runs]
            _append(path, "voting", runs=begin, seed=seed)
        votes = read_votes(path)
        _check_same(path, votes, runs, seed=seed)
        # The folders may have moved.
        file = VotesFile(path, replace(votes, runs=tuple(runs)), pairs)
        file.write_pairs()
        yield file


class VotesFile:
    """Votes as they are cast: each is safe on disk when its method returns."""

    def __init__(self, path: Path, votes: Votes, pairs: Sequence[VotePair]) -> None:
        self.path, self.votes = path, votes
        self._pairs: Mapping[Key, VotePair] = {pair.key: pair for pair in pairs}

    @property
    def files(self) -> tuple[Path, ...]:
        """The votes, and of one run the prompt file of pairs."""
        return (self.path, pairs_file(self.path))[: 3 - len(self.votes.runs)]

    @property
    def num_of_other_images(self) -> int:
        """Votes on images that the runs do not have any more: they count, and cannot be trained on."""
        return sum(vote.key not in self._pairs for vote in self.votes.cast)

    def add(self, pair: VotePair, *, left: int, preferred: int | None) -> None:
        """Record a vote. Raises DiskFull, OSError, and RunFolderError once the file is gone."""
        vote = Vote(
            key=pair.key,
            files=(pair.first.name, pair.second.name),
            left=left,
            preferred=preferred,
            number=self.votes.num_recorded,
        )
        samples = [{"file": file, "sha256": digest} for file, digest in zip(vote.files, pair.key[1:], strict=True)]
        self._append("vote", prompt=pair.prompt, samples=samples, left=left, preferred=preferred)
        cast = (*self.votes.cast, vote)
        self.votes = replace(self.votes, cast=cast, num_recorded=self.votes.num_recorded + 1)
        self.write_pairs()

    def undo(self) -> None:
        """Take back the last vote that stands. Raises ValueError without one, and as `add`."""
        if not self.votes.cast:
            raise ValueError("there is no vote to undo.")
        self._append("undone")
        self.votes = replace(self.votes, cast=self.votes.cast[:-1])
        self.write_pairs()

    def write_pairs(self) -> None:
        """Write the prompt file of all preferences, as a whole. Held-out images of two runs are not for training."""
        if len(self.votes.runs) == 1:
            folder = self.path.parent.resolve()
            rows = [
                _row(self._pairs[vote.key], vote.preferred, number=vote.number, folder=folder)
                for vote in self.votes.cast
                if vote.preferred is not None and vote.key in self._pairs
            ]
            replace_text(pairs_file(self.path), "".join(f"{strict_json(row)}\n" for row in rows))

    def _append(self, kind: str, **data: Any) -> None:
        if not self.path.exists():
            raise FileNotFoundError(0, "it is gone", str(self.path))
        _append(self.path, kind, **data)


def _append(path: Path, kind: str, **data: Any) -> None:
    """One line, safe on disk when this returns."""
    stream = EventStream(path)
    try:
        stream.emit(kind, step=0, **data)
    finally:
        stream.close()


def _vote(read: Recorded, *, number: int) -> Vote:
    samples = read.sections("samples")
    left, preferred = read.count("left"), read.optional_count("preferred")
    if len(samples) != 2 or left > 1 or (preferred or 0) > 1:
        raise ValueError(f"{read.where}: got {len(samples)} samples, left {left}, preferred {preferred}, expected two.")
    first, second = samples
    return Vote(
        key=(read.text("prompt"), first.text("sha256"), second.text("sha256")),
        files=(first.text("file"), second.text("file")),
        left=left,
        preferred=preferred,
        number=number,
    )


def _check_same(path: Path, votes: Votes, runs: Sequence[VotedRun], *, seed: int) -> None:
    if [run.began for run in votes.runs] != [run.began for run in runs]:
        own, given = (" and ".join(str(run.folder) for run in some) for some in (votes.runs, runs))
        raise RecipeError(
            f"--votes {path}: it has votes on {own}, and you vote on {given}. Give another file with --votes."
        )
    if votes.seed != seed:
        raise RecipeError(
            f"--seed: got {seed}, but {path} was begun with seed {votes.seed}. Give that, or another file."
        )


def _row(pair: VotePair, preferred: int, *, number: int, folder: Path) -> dict[str, Any]:
    """A row of the prompt file. Its paths start at the folder of the file."""
    sides = (pair.first, pair.second) if preferred == 0 else (pair.second, pair.first)
    images = [
        {"modality": "image", "role": role, "uri": os.path.relpath(side.file.resolve(), folder)}
        for role, side in zip(("preferred", "rejected"), sides, strict=True)
    ]
    media = [asdict(ref) for ref in pair.media if ref.role not in STORED_ROLES]
    return {"prompt": pair.prompt, "prompt_id": f"vote-{number}", "metadata": {}, "media": [*media, *images]}
