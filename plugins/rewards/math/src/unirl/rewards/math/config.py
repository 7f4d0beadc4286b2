"""Settings of the reward `math`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from unirl.core.limits import Reason, limit, one_of
from unirl.core.specs.part_config import RewardConfig
from unirl.core.types.sampling import TextSamplingConfig

if TYPE_CHECKING:
    from unirl.core.specs.plan import Plan, Stage

__all__ = ["MathConfig"]


@dataclass
class MathConfig(RewardConfig):
    method: str = one_of("math-verify", "boxed", "gsm8k", "choice", "exact", default="math-verify")
    """How the answer is extracted and compared: `math-verify` (symbolic equality), `boxed` (the last \\boxed{...}, as
    normalised text), `gsm8k` (the number after the last `####`, else the last number), `choice` (a letter), `exact`
    (the whole completion, stripped)."""
    thinking: str = one_of("optional", "opened", "ignored", default="optional")
    """Where to look for the answer. `optional`: after the last </think>; nowhere if <think> is never closed; in the
    whole completion if it has neither. `opened`: the prompt ends in <think>, so a completion without </think> has no
    answer. `ignored`: in the whole completion."""
    needs_box: bool = False
    """With `math-verify`, accept only the last \\boxed{...}. If false, a completion without a box is searched by
    math-verify's rules: after "the final answer is", else the last expression."""
    choices: str = "ABCDE"
    """Letters of the options, for `choice`."""
    unparsed: str = one_of("error", "wrong", default="wrong")
    """A completion without an answer: score it as `wrong` (counted in the part `unparsed`), or raise an `error`."""
    on_failure: str = one_of("error", "wrong", default="wrong")
    """A completion whose grading timed out or crashed: score it as `wrong` (counted in the part `failed`), or raise an
    `error`."""
    truncated: str = one_of("keep", "zero", "soft", default="keep")
    """Completions cut off by the length limit: `keep` scores them like any other, `zero` scores them 0, `soft` scores
    them like any other and adds DAPO's soft overlong penalty to all completions (arXiv 2503.14476, equation 13)."""
    max_tokens: int | None = limit(None, least=1)
    """For `soft`: length in generated tokens at which the penalty is full. Set it to ${sampling.max_new_tokens};
    of an episode with an environment, the tokens of all answers count."""
    overlong_buffer: int = limit(4096, least=1)
    """For `soft`: the penalty grows linearly over this many tokens before `max_tokens`."""
    overlong_factor: float = limit(1.0, above=0, most=1)
    """For `soft`: size of the full penalty, above 0 and at most 1."""
    format_weight: float = limit(0.0, least=0, below=1)
    """Fraction of the score given for the format <think>...</think> followed by an answer; at least 0 and below 1. The
    rest is for a correct answer."""
    workers: int = limit(4, least=1)
    """Grading processes for `math-verify`. They start at the first answer that is not a plain integer."""
    timeout_s: float = limit(5.0, above=0)
    """Maximum CPU seconds per answer, for `math-verify`."""

    def problems(self, plan: Plan | None, stage: Stage | None) -> Iterator[Reason]:
        """Settings of another method, and a length penalty that no completion can reach."""
        if self.needs_box and self.method != "math-verify":
            yield Reason(key=".needs_box", text="got true, but it is for method=math-verify.")
        letters = self.choices
        if not (letters.isascii() and letters.isalpha()) or len(set(letters.upper())) < len(letters):
            yield Reason(key=".choices", text=f"got {letters!r}, expected one letter for each option, such as ABCDE.")
        if self.truncated == "soft":
            yield from self._of_soft(stage)

    def _of_soft(self, stage: Stage | None) -> Iterator[Reason]:
        if self.max_tokens is None:
            yield Reason(
                key=".max_tokens",
                text="got null, expected a number with truncated=soft, such as ${sampling.max_new_tokens}.",
            )
        elif self.overlong_buffer > self.max_tokens:
            yield Reason(
                key=".overlong_buffer",
                text=f"got {self.overlong_buffer}, expected at most max_tokens = {self.max_tokens}.",
            )
        elif stage is not None and isinstance(stage.sampling, TextSamplingConfig):
            longest, first = stage.sampling.max_new_tokens, self.max_tokens - self.overlong_buffer
            if first >= longest:
                yield Reason(
                    key=".max_tokens",
                    text=f"the penalty of truncated=soft begins after {first} tokens, and no completion has more than "
                    f"sampling.max_new_tokens = {longest}; set max_tokens=${{sampling.max_new_tokens}}.",
                )
