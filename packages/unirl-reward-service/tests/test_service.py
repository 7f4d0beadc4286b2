"""A service as others see it: real processes, real rewards, HTTP."""

from __future__ import annotations

import dataclasses
import os
import random
import signal
import socket
import struct
import threading
import time
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import msgspec
import pytest
import torch
from reward_services import NUMBER, RunningService, request, running, samples, scored, values
from unirl.core.roles import ScoreInput
from unirl.numerics.media import LoadedImage
from unirl.reward_service.errors import STATUS
from unirl.reward_service.wire import ScoreRequest, decode, encode
from unirl.reward_service.wire_pixels import Encoded

pytestmark = pytest.mark.slow

KEY = "a-key-of-many-characters"
SETTINGS = (
    """
keys_env: TEST_REWARD_KEYS
max_body_mb: 2
max_image_pixels: 65536
request_timeout_s: 30
scorers:
  light: {{use: brightness}}
"""
    + NUMBER
    + "    max_queue: 4\n    timeout_s: 2\n"
)


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningService]:
    folder = tmp_path_factory.mktemp("service")
    with running(folder, SETTINGS, key=KEY, TEST_REWARD_KEYS=f"an-older-key-of-the-service,{KEY}") as result:
        yield result


def error(reply: httpx.Response) -> str:
    """Code of an error, once it is the one that its status is for, and says nothing of the inside."""
    content = reply.json()["error"]
    assert set(content) == {"code", "message"} and content["message"]
    assert "Traceback" not in content["message"] and "site-packages" not in content["message"]
    assert reply.status_code == STATUS[content["code"]]
    return content["code"]


def test_health_is_open_and_all_else_needs_a_key(service: RunningService) -> None:
    with httpx.Client(base_url=service.url, trust_env=False) as stranger:
        assert stranger.get("/health").json() == {"healthy": True}
        assert stranger.get("/ready").json() == {"ready": True}
        for path in ("/metrics", "/v1/scorers", "/v1/scorers/light"):
            assert error(stranger.get(path)) == "unauthorized"
        for key in ("x", KEY[:-1], KEY + "x", "ключ".encode()):
            headers = {"Authorization": b"Bearer " + (key.encode() if isinstance(key, str) else key)}
            assert error(stranger.post("/v1/score", content=b"", headers=headers)) == "unauthorized"
        older = {"Authorization": "Bearer an-older-key-of-the-service"}
        assert stranger.get("/v1/scorers", headers=older).status_code == 200
        for path in ("/", "/docs", "/openapi.json", "/v1/scorers/light/../../etc"):
            assert stranger.get(path).status_code in (401, 404)


def test_a_scorers_environment_has_no_keys(service: RunningService) -> None:
    environment = Path(f"/proc/{service.pid_of('light')}/environ").read_bytes()
    assert b"SCORED=" in environment and b"TEST_REWARD_KEYS" not in environment


def edits(prompts: list[str], *, pixels: torch.Tensor) -> ScoreInput:
    """Samples that are all made from one image."""
    batch, source = samples(prompts), LoadedImage.of(pixels, role="source")
    inputs = dataclasses.replace(batch.inputs, media=((source,),) * len(batch))
    return dataclasses.replace(batch, inputs=inputs)


def test_every_error_has_its_code(service: RunningService) -> None:
    batch = samples(["1"])
    bad = request("e-chars-0", batch)
    version = service.http.get("/v1/scorers/number").json()["version"]
    assert values(service.post(request("e-right-1", batch, version=version))) == [1.0]
    for body, code in (
        (b"", "bad_request"),
        (b"not msgpack", "bad_request"),
        (bad[:-3], "bad_request"),
        (request("e-scorer-1", batch, scorer="nobody"), "not_found"),
        (request("e-version-1", batch, version="0" * 64), "version_mismatch"),
        (request("e-reward-1", samples(["no number"])), "reward_failed"),
        (
            request("e-nan-01", samples(["1"], pixels=torch.full((1, 3, 4, 4), torch.nan)), scorer="light"),
            "reward_failed",
        ),
        (bytes(2_000_001), "too_large"),
        (request("e-pixels-1", samples(["1"], pixels=torch.zeros(1, 3, 257, 256))), "too_large"),
        (request("e-source-1", edits(["1"], pixels=torch.zeros(3, 257, 256)), codec="png"), "too_large"),
    ):
        assert error(service.post(body)) == code
    assert error(service.http.post("/v1/score", content=iter([bad]))) == "length_required"
    assert service.http.get("/v1/score").status_code == 405
    assert service.metric("unirl_reward_requests_total", code="version_mismatch") == 1


