"""Settings of the reward `math`."""

from __future__ import annotations

from dataclasses import dataclass

from unirl.core.config import RewardConfig

__all__ = ["METHODS", "POLICIES", "THINKING", "TRUNCATED", "MathConfig"]

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
