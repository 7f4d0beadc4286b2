"""The voting page over HTTP: for this machine, and nothing in it tells which run an image is of."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

from unirl.core.errors import UniRLError

from ..local_server import TYPES, LocalHandler, LocalServer, Reply, json_reply, missing, page_file, port_refused
from .session import Refused, VotingSession

__all__ = ["PAGE", "VoteServer", "start_server"]

PAGE = {"index.html": "vote", "vote.css": "vote", "vote.js": "vote"} | dict.fromkeys(
    ("view.css", "icon.svg", "parts.js"), "view"
)
"""Files of the page -> the package that has them."""
OTHER_SESSION = (
    "`unirl vote` was started again since this page was loaded, so nothing was recorded. Reload the page to continue."
)


class VoteServer(LocalServer):
    """Serves a session until `shutdown`."""

    def __init__(self, session: VotingSession, *, host: str, port: int) -> None:
        self.session = session
        super().__init__(_Handler, host=host, port=port)


def start_server(session: VotingSession, *, host: str, port: int) -> VoteServer:
    """A server that listens; `serve_forever` answers. port: 0 takes a free one.

    Raises RecipeError for a port in use and for a host that is not one of this machine.
    """
    try:
        return VoteServer(session, host=host, port=port)
    except OSError as error:
        raise port_refused(error, host=host, port=port) from error


class _Handler(LocalHandler):
    def reply(self, parts: list[str]) -> Reply:
        session = cast("VoteServer", self.server).session
        match parts:
            case [""]:
                return self.reply(["index.html"])
            case [name] if name in PAGE:
                return 200, TYPES[Path(name).suffix], page_file(name, of=PAGE[name])
            case ["api", "vote"]:
                return json_reply(session.state())
            case ["pictures", number, side] if number.isdecimal() and len(number) < 10:
                try:
                    content = session.picture(int(number), side)
                except UniRLError as error:
                    return _problem(str(error))
                return missing() if content is None else (200, _type(content), content)
            case _:
                return missing()

    def do_POST(self) -> None:
        sent = self.take()
        if sent is not None:
            self.send(self._taken(sent))

    def _taken(self, sent: dict[str, Any]) -> Reply:
        session = cast("VoteServer", self.server).session
        try:
            match self.path, sent:
                case "/api/vote" | "/api/undo", _ if sent.get("session") != session.token:
                    return _problem(OTHER_SESSION)
                case "/api/vote", {"pair": int(number), "choice": "left" | "right" | "tie" as choice}:
                    return json_reply(session.vote(number, choice))
                case "/api/undo", {"done": int(done)}:
                    return json_reply(session.undo(done))
                case _:
                    return missing()
        except Refused:
            # Two pages, or a key that was pressed twice.
            return json_reply(session.state(), status=409)
        except (UniRLError, OSError) as error:
            return _problem(str(error))


def _type(content: bytes) -> str:
    """Media type of a saved picture, by its first bytes."""
    return "image/webp" if content[:4] == b"RIFF" else "image/png"


def _problem(text: str) -> Reply:
    return json_reply({"problem": text}, status=410)
