"""Calls between the process that has the tests and the process that runs the code, over a socket.

Plain values (numbers, strings, containers of them) cross as copies of exact built-in types, so that no `__eq__` or
other method of the code runs where the tests are. Any other object of the code stays where it is, called by number.
"""

from __future__ import annotations

import builtins
import json
import operator
import os
import select
import socket
import struct
import time
import types
from collections.abc import Callable
from typing import Any

__all__ = ["BrokenTalk", "Expired", "Peer", "Proxy", "read_exactly", "recv_frame", "send_frame"]


class Expired(BaseException):
    """The time of a test is over. Not an Exception: tests that catch those do not continue."""


class BrokenTalk(BaseException):
    """The other side has ended, or sent an invalid message."""


def read_exactly(fd: int, count: int, *, until: float | None = None) -> bytes:
    """Raises EOFError, or Expired when `until` (of time.monotonic) passes."""
    data = bytearray()
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    while len(data) < count:
        if until is not None and not poll.poll(max(0.0, until - time.monotonic()) * 1000):
            raise Expired
        piece = os.read(fd, min(count - len(data), 1 << 20))
        if not piece:
            raise EOFError
        data += piece
    return bytes(data)


def recv_frame(fd: int, *, until: float | None = None, most: int = 1 << 30) -> Any:
    (size,) = struct.unpack(">I", read_exactly(fd, 4, until=until))
    if size > most:
        raise BrokenTalk(f"a message of {size} bytes")
    return json.loads(read_exactly(fd, size, until=until))


def send_frame(fd: int, message: Any, *, until: float | None = None) -> None:
    data = memoryview(_framed(message))
    poll = select.poll()
    poll.register(fd, select.POLLOUT)
    while data:
        if until is not None and not poll.poll(max(0.0, until - time.monotonic()) * 1000):
            raise Expired
        data = data[os.write(fd, data[:4096] if until is not None else data) :]


def _framed(message: Any) -> bytes:
    # Of lone surrogates, which a tokenizer may leave, ASCII JSON has escapes.
    data = json.dumps(message).encode("ascii")
    return struct.pack(">I", len(data)) + data


_BASES: tuple[tuple[str, type[Any]], ...] = (
    ("tuple", tuple),
    ("set", set),
    ("frozenset", frozenset),
    ("bytes", bytes),
    ("bytearray", bytearray),
    ("complex", complex),
    ("range", range),
)


class Peer:
    """One end. `is_open` ends serve every operation on their objects; the other serves calls of functions alone."""

    def __init__(self, link: socket.socket, *, is_open: bool, until: float | None = None, most: int = 1 << 26) -> None:
        self.link, self.is_open, self.until, self.most = link, is_open, until, most
        self.objects: list[Any] = []

    def request(self, op: str, *arguments: Any) -> Any:
        """Ask, and answer what the other side asks before it replies. Raises what was raised there, as a built-in."""
        self._send({"op": op, "arguments": [self.encoded(value) for value in arguments]})
        while True:
            message = self._receive()
            if "op" in message:
                self.answer(message)
            elif "error" in message:
                kind: Any = getattr(builtins, str(message["error"]), None)
                is_error = isinstance(kind, type) and issubclass(kind, Exception)
                raise (kind if is_error else RuntimeError)(message["text"])
            else:
                return self.decoded(message["value"])

    def serve(self, handlers: dict[str, Callable[..., Any]]) -> None:
        """Answer until the other side ends."""
        while True:
            self.answer(self._receive(), handlers)

    def answer(self, message: Any, handlers: dict[str, Callable[..., Any]] | None = None) -> None:
        try:
            arguments = [self.decoded(value) for value in message["arguments"]]
            op = str(message["op"])
            handler = handlers[op] if handlers and op in handlers else self._operation(op)
            reply = {"value": self.encoded(handler(*arguments))}
        except Exception as error:  # noqa: BLE001 - the other side raises it
            names = [kind.__name__ for kind in type(error).__mro__ if kind.__module__ == "builtins"]
            reply = {"error": names[0], "text": str(error)[:1000]}
        self._send(reply)

    def _operation(self, op: str) -> Callable[..., Any]:
        if op == "call":
            # With the arguments as they are afterwards: a function may sort a list in place.
            return lambda function, args, kwargs: [function(*args, **kwargs), args]
        if not self.is_open:
            raise PermissionError(op)
        if op in ("getattr", "setattr", "isinstance"):
            return getattr(builtins, op)
        # As `with` does: on the type, not on the object.
        return _OPERATIONS.get(op) or (lambda item, *args: getattr(type(item), op)(item, *args))

    def _send(self, message: Any) -> None:
        try:
            send_frame(self.link.fileno(), message, until=self.until)
        except OSError as error:
            raise BrokenTalk("the other side has ended") from error

    def _receive(self) -> Any:
        try:
            message = recv_frame(self.link.fileno(), until=self.until, most=self.most)
        except (OSError, EOFError, ValueError, RecursionError) as error:
            raise BrokenTalk(f"no message: {error}") from error
        if not isinstance(message, dict):
            raise BrokenTalk("not an object")
        return message

    def encoded(self, value: Any) -> Any:
        if value is None or type(value) in (bool, int, float, str):
            return value
        if type(value).__module__ == "numpy" and getattr(value, "ndim", 1) == 0:
            return self.encoded(value.item())
        if isinstance(value, int):
            return int.__index__(value)
        if isinstance(value, float):
            return float.__float__(value)
        if isinstance(value, str):
            return str.__str__(value)
        if isinstance(value, list):
            return [self.encoded(item) for item in list.__iter__(value)]
        if isinstance(value, dict):
            return {"dict": [[self.encoded(k), self.encoded(v)] for k, v in dict.items(value)]}
        for name, kind in _BASES:
            if isinstance(value, kind):
                if name in ("bytes", "bytearray"):
                    return {name: bytes(value).hex()}
                if name == "complex":
                    return {name: [value.real, value.imag]}
                if name == "range":
                    return {name: [value.start, value.stop, value.step]}
                return {name: [self.encoded(item) for item in kind.__iter__(value)]}
        if isinstance(value, types.ModuleType):
            return {"module": value.__name__}
        if isinstance(value, Proxy):
            return {"yours": object.__getattribute__(value, "_number")}
        self.objects.append(value)
        return {"mine": len(self.objects) - 1}

    def decoded(self, value: Any) -> Any:
        if isinstance(value, list):
            return [self.decoded(item) for item in value]
        if not isinstance(value, dict):
            return value
        ((name, content),) = value.items()
        if name == "dict":
            return {self.decoded(k): self.decoded(v) for k, v in content}
        if name in ("tuple", "set", "frozenset"):
            return getattr(builtins, name)([self.decoded(item) for item in content])
        if name in ("bytes", "bytearray"):
            return getattr(builtins, name).fromhex(content)
        if name in ("complex", "range"):
            return getattr(builtins, name)(*content)
        if name == "yours":
            return self.objects[content]
        return Module(content) if name == "module" else Proxy(self, content)


