"""Calls between the process that has the tests and the process that runs the code, over a socket.

Plain values (numbers, strings, containers of them) cross as copies of exact built-in types, so that no `__eq__` or
other method of the code runs where the tests are. Any other object of the code stays where it is, called by number.
The process that runs the code writes whatever it likes to the socket. Where the tests are, a message that is not
exactly one of this format therefore ends the test, and it stays ended whatever the test catches.
"""

from __future__ import annotations

import builtins
import itertools
import json
import operator
import os
import select
import socket
import struct
import time
from collections.abc import Callable
from typing import Any

__all__ = ["BrokenTalk", "Expired", "Peer", "Proxy", "read_exactly", "recv_frame", "send_frame"]


class Expired(BaseException):
    """The time is over."""


class BrokenTalk(BaseException):
    """The other side has ended, or sent an invalid message. Not an Exception, which a test may catch."""


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
)

_ENDS_LOOPS = (StopIteration, StopAsyncIteration)
"""Raised by the code in a test's `all(map(...))`, they would end it after no item."""


class Peer:
    """One end. `is_open` ends serve every operation on their objects; the other serves calls of functions alone."""

    def __init__(self, link: socket.socket, *, is_open: bool, most: int = 1 << 26) -> None:
        self.link, self.is_open, self.most = link, is_open, most
        self.objects: list[Any] = []
        self.failure: BaseException | None = None
        """Why the test cannot pass any more: the first broken message, or failed assert of a function of the tests that
        the code called, and could have caught."""

    def request(self, op: str, *arguments: Any) -> Any:
        """Ask, and answer what the other side asks before it replies. Raises what was raised there, as a built-in."""
        self._send({"op": op, "arguments": [self.encoded(value) for value in arguments]})
        while True:
            message = self._receive()
            if "op" in message:
                self.answer(message)
            elif "error" in message:
                kind: Any = getattr(builtins, str(message["error"]), None)
                is_error = isinstance(kind, type) and issubclass(kind, Exception) and not issubclass(kind, _ENDS_LOOPS)
                raise (kind if is_error else RuntimeError)(str(message.get("text")))
            else:
                return self.decoded(message.get("value"))

    def serve(self, handlers: dict[str, Callable[..., Any]]) -> None:
        """Answer until the other side ends."""
        while True:
            self.answer(self._receive(), handlers)

    def answer(self, message: Any, handlers: dict[str, Callable[..., Any]] | None = None) -> None:
        arguments = self.decoded(message.get("arguments"))
        op = str(message.get("op"))
        if not isinstance(arguments, list):
            raise self._broken("arguments that are not a list")
        try:
            handler = handlers[op] if handlers and op in handlers else self._operation(op)
            reply = {"value": self.encoded(handler(*arguments))}
        except Exception as error:  # noqa: BLE001 - the other side raises it
            if isinstance(error, AssertionError):
                self.failure = self.failure or error
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
            send_frame(self.link.fileno(), message)
        except OSError as error:
            raise self._broken("the other side has ended") from error

    def _receive(self) -> Any:
        try:
            message = recv_frame(self.link.fileno(), most=self.most)
        except (OSError, EOFError, ValueError, RecursionError, BrokenTalk) as error:
            raise self._broken(f"no message: {error}") from error
        if not isinstance(message, dict):
            raise self._broken("not an object")
        return message

    def _broken(self, text: str) -> BrokenTalk:
        self.failure = BrokenTalk(text)
        return self.failure

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
                return {name: [self.encoded(item) for item in kind.__iter__(value)]}
        if isinstance(value, range):
            # In full, within the limits of this process, so that no few bytes become a large list on the other side.
            return {"range": list(value)}
        if isinstance(value, Proxy):
            return {"yours": object.__getattribute__(value, "_number")}
        self.objects.append(value)
        return {"mine": len(self.objects) - 1}

    def decoded(self, value: Any) -> Any:
        """The value of a message. Raises BrokenTalk for what `encoded` does not make."""
        try:
            return self._value(value)
        except (ValueError, TypeError, LookupError, ArithmeticError, RecursionError) as error:
            raise self._broken(f"an invalid value: {error}") from error

    def _value(self, value: Any) -> Any:
        if isinstance(value, list):
            return [self._value(item) for item in value]
        if not isinstance(value, dict):
            return value
        ((name, content),) = value.items()
        if name == "dict":
            return {self._value(k): self._value(v) for k, v in content}
        if name in ("tuple", "set", "frozenset"):
            return getattr(builtins, name)([self._value(item) for item in content])
        if name in ("bytes", "bytearray"):
            return getattr(builtins, name).fromhex(content)
        if name == "complex":
            return complex(*content)
        if name == "range":
            return _range(content)
        if type(content) is not int or not (name == "mine" or (name == "yours" and 0 <= content < len(self.objects))):
            raise ValueError(name)
        return Proxy(self, content) if name == "mine" else self.objects[content]


def _range(items: list[int]) -> range:
    step = items[1] - items[0] if len(items) > 1 else 1
    result = range(items[0], items[-1] + step, step) if items else range(0)
    if len(result) != len(items) or list(result) != items:
        raise ValueError("not a range")
    return result


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
        while items := _peer(self).request("next", iterator):
            yield from items

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: object) -> bool:
        # A failed assert of the test is not the code's to swallow.
        is_for_code = kind is None or (issubclass(kind, Exception) and not issubclass(kind, AssertionError))
        return bool(_peer(self).request("__exit__", self, kind, error, trace)) and is_for_code


def _peer(proxy: Proxy) -> Peer:
    return object.__getattribute__(proxy, "_peer")


def _forward(name: str) -> Callable[..., Any]:
    return lambda self, *args: _peer(self).request(name, self, *args)


def _between(name: str) -> Callable[..., Any]:
    """Operator on two objects of the code. Against a test's value, the code's operators could make anything true."""
    forward = _forward(name)
    return lambda self, other: forward(self, other) if isinstance(other, Proxy) else NotImplemented


_UNARY = ["bool", "len", "str", "repr", "hash", "abs", "neg", "getitem", "setitem", "delitem", "enter"]
_BINARY = ["lt", "le", "gt", "ge", "add", "sub", "mul", "truediv", "floordiv", "mod"]
_NAMED = {"__bool__": bool, "__len__": len, "__str__": str, "__repr__": repr, "__hash__": hash, "__iter__": iter}
_OPERATIONS: dict[str, Callable[..., Any]] = {
    **{name: getattr(operator, name) for name in dir(operator) if name.startswith("__")},
    **_NAMED,
    "next": lambda iterator: list(itertools.islice(iterator, 1)),
}
for _name in [f"__{name}__" for name in _UNARY]:
    setattr(Proxy, _name, _forward(_name))
for _name in [f"__{name}__" for name in _BINARY]:
    setattr(Proxy, _name, _between(_name))
