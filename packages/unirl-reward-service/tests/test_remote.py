"""The reward `remote` against servers that misbehave, over real HTTP."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
import torch
from reward_services import samples
from unirl.core.cli import main
from unirl.core.errors import RecipeError, RewardFailed
from unirl.core.types.media import Media
from unirl.reward_service.remote.config import RemoteConfig
from unirl.reward_service.remote.reward import RemoteReward, build
from unirl.reward_service.wire import FORMAT, ScoreReply, ScoreRequest, decode, encode, to_samples

pytestmark = pytest.mark.slow

INFO: dict[str, Any] = {
    "name": "x",
    "version": "v1",
    "media": "image",
    "parts": ["p"],
    "metadata": [],
    "scores_groups": False,
    "max_samples": 100,
    "max_body_bytes": 10_000,
}
Answer = Callable[[ScoreRequest], tuple[int, dict[str, str], bytes]]


def reply(request: ScoreRequest, **fields: Any) -> bytes:
    """The number that each prompt is."""
    numbers = [float(text.decode()) for text in request.samples.prompts]
    right = {
        "format": FORMAT,
        "id": request.id,
        "scorer": "x",
        "version": "v1",
        "sample_ids": request.samples.sample_ids,
        "values": numbers,
        "parts": {"p": [-number for number in numbers]},
    }
    return encode(ScoreReply(**{**right, **fields}))


@contextmanager
def serving(answer: Answer, **info: Any) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._send(200, {}, json.dumps({**INFO, **info}).encode())

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            self._send(*answer(decode(body, ScoreRequest)))

        def _send(self, status: int, headers: dict[str, str], body: bytes) -> None:
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the name of the base class
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def remote(*urls: str, **settings: Any) -> closing[RemoteReward]:
    config = RemoteConfig(urls=list(urls), scorer="x", **{"deadline_s": 10.0, "batch_size": 2, **settings})
    return closing(build(config, device="cpu"))


def error(code: str, message: str = "why") -> bytes:
    return json.dumps({"error": {"code": code, "message": message}}).encode()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"values": [1.0]}, "the reply of scorer 'x': values: got 1 numbers for 2 samples"),
        ({"sample_ids": ["s1", "s0"]}, "another order"),
        ({"sample_ids": ["s0"], "values": [0.0]}, "got scores of 1 samples"),
        ({"values": [float("nan"), 1.0]}, "got nan for sample 's0'"),
        ({"version": "v2"}, "scorer 'x' is v2, expected v1 as at the start"),
        ({"parts": {}}, "parts: 'p' is missing"),
        ({"id": "another-id"}, "the reply to request 'another-id'"),
    ],
)
def test_a_reply_that_does_not_fit_is_refused(fields: dict[str, Any], message: str) -> None:
    with (
        serving(lambda request: (200, {}, reply(request, **fields))) as url,
        remote(url, parts=["p"]) as reward,
        pytest.raises(RewardFailed, match=message),
    ):
        reward.score(samples(["0", "1"]))


def test_bytes_that_are_not_a_reply_are_refused() -> None:
    with (
        serving(lambda _: (200, {}, b"<html>a proxy</html>")) as url,
        remote(url) as reward,
        pytest.raises(RewardFailed, match="the reply of scorer 'x': not a valid ScoreReply"),
    ):
        reward.score(samples(["0"]))


def test_a_request_is_sent_again_with_its_id_after_429_and_503_and_not_after_others() -> None:
    seen: list[str] = []

    def answer(request: ScoreRequest) -> tuple[int, dict[str, str], bytes]:
        seen.append(request.id)
        if len(seen) < 3:
            status = (429, 503)[len(seen) - 1]
            return status, {"Retry-After": "0"}, error("overloaded")
        return 200, {}, reply(request)

    with serving(answer) as url, remote(url) as reward:
        assert reward.score(samples(["5"])).values.tolist() == [5.0]
    assert len(seen) == 3 and len(set(seen)) == 1

    def refuse(request: ScoreRequest) -> tuple[int, dict[str, str], bytes]:
        seen.append(request.id)
        return 422, {}, error("reward_failed", "no")

    with (
        serving(refuse) as url,
        remote(url) as reward,
        pytest.raises(RewardFailed, match="refused a request: reward_failed: no"),
    ):
        reward.score(samples(["5"]))
    assert len(seen) == 4


def test_text_of_a_service_that_cannot_be_encoded_is_escaped_or_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with (
        serving(lambda _: (422, {}, error("x", "half of \ud83d"))) as url,
        remote(url) as reward,
        pytest.raises(RewardFailed, match=r"half of \\ud83d"),
    ):
        reward.score(samples(["0"]))
    lone = "\ud83d"
    with serving(lambda _: (200, {}, b""), version=lone, scorers=[{"name": lone, "is_up": True}]) as url:
        with pytest.raises(RewardFailed, match="DecodeError"), remote(url, deadline_s=0.2):
            pass
        for words in ([], ["--json"]):
            with pytest.raises(SystemExit) as end:
                main(["reward-service", "check", url, *words])
            assert end.value.code == 1 and "DecodeError" in capsys.readouterr().err


def test_requests_go_to_the_least_busy_replica() -> None:
    """One replica holds its request until the other has answered all the rest."""
    others = threading.Semaphore(0)
    counts = {"held": 0, "free": 0}

    def held(request: ScoreRequest) -> tuple[int, dict[str, str], bytes]:
        counts["held"] += 1
        for _ in range(5):
            assert others.acquire(timeout=20)
        return 200, {}, reply(request)

    def free(request: ScoreRequest) -> tuple[int, dict[str, str], bytes]:
        counts["free"] += 1
        others.release()
        return 200, {}, reply(request)

    with serving(held) as one, serving(free) as other, remote(one, other, concurrency=2, batch_size=1) as reward:
        assert reward.score(samples([str(n) for n in range(6)])).values.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    assert counts == {"held": 1, "free": 5}


def test_a_reply_that_comes_too_late_is_asked_for_again_where_it_is_made() -> None:
    late = threading.Event()
    seen: list[str] = []

    def answer(request: ScoreRequest) -> tuple[int, dict[str, str], bytes]:
        seen.append(request.id)
        if len(seen) == 1:
            late.wait(10)
        return 200, {}, reply(request)

    with serving(answer) as url, remote(url, timeout_s=0.5) as reward:
        assert reward.score(samples(["5"])).values.tolist() == [5.0]
        late.set()
    assert len(seen) == 2 and len(set(seen)) == 1


def test_samples_without_a_score_stay_so_over_several_requests() -> None:
    def answer(request: ScoreRequest) -> tuple[int, dict[str, str], bytes]:
        numbers = [float(text.decode()) for text in request.samples.prompts]
        scored = None if numbers[0] == 0 else [number != 3 for number in numbers]
        return 200, {}, reply(request, scored=scored)

    with serving(answer) as url, remote(url, parts=["p"]) as reward:
        scores = reward.score(samples([str(n) for n in range(4)]))
    assert scores.values.tolist() == [0.0, 1.0, 2.0, 3.0]
    assert scores.parts["p"].tolist() == [0.0, -1.0, -2.0, -3.0]
    assert scores.scored is not None and scores.scored.tolist() == [True, True, True, False]


def test_a_group_that_is_compared_goes_in_one_request() -> None:
    sizes: list[list[str]] = []

    def answer(request: ScoreRequest) -> tuple[int, dict[str, str], bytes]:
        sizes.append(request.samples.group_ids)
        return 200, {}, reply(request)

    batch = samples([str(n) for n in range(6)])
    batch = type(batch)(**{**vars(batch), "group_ids": ("a", "b", "a", "b", "a", "c")})
    with serving(answer, scores_groups=True) as url, remote(url, concurrency=1) as reward:
        assert reward.score(batch).values.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    assert sizes == [["a"] * 3, ["b"] * 2, ["c"]]


def test_a_body_past_the_services_limit_is_not_sent() -> None:
    with (
        serving(lambda request: (200, {}, reply(request))) as url,
        remote(url) as reward,
        pytest.raises(RewardFailed, match=r"batch_size: 1 samples have .* bytes, expected at most 10000"),
    ):
        reward.score(samples(["0"], pixels=torch.zeros(1, 3, 40, 40)))


def test_replicas_of_several_versions_are_refused() -> None:
    with (
        serving(lambda request: (200, {}, reply(request))) as one,
        serving(lambda request: (200, {}, reply(request)), version="v2") as other,
        pytest.raises(RewardFailed, match=r"has several versions: v1 at .*, v2 at"),
        remote(one, other),
    ):
        pass


@pytest.mark.parametrize(
    ("frames", "places", "rate"),
    [("spread", [0, 5, 10, 15, 20], 1.6), ("first", range(5), 8), ("last", range(16, 21), 8)],
)
def test_some_frames_of_videos_are_all_that_is_sent(frames: str, places: Any, rate: float) -> None:
    """Five of 21, in bytes and in pixels; for the sizes of a body, see `ScoreRequest`."""
    sizes: list[int] = []
    seen: list[Any] = []

    def answer(request: ScoreRequest) -> tuple[int, dict[str, str], bytes]:
        sizes.append(len(encode(request)))
        seen.append(to_samples(request.samples).media)
        return 200, {}, reply(request)

    videos = torch.rand(2, 21, 3, 8, 8)
    batch = replace(samples(["0", "1"]), media=Media(kind="video", values=videos, rate=8.0))
    with serving(answer, media="video", max_body_bytes=10**6) as url:
        for settings in ({}, {"num_frames": 5, "frames": frames}, {"num_frames": 30, "frames": frames}):
            with remote(url, **settings) as reward:
                assert reward.score(batch).values.tolist() == [0.0, 1.0]
    whole, some, few = sizes
    # 16 fewer frames of each of two videos, of 3 x 8 x 8 pixels in fp32; a body is less than 1 KiB besides.
    assert 0 <= whole - some - 2 * 16 * 3 * 8 * 8 * 4 < 1024 and few == whole
    assert seen[1].rate == pytest.approx(rate) and seen[0].rate == seen[2].rate == 8.0
    assert torch.equal(seen[1].stacked, videos[:, list(places)]) and torch.equal(seen[2].stacked, videos)


def test_no_samples_need_no_request() -> None:
    def answer(_: ScoreRequest) -> tuple[int, dict[str, str], bytes]:
        raise AssertionError("a request came")

    with serving(answer) as url, remote(url, parts=["p"]) as reward:
        scores = reward.score(samples([], pixels=torch.zeros(0, 3, 4, 4)))
    assert scores.values.shape == (0,) and scores.parts["p"].shape == (0,)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"urls": []}, r"reward\.remote\.urls: got none"),
        ({"urls": ["file:///etc/passwd"]}, r"urls: got 'file:///etc/passwd', expected http://HOST:PORT"),
        ({"urls": ["http://user:secret@host"]}, r"urls: got a URL with a password"),
        ({"serve": "rewards.yaml"}, r"reward\.remote\.serve: got a file besides `urls`"),
        ({"scorer": ""}, r"reward\.remote\.scorer: got none"),
        ({"encoding": "jpeg"}, r"encoding: got 'jpeg', expected one of raw, png, webp"),
        ({"batch_size": 0}, r"batch_size: got 0"),
    ],
)
def test_settings_that_cannot_be_used_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError, match=message) as raised:
        build(RemoteConfig(**{"urls": ["http://127.0.0.1:1"], "scorer": "x", **settings}), device="cpu")
    assert "secret" not in str(raised.value)


def test_a_key_that_is_not_set_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_SUCH_KEY", raising=False)
    with pytest.raises(RewardFailed, match=r"reward\.remote\.key_env: NO_SUCH_KEY is not set"):
        build(RemoteConfig(urls=["http://127.0.0.1:1"], scorer="x", key_env="NO_SUCH_KEY"), device="cpu")
