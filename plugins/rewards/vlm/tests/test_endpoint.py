"""Judges behind an endpoint, against a server that speaks chat completions."""

from __future__ import annotations

import json
import re
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from unirl.core.errors import RecipeError, RewardFailed
from unirl.core.roles import ScoreInput
from unirl.core.types.media import Media
from unirl.rewards.vlm.config import JudgeConfig, PairJudgeConfig, PairwiseConfig
from unirl.rewards.vlm.judge import JudgeReward, build, build_pairwise
from vlm_chat_server import Reply, images_of, serving, text_of
from vlm_samples import images, samples

GOOD = '{"score": 4, "reason": "fine"}'


@contextmanager
def judge(url: str, **settings: Any) -> Iterator[JudgeReward]:
    reward = build(JudgeConfig(base_url=url, model="judge", **settings), device="cpu")
    try:
        yield reward
    finally:
        reward.close()


def test_the_judge_sees_the_prompt_and_every_pixel_and_its_score_goes_from_0_to_1() -> None:
    pixels = images(2)
    with serving(lambda _, body: GOOD if "cat" in text_of(body) else '{"score": 2}') as chat, judge(chat.url) as reward:
        scores = reward.score(samples(["a cat {x}", "a dog"], pixels))
    assert scores.values.tolist() == [0.75, 0.25]
    assert scores.parts["raw"].tolist() == [4.0, 2.0]
    assert scores.scored is not None and scores.scored.tolist() == [True, True]
    bodies = sorted(chat.requests, key=text_of)
    assert "a cat {x}" in text_of(bodies[0])
    assert {key: bodies[0][key] for key in ("model", "temperature", "seed", "max_tokens")} == {
        "model": "judge",
        "temperature": 0,
        "seed": 0,
        "max_tokens": 512,
    }
    for body, expected in zip(bodies, pixels, strict=True):
        (image,) = images_of(body)
        assert np.array_equal(np.asarray(image), (expected * 255).round().byte().permute(1, 2, 0).numpy())


def test_an_answer_that_cannot_be_parsed_is_not_scored_and_not_zero() -> None:
    answers = ["What a lovely picture!", GOOD, '{"score": 9}']
    with (
        serving(lambda _, body: answers[int(text_of(body).split("number ")[1][0])]) as chat,
        judge(chat.url) as reward,
    ):
        scores = reward.score(samples(["number 0", "number 1", "number 2"]))
    assert scores.scored is not None and scores.scored.tolist() == [False, True, False]
    assert scores.values[1] == 0.75
    assert bool(scores.values.isfinite().all())


@pytest.mark.parametrize(
    "reply",
    [Reply(text=None), Reply(text=GOOD, finish_reason="length"), Reply(text="")],
    ids=["null", "cut off", "empty"],
)
def test_refusals_and_answers_that_are_cut_off_are_not_scored(reply: Reply) -> None:
    with serving(lambda *_: reply) as chat, judge(chat.url) as reward:
        scores = reward.score(samples(["a cat"]))
        assert scores.scored is not None and scores.scored.tolist() == [False]
        # They may come out otherwise another time, so they are not kept.
        reward.score(samples(["a cat"]))
    assert len(chat.requests) == 2


@pytest.mark.parametrize("status", [429, 500, 503])
def test_a_busy_endpoint_is_asked_again_when_it_says(status: int) -> None:
    replies = [Reply(status=status, headers={"Retry-After": "0.2"}), Reply(text=GOOD)]
    with serving(lambda number, _: replies[number]) as chat, judge(chat.url) as reward:
        start = time.monotonic()
        assert reward.score(samples(["a cat"])).values.tolist() == [0.75]
        # Below the first wait of its own, 0.5 s; above is a matter of the machine's load.
        assert time.monotonic() - start >= 0.2
    assert len(chat.requests) == 2


