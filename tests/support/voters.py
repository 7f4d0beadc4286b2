"""People who vote over HTTP by a rule, seeing what a browser is given."""

from __future__ import annotations

import hashlib
import http.client
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

__all__ = ["VoteClient", "by_reward"]


class VoteClient:
    """Talks to a server of votes. Each request has a connection of its own."""

    def __init__(self, url: str) -> None:
        address = urlsplit(url)
        self._host, self._port = address.hostname or "", address.port
        self._session: str | None = None

    def request(
        self, path: str, sent: object = None, *, method: str = "GET", **headers: str
    ) -> tuple[int, Mapping[str, str], bytes]:
        """sent: posted as JSON, an object with the token of the session unless it has one; bytes as they are."""
        connection = http.client.HTTPConnection(self._host, self._port, timeout=30)
        if isinstance(sent, dict):
            self._session = self._session or self.state()["session"]
            sent = {"session": self._session, **sent}
        if sent is not None:
            method, headers = "POST", {"Content-Type": "application/json", **headers}
            sent = sent if isinstance(sent, bytes) else json.dumps(sent).encode()
        connection.request(method, path, body=sent, headers=headers)
        response = connection.getresponse()
        result = response.status, dict(response.headers), response.read()
        connection.close()
        return result

    def state(self) -> dict[str, Any]:
        return json.loads(self.request("/api/vote")[2])

    def vote(self, pair: int, choice: str) -> dict[str, Any]:
        status, _, content = self.request("/api/vote", {"pair": pair, "choice": choice})
        assert status == 200, content
        return json.loads(content)

    def sides(self, pair: int) -> tuple[bytes, bytes]:
        contents = [self.request(f"/pictures/{pair}/{side}") for side in ("left", "right")]
        assert [status for status, _, _ in contents] == [200, 200]
        return contents[0][2], contents[1][2]

    def vote_on_all(self, prefers: Callable[[bytes, bytes], str]) -> dict[str, Any]:
        """prefers: choice by the contents of the left and the right file. Returns the last state."""
        state = self.state()
        while "result" not in state:
            state = self.vote(state["pair"], prefers(*self.sides(state["pair"])))
        return state


def by_reward(*runs: Path) -> Callable[[bytes, bytes], str]:
    """Prefers the image of the higher reward, which the indices of these runs have; a tie where both are equal."""
    rewards: dict[str, float] = {}
    for run in runs:
        for line in (run / "media" / "index.jsonl").read_text().splitlines():
            for sample in json.loads(line).get("samples", ()):
                content = (run / "media" / sample["file"]).read_bytes()
                rewards[hashlib.sha256(content).hexdigest()] = sample["reward"]

    def prefers(left: bytes, right: bytes) -> str:
        one, other = (rewards[hashlib.sha256(content).hexdigest()] for content in (left, right))
        return "left" if one > other else "right" if other > one else "tie"

    return prefers
