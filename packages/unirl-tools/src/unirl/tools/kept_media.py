"""Images and videos that the tracker `report` kept of a run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from unirl.core.disk import is_inside
from unirl.core.errors import RunFolderError
from unirl.core.observe.events import read_events
from unirl.core.observe.recorded import Recorded

__all__ = ["KeptMedia", "kept_media"]


@dataclass(frozen=True, kw_only=True)
class KeptMedia:
    """One saved sample."""

    file: Path
    """A PNG, of a video a strip of its frames."""
    sample: str
    """Its id; "" in runs of earlier reports."""
    prompt: str
    key: str
    """`train` or `eval`, followed by the stage where there are several."""
    step: int
    has_inputs: bool
    """Whether its prompt refers to images."""


def kept_media(run: Path) -> Iterator[KeptMedia]:
    """The samples in the order in which they were saved, of which the file is still there. Raises RunFolderError for an
    index that cannot be read."""
    index = run / "media" / "index.jsonl"
    if not index.is_file():
        return
    try:
        for event in read_events(index):
            if event.kind != "images":
                continue
            for item in Recorded(where=event.read_from, values=event.data).sections("samples"):
                file = index.parent / item.text("file")
                if is_inside(file, index.parent) and file.is_file():
                    yield KeptMedia(
                        file=file,
                        sample=item.text("sample", default=""),
                        prompt=item.text("prompt", default=""),
                        key=str(event.data.get("key", "")),
                        step=event.step,
                        has_inputs=bool(item.texts("inputs")),
                    )
    except (OSError, ValueError) as error:
        raise RunFolderError(f"{error}") from error
