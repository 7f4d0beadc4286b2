"""Hostile clients of a service, over real sockets: what they send is bounded before it is worked on, and others are
served in the meantime."""

from __future__ import annotations

import io
import os
import re
import signal
import socket
import struct
import time
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path

import httpx
import msgspec
import pytest
import torch
from PIL import Image
from reward_services import NUMBER, RunningService, connected, request, rest, running, samples, scored, values
from unirl.reward_service.wire import ScoreRequest, decode, encode
from unirl.reward_service.wire_pixels import Encoded

pytestmark = pytest.mark.slow

KEY = "a-key-of-many-characters"
SETTINGS = (
    """
keys_env: TEST_REWARD_KEYS
head_timeout_s: 1
body_timeout_s: 2
max_body_mb: 4
max_pending_mb: 20
max_metadata_mb: 0.1
keep_replies_mb: 0.02
max_request_frames: 100
scorers:
  light: {{use: brightness}}
"""
    + NUMBER
)
MAX_FILES = 256


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningService]:
    folder = tmp_path_factory.mktemp("attacked")
    with running(folder, SETTINGS, key=KEY, max_files=MAX_FILES, TEST_REWARD_KEYS=KEY) as result:
        yield result


@pytest.fixture(scope="module")
def keyless(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningService]:
    """A service without keys that takes four connections."""
    settings = "max_connections: 4\nhosts: [rewards.test, '*.lab.test']\nscorers:" + NUMBER
    with running(tmp_path_factory.mktemp("keyless"), settings) as result:
        yield result


def is_open(connection: socket.socket) -> bool:
    connection.setblocking(False)
    try:
        return connection.recv(1, socket.MSG_PEEK) != b""
    except BlockingIOError:
        return True
    except ConnectionResetError:
        return False
    finally:
        connection.setblocking(True)


def is_ended_while_sending(connection: socket.socket, piece: bytes, *, every_s: float, within_s: float = 20) -> bool:
    until = time.monotonic() + within_s
    with suppress(OSError):
        while is_open(connection):
            if time.monotonic() > until:
                return False
            connection.sendall(piece)
            time.sleep(every_s)
    return True


def error(reply: httpx.Response) -> str:
    return reply.json()["error"]["code"]


def asked(service: RunningService, name: str, number: int) -> list[float]:
    """Values of an ordinary request on a connection of its own."""
    with httpx.Client(base_url=service.url, headers=service.http.headers, timeout=20, trust_env=False) as http:
        return values(http.post("/v1/score", content=request(name, samples([str(number)]))))


def post(*, size: int, key: str = KEY) -> bytes:
    """The head of a request to score."""
    lines = ("POST /v1/score HTTP/1.1", "Host: x", f"Authorization: Bearer {key}", f"Content-Length: {size}", "", "")
    return "\r\n".join(lines).encode()


HALF = b"GET /health HTTP/1.1\r\nHost: x\r\n"
WHOLE = HALF + b"\r\n"


@pytest.mark.parametrize("sent", [b"", b"G", HALF])
def test_a_head_that_does_not_arrive_is_refused_after_its_time(service: RunningService, sent: bytes) -> None:
    with connected(service, sent) as connection:
        reply = rest(connection)
    assert reply.startswith(b"HTTP/1.1 408 ") and b'"head_timeout"' in reply


def test_the_time_of_a_head_does_not_begin_again_with_each_byte(service: RunningService) -> None:
    with connected(service, HALF + b"X: ") as connection:
        assert is_ended_while_sending(connection, b"x", every_s=0.1)
    with connected(service, WHOLE) as connection:
        while b"healthy" not in connection.recv(65536):
            pass
        connection.sendall(HALF)
        assert rest(connection).startswith(b"HTTP/1.1 408 ")


def test_more_half_requests_than_open_files_leave_the_service_to_others(service: RunningService) -> None:
    with ExitStack() as stack:
        held = [stack.enter_context(connected(service, HALF)) for _ in range(MAX_FILES + 64)]
        assert [asked(service, f"a-half-{n:03}", n) for n in range(10)] == [[float(n)] for n in range(10)]
        # All but the newest were ended for those that came after them.
        assert sum(map(is_open, held)) < MAX_FILES
        assert len(list(Path(f"/proc/{service.process.pid}/fd").iterdir())) < MAX_FILES
    assert "out of system resource" not in service._log.read_text()


