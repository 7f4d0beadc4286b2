"""Settings of the clipped policy loss over tokens, alike in every algorithm that has one, and their checks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .capability import Cap, Support
from .kl import TokenKlConfig

if TYPE_CHECKING:
    from .plan import Plan

__all__ = ["TokenPolicyConfig", "clip_reasons", "token_policy_reasons"]


@dataclass
class TokenPolicyConfig(TokenKlConfig):
    """The config of an algorithm inherits it."""

    clip_range: float = 0.2
    """Lower clip of the ratio, at 1 - clip_range; also the upper one unless `clip_range_high` is set."""
    clip_range_high: float | None = None
    """Upper clip, at 1 + clip_range_high; None is `clip_range`."""
    dual_clip: float | None = None
    """Bound of the loss of tokens with negative advantage, as a multiple of it; above 1 + the upper clip. None is none,
    as in the papers, and the loss is then theirs to the digit. Where a few tokens that became far likelier decide the
    gradient, 3.0 leaves them out, which verl does by default."""
    truncated: str = "keep"
    """Texts that a length limit stopped: `keep` trains on them, `mask` leaves them out of the loss. Their rewards
    count in the mean of their group either way."""
    entropy_coef: float = 0.0
    """Coefficient of the entropy of the tokens' distributions, which the loss then raises."""
    tis: str = "none"
    """Truncated importance sampling, for engines whose log-probs are not those of the model that trains: each token
    weighs min(ratio of old to engine's, tis_cap), by its own ratio (`token`) or by that of its text (`sequence`).
    `none` takes no such weight. A run still stops at `train.logp_gap_max` and `train.logp_gap_mean`."""
    tis_cap: float = 2.0
    """Largest weight of `tis`."""

    @property
    def clip_bounds(self) -> tuple[float, float]:
        """Lower and upper clip range."""
        return self.clip_range, self.clip_range if self.clip_range_high is None else self.clip_range_high


def token_policy_reasons(config: TokenPolicyConfig, plan: Plan) -> Iterator[str]:
    """Why these settings cannot be, for `unirl_check_plan`; see also `clip_reasons`."""
    for key, value, known in (
        ("truncated", config.truncated, ("keep", "mask")),
        ("tis", config.tis, ("none", "token", "sequence")),
    ):
        if value not in known:
            yield f"algorithm.{key}: {value!r} was asked for; it is one of {', '.join(known)}."
    if config.clip_range_high is not None and config.clip_range_high <= 0:
        yield f"algorithm.clip_range_high: {config.clip_range_high} was asked for; it must be above 0."
    if config.entropy_coef < 0:
        yield f"algorithm.entropy_coef: {config.entropy_coef} was asked for; it must be 0 or more."
    if config.tis_cap <= 0:
        yield f"algorithm.tis_cap: {config.tis_cap} was asked for; it must be above 0."
    if config.tis != "none":
        yield from _sources(config, plan)


def clip_reasons(config: TokenPolicyConfig) -> Iterator[str]:
    """Why the clips of a ratio cannot be, where the loss is the clipped surrogate."""
    if not 0 < config.clip_range < 1:
        yield f"algorithm.clip_range: {config.clip_range} was asked for; it must lie between 0 and 1."
    least = 1 + config.clip_bounds[1]
    if config.dual_clip is not None and config.dual_clip <= least:
        yield (
            f"algorithm.dual_clip: {config.dual_clip} was asked for; it must be above the upper clip, {least:g}, "
            "such as 3."
        )


def _sources(config: TokenPolicyConfig, plan: Plan) -> Iterator[str]:
    """Where the log-probs come from that importance weights compare."""
    if plan.train.old_log_probs == "engine":
        yield (
            "algorithm.tis: with train.old_log_probs=engine the old log-probs are the engine's, so every weight would "
            "be 1; set train.old_log_probs=replay, or algorithm.tis=none."
        )
    if plan.engine.spec.support(Cap.LOG_PROBS_TOKEN) is not Support.NATIVE:
        yield (
            f"algorithm.tis: {config.tis!r} weighs by the log-probs of the engine, and engine {plan.engine.name!r} "
            "gives none of tokens; set algorithm.tis=none."
        )