def test_a_retry_after_may_be_a_date() -> None:
    date = format_datetime(datetime.now(UTC) + timedelta(seconds=2), usegmt=True)
    replies = [Reply(status=429, headers={"Retry-After": date}), Reply(text=GOOD)]
    with serving(lambda number, _: replies[number]) as chat, judge(chat.url) as reward:
        assert reward.score(samples(["a cat"])).values.tolist() == [0.75]
        # The date has whole seconds.
        assert (
            datetime.now(UTC).timestamp()
            >= datetime.strptime(date, "%a, %d %b %Y %H:%M:%S %Z").replace(tzinfo=UTC).timestamp()
        )


def test_an_endpoint_that_asks_for_too_long_a_wait_is_down() -> None:
    reply = Reply(status=429, headers={"Retry-After": "3600"}, body="quota")
    with (
        serving(lambda *_: reply) as chat,
        judge(chat.url) as reward,
        pytest.raises(RewardFailed, match=r"reward.vlm-judge: http.* asks to wait for 3600 s.*429: quota"),
    ):
        reward.score(samples(["a cat"]))


def test_an_endpoint_that_stays_down_is_named_with_its_last_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        url = f"http://127.0.0.1:{free.getsockname()[1]}/v1"
    with (
        judge(url, max_retries=1) as reward,
        pytest.raises(RewardFailed, match=rf"reward.vlm-judge: {url} gave no answer after 2 tries.*ConnectError"),
    ):
        reward.score(samples(["a cat"]))


def test_a_slow_endpoint_runs_into_the_timeout() -> None:
    with (
        serving(lambda *_: Reply(text=GOOD, delay_s=1.0)) as chat,
        judge(chat.url, timeout_s=0.1, max_retries=0) as reward,
        pytest.raises(RewardFailed, match=r"after 1 tries.*ReadTimeout.*timeout_s = 0\.1"),
    ):
        reward.score(samples(["a cat"]))


@pytest.mark.parametrize("body", ["<html>", "{}", '{"choices": []}', '{"choices": [{"text": "x"}]}', "[]"])
def test_a_reply_without_a_choice_raises(body: str) -> None:
    with (
        serving(lambda *_: Reply(body=body)) as chat,
        judge(chat.url) as reward,
        pytest.raises(RewardFailed, match=r"without choices\[0\].message.content"),
    ):
        reward.score(samples(["a cat"]))


def test_a_wrong_path_or_request_is_not_tried_again() -> None:
    with serving(lambda *_: Reply(status=400, body="no images here")) as chat:
        with (
            judge(chat.url) as reward,
            pytest.raises(RewardFailed, match="refused the request with HTTP 400: no images"),
        ):
            reward.score(samples(["a cat"]))
        with judge(chat.url.removesuffix("/v1")) as reward, pytest.raises(RewardFailed, match="HTTP 404"):
            reward.score(samples(["a cat"]))
    assert len(chat.requests) == 2


def test_the_api_key_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    def script(number: int, body: dict[str, Any]) -> Reply:
        return Reply(text=GOOD) if chat.keys[number] == "Bearer right" else Reply(status=401, body="bad key")

    with serving(script) as chat:
        monkeypatch.setenv("JUDGE_KEY", "right")
        with judge(chat.url, api_key_env="JUDGE_KEY") as reward:
            assert reward.score(samples(["a cat"])).values.tolist() == [0.75]
        monkeypatch.setenv("JUDGE_KEY", "wrong")
        with judge(chat.url, api_key_env="JUDGE_KEY") as reward:
            with pytest.raises(RewardFailed, match=r"HTTP 401: bad key\. Check the API key in JUDGE_KEY") as caught:
                reward.score(samples(["a cat"]))
            assert "wrong" not in str(caught.value)
        with judge(chat.url) as reward, pytest.raises(RewardFailed, match="Name the variable of the API key"):
            reward.score(samples(["a cat"]))
        monkeypatch.delenv("JUDGE_KEY")
        with pytest.raises(RecipeError, match="api_key_env: the environment variable 'JUDGE_KEY' is not set"):
            build(JudgeConfig(base_url=chat.url, api_key_env="JUDGE_KEY"), device="cpu")