class Module(str):
    """The name of a module that the code has imported."""


class Proxy:
    """An object of the other side. What it gives back is plain, or a proxy again."""

    def __init__(self, peer: Peer, number: int) -> None:
        object.__setattr__(self, "_peer", peer)
        object.__setattr__(self, "_number", number)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        result, after = _peer(self).request("call", self, list(args), kwargs)
        for old, new in zip(args, after, strict=True):
            if isinstance(old, list) and type(new) is list:
                old[:] = new
            elif isinstance(old, dict | set) and type(new) is type(old):
                old.clear()
                old.update(new)
        return result

    def __getattr__(self, name: str) -> Any:
        return _peer(self).request("getattr", self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        _peer(self).request("setattr", self, name, value)

    def __instancecheck__(self, other: Any) -> bool:
        return isinstance(other, Proxy) and bool(_peer(self).request("isinstance", other, self))

    def __eq__(self, other: object) -> bool:
        # The code is not asked to compare its own objects with a value of the tests.
        return isinstance(other, Proxy) and _peer(self).request("__eq__", self, other) is True

    def __iter__(self) -> Any:
        iterator = _peer(self).request("__iter__", self)
        while True:
            try:
                yield iterator.__next__()
            except StopIteration:
                return


def _peer(proxy: Proxy) -> Peer:
    return object.__getattribute__(proxy, "_peer")


def _forward(name: str) -> Callable[..., Any]:
    return lambda self, *args: _peer(self).request(name, self, *args)


def _between(name: str) -> Callable[..., Any]:
    """Operator on two objects of the code. Against a test's value, the code's operators could make anything true."""
    forward = _forward(name)
    return lambda self, other: forward(self, other) if isinstance(other, Proxy) else NotImplemented


_UNARY = ["bool", "len", "str", "repr", "hash", "abs", "neg", "getitem", "setitem", "delitem", "enter", "exit"]
_BINARY = ["lt", "le", "gt", "ge", "add", "sub", "mul", "truediv", "floordiv", "mod"]
_NAMED = {"__bool__": bool, "__len__": len, "__str__": str, "__repr__": repr, "__hash__": hash, "__iter__": iter}
_OPERATIONS: dict[str, Callable[..., Any]] = {
    **{name: getattr(operator, name) for name in dir(operator) if name.startswith("__")},
    **_NAMED,
}
for _name in [f"__{name}__" for name in _UNARY]:
    setattr(Proxy, _name, _forward(_name))
for _name in [f"__{name}__" for name in _BINARY]:
    setattr(Proxy, _name, _between(_name))
