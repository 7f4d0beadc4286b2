"""Pages over HTTP for readers on this machine: who is answered, with which headers, and what a page may send."""

from __future__ import annotations

import ipaddress
import json
import socket
import sys
from abc import abstractmethod
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import resources
from typing import Any, TypeAlias, cast
from urllib.parse import unquote, urlsplit

from unirl.core.errors import RecipeError
from unirl.core.strict_json import strict_json

from .theme import style_variables

__all__ = ["TYPES", "LocalHandler", "LocalServer", "Reply", "json_reply", "missing", "page_file", "port_refused"]

Reply: TypeAlias = tuple[int, str, bytes]
"""Status, type and content."""
TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
"""Suffixes of the files of a page -> their types."""
MOST_SENT = 4096
"""Bytes that a page sends at once."""
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}


class LocalServer(ThreadingHTTPServer):
    """Answers with a handler until `shutdown`."""

    daemon_threads = True

    def __init__(self, handler: type[LocalHandler], *, host: str, port: int) -> None:
        self.names = {"localhost", socket.gethostname().lower(), host.lower()}
        """Host names under which it answers, beside any address: another name would be that of a foreign page."""
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        super().__init__((host, port), handler)

    def handle_error(self, request: Any, client_address: Any) -> None:
        # A browser that leaves a page drops its requests.
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)

    @property
    def url(self) -> str:
        host, port = str(self.server_address[0]), self.server_address[1]
        return f"http://{f'[{host}]' if ':' in host else host}:{port}/"


class LocalHandler(BaseHTTPRequestHandler):
    """Answers reads; a page that sends something adds `do_POST`, which calls `take`."""

    server_version, sys_version = "unirl", ""
    protocol_version = "HTTP/1.1"
    timeout = 30

    @abstractmethod
    def reply(self, parts: list[str]) -> Reply:
        """The answer to a path in parts, unquoted: a part may hold a slash."""

    def do_GET(self) -> None:
        self._read(with_body=True)

    def do_HEAD(self) -> None:
        self._read(with_body=False)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002, the name in the class above
        """Nothing: a page may ask every two seconds."""

    def take(self) -> dict[str, Any] | None:
        """The JSON object that a page of this server sent. None when the request is refused, and has its answer.

        Only JSON of our own origin: a page elsewhere could send plain text or a form to here without being asked.
        """
        size = self.headers.get("Content-Length", "")
        origin, host = self.headers.get("Origin"), self.headers.get("Host", "")
        if not self._is_asked_by_name() or origin not in (None, f"http://{host}"):
            problem = (403, "text/plain", b"This host name is not one of this server.\n")
        elif self.headers.get_content_type() != "application/json":
            problem = (415, "text/plain", b"Expected application/json.\n")
        elif not size.isdecimal() or len(size) > 9 or int(size) > MOST_SENT:
            problem = (413, "text/plain", f"Expected a length of at most {MOST_SENT} bytes.\n".encode())
        else:
            try:
                value: Any = json.loads(self.rfile.read(int(size)))
                if isinstance(value, dict):
                    return cast("dict[str, Any]", value)
            except (ValueError, RecursionError):
                pass
            problem = (400, "text/plain", b"Expected a JSON object.\n")
        # What was not read would be taken for the next request.
        self.close_connection = True
        self.send(problem)
        return None

    def send(self, reply: Reply, *, with_body: bool = True) -> None:
        status, kind, content = reply
        self.send_response(status)
        for name, value in {**HEADERS, "Content-Type": kind, "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        if with_body:
            self.wfile.write(content)

    def _read(self, *, with_body: bool) -> None:
        if not self._is_asked_by_name():
            reply = (403, "text/plain", b"This host name is not one of this server.\n")
        else:
            reply = self.reply([unquote(part, errors="replace") for part in self.path.partition("?")[0].split("/")[1:]])
        self.send(reply, with_body=with_body)

    def _is_asked_by_name(self) -> bool:
        """Whether the request names this machine: a page elsewhere can make its own name lead here."""
        try:
            name = urlsplit(f"//{self.headers.get('Host', '')}").hostname or ""
        except ValueError:
            return False
        return name in cast("LocalServer", self.server).names or _is_address(name)


def port_refused(error: OSError, *, host: str, port: int) -> RecipeError:
    """The error of a port in use, or of a host that is not one of this machine."""
    return RecipeError(
        f"--port {port} on {host}: {error.strerror}. Give another one with --port, or --port 0 for a free one."
    )


def page_file(name: str, *, of: str = "view") -> bytes:
    """A file of a page. of: the package with the folder `page`. The style sheet begins with the colours."""
    file = resources.files(f"unirl.trackers.report.{of}").joinpath("page", name)
    content = file.read_text(encoding="utf-8")
    return (f"{style_variables()}\n{content}" if name == "view.css" else content).encode()


def json_reply(value: object, *, status: int = 200) -> Reply:
    return status, "application/json", strict_json(value, separators=(",", ":")).encode()


def missing() -> Reply:
    return 404, "text/plain", b"There is nothing at this address.\n"


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
