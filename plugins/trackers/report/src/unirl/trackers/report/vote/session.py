"""A person voting: which pair is asked, on which sides its images are, and the answers, without what would tell."""

from __future__ import annotations

import hashlib
import secrets
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from ..media import RunFolderError, open_picture
from .pairs import Picture, VotePair
from .result import result_lines
from .votes_file import VotesFile

__all__ = ["Choice", "Refused", "VotingSession"]

Choice = Literal["left", "right", "tie"]


class Refused(Exception):
    """A vote that does not count, because the page shows something else than it believes."""


class VotingSession:
    """Asks pairs in their order, those without a vote. Methods may be called from many threads."""

    def __init__(self, pairs: Sequence[VotePair], file: VotesFile, *, limit: int | None = None) -> None:
        """limit: votes after which it is done; None asks every pair."""
        self._pairs, self._file = pairs, file
        self.token = secrets.token_hex(16)
        """In every state, and in what a page of this session sends: numbers of pairs mean others in another session."""
        self._lock = threading.Lock()
        self._most = len(pairs) if limit is None else limit

    def state(self) -> dict[str, Any]:
        """What the page shows: the pair to vote on, or the result when all are done. Nothing tells the sides apart."""
        with self._lock:
            return self._state()

    def vote(self, number: int, choice: Choice) -> dict[str, Any]:
        """Record a vote on the pair of this number, which has to be the one that is asked; returns the next state.

        Raises Refused otherwise, RunFolderError for images that are gone or have changed, and what the file raises.
        """
        with self._lock:
            if number != self._asked():
                raise Refused
            pair = self._pairs[number]
            for picture in (pair.first, pair.second):
                _content(picture)
            left = self._left(pair)
            preferred = None if choice == "tie" else left if choice == "left" else 1 - left
            self._file.add(pair, left=left, preferred=preferred)
            return self._state()

    def undo(self, done: int) -> dict[str, Any]:
        """Take back the last of so many votes; returns the state, which asks for it again. Raises as `vote`."""
        with self._lock:
            if done != len(self._file.votes.cast) or done == 0:
                raise Refused
            self._file.undo()
            return self._state()

    def picture(self, number: int, side: str) -> bytes | None:
        """The PNG, or of a video the WebP, on the `left` or `right` of a pair, or an image of its prompt by its place;
        None when there is none.

        Raises RunFolderError for a file that is gone, has changed or is no image.
        """
        if number >= len(self._pairs):
            return None
        pair = self._pairs[number]
        if side in ("left", "right"):
            is_first = (self._left(pair) == 0) == (side == "left")
            return _content(pair.first if is_first else pair.second)
        if side.isdecimal() and len(side) < 4 and int(side) < len(pair.inputs):
            return _read(pair.inputs[int(side)])
        return None

    def _state(self) -> dict[str, Any]:
        votes = self._file.votes
        number, done = self._asked(), len(votes.cast)
        facts = {"session": self.token, "done": done, "total": min(self._most, done + self._num_open())}
        if number is None:
            return {**facts, "result": list(result_lines(votes)), "files": list(map(str, self._file.files))}
        pair = self._pairs[number]
        return {**facts, "pair": number, "prompt": pair.prompt, "num_inputs": len(pair.inputs)}

    def _asked(self) -> int | None:
        voted = {vote.key for vote in self._file.votes.cast}
        if len(self._file.votes.cast) >= self._most:
            return None
        return next((at for at, pair in enumerate(self._pairs) if pair.key not in voted), None)

    def _num_open(self) -> int:
        voted = {vote.key for vote in self._file.votes.cast}
        return sum(pair.key not in voted for pair in self._pairs)

    def _left(self, pair: VotePair) -> int:
        return 0 if pair.is_first_left(seed=self._file.votes.seed) else 1


def _content(picture: Picture) -> bytes:
    content = _read(picture.file)
    if hashlib.sha256(content).hexdigest() != picture.sha256:
        raise RunFolderError(
            f"{picture.file.name}: the run has written another image since the vote began. Start `unirl vote` again; "
            "votes so far are kept."
        )
    try:
        open_picture(picture.file)
    except RunFolderError as error:
        # Its text names the folder, and so the run.
        raise RunFolderError(f"{picture.file.name}: it cannot be read as an image.") from error
    return content


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise RunFolderError(
            f"{file.name}: it cannot be read: {error.strerror}. Was the run moved or deleted? Votes so far are kept."
        ) from error
