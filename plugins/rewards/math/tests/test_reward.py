"""The reward as a whole: policies, thinking, format, length, and what it refuses."""

from __future__ import annotations

import dataclasses
import importlib
import subprocess
import sys
from typing import Any

import pytest
from unirl.core.errors import RecipeError, RewardFailed
from unirl.core.match.match import match
from unirl.core.plugins.catalog import Catalog
from unirl.core.recipe.compose import compose
from unirl.core.roles import ScoreInput, Scores
from unirl.core.types.inputs import Inputs
from unirl.core.types.media import Media
from unirl.core.types.track import Status
from unirl.rewards.math.config import MathConfig
from unirl.rewards.math.length import overlong_penalty
from unirl.rewards.math.plain import exact
from unirl.rewards.math.plugin import MATH
from unirl.rewards.math.reward import build
from unirl.rewards.math.thinking import answer_part, is_well_formed
from unirl.rewards.math.verdict import Verdict


def score(texts: list[str], answer: Any = "42", *, fields: dict[str, Any] | None = None, **settings: Any) -> Scores:
    """Scores of these texts for one prompt. settings: of the config; `exact` unless they say otherwise."""
    names = tuple(f"s{row}" for row in range(len(texts)))
    reward = build(MathConfig(**{"method": "exact", **settings}), device="cpu")
    try:
        samples = ScoreInput(
            sample_ids=names,
            group_ids=names,
            inputs=Inputs.of_texts(("What is 6 x 7?",) * len(texts)),
            metadata=({"answer": answer},) * len(texts),
            media=Media(kind="text", values=tuple(texts)),
        )
        return reward.score(dataclasses.replace(samples, **(fields or {})))
    finally:
        reward.close()


def test_right_is_one_and_all_else_zero() -> None:
    scores = score(["42", "41", ""])
    assert scores.values.tolist() == [1, 0, 0]
    assert scores.parts["correct"].tolist() == [1, 0, 0]
    assert scores.parts["unparsed"].tolist() == [0, 0, 1]
    assert sorted(scores.parts) == sorted(MATH.parts)


@pytest.mark.parametrize(
    ("method", "text"),
    [("math-verify", "42."), ("boxed", r"\boxed{42}"), ("gsm8k", "#### 42"), ("exact", "42")],
)
def test_answers_that_json_holds_as_numbers_are_taken(method: str, text: str) -> None:
    assert score([text], 42, method=method).values.tolist() == [1]


@pytest.mark.parametrize("method", ["math-verify", "boxed", "gsm8k", "choice"])
def test_an_answer_in_the_thinking_part_alone_does_not_count(method: str) -> None:
    right = {"choice": "B", "boxed": r"\boxed{2}", "math-verify": "2", "gsm8k": "#### 2"}[method]
    key = "B" if method == "choice" else "2"
    texts = [f"<think>{right}</think> I do not know", f"<think>{right}", f"<think>No.</think>{right}"]
    scores = score(texts, key, method=method)
    assert scores.values.tolist() == [0, 0, 1]
    assert scores.parts["unparsed"].tolist() == [1, 1, 0]


@pytest.mark.parametrize(
    ("text", "optional", "opened", "ignored"),
    [
        ("5", "5", "", "5"),
        ("<think>a</think>5", "5", "5", "<think>a</think>5"),
        ("a</think>5", "5", "5", "a</think>5"),
        ("<think>a", "", "", "<think>a"),
        ("<think>a</think>b</think>5", "5", "5", "<think>a</think>b</think>5"),
        ("<think>a</think>5<think>6", "5", "5", "<think>a</think>5<think>6"),
    ],
)
def test_the_answer_stands_behind_the_thinking(text: str, optional: str, opened: str, ignored: str) -> None:
    assert answer_part(text, thinking="optional") == optional
    assert answer_part(text, thinking="opened") == opened
    assert answer_part(text, thinking="ignored") == ignored


