"""The page over HTTP: for readers on this machine, read-only, and nothing outside of the run folders."""

from __future__ import annotations

import ipaddress
import socket
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import resources
from pathlib import Path
from typing import Any, cast
from urllib.parse import quote, unquote, urlsplit

from unirl.core.disk import is_inside
from unirl.core.errors import RecipeError
from unirl.core.strict_json import strict_json

from ..media import MEDIA
from ..theme import style_variables
from .library import Library
from .live_run import LiveRun
from .replies import curves, details, path_of, row, sample_steps, samples

__all__ = ["PAGE", "ViewServer", "page_file", "start_server"]

PAGE = {
    "index.html": "text/html; charset=utf-8",
    "view.css": "text/css; charset=utf-8",
    "icon.svg": "image/svg+xml",
    "maths.js": "text/javascript; charset=utf-8",
    "parts.js": "text/javascript; charset=utf-8",
    "view.js": "text/javascript; charset=utf-8",
}
"""Files of the page -> their types."""
SHOWN = {".png": "image/png", ".webp": "image/webp"}
"""Suffixes of the files of a run that are served -> their types."""
READING_S = 0.5
"""Seconds of reading new events that an answer waits for; what is left is read beside."""
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}


class ViewServer(ThreadingHTTPServer):
    """Serves a library until `shutdown`."""

    daemon_threads = True

    def __init__(self, library: Library, *, host: str, port: int) -> None:
        self.library = library
        self.names = {"localhost", socket.gethostname().lower(), host.lower()}
        """Host names under which it answers, beside any address: another name would be that of a foreign page."""
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        super().__init__((host, port), _Handler)

    def handle_error(self, request: Any, client_address: Any) -> None:
        # A browser that leaves a page drops its requests.
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)

    @property
    def url(self) -> str:
        host, port = str(self.server_address[0]), self.server_address[1]
        return f"http://{f'[{host}]' if ':' in host else host}:{port}/"


def start_server(library: Library, *, host: str, port: int) -> ViewServer:
    """A server that listens; `serve_forever` answers. port: 0 takes a free one.

    Raises RecipeError for a port in use and for a host that is not one of this machine.
    """
    try:
        return ViewServer(library, host=host, port=port)
    except OSError as error:
        raise RecipeError(
            f"--port {port} on {host}: {error.strerror}. Give another one with --port, or --port 0 for a free one."
        ) from error


def page_file(name: str) -> bytes:
    """A file of the page. The style sheet begins with the colours."""
    content = resources.files("unirl.trackers.report.view").joinpath("page", name).read_text(encoding="utf-8")
    return (f"{style_variables()}\n{content}" if name == "view.css" else content).encode()


class _Handler(BaseHTTPRequestHandler):
    server_version, sys_version = "unirl-view", ""
    protocol_version = "HTTP/1.1"
    timeout = 30

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002, the name in the class above
        """Nothing: the page asks every two seconds."""

    def _answer(self, *, with_body: bool) -> None:
        library = cast("ViewServer", self.server).library
        if not self._is_asked_by_name():
            status, kind, content = 403, "text/plain", b"This host name is not one of this server.\n"
        else:
            parts = [unquote(part, errors="replace") for part in self.path.partition("?")[0].split("/")[1:]]
            with library.lock:
                status, kind, content = _reply(library, parts)
        self.send_response(status)
        for name, value in {**HEADERS, "Content-Type": kind, "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        if with_body:
            self.wfile.write(content)

    def _is_asked_by_name(self) -> bool:
        """Whether the request names this machine: a page elsewhere can make its own name lead here."""
        try:
            name = urlsplit(f"//{self.headers.get('Host', '')}").hostname or ""
        except ValueError:
            return False
        return name in cast("ViewServer", self.server).names or _is_address(name)


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _reply(library: Library, parts: list[str]) -> tuple[int, str, bytes]:
    """Status, type and content of a path."""
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
            return _json({"runs": {name: row(run) for name, run in library.runs.items()}, "is_more": is_more})
        case ["api", "runs", name, *rest] if name in library.runs:
            result = _of_run(library.runs[name], name, rest)
            return _missing() if result is None else _json(result)
        case ["media", name, *rest] if name in library.runs and rest:
            return _media(library.runs[name], rest)
        case _:
            return _missing()


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


def _media(run: LiveRun, rest: list[str]) -> tuple[int, str, bytes]:
    folder = run.folder / MEDIA
    file = Path(folder, *rest)
    kind = SHOWN.get(file.suffix)
    # Parts with a slash or a link may lead anywhere.
    if kind is None or not is_inside(folder, run.folder) or not is_inside(file, folder) or not file.is_file():
        return _missing()
    try:
        return 200, kind, file.read_bytes()
    except OSError:
        return _missing()


def _json(value: object) -> tuple[int, str, bytes]:
    return 200, "application/json", strict_json(value, separators=(",", ":")).encode()


def _missing() -> tuple[int, str, bytes]:
    return 404, "text/plain", b"There is nothing at this address.\n"
