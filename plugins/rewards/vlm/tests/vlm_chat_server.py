"""A small OpenAI-compatible server with scripted answers."""

from __future__ import annotations

import base64
import io
import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from PIL import Image


@dataclass
class Reply:
    """Reply of the server to one request."""

    text: str | None = ""
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)
    finish_reason: str = "stop"
    tokens: Mapping[str, float] | None = None
    """Log-prob of each of the most probable first tokens, sent as `top_logprobs`."""
    body: str | None = None
    """Sent as it is, in place of a completion."""
    delay_s: float = 0.0


@dataclass
class Chat:
    url: str
    requests: list[dict[str, Any]] = field(default_factory=list)
    """Bodies, in the order of arrival."""
    keys: list[str | None] = field(default_factory=list)
    """`Authorization` headers."""
    at_once: int = 0
    """Most requests that were open at a time."""


@contextmanager
def serving(script: Callable[[int, dict[str, Any]], Reply | str]) -> Iterator[Chat]:
    """script: (number of the request from 0, its body) -> the reply."""
    lock, open_now = threading.Lock(), 0

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            nonlocal open_now
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with lock:
                number = len(chat.requests)
                chat.requests.append(body)
                chat.keys.append(self.headers.get("Authorization"))
                open_now += 1
                chat.at_once = max(chat.at_once, open_now)
            reply = script(number, body)
            reply = Reply(text=reply) if isinstance(reply, str) else reply
            time.sleep(reply.delay_s)
            if self.path != "/v1/chat/completions":
                reply = Reply(status=404, body="no such page")
            top = [{"token": token, "logprob": logprob} for token, logprob in (reply.tokens or {}).items()]
            choice = {
                "message": {"role": "assistant", "content": reply.text},
                "finish_reason": reply.finish_reason,
                "logprobs": None if reply.tokens is None else {"content": [{"top_logprobs": top}]},
            }
            data = (reply.body if reply.body is not None else json.dumps({"choices": [choice]})).encode()
            with lock:
                open_now -= 1
            try:
                self.send_response(reply.status)
                for name, value in reply.headers.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)
            except (BrokenPipeError, ConnectionResetError):
                pass  # A client that ran out of patience.

        def log_message(self, *_: Any) -> None:
            """Nothing: the base class writes to stderr."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    chat = Chat(url=f"http://127.0.0.1:{server.server_address[1]}/v1")
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield chat
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def text_of(body: dict[str, Any]) -> str:
    """The text of a request's question."""
    return body["messages"][0]["content"][-1]["text"]


def images_of(body: dict[str, Any]) -> list[Image.Image]:
    """The images of a request's question, decoded."""
    result: list[Image.Image] = []
    for part in body["messages"][0]["content"][:-1]:
        scheme, data = part["image_url"]["url"].split(",")
        assert scheme == "data:image/png;base64"
        result.append(Image.open(io.BytesIO(base64.b64decode(data))))
    return result
