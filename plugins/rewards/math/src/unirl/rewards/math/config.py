"""Settings of the reward `math`."""

from __future__ import annotations

import math
from dataclasses import dataclass

from unirl.core.config import RewardConfig

__all__ = ["METHODS", "POLICIES", "THINKING", "TRUNCATED", "MathConfig", "problems"]

METHODS = ("math-verify", "boxed", "gsm8k", "choice", "exact")
POLICIES = ("error", "wrong")
THINKING = ("optional", "opened", "ignored")
TRUNCATED = ("keep", "zero", "soft")


@dataclass
class MathConfig(RewardConfig):
    method: str = "math-verify"
    """How the answer is found and compared: `math-verify` (symbolic equality), `boxed` (the last \\boxed{...}, as
    normalised text), `gsm8k` (the number after the last `####`, else the last number), `choice` (a letter), `exact`
    (the whole text, stripped)."""
    thinking: str = "optional"
    """Where the answer stands. `optional`: after the last </think>, nowhere if <think> was opened and not closed, and
    in the whole text without either. `opened`: the prompt ends in <think>, so nowhere without </think>. `ignored`: in
    the whole text."""
    needs_box: bool = False
    """`math-verify` takes the last \\boxed{...} alone. Without this, a text that has none is searched by the rules of
    math-verify: after "the final answer is", else the last expression."""
    choices: str = "ABCDE"
    """Letters of `choice`, one for each option."""
    unparsed: str = "wrong"
    """A text without an answer: `wrong` (counted in the part `unparsed`) or `error`."""
    on_failure: str = "wrong"
    """A text whose grading ran into `timeout_s` or crashed: `wrong` (counted in the part `failed`) or `error`."""
    truncated: str = "keep"
    """A text that the length limit cut off: `keep` scores it as any other, `zero` gives 0, `soft` scores all texts as
    any other and adds the penalty for length of DAPO, arXiv 2503.14476, equation 13."""
    max_tokens: int | None = None
    """Of `soft`: generated tokens from where on the penalty is full. Set it to the limit of the sampling."""
    overlong_buffer: int = 4096
    """Of `soft`: the penalty grows linearly over so many tokens before `max_tokens`."""
    overlong_factor: float = 1.0
    """Of `soft`: the full penalty, above 0 and at most 1."""
    format_weight: float = 0.0
    """Share of the score that is for the format: <think>...</think>, then an answer. At least 0 and below 1; the rest
    is for the right answer."""
    workers: int = 4
    """Processes that grade for `math-verify`. They start with the first answer that is not a plain integer."""
    timeout_s: float = 5.0
    """CPU seconds that one answer may take there."""


def problems(config: MathConfig) -> list[str]:
    """Settings that mean nothing, each as a sentence that begins with its key."""
    limit, letters = config.max_tokens, config.choices
    is_soft = config.truncated == "soft"
    found: list[tuple[bool, str, object, str]] = [
        *(
            (value not in known, key, value, f"it is one of {', '.join(known)}")
            for key, value, known in (
                ("method", config.method, METHODS),
                ("thinking", config.thinking, THINKING),
                ("unparsed", config.unparsed, POLICIES),
                ("on_failure", config.on_failure, POLICIES),
                ("truncated", config.truncated, TRUNCATED),
            )
        ),
        (
            config.needs_box and config.method != "math-verify",
            "needs_box",
            True,
            "it is for method=math-verify",
        ),
        (
            not (letters.isascii() and letters.isalpha()) or len(set(letters.upper())) < len(letters),
            "choices",
            letters,
            "it is one letter an option",
        ),
        (not 0 <= config.format_weight < 1, "format_weight", config.format_weight, "it is at least 0 and below 1"),
        (config.workers < 1, "workers", config.workers, "there is at least one"),
        (not 0 < config.timeout_s < math.inf, "timeout_s", config.timeout_s, "it is above 0 and finite"),
        (not 0 < config.overlong_factor <= 1, "overlong_factor", config.overlong_factor, "it is above 0 and at most 1"),
        (
            is_soft and limit is None,
            "max_tokens",
            None,
            "truncated=soft needs it, as ${sampling.max_new_tokens}",
        ),
        (is_soft and limit is not None and limit < 1, "max_tokens", limit, "it is at least 1"),
        (
            is_soft and limit is not None and not 0 < config.overlong_buffer <= limit,
            "overlong_buffer",
            config.overlong_buffer,
            f"it is 1 to max_tokens = {limit}",
        ),
    ]
    return [f"{key}: {value!r} was asked for; {rule}." for is_wrong, key, value, rule in found if is_wrong]