@pytest.mark.parametrize(
    ("text", "optional", "opened"),
    [
        ("<think>a</think>5", True, True),
        ("\n<think>\n\n</think>\n5\n", True, True),
        ("a</think>5", False, True),
        ("<think>a</think> ", False, False),
        ("<think>a", False, False),
        ("so <think>a</think>5", False, False),
        ("<think>a</think>5</think>", False, False),
        ("<think>a<think>b</think>5", False, False),
        ("5", False, False),
    ],
)
def test_the_format_is_thinking_and_then_an_answer(text: str, optional: bool, opened: bool) -> None:
    assert is_well_formed(text, thinking="optional") is optional
    assert is_well_formed(text, thinking="opened") is opened


def test_the_format_has_its_share_of_the_score() -> None:
    """0.75 for the answer and 0.25 for the format, both exact in binary."""
    texts = ["<think>a</think>42", "42", "<think>a</think>41", "41"]
    scores = score(texts, format_weight=0.25)
    assert scores.values.tolist() == [1, 0.75, 0.25, 0]
    assert scores.parts["format"].tolist() == [1, 0, 1, 0]


@pytest.mark.parametrize(
    ("length", "penalty"),
    [(0, 0.0), (12288, 0.0), (12289, -1 / 4096), (14336, -0.5), (16384, -1.0), (16385, -1.0), (99999, -1.0)],
)
def test_the_penalty_for_length_is_that_of_the_paper(length: int, penalty: float) -> None:
    """DAPO, arXiv 2503.14476, equation 13, with its L_max 16384 and L_cache 4096; powers of 2 divide without rounding."""
    assert overlong_penalty(length, max_tokens=16384, buffer=4096) == penalty


CUT = {"status": (Status.COMPLETED, Status.TRUNCATED, Status.TRUNCATED), "lengths": (4, 8, 7)}


@pytest.mark.parametrize(
    ("settings", "values"),
    [
        ({"truncated": "keep"}, [1, 1, 0]),
        ({"truncated": "zero"}, [1, 0, 0]),
        # (length - 4) / 4: nothing at 4 tokens, all at 8, three quarters at 7.
        ({"truncated": "soft", "max_tokens": 8, "overlong_buffer": 4}, [1, 0, -0.75]),
        ({"truncated": "soft", "max_tokens": 8, "overlong_buffer": 4, "overlong_factor": 0.5}, [1, 0.5, -0.375]),
    ],
)
def test_texts_that_were_cut_off(settings: dict[str, Any], values: list[float]) -> None:
    scores = score(["42", "42", "41"], fields=CUT, **settings)
    assert scores.values.tolist() == values
    assert scores.parts["correct"].tolist() == [1, 1, 0]


@pytest.mark.parametrize(
    ("settings", "missing"),
    [({"truncated": "zero"}, "status"), ({"truncated": "soft", "max_tokens": 4096}, "number of generated tokens")],
)
def test_a_track_that_does_not_say_what_was_cut_off_is_refused(settings: dict[str, Any], missing: str) -> None:
    with pytest.raises(RewardFailed, match=missing):
        score(["42"], **settings)


def test_texts_without_an_answer_may_be_an_error() -> None:
    with pytest.raises(RewardFailed, match=r"no answer in sample 's1'.*unparsed=wrong"):
        score([r"\boxed{42}", "forty-two"], method="boxed", unparsed="error")


class Stuck:
    """A grader that comes to no end on `...`; tests/test_symbolic.py has real ones."""

    def grade(self, pairs: list[tuple[str, str]]) -> list[Verdict]:
        return [Verdict("failed", "took too long") if text == "..." else exact(key, text) for key, text in pairs]

    def close(self) -> None:
        pass