def test_equal_questions_are_asked_once_and_other_pixels_are_another_question() -> None:
    pixels = images(1).expand(2, -1, -1, -1)
    with serving(lambda *_: GOOD) as chat, judge(chat.url) as reward:
        reward.score(samples(["a cat", "a cat"], pixels))
        assert len(chat.requests) == 1
        reward.score(samples(["a cat"], pixels[:1]))
        assert len(chat.requests) == 1
        changed = pixels[:1].clone()
        changed[0, 0, 0, 0] = (changed[0, 0, 0, 0] + 0.5) % 1
        reward.score(samples(["a cat"], changed))
        reward.score(samples(["a dog"], pixels[:1]))
        assert len(chat.requests) == 3


def test_a_file_of_answers_serves_the_next_run(tmp_path: Path) -> None:
    file = str(tmp_path / "answers.sqlite")
    with serving(lambda *_: GOOD) as chat:
        for _ in range(2):
            with judge(chat.url, cache=file) as reward:
                assert reward.score(samples(["a cat", "a dog"])).values.tolist() == [0.75, 0.75]
        assert len(chat.requests) == 2
        with judge(chat.url, cache=file, max_new_tokens=7) as reward:
            reward.score(samples(["a cat"]))
        assert len(chat.requests) == 3


def test_a_cache_that_is_another_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("These are notes, not a database, and long enough to be told from one." * 20)
    config = JudgeConfig(base_url="http://127.0.0.1:9/v1", cache=str(tmp_path / "notes.txt"))
    with pytest.raises(RecipeError, match=r"reward.vlm-judge.cache: .*notes.txt.* does not open as an SQLite file"):
        build(config, device="cpu")


def test_calls_past_the_budget_are_refused_and_paid_answers_are_kept(tmp_path: Path) -> None:
    file = str(tmp_path / "answers.sqlite")
    with serving(lambda *_: GOOD) as chat:
        with judge(chat.url, cache=file, max_calls=2, concurrency=1) as reward:
            with pytest.raises(
                RewardFailed, match=r"reward.vlm-judge.max_calls: all 2 calls of this process are spent"
            ):
                reward.score(samples(["a", "b", "c"]))
            assert len(chat.requests) == 2
        with judge(chat.url, cache=file, max_calls=1) as reward:
            assert reward.score(samples(["a", "b", "c"])).values.tolist() == [0.75] * 3
    assert len(chat.requests) == 3


def test_retries_count_against_the_budget() -> None:
    reply = Reply(status=503, headers={"Retry-After": "0"})
    with (
        serving(lambda *_: reply) as chat,
        judge(chat.url, max_calls=2) as reward,
        pytest.raises(RewardFailed, match="all 2 calls"),
    ):
        reward.score(samples(["a cat"]))
    assert len(chat.requests) == 2


def test_no_more_questions_are_open_than_concurrency_allows_and_scores_keep_their_order() -> None:
    def script(number: int, body: dict[str, Any]) -> Reply:
        score = int(text_of(body).split("number ")[1][0])
        # The first ones end last.
        return Reply(text=json.dumps({"score": score}), delay_s=0.02 * (6 - score))

    with serving(script) as chat, judge(chat.url, concurrency=3) as reward:
        scores = reward.score(samples([f"number {n}" for n in (1, 2, 3, 4, 5)]))
    assert scores.parts["raw"].tolist() == [1.0, 2.0, 3.0, 4.0, 5.0]
    assert chat.at_once <= 3


def test_the_request_may_have_further_fields_and_lack_some() -> None:
    extra = {"seed": None, "max_tokens": None, "max_completion_tokens": 9}
    with serving(lambda *_: GOOD) as chat, judge(chat.url, extra_body=extra) as reward:
        reward.score(samples(["a cat"]))
    (body,) = chat.requests
    assert body["max_completion_tokens"] == 9
    assert not {"seed", "max_tokens"} & set(body)