def test_a_burst_of_connections_is_accepted_within_the_open_files(service: RunningService) -> None:
    """All of them wait before the service looks at the first."""
    with ExitStack() as stack:
        service.process.send_signal(signal.SIGSTOP)
        try:
            for _ in range(MAX_FILES + 64):
                stack.enter_context(connected(service, HALF))
        finally:
            service.process.send_signal(signal.SIGCONT)
        assert asked(service, "a-burst-1", 1) == [1.0]
    assert "out of system resource" not in service._log.read_text()


def test_a_connection_beyond_the_bound_is_refused_where_all_have_a_request(keyless: RunningService) -> None:
    hold = keyless._log.with_name("scored.txt.hold")
    hold.touch()
    try:
        body = request("b-held-01", samples(["1"]))
        held = [connected(keyless, post(size=len(body)).replace(b" x", b" localhost") + body) for _ in range(4)]
        until = time.monotonic() + 20
        while not keyless._log.with_name("scored.txt.held").exists():
            assert time.monotonic() < until
            time.sleep(0.01)
        with connected(keyless) as connection:
            reply = rest(connection)
        assert reply.startswith(b"HTTP/1.1 429 ") and b'"overloaded"' in reply and b"Retry-After: 1" in reply
    finally:
        hold.unlink()
    for connection in held:
        with connection:
            assert connection.recv(65536).startswith(b"HTTP/1.1 200 ")
    assert keyless.http.get("/health").status_code == 200


def test_a_long_head_is_refused_wherever_it_stands(service: RunningService) -> None:
    many = b"GET /health HTTP/1.1\r\n" + b"a:b\r\n" * 40_000 + b"Host: x\r\n\r\n"
    refused = b"HTTP/1.1 401 "
    for before, replies in ((b"", b""), (WHOLE, b"HTTP/1.1 200 "), (post(size=1, key="x") + b"x", refused)):
        with connected(service) as connection:
            with suppress(OSError):
                connection.sendall(before + many)
            result = rest(connection)
        assert result.count(b"HTTP/1.1 200 ") == (replies == b"HTTP/1.1 200 ")
        assert result == b"" or result.startswith((replies, b"HTTP/1.1 400 "))


@pytest.mark.parametrize("key", [KEY, "x"])
def test_a_body_has_a_time_limit_with_and_without_a_key(service: RunningService, key: str) -> None:
    with connected(service, post(size=1000, key=key)) as silent, connected(service, post(size=1000, key=key)) as slow:
        assert is_ended_while_sending(slow, b"x", every_s=0.1)
        reply = rest(silent)
    assert reply.startswith(b"HTTP/1.1 408 " if key == KEY else b"HTTP/1.1 401 ")


def test_requests_that_do_not_wait_for_a_reply_end_the_connection(service: RunningService) -> None:
    with connected(service, WHOLE * 1000) as connection:
        assert rest(connection).count(b"HTTP/1.1 ") <= 1


