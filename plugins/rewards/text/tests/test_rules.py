"""Format and length, by hand."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import pytest
from unirl.core.errors import RecipeError, RewardFailed
from unirl.core.roles import ScoreInput
from unirl.core.types.inputs import Inputs
from unirl.core.types.media import Media
from unirl.rewards.text import format as formats
from unirl.rewards.text import length
from unirl.rewards.text.config import FormatConfig, LengthConfig

GOOD = "<think>6 x 7</think>\n<answer>42</answer>"


def samples(*texts: str, lengths: tuple[int, ...] | None = None) -> ScoreInput:
    names = tuple(f"s{row}" for row in range(len(texts)))
    return ScoreInput(
        sample_ids=names,
        group_ids=names,
        inputs=Inputs.of_texts(("What is 6 x 7?",) * len(texts)),
        metadata=({},) * len(texts),
        media=Media(kind="text", values=texts),
        lengths=lengths,
    )


@pytest.mark.parametrize(
    ("text", "strict", "tags"),
    [
        (GOOD, 1, 1),
        (f"\n {GOOD}\n", 1, 1),
        ("<think>a\nb</think><answer>c</answer>", 1, 1),
        (f"Well: {GOOD}", 0, 1),
        (f"{GOOD} Done.", 0, 1),
        ("<think>a</think> so <answer>c</answer>", 0, 1),
        ("<answer>c</answer><think>a</think>", 0, 1),
        ("<think>a<answer>c</answer></think>", 0, 1),
        ("<think>a</think><answer> </answer>", 0, 0.5),
        ("<think></think><answer>c</answer>", 0, 0.5),
        ("<think>a</think><answer>c", 0, 0.5),
        ("<think>a</think><think>b</think><answer>c</answer>", 0, 0.5),
        ("</think>a<think><answer>c</answer>", 0, 0.5),
        ("<THINK>a</THINK><answer>c</answer>", 0, 0.5),
        ("42", 0, 0),
        ("", 0, 0),
    ],
)
def test_tags_are_in_order_once_closed_and_not_empty(text: str, strict: float, tags: float) -> None:
    for score, expected in (("strict", strict), ("share", tags)):
        scores = formats.build(FormatConfig(score=score), device="cpu").score(samples(text))
        assert scores.values.tolist() == [expected]
        assert (scores.parts["strict"].tolist(), scores.parts["tags"].tolist()) == ([strict], [tags])


def test_an_opening_tag_may_stand_in_the_prompt() -> None:
    reward = formats.build(FormatConfig(opened=True), device="cpu")
    texts = ("6 x 7</think><answer>42</answer>", GOOD, "<answer>42</answer>")
    assert reward.score(samples(*texts)).values.tolist() == [1, 1, 0]


def test_other_tags_and_patterns() -> None:
    one = formats.build(FormatConfig(tags=["plan", "code", "answer"], score="share"), device="cpu")
    assert one.score(samples("<plan>a</plan><code>b</code>")).values.tolist() == pytest.approx([2 / 3])
    pattern = formats.build(FormatConfig(pattern=r"\d+\n#### \d+"), device="cpu")
    assert pattern.score(samples("1\n#### 2", "1\n#### 2 ", "x")).values.tolist() == [1, 0, 0]


def test_hostile_texts_take_linear_time() -> None:
    """100 kB of opening tags or white space: quadratic matching would take minutes."""
    start = time.process_time()
    reward = formats.build(FormatConfig(), device="cpu")
    texts = (
        "<think>" * 20_000,
        " " * 100_000 + "x",
        "<think>" + " " * 100_000 + "</think><answer>1</answer>" + " " * 9 + "x",
    )
    assert reward.score(samples(*texts)).values.tolist() == [0, 0, 0]
    # A thousand times what it takes; backtracking would be slower by another thousand.
    assert time.process_time() - start < 20


def test_a_pattern_that_never_ends_is_an_error_with_the_sample() -> None:
    reward = formats.build(FormatConfig(pattern=r"(a|aa)+$", timeout_s=0.05), device="cpu")
    with pytest.raises(RewardFailed, match=r"reward\.format\.pattern.*'s0'"):
        reward.score(samples("a" * 64 + "!" * 2))


@pytest.mark.parametrize(
    ("settings", "key"),
    [({"pattern": "("}, "pattern"), ({"pattern": "a", "score": "share"}, "score"), ({"tags": []}, "tags")]
    + [({"tags": tags}, "tags") for tags in (["<think>"], ["a", "a"], [""])],
)
def test_invalid_formats_are_refused(settings: dict[str, Any], key: str) -> None:
    with pytest.raises(RecipeError, match=rf"reward\.format\.{key}: got"):
        formats.build(FormatConfig(**settings), device="cpu")


def test_length_is_full_in_the_range_and_falls_linearly_outside() -> None:
    """By hand: 4 to 6 words, gone 4 words further."""
    reward = length.build(LengthConfig(unit="words", least=4, most=6, falloff=4), device="cpu")
    scores = reward.score(samples(*(" ".join("w" * n) for n in (0, 2, 4, 5, 6, 8, 10, 12))))
    assert scores.values.tolist() == [0, 0.5, 1, 1, 1, 0.5, 0, 0]
    assert scores.parts["under"].tolist() == [1, 0.5, 0, 0, 0, 0, 0, 0]
    assert scores.parts["over"].tolist() == [0, 0, 0, 0, 0, 0.5, 1, 1]
    assert scores.parts["length"].tolist() == [0, 2, 4, 5, 6, 8, 10, 12]


def test_the_penalty_is_that_of_dapo() -> None:
    """Equation 13 of arXiv 2503.14476 with L_max = 100 and L_cache = 20, case by case."""

    def soft_punish(tokens: int) -> float:
        if tokens <= 100 - 20:
            return 0.0
        if tokens <= 100:
            return ((100 - 20) - tokens) / 20
        return -1.0

    reward = length.build(LengthConfig(most=80, falloff=20, penalty=True), device="cpu")
    counts = (0, 79, 80, 81, 90, 99, 100, 101, 500)
    values = reward.score(samples(*["x"] * len(counts), lengths=counts)).values
    # Quotients of small whole numbers in fp32.
    assert values.tolist() == pytest.approx([soft_punish(count) for count in counts], abs=1e-7)


def test_units_of_length() -> None:
    text = samples("two words", lengths=(5,))
    for unit, expected in (("characters", 9), ("words", 2), ("tokens", 5)):
        assert length.build(LengthConfig(unit=unit), device="cpu").score(text).parts["length"].tolist() == [expected]
    with pytest.raises(RewardFailed, match=r"reward\.length\.unit: got tokens"):
        length.build(LengthConfig(), device="cpu").score(dataclasses.replace(text, lengths=None))
    with pytest.raises(RecipeError, match=r"reward\.length\.least: got 9"):
        length.build(LengthConfig(least=9, most=8), device="cpu")
