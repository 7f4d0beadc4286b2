"""Converting a data set: read it, drop unusable rows, write a prompt file, and count each."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections import Counter
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unirl.core.errors import DataError

from .example import Dropped, Example, PromptSet, SourceRow
from .source import read_source

__all__ = ["Conversion", "convert"]

REPEATED = "the same question as an earlier row"
DISPUTED = "a question with different answers; all its rows"
UNENCODABLE = "text that is not valid Unicode"
_ENDINGS = {b"\x89PNG": ".png", b"\xff\xd8\xff": ".jpg", b"GIF8": ".gif", b"RIFF": ".webp"}


@dataclass(frozen=True, kw_only=True)
class Conversion:
    """Result of a conversion: rows_read = written + the sum of dropped."""

    rows_read: int
    written: int
    dropped: dict[str, int]
    """Reason -> rows."""
    file: Path
    media: Path | None
    """Folder of the images, beside the file."""


def convert(
    prompts: PromptSet,
    sources: Sequence[Path],
    out: Path,
    *,
    instruction: str | None = None,
    overwrite: bool = False,
) -> Conversion:
    """Write the questions of a set as a prompt file for `data.train` or `data.eval`.

    Each question is written once, with `instruction` (by default the set's own) below it and its answer, if it has
    one, in the metadata `answer`; its prompt_id is `<file name>:<row>` of the source. Questions are the same when their
    text and images are; one with different answers is dropped. Images go to the folder `<name of out>.media`. File and
    folder are written completely or not at all.

    Raises DataError when a source cannot be read, when `out` exists (unless `overwrite`), when two sources have the
    same name, and when nothing is left to write.
    """
    media = out.with_suffix(".media")
    _check(sources, out, media, overwrite=overwrite)
    below = prompts.instruction if instruction is None else instruction
    dropped: Counter[str] = Counter()
    kept: dict[bytes, _Kept] = {}
    rows_read = 0
    with _whole(out, media) as (file, folder):
        for source in sources:
            for row in read_source(source, prompts=prompts):
                rows_read += 1
                result = prompts.read(row)
                if isinstance(result, Example) and not _is_encodable(result):
                    result = Dropped(UNENCODABLE)
                if isinstance(result, Dropped):
                    dropped[result.reason] += 1
                    continue
                content = _content(result)
                if content not in kept:
                    kept[content] = _Kept(row, result, folder)
                kept[content].count(result.answer)
        for content in [content for content, one in kept.items() if one.is_disputed]:
            disputed = kept.pop(content)
            disputed.remove()
            dropped[DISPUTED] += disputed.rows
        dropped[REPEATED] += sum(one.rows - 1 for one in kept.values())
        if not kept:
            reasons = "; ".join(f"{count} dropped: {reason}" for reason, count in (+dropped).items())
            raise DataError(f"{out}: nothing to write. {rows_read} rows were read{'; ' if reasons else ''}{reasons}.")
        rows = (one.prompt(media=media.name, role=prompts.role, instruction=below) for one in kept.values())
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        file.write_text(text, encoding="utf-8", newline="\n")
    return Conversion(
        rows_read=rows_read,
        written=len(kept),
        dropped=dict(+dropped),
        file=out,
        media=media if any(one.files for one in kept.values()) else None,
    )


class _Kept:
    """A question, and the rows that have it. Its images are written at once: those of a set do not fit into memory."""

    def __init__(self, row: SourceRow, example: Example, folder: Path) -> None:
        self.name = row.name
        self.question = example.question
        self.answer = example.answer
        self.metadata = example.metadata
        self.files = [_written(folder, row.name, number, data) for number, data in enumerate(example.images)]
        self.rows = 0
        self.is_disputed = False

    def count(self, answer: str | None) -> None:
        self.rows += 1
        self.is_disputed = self.is_disputed or answer != self.answer

    def remove(self) -> None:
        """Remove its images."""
        for file in self.files:
            file.unlink()

    def prompt(self, *, media: str, role: str, instruction: str) -> dict[str, Any]:
        """Its row of the prompt file."""
        answer = {} if self.answer is None else {"answer": self.answer}
        row: dict[str, Any] = {
            "prompt_id": self.name,
            "prompt": f"{self.question}\n\n{instruction}" if instruction else self.question,
            "metadata": {**answer, **self.metadata},
        }
        if self.files:
            row["media"] = [{"modality": "image", "role": role, "uri": f"{media}/{file.name}"} for file in self.files]
        return row


def _check(sources: Sequence[Path], out: Path, media: Path, *, overwrite: bool) -> None:
    if out.suffix != ".jsonl":
        raise DataError(f"{out}: the prompt file is JSONL; use a name that ends in .jsonl.")
    names = Counter(source.name for source in sources)
    twice = [name for name, count in names.items() if count > 1]
    if twice:
        raise DataError(f"{twice[0]}: {names[twice[0]]} sources have this name, so their prompt ids would clash.")
    if out.resolve() in {source.resolve() for source in sources}:
        raise DataError(f"{out}: is also a source; write to another file.")
    there = [path for path in (out, media) if path.exists()]
    if there and not overwrite:
        raise DataError(f"{there[0]}: already exists; choose another name, or pass --overwrite.")
    if not out.parent.is_dir():
        raise DataError(f"{out}: there is no folder {out.parent}.")


@contextmanager
def _whole(out: Path, media: Path) -> Generator[tuple[Path, Path]]:
    """A file and a folder to write to, which take the places of `out` and `media` when all is written."""
    file, folder = (path.with_name(f".{path.name}.{os.getpid()}") for path in (out, media))
    old = folder.with_name(f"{folder.name}.old")
    try:
        yield file, folder
        if media.exists():
            media.rename(old)
        if folder.exists() and any(folder.iterdir()):
            folder.replace(media)
        file.replace(out)
    except BaseException:
        if old.exists():
            shutil.rmtree(media, ignore_errors=True)
            old.rename(media)
        raise
    finally:
        file.unlink(missing_ok=True)
        for rest in (folder, old):
            shutil.rmtree(rest, ignore_errors=True)


def _written(folder: Path, row: str, number: int, data: bytes) -> Path:
    """The file that an image of a row is written to."""
    file = folder / f"{row.replace(':', '-')}-{number}{_ending(data, row)}"
    folder.mkdir(exist_ok=True)
    file.write_bytes(data)
    return file


def _ending(data: bytes, name: str) -> str:
    for start, ending in _ENDINGS.items():
        if data.startswith(start):
            return ending
    raise DataError(f"{name}: an image begins with {data[:4]!r}, which is neither PNG, JPEG, GIF nor WebP.")


def _content(example: Example) -> bytes:
    """Digest of a question's words and images: equal for the same question."""
    digest = hashlib.sha256(" ".join(example.question.split()).encode())
    for image in example.images:
        digest.update(hashlib.sha256(image).digest())
    return digest.digest()


def _is_encodable(example: Example) -> bool:
    """JSON can hold halves of surrogate pairs, which a UTF-8 file cannot."""
    try:
        json.dumps([example.question, example.answer, dict(example.metadata)], ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True