def test_an_endless_body_without_a_key_is_read_up_to_a_bound(service: RunningService) -> None:
    head = post(size=0, key="x").replace(b"Content-Length: 0", b"Transfer-Encoding: chunked")
    chunk = b"10000\r\n" + bytes(65536) + b"\r\n"
    for begin, piece in ((head, chunk), (post(size=10**15, key="x"), chunk)):
        with connected(service, begin) as connection, pytest.raises(ConnectionError):
            # Twice max_body_mb, and what the kernel holds.
            for _ in range(64_000_000 // len(piece)):
                connection.sendall(piece)


def test_replies_that_are_not_taken_end_the_connection(service: RunningService) -> None:
    """Requests one after the other, whose replies fill every buffer on the way."""
    metrics = f"GET /metrics HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\n\r\n".encode()
    connection = connected(service, timeout_s=0.5)
    with connection:
        until = time.monotonic() + 20
        with pytest.raises(ConnectionError):
            while time.monotonic() < until:
                try:
                    connection.sendall(metrics)
                except TimeoutError:
                    continue


def test_bodies_that_are_announced_and_not_sent_hold_nothing(service: RunningService) -> None:
    """Four times as much as the service holds at a time."""
    with ExitStack() as stack:
        for _ in range(20):
            stack.enter_context(connected(service, post(size=4_000_000) + b"x"))
        assert asked(service, "p-stated-1", 5) == [5.0]
        assert service.metric("unirl_reward_pending_bytes") < 100


def chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def with_files(name: str, *files: bytes, kind: str = "image") -> bytes:
    body = decode(request(name, samples(["1"]), scorer="light", codec="png"), ScoreRequest)
    rate = 8.0 if kind == "video" else None
    media = msgspec.structs.replace(body.samples, media=[Encoded(codec="png", files=list(files))], kind=kind, rate=rate)
    return encode(msgspec.structs.replace(body, samples=media))


def white() -> tuple[bytes, bytes, bytes]:
    """A PNG in three parts: its header, its pixels, its end."""
    file = io.BytesIO()
    Image.new("RGB", (8, 8), "white").save(file, "PNG")
    content = file.getvalue()
    return content[:33], content[33:-12], content[-12:]


MEGABYTE = zlib.compress(bytes(2**20), 9)
CHUNKS = {
    "zTXt": b"k\0\0" + MEGABYTE,
    # Text that is not UTF-8 is not counted by Pillow.
    "iTXt": b"k\0\1\0\0\0" + zlib.compress(b"\xff" * 2**20, 9),
    "iCCP": b"k\0\0" + MEGABYTE,
}


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@pytest.mark.parametrize("kind", CHUNKS)
def test_packed_chunks_of_an_image_are_never_unpacked(service: RunningService, kind: str) -> None:
    header, pixels, end = white()
    bombs = chunk(kind.encode(), CHUNKS[kind]) * 1000
    # Eight bodies of 2 MB, which unpack to 2 GB each.
    bodies = [with_files(f"c-{kind}-{n:03}", header + bombs + pixels + bombs + end) for n in range(8)]
    pids = (service.process.pid, service.pid_of("light"))
    before = sum(map(cpu_s, pids))
    with ThreadPoolExecutor(8) as threads:
        replies = [threads.submit(service.post, body) for body in bodies]
        assert asked(service, f"c-other-{kind}", 3) == [3.0]
    # 0.299 + 0.587 + 0.114 in fp32.
    assert [values(reply.result())[0] for reply in replies] == pytest.approx([1.0] * 8, abs=1e-6)
    # Unpacking 16 GB takes ten seconds or more.
    assert sum(map(cpu_s, pids)) - before < 3


def test_chunks_and_frames_without_number_are_refused(service: RunningService) -> None:
    header, pixels, end = white()
    many = service.post(with_files("n-chunks-1", header + chunk(b"tIME", b"") * 5000 + pixels + end))
    assert error(many) == "too_large" and "chunks" in many.text
    frames = service.post(with_files("n-frames-1", *[header + pixels + end] * 101, kind="video"))
    assert error(frames) == "too_large" and "101" not in frames.text and "100 images and frames" in frames.text
    animated = header + chunk(b"acTL", struct.pack(">II", 2, 0)) + pixels + end
    assert error(service.post(with_files("n-apng-001", animated))) == "bad_media"
    thin = msgspec.msgpack.decode(request("n-thin-001", samples(["1"])))
    raw = {"type": "raw", "dtype": "float16", "shape": [101, 1, 1, 1], "data": bytes(202)}
    thin["samples"] |= {"kind": "video", "rate": 8.0, "media": [raw]}
    assert error(service.post(msgspec.msgpack.encode(thin))) == "too_large"


def test_metadata_is_bounded_and_opened_by_the_scorer_alone(service: RunningService) -> None:
    big = {"x": [[]] * 200_000}
    refused = service.post(request("m-large-01", samples(["1"])).replace(b"\x80", msgspec.msgpack.encode(big), 1))
    assert error(refused) == "too_large" and "samples.metadata" in refused.text
    for other in (b"\x90", b"\xa1\xff", b"\x81" * 5000 + b"\xc0"):
        assert error(service.post(request("m-other-01", samples(["1"])).replace(b"\x80", other, 1))) == "bad_request"
    endless = request("m-rows-001", samples(["1"])).replace(b"\x91", b"\xdd\x7f\xff\xff\xff", 1)
    assert error(service.post(endless)) == "bad_request"


def test_requests_are_joined_up_to_the_size_of_one_body(service: RunningService) -> None:
    """A batch of `number` is two samples, unless they have 2.5 MB each."""
    hold = service._log.with_name("scored.txt.hold")
    pixels = (None, *[torch.zeros(1, 3, 456, 456)] * 2)
    bodies = [request(f"j-join-{n:03}", samples([str(600 + n)], pixels=pixels[n])) for n in range(3)]
    hold.touch()
    with ThreadPoolExecutor(3) as threads:
        replies = [threads.submit(service.post, bodies[0])]
        until = time.monotonic() + 20
        while "600|" not in scored(service):
            assert time.monotonic() < until
        replies += [threads.submit(service.post, body) for body in bodies[1:]]
        while service.metric("unirl_reward_queue_requests") < 2:
            assert time.monotonic() < until
        hold.unlink()
        assert [values(reply.result()) for reply in replies] == [[600.0], [601.0], [602.0]]
    assert sorted(line for line in scored(service) if line.startswith("60")) == ["600|", "601|", "602|"]


@pytest.mark.parametrize(
    "head",
    [
        "Content-Length: 5\r\nTransfer-Encoding: chunked",
        "Transfer-Encoding: chunked\r\ncontent-length : 5",
        "Content-Length: 5\r\nContent-Length: 5",
        "Content-Length: 5\r\nContent-Length: 6",
        "Content-Length: 5, 5",
        "Content-Length: +5",
        "Content-Length: 0x5",
        "Content-Length: -1",
        "Content-Length: 5\r\n ,5",
        "Content-Length: " + "9" * 40,
        "Content-Length:\r\n 5",
        "Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked",
        "Transfer-Encoding: gzip, chunked",
        "Transfer-Encoding: xchunked",
        "Host: y",
        "X\0: 1",
        "X y: 1",
    ],
)
def test_a_request_that_others_may_read_otherwise_is_refused(service: RunningService, head: str) -> None:
    sent = f"POST /v1/score HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\n{head}\r\n\r\n0\r\n\r\n"
    with connected(service, sent.encode() + WHOLE) as connection:
        reply = rest(connection)
    assert reply.startswith(b"HTTP/1.1 400 ") and b'"bad_request"' in reply
    assert reply.count(b"HTTP/1.1 ") == 1, "what follows is not a further request"


@pytest.mark.parametrize("size", ["x", "-5", "5 5", "0x5", "F" * 30, "5\r\nabc", "5\r\nabcdefgh\r\n0"])
def test_chunks_of_a_wrong_size_end_the_connection(service: RunningService, size: str) -> None:
    for path in ("v1/score", "health"):
        head = f"POST /{path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\nTransfer-Encoding: chunked\r\n\r\n"
        with connected(service, f"{head}{size}\r\n\r\n".encode() + WHOLE) as connection:
            reply = rest(connection)
        assert re.match(rb"HTTP/1.1 (400|405|408|411) ", reply)
        assert b"healthy" not in reply


def test_http_1_0_with_chunks_is_refused(service: RunningService) -> None:
    with connected(service, b"POST /health HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n") as connection:
        assert rest(connection).startswith(b"HTTP/1.1 400 ")


def test_a_service_without_keys_answers_its_own_names_alone(keyless: RunningService) -> None:
    for host in ("localhost", "localhost:80", "127.0.0.1", "LOCALHOST", "[::1]:8790", "rewards.test", "a.lab.test"):
        assert keyless.http.get("/v1/scorers", headers={"Host": host}).status_code == 200, host
    for host in ("evil.test", "127.0.0.1.evil.test", "localhost.evil.test", "evil.test:8790", "evil.test@localhost"):
        for path in ("/health", "/v1/scorers"):
            assert keyless.http.get(path, headers={"Host": host}).status_code == 400, host
    body = request("o-page-001", samples(["1"]))
    page = keyless.http.post("/v1/score", content=body, headers={"Origin": "http://evil.test"})
    assert (page.status_code, error(page)) == (403, "forbidden")
    assert values(keyless.http.post("/v1/score", content=body)) == [1.0]


def test_the_oldest_replies_go_when_they_take_too_much(service: RunningService) -> None:
    """Replies of 5 kB each, of which 20 kB are kept: a retry of an early request is scored again."""
    bodies = [
        body for n in range(6) for body in [request(f"r-kept-{n:03}", samples([str(7000 + n)] * 10, first="i" * 500))]
    ]
    for body in [*bodies, bodies[5], bodies[0]]:
        service.post(body)
    lines = scored(service)
    assert [sum(line.startswith(f"{7000 + n}|") for line in lines) for n in range(6)] == [2, 1, 1, 1, 1, 1]


def test_an_error_that_cannot_be_encoded_reaches_the_client_and_the_scorer_stays(service: RunningService) -> None:
    pid = service.pid_of("number")
    reply = service.post(request("s-half-001", samples(["no number"])))
    assert (reply.status_code, error(reply)) == (422, "reward_failed")
    assert reply.json()["error"]["message"].count("ValueError: not a number, nor half a \\ud83d") == 1
    assert service.pid_of("number") == pid
    assert asked(service, "s-after-01", 4) == [4.0]