def png(width: int, height: int, data: bytes) -> bytes:
    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(data)) + chunk(b"IEND", b"")


def with_file(name: str, file: bytes) -> bytes:
    body = decode(request(name, samples(["1"]), scorer="light", codec="png"), ScoreRequest)
    media = msgspec.structs.replace(body.samples, media=[Encoded(codec="png", files=[file])])
    return encode(msgspec.structs.replace(body, samples=media))


def test_image_files_that_are_bombs_or_truncated_are_refused_and_the_scorer_stays(service: RunningService) -> None:
    pid = service.pid_of("light")
    # 30 kB that unpack to 30 MB; the header alone is read.
    bomb = png(12000, 12000, bytes(30_000_000))
    assert len(bomb) < 50_000
    assert error(service.post(with_file("f-bomb-01", bomb))) == "too_large"
    # A small header over the same data: no more than the header says is unpacked.
    assert service.post(with_file("f-bomb-02", png(16, 16, bytes(30_000_000)))).status_code in (200, 422)
    assert error(service.post(with_file("f-short-1", png(16, 16, bytes(100))))) == "bad_media"
    assert values(service.post(with_file("f-good-01", png(16, 16, bytes(16 * 49))))) == [0.0]
    os.kill(pid, 0)
    assert service.pid_of("light") == pid


def test_a_request_that_is_sent_again_is_scored_once(service: RunningService) -> None:
    body = request("i-same-01", samples(["31", "32"]))
    with ThreadPoolExecutor(4) as threads:
        replies = list(threads.map(lambda _: service.post(body), range(4)))
    replies.append(service.post(body))
    assert [values(reply) for reply in replies] == [[31.0, 32.0]] * 5
    assert scored(service).count("31|32|") == 1
    assert service.metric("unirl_reward_repeated_total") == 4
    assert error(service.post(request("i-same-01", samples(["33"])))) == "id_reused"