def test_frames_of_a_video_are_shown_in_their_order_first_and_last_among_them() -> None:
    # Frame n is grey level n.
    video = (torch.arange(9.0) / 255).view(1, 9, 1, 1, 1).expand(1, 9, 3, 32, 32)
    with serving(lambda *_: GOOD) as chat, judge(chat.url, num_frames=3) as reward:
        assert reward.score(samples(["a cat"], video, rate=8.0)).values.tolist() == [0.75]
        assert [image.getpixel((0, 0)) for image in images_of(chat.requests[0])] == [(n, n, n) for n in (0, 4, 8)]
    with serving(lambda *_: GOOD) as chat, judge(chat.url, num_frames=20) as reward:
        reward.score(samples(["a cat"], video, rate=8.0))
        assert len(images_of(chat.requests[0])) == 9


def test_missing_metadata_and_texts_are_refused_with_the_sample(tmp_path: Path) -> None:
    file = tmp_path / "styled.toml"
    file.write_text(
        'version = "1"\nanswer = "json"\ntext = "{prompt} {metadata.style}"\n[scores.score]\nrange = [1, 5]\n'
    )
    with serving(lambda *_: GOOD) as chat, judge(chat.url, template=str(file)) as reward:
        given = samples(["a", "b"], metadata=[{"style": "flat"}, {}])
        with pytest.raises(RewardFailed, match=r"sample 's1' \(prompt 'b'\) has no metadata 'style'.*'styled'"):
            reward.score(given)
    assert chat.requests == []


def test_pixels_that_are_not_finite_never_reach_the_judge() -> None:
    pixels = images(2)
    pixels[1, 0, 0, 0] = float("nan")
    with (
        serving(lambda *_: GOOD) as chat,
        judge(chat.url) as reward,
        pytest.raises(RewardFailed, match=r"sample 's1'.*NaN"),
    ):
        reward.score(samples(["a", "b"], pixels))
    assert chat.requests == []


def brightness_judge(_: int, body: dict[str, Any]) -> str:
    """Prefers the brighter image, and says so in no words where one is black."""
    first, second = (float(np.asarray(image).mean()) for image in images_of(body))
    if min(first, second) == 0:
        return "I cannot tell."
    return f"Better Result: {1 if first > second else 2 if second > first else 1.5}"


def grey(*levels: int) -> torch.Tensor:
    return torch.stack([torch.full((3, 32, 32), level / 255) for level in levels])


def test_samples_of_a_group_are_compared_in_both_orders() -> None:
    with serving(brightness_judge) as chat:
        reward = build_pairwise(PairwiseConfig(base_url=chat.url), device="cpu")
        # Rows of the groups are interleaved. Group a: 10 < 20 < 30; group b: 50 = 50, and black, which has no answer.
        given = samples(["p"] * 6, grey(20, 50, 10, 0, 30, 50), groups=["a", "b", "a", "b", "a", "b"])
        scores = reward.score(given)
        reward.close()
    assert scores.values.tolist() == [0.5, 0.5, 0.0, 0.0, 1.0, 0.5]
    assert scores.parts["compared"].tolist() == [4, 2, 4, 0, 4, 2]
    assert scores.scored is not None and scores.scored.tolist() == [True, True, True, False, True, True]
    # Of group b: the pair of equal images asks the same question in both orders, and so do both pairs with black.
    assert len(chat.requests) == 6 + 1 + 2


