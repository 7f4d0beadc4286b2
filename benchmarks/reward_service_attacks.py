"""Latency of an ordinary request to a reward service while hostile clients attack it.

    python benchmarks/reward_service_attacks.py                   # all attacks, one after the other
    python benchmarks/reward_service_attacks.py chunks heads      # these
    PYTHONPATH=OTHER/packages/unirl-reward-service/src python benchmarks/reward_service_attacks.py   # another checkout

A service with a key, of 256 open files, is started for each attack. The attackers are a separate process, repeat what
they do, and share this machine. An ordinary request scores one image of 64 px, on a new connection, and is sent again
after 429, 503 and lost connections, as the reward `remote` does.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import resource
import socket
import statistics
import struct
import subprocess
import sys
import tempfile
import threading
import time
import zlib
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

import httpx
import msgspec
import torch
from unirl.core.roles import ScoreInput
from unirl.core.types.inputs import Inputs
from unirl.core.types.media import Media
from unirl.reward_service.wire import FORMAT, ScoreReply, ScoreRequest, decode, encode, from_samples

KEY = "a-key-of-many-characters"
MAX_FILES = 256
REWARD = '''
def light(images, prompts):
    """1 for each image, and an error that UTF-8 cannot hold."""
    if "fail" in prompts:
        raise ValueError("half of \\ud83d")
    return [1.0] * len(images)
'''


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("attacks", nargs="*", metavar="ATTACK", help=f"of {', '.join(ATTACKS)}")
    parser.add_argument("--requests", type=int, default=5, help="ordinary requests, one after the other")
    parser.add_argument("--give-up", type=float, default=120, help="seconds after which a request has failed")
    args = parser.parse_args()
    print(f"{os.cpu_count()} CPU cores; {args.requests} ordinary requests during each attack")
    print(f"{'attack':<12} {'median':>9} {'longest':>9}  sent again  served")
    for name in args.attacks or ATTACKS:
        measure(name, args)


def measure(name: str, args: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "rewards.yaml"
        (Path(folder) / "light.py").write_text(REWARD)
        scorer = f"{{use: function, settings: {{target: '{folder}/light.py:light'}}}}"
        file.write_text(f"keys_env: BENCHMARK_KEYS\nscorers: {{light: {scorer}}}\n")
        command = [sys.executable, "-m", "unirl.core", "reward-service", "serve", str(file), "--port", "0"]
        with (Path(folder) / "log.jsonl").open("wb") as log:
            service = subprocess.Popen(
                command,
                stdout=subprocess.PIPE,
                stderr=log,
                env={**os.environ, "BENCHMARK_KEYS": KEY},
                preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (MAX_FILES, MAX_FILES)),
            )
        assert service.stdout is not None
        attackers = None
        try:
            url = json.loads(service.stdout.readline())["url"]
            context = multiprocessing.get_context("spawn")
            attackers = context.Process(target=ATTACKS[name], args=(httpx.URL(url).port,), daemon=True)
            attackers.start()
            # The attackers import torch first.
            time.sleep(8)
            report(name, url, args)
        finally:
            if attackers is not None:
                attackers.kill()
                attackers.join()
            service.kill()
            service.wait()
            service.stdout.close()


def report(name: str, url: str, args: argparse.Namespace) -> None:
    seconds: list[float] = []
    again = served = 0
    for number in range(args.requests):
        content = body(f"{number:032}", prompt="ordinary")
        began = time.perf_counter()
        is_served = False
        while not is_served and (left := args.give_up - (time.perf_counter() - began)) > 0:
            try:
                reply = httpx.post(
                    f"{url}/v1/score", content=content, headers=AUTHORIZED, timeout=left, trust_env=False
                )
            except httpx.TransportError:
                again += 1
                time.sleep(0.1)
                continue
            if reply.status_code == 200:
                assert decode(reply.content, ScoreReply).values == [1.0]
                is_served = True
            else:
                assert reply.status_code in (429, 503), reply.text
                again += 1
                time.sleep(min(left, float(reply.headers.get("retry-after", 0.1))))
        seconds.append(time.perf_counter() - began)
        served += is_served
        if not is_served:
            break
    median, longest = (f"{value * 1000:.0f} ms" for value in (statistics.median(seconds), max(seconds)))
    print(f"{name:<12} {median:>9} {longest:>9}  {again:>10}  {served} of {len(seconds)}", flush=True)


AUTHORIZED = {"Authorization": f"Bearer {KEY}"}


def body(name: str, *, prompt: str, metadata: Mapping[str, object] | None = None, pixels: int = 64) -> bytes:
    samples = ScoreInput(
        sample_ids=("s",),
        group_ids=("s",),
        inputs=Inputs.of_texts([prompt]),
        metadata=(metadata or {},),
        media=Media(kind="image", values=torch.zeros(1, 3, pixels, pixels)),
    )
    wire = from_samples(samples, codec="raw")
    return encode(ScoreRequest(format=FORMAT, id=name, scorer="light", version="", samples=wire))


def of_files(*files: bytes, kind: str) -> bytes:
    """A request whose sample has these PNG files."""
    message = msgspec.msgpack.decode(body("0" * 32, prompt="x"))
    media = [{"type": "files", "codec": "png", "files": list(files)}]
    message["samples"] |= {"kind": kind, "rate": 8.0 if kind == "video" else None, "media": media}
    return msgspec.msgpack.encode(message)


def png(*more: tuple[bytes, bytes]) -> bytes:
    """A PNG of 16 px with further chunks before its pixels."""
    chunks = [(b"IHDR", struct.pack(">IIBBBBB", 16, 16, 8, 2, 0, 0, 0)), *more]
    chunks += [(b"IDAT", zlib.compress(bytes(16 * 49))), (b"IEND", b"")]
    sized = [struct.pack(">I", len(c)) + kind + c + struct.pack(">I", zlib.crc32(kind + c)) for kind, c in chunks]
    return b"\x89PNG\r\n\x1a\n" + b"".join(sized)


def head(size: int, *, key: str = KEY) -> bytes:
    return (
        f"POST /v1/score HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {key}\r\nContent-Length: {size}\r\n\r\n".encode()
    )


def held(port: int, first: bytes, *, count: int, further: bytes = b"") -> None:
    """Open connections that send this, then a further piece a second; those that are ended are opened again."""
    connections: list[socket.socket] = []
    while True:
        alive: list[socket.socket] = []
        for connection in connections:
            try:
                if further:
                    connection.send(further)
                elif connection.recv(1, socket.MSG_PEEK) == b"":
                    raise ConnectionError
                alive.append(connection)
            except BlockingIOError:
                alive.append(connection)
            except OSError:
                connection.close()
        connections = alive
        while len(connections) < count:
            connection = socket.socket()
            connection.settimeout(1)
            try:
                connection.connect(("127.0.0.1", port))
                connection.send(first)
                connection.setblocking(False)
            except OSError:
                connection.close()
                break
            connections.append(connection)
        time.sleep(1)


def streamed(port: int, first: bytes, piece: bytes, *, count: int = 8) -> None:
    """Connections that send as fast as they can, and never read; those that are ended are opened again."""

    def stream() -> None:
        while True:
            with suppress(OSError), socket.create_connection(("127.0.0.1", port)) as connection:
                connection.sendall(first)
                while True:
                    connection.sendall(piece)

    in_threads(stream, count)


def posted(port: int, content: bytes, *, count: int = 8) -> None:
    """Keeps this many requests in progress, each with a unique id."""

    def post() -> None:
        number = 0
        while True:
            number += 1
            name = f"{threading.get_ident() % 10**12}-{number:08}".rjust(32, "0").encode()
            with suppress(httpx.TransportError):
                httpx.post(
                    f"http://127.0.0.1:{port}/v1/score",
                    content=content.replace(b"0" * 32, name, 1),
                    headers=AUTHORIZED,
                    timeout=600,
                    trust_env=False,
                )

    in_threads(post, count)


def in_threads(work: Callable[[], None], count: int) -> None:
    threads = [threading.Thread(target=work) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def none(port: int) -> None:
    pass


def half_heads(port: int) -> None:
    held(port, b"GET /health HTTP/1.1\r\nHost: x\r\n", count=300)


def slow_bodies(port: int) -> None:
    """Without a key, a byte a second."""
    held(port, head(10**9, key="x"), count=300, further=b"x")


def announced(port: int) -> None:
    """With a key: 64 bodies of 64 MB are announced, and come at a byte a second."""
    held(port, head(64_000_000), count=64, further=b"x")


def endless(port: int) -> None:
    """Bodies without a key and without an end."""
    streamed(port, head(10**15, key="x"), bytes(2**16))


def untaken(port: int) -> None:
    """Requests without a key whose replies are not read."""
    held(
        port,
        b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n" * 200,
        count=300,
        further=b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" * 20,
    )


def heads(port: int) -> None:
    """Heads of 250 kB without a key, of 50,000 fields."""
    streamed(port, b"", b"GET /health HTTP/1.1\r\nHost: x\r\n" + b"a:b\r\n" * 50_000 + b"\r\n")


def chunks(port: int) -> None:
    """Images of 2.4 MB, with 2,300 chunks that unpack to 1 MB each."""
    packed = zlib.compress(b"\xff" * 2**20, 9)
    posted(port, of_files(png(*[(b"iTXt", b"k\0\1\0\0\0" + packed)] * (2_400_000 // (len(packed) + 18))), kind="image"))


def frames(port: int) -> None:
    """Videos of 2.4 MB, of 24,000 image files."""
    one = png()
    posted(port, of_files(*[one] * (2_400_000 // len(one)), kind="video"))


def metadata(port: int) -> None:
    """Metadata of 2.4 MB, of as many empty lists."""
    posted(port, body("0" * 32, prompt="x", metadata={"x": [[]] * 2_400_000}))


def errors(port: int) -> None:
    """Requests that fail with a text that UTF-8 cannot hold."""
    posted(port, body("0" * 32, prompt="fail"), count=1)


ATTACKS: Mapping[str, Callable[[int], None]] = {
    "none": none,
    "half-heads": half_heads,
    "slow-bodies": slow_bodies,
    "announced": announced,
    "endless": endless,
    "untaken": untaken,
    "heads": heads,
    "chunks": chunks,
    "frames": frames,
    "metadata": metadata,
    "errors": errors,
}

if __name__ == "__main__":
    main()
