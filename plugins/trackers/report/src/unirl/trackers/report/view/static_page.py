"""The page as a folder that opens without a server: the same files, with all answers in `data.js`."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any
from urllib.parse import quote

from unirl.core.disk import replace_bytes, writing
from unirl.core.errors import RecipeError
from unirl.core.strict_json import strict_json

from ..local_server import page_file
from ..media import MEDIA
from ..page import spread
from .library import Library
from .live_run import LiveRun
from .replies import Key, curves, details, row, sample_steps, samples
from .server import PAGE

__all__ = ["write_static"]

STEPS = 8
"""Steps whose samples are copied, evenly spread, of training and of evaluations."""


def write_static(library: Library, folder: Path) -> Path:
    """Write the page of all runs into a folder, with the samples of some steps. Returns the file to open.

    Raises RecipeError for a folder that is not empty, and DiskFull.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise RecipeError(f"--static: {folder} exists and is not an empty folder; give another one, or remove it.")
    folder.mkdir(parents=True, exist_ok=True)
    while library.read(seconds=60.0):
        pass
    answers: dict[str, Any] = {
        "runs": {"runs": {name: row(run) for name, run in library.runs.items()}, "is_more": False}
    }
    for number, (name, run) in enumerate(library.runs.items()):
        at = f"runs/{quote(name, safe='')}"
        answers[f"{at}/curves"], answers[f"{at}/details"] = curves(run), details(run)
        steps = sample_steps(run)
        keys: tuple[Key, ...] = ("train", "eval")
        for key in keys:
            steps[key] = spread(steps[key], STEPS)
            for step in steps[key]:
                answers[f"{at}/samples/{key}/{step}"] = _copied(run, key, step, folder, number)
        answers[f"{at}/samples"] = steps
    for name in PAGE:
        replace_bytes(folder / name, page_file(name))
    data = strict_json(answers, separators=(",", ":")).replace("<", "\\u003c")
    replace_bytes(folder / "data.js", f"window.UNIRL_VIEW = {data};\n".encode())
    return folder / "index.html"


def _copied(run: LiveRun, key: Key, step: int, folder: Path, number: int) -> dict[str, Any]:
    """The samples of a step, whose files are copied."""

    def copy(file: Path) -> str:
        path = f"{MEDIA}/{number}/{file.relative_to(run.folder / MEDIA).as_posix()}"
        target = folder / path
        if not target.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            with writing(target):
                shutil.copyfile(file, target)
        return quote(path)

    return samples(run, key, step, url=copy)