def test_fewer_opponents_ask_fewer_questions_wherever_rows_stand() -> None:
    levels = [10, 20, 30, 40, 50]
    results: list[dict[int, float]] = []
    for order in (levels, levels[::-1], [30, 10, 50, 20, 40]):
        with serving(brightness_judge) as chat:
            reward = build_pairwise(PairwiseConfig(base_url=chat.url, opponents=1), device="cpu")
            scores = reward.score(samples(["p"] * 5, grey(*order), groups=["a"] * 5))
            reward.close()
        # A circle of five has five pairs, each asked in both orders.
        assert len(chat.requests) == 10
        assert scores.parts["compared"].tolist() == [4] * 5
        results.append(dict(zip(order, scores.values.tolist(), strict=True)))
    assert results[0] == results[1] == results[2]
    assert results[0][50] == 1.0 and results[0][10] == 0.0


def test_a_group_of_one_has_nothing_to_compare() -> None:
    with serving(brightness_judge) as chat:
        reward = build_pairwise(PairwiseConfig(base_url=chat.url), device="cpu")
        with pytest.raises(RewardFailed, match=r"group 'a' \(prompt 'p'\) has one sample; expected two or more"):
            reward.score(samples(["p"], grey(1), groups=["a"]))
        reward.close()


def test_a_pair_counts_only_where_both_orders_can_be_parsed() -> None:
    def script(_: int, body: dict[str, Any]) -> str:
        """Always prefers the first place, and does not answer when 10 comes first."""
        return "no idea" if images_of(body)[0].getpixel((0, 0)) == (10, 10, 10) else "Better Result: 1"

    with serving(script) as chat:
        reward = build_pairwise(PairwiseConfig(base_url=chat.url), device="cpu")
        scores = reward.score(samples(["p"] * 3, grey(10, 20, 30), groups=["a"] * 3))
        reward.close()
    assert scores.scored is not None and scores.scored.tolist() == [False, True, True]
    assert scores.values[1:].tolist() == [0.5, 0.5]
    assert scores.parts["compared"].tolist() == [0, 2, 2]
    assert scores.parts["unparsed"].tolist() == [4, 2, 2]


def completions(texts: Sequence[str], *, groups: Sequence[str], prompt: str = "p") -> ScoreInput:
    given = samples([prompt] * len(texts), groups=groups)
    return replace(given, media=Media(kind="text", values=tuple(texts)))


def test_completions_of_a_group_are_compared_in_both_orders() -> None:
    def longest(_: int, body: dict[str, Any]) -> str:
        """Prefers the longer reply."""
        first, second = re.findall(r"<reply-\d>\n(.*?)\n</reply", text_of(body))
        sign = (len(second) > len(first)) - (len(second) < len(first))
        return "They are silent." if "?" in first + second else f"**Better Reply:** {1.5 + sign / 2:g}"

    with serving(longest) as chat:
        reward = build_pairwise(PairJudgeConfig(base_url=chat.url), device="cpu")
        texts = ["bb", "x", "a", "?", "{first} ccc", "y"]
        scores = reward.score(completions(texts, groups=["a", "b", "a", "b", "a", "b"], prompt="say {second}"))
        reward.close()
    # Group a: 1 < 2 < 11 letters; group b: two of one letter, and one about which the judge has no answer.
    assert scores.values.tolist() == [0.5, 0.5, 0.0, 0.0, 1.0, 0.5]
    assert scores.scored is not None and scores.scored.tolist() == [True, True, True, False, True, True]
    assert scores.parts["compared"].tolist() == [4, 2, 4, 0, 4, 2]
    assert scores.parts["unparsed"].tolist() == [0, 2, 0, 4, 0, 2]
    assert len(chat.requests) == 12
    assert all("<request>\nsay {second}\n</request>" in text_of(body) for body in chat.requests)
    assert images_of(chat.requests[0]) == []


def test_images_are_not_completions() -> None:
    with serving(brightness_judge) as chat:
        reward = build_pairwise(PairJudgeConfig(base_url=chat.url), device="cpu")
        with pytest.raises(RewardFailed, match=r"reward.pair-judge: got image, expected text"):
            reward.score(samples(["p"] * 2, groups=["a", "a"]))
        reward.close()