def test_grading_that_comes_to_no_end_is_counted_or_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("unirl.rewards.math.reward._grader", lambda config: Stuck())
    scores = score(["...", "42"])
    assert scores.values.tolist() == [0, 1]
    assert scores.parts["failed"].tolist() == [1, 0]
    with pytest.raises(RewardFailed, match=r"grading sample 's0' took too long.*on_failure=wrong"):
        score(["...", "42"], on_failure="error")


@pytest.mark.parametrize(
    ("settings", "answer", "message"),
    [
        ({"method": "gsm8k"}, "a dozen", "sample 's0' is 'a dozen', which has no number"),
        ({"method": "choice"}, "F", "is not one of the letters A, B, C, D, E"),
        ({"method": "boxed"}, "  ", "is empty in normal form"),
        ({}, None, "is None, neither text nor a number"),
        ({}, True, "is True, neither text nor a number"),
        ({}, ["42"], "neither text nor a number"),
        ({}, float("nan"), "neither text nor a number"),
    ],
)
def test_a_key_that_cannot_be_read_names_its_sample(settings: dict[str, Any], answer: Any, message: str) -> None:
    """Whatever the policies for texts are, and also when the text has no answer."""
    with pytest.raises(RewardFailed, match=message):
        score([""], answer, **settings)


def test_a_prompt_without_an_answer_is_refused() -> None:
    with pytest.raises(RewardFailed, match=r"'answer' of sample 's0'.*is missing"):
        score(["42"], fields={"metadata": ({},)})


def test_a_track_without_texts_is_refused() -> None:
    with pytest.raises(RewardFailed, match="got samples without media, expected text"):
        score(["42"], fields={"media": None})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"method": "sympy"}, "reward.math.method: got 'sympy', expected one of math-verify, boxed"),
        ({"thinking": "yes"}, "thinking"),
        ({"unparsed": "zero"}, "expected one of error, wrong"),
        ({"on_failure": "zero"}, "expected one of error, wrong"),
        ({"truncated": "drop"}, "keep, zero, soft"),
        ({"truncated": "soft"}, "max_tokens: got null, expected a number with truncated=soft"),
        ({"truncated": "soft", "max_tokens": 100}, "overlong_buffer: got 4096, expected at most max_tokens = 100"),
        ({"overlong_factor": 2.0}, "expected more than 0 and at most 1"),
        ({"format_weight": 1.0}, "expected 0 or more and less than 1"),
        ({"choices": "ABA"}, "expected one letter for each option"),
        ({"workers": 0}, "expected 1 or more"),
        ({"timeout_s": 0.0}, "expected more than 0"),
        ({"method": "boxed", "needs_box": True}, "it is for method=math-verify"),
    ],
)
def test_settings_that_mean_nothing_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        build(MathConfig(**settings), device="cpu")


SOFT = ["reward.math.truncated=soft", "reward.math.overlong_buffer=8"]


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        ([*SOFT, "reward.math.max_tokens=${sampling.max_new_tokens}"], ""),
        (SOFT, "reward.math.max_tokens: got null, expected a number with truncated=soft"),
        (["reward.math.method=sympy"], "reward.math.method: got 'sympy'"),
        (
            [*SOFT, "reward.math.max_tokens=48", "sampling.max_new_tokens=40"],
            "begins after 40 tokens, and no completion",
        ),
    ],
)
def test_a_recipe_is_refused_before_it_starts(overrides: list[str], reason: str) -> None:
    catalog = Catalog.discover()
    verdict = match(compose("quickstart-text", overrides, catalog=catalog), catalog=catalog)
    assert verdict.accepted is not bool(reason)
    assert reason in "".join(map(str, verdict.reasons))


def test_the_spec_points_at_what_exists() -> None:
    for path in (MATH.build, MATH.config):
        module, _, name = path.partition(":")
        getattr(importlib.import_module(module), name)


def test_the_plugin_imports_nothing_heavy() -> None:
    code = "import sys, unirl.rewards.math.plugin; print(sorted({'torch', 'numpy', 'sympy'} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
