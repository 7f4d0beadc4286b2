"""The page over HTTP: for readers on this machine, read-only, and nothing outside of the run folders."""

from __future__ import annotations

from pathlib import Path
from typing import cast
from urllib.parse import quote

from unirl.core.disk import is_inside

from ..local_server import TYPES, LocalHandler, LocalServer, Reply, json_reply, missing, page_file, port_refused
from ..media import MEDIA
from .library import Library
from .live_run import LiveRun
from .replies import curves, details, path_of, row, sample_steps, samples

__all__ = ["PAGE", "ViewServer", "start_server"]

PAGE = {
    name: TYPES[Path(name).suffix] for name in ("index.html", "view.css", "icon.svg", "maths.js", "parts.js", "view.js")
}
"""Files of the page -> their types."""
SHOWN = {".png": "image/png", ".webp": "image/webp"}
"""Suffixes of the files of a run that are served -> their types."""
READING_S = 0.5
"""Seconds of reading new events that an answer waits for; what is left is read beside."""


class ViewServer(LocalServer):
    """Serves a library until `shutdown`."""

    def __init__(self, library: Library, *, host: str, port: int) -> None:
        self.library = library
        super().__init__(_Handler, host=host, port=port)


def start_server(library: Library, *, host: str, port: int) -> ViewServer:
    """A server that listens; `serve_forever` answers. port: 0 takes a free one.

    Raises RecipeError for a port in use and for a host that is not one of this machine.
    """
    try:
        return ViewServer(library, host=host, port=port)
    except OSError as error:
        raise port_refused(error, host=host, port=port) from error


class _Handler(LocalHandler):
    def reply(self, parts: list[str]) -> Reply:
        library = cast("ViewServer", self.server).library
        with library.lock:
            return _reply(library, parts)


def _reply(library: Library, parts: list[str]) -> Reply:
    match parts:
        case [""]:
            return 200, PAGE["index.html"], page_file("index.html")
        case [name] if name in PAGE:
            return 200, PAGE[name], page_file(name)
        # A page that was exported has its data here; this one asks for them.
        case ["data.js"]:
            return 200, PAGE["view.js"], b""
        case ["api", "runs"]:
            library.look()
            if is_more := library.read(seconds=READING_S):
                library.read_on()
            return json_reply({"runs": {name: row(run) for name, run in library.runs.items()}, "is_more": is_more})
        case ["api", "runs", name, *rest] if name in library.runs:
            result = _of_run(library.runs[name], name, rest)
            return missing() if result is None else json_reply(result)
        case ["media", name, *rest] if name in library.runs and rest:
            return _media(library.runs[name], rest)
        case _:
            return missing()


def _of_run(run: LiveRun, name: str, rest: list[str]) -> object:
    match rest:
        case ["curves"]:
            return curves(run)
        case ["details"]:
            return details(run)
        case ["samples"]:
            return sample_steps(run)
        case ["samples", ("train" | "eval") as key, step] if step.isdecimal() and len(step) < 17:
            return samples(run, key, int(step), url=lambda file: f"media/{quote(name, safe='')}/{path_of(run, file)}")
        case _:
            return None


def _media(run: LiveRun, rest: list[str]) -> Reply:
    folder = run.folder / MEDIA
    file = Path(folder, *rest)
    kind = SHOWN.get(file.suffix)
    # Parts with a slash or a link may lead anywhere.
    if kind is None or not is_inside(folder, run.folder) or not is_inside(file, folder) or not file.is_file():
        return missing()
    try:
        return 200, kind, file.read_bytes()
    except OSError:
        return missing()