def test_a_client_that_goes_away_leaves_its_reply_for_the_next_attempt(service: RunningService) -> None:
    body = request("g-gone-01", samples(["41", "42"]))
    port = httpx.URL(service.url).port
    head = f"POST /v1/score HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\nContent-Length: {len(body)}\r\n\r\n"
    for sent in (body[: len(body) // 2], body):
        with socket.create_connection(("127.0.0.1", port)) as connection:
            connection.sendall(head.encode() + sent)
    until = time.monotonic() + 20
    while "41|42|" not in scored(service):
        assert time.monotonic() < until
        time.sleep(0.02)
    assert values(service.post(body)) == [41.0, 42.0]
    assert scored(service).count("41|42|") == 1
    while service.metric("unirl_reward_pending_bytes"):
        assert time.monotonic() < until


def until_scored(service: RunningService, body: bytes, refused: list[str]) -> list[float]:
    """The values, sent again while the queue is full."""
    until = time.monotonic() + 60
    while (reply := service.post(body)).status_code == 429:
        assert error(reply) == "overloaded" and int(reply.headers["retry-after"]) >= 1
        refused.append(reply.text)
        assert time.monotonic() < until
        time.sleep(0.05)
    return values(reply)


def test_load_beyond_the_queue_is_refused_with_a_time_and_scored_later(service: RunningService) -> None:
    bodies = [request(f"o-load-{n:03}", samples([str(1000 + n), "1"])) for n in range(24)]
    refused: list[str] = []
    with ThreadPoolExecutor(24) as threads:
        results = list(threads.map(lambda body: until_scored(service, body, refused), bodies))
    assert results == [[1000.0 + n, 1.0] for n in range(24)]
    assert refused
    assert [sum(line.startswith(f"{1000 + n}|") for line in scored(service)) for n in range(24)] == [1] * 24


def test_nothing_is_lost_or_answered_twice_when_a_scorer_is_killed(service: RunningService) -> None:
    bodies = [request(f"k-kill-{n:03}", samples([str(n), str(n + 0.5)])) for n in range(30)]
    before = {name: service.metric(f"unirl_reward_{name}_total") for name in ("samples", "restarts")}
    with ThreadPoolExecutor(8) as threads:
        results = [threads.submit(until_scored, service, body, []) for body in bodies]
        while service.metric("unirl_reward_samples_total") < before["samples"] + 10:
            time.sleep(0.01)
        os.kill(service.pid_of("number"), signal.SIGKILL)
        assert [result.result() for result in results] == [[n, n + 0.5] for n in range(30)]
    assert service.metric("unirl_reward_restarts_total") == before["restarts"] + 1
    assert service.metric("unirl_reward_samples_total") == before["samples"] + 60


def test_a_request_that_ends_the_process_gets_an_error_and_others_their_scores(service: RunningService) -> None:
    bodies = [request("d-crash-1", samples(["die"])), *(request(f"d-good-{n:02}", samples([f"{n}"])) for n in range(3))]
    with ThreadPoolExecutor(4) as threads:
        first, *others = threads.map(service.post, bodies)
    assert error(first) == "scorer_crashed"
    assert [values(reply) for reply in others] == [[float(n)] for n in range(3)]
    service.wait_until_up()


def test_a_call_that_hangs_is_ended(service: RunningService) -> None:
    pid = service.pid_of("number")
    assert error(service.post(request("h-hangs-1", samples(["hang"])))) == "timeout"
    assert values(service.post(request("h-after-1", samples(["5"])))) == [5.0]
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    service.wait_until_up()


def test_changed_bytes_of_requests_get_an_error_or_scores(service: RunningService) -> None:
    """Over the wire: each reply is one of the service's own, and no scorer ends."""
    pids = [service.pid_of(scorer) for scorer in ("light", "number")]
    dice = random.Random(20)
    seeds = [
        request("z-fuzz-00", samples(["1", "2"]), scorer=scorer, codec=codec)
        for scorer in ("light", "number")
        for codec in ("raw", "png", "webp")
    ]
    seeds += [
        request("z-fuzz-00", edits(["1", "2"], pixels=torch.rand(3, 5, 6)), codec=codec) for codec in ("raw", "png")
    ]

    def mutated(number: int) -> bytes:
        body = bytearray(seeds[number % len(seeds)].replace(b"z-fuzz-00", f"z-fz{number:05}".encode()))
        for _ in range(dice.randrange(1, 5)):
            where = dice.randrange(len(body))
            body[where : where + dice.randrange(4)] = dice.randbytes(dice.randrange(4))
        return bytes(body)

    codes: set[str] = set()
    bodies = [mutated(number) for number in range(240)]
    with ThreadPoolExecutor(3) as threads:
        for reply in threads.map(service.post, bodies):
            codes.add("ok" if reply.status_code == 200 else error(reply))
    assert {"bad_request", "bad_media"} <= codes <= {"ok", "overloaded", *STATUS} - {"internal", "scorer_crashed"}
    assert [service.pid_of(scorer) for scorer in ("light", "number")] == pids


def test_logs_are_json_without_prompts_or_keys(service: RunningService) -> None:
    service.post(request("l-secret-1", samples(["98765.25"])))
    lines = service.log()
    assert next(line for line in lines if line.get("id") == "l-secret-1")["code"] == "ok"
    text = service._log.read_text()
    assert KEY not in text and "98765.25" not in text
    assert "Exception in ASGI" not in text


def test_a_service_that_is_told_to_stop_finishes_what_it_has(service: RunningService) -> None:
    """The last test of this service."""
    bodies = [request(f"t-end-{n:03}", samples([str(n)])) for n in range(3)]
    replies: list[httpx.Response] = []
    threads = [threading.Thread(target=lambda b=body: replies.append(service.post(b))) for body in bodies]
    for thread in threads:
        thread.start()
    until = time.monotonic() + 20
    while service.metric("unirl_reward_pending_bytes") == 0 and not replies:
        assert time.monotonic() < until
    service.process.send_signal(signal.SIGTERM)
    for thread in threads:
        thread.join()
    # One that had not arrived by then is told to come again, or finds no service; the others have their scores.
    assert sorted(reply.status_code for reply in replies)[0] == 200
    assert all(reply.status_code in (200, 503) for reply in replies)
    assert service.process.wait(timeout=20) == 0
    with pytest.raises(httpx.TransportError):
        service.post(bodies[0])
