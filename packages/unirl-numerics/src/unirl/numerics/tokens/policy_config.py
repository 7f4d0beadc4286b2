"""Settings of the clipped policy loss over tokens, shared by every algorithm that has one, with their limits."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from unirl.core.limits import Reason, limit, one_of
from unirl.core.specs.capability import Cap

from ..loss.kl_config import TokenKlConfig

if TYPE_CHECKING:
    from unirl.core.specs.plan import Plan, Stage

__all__ = ["AGGREGATIONS", "TokenPolicyConfig"]

AGGREGATIONS = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm")
"""How token losses can be aggregated, see `unirl.numerics.loss.aggregation`."""


@dataclass
class TokenPolicyConfig(TokenKlConfig):
    """An algorithm's config inherits from it."""

    clip_range: float = limit(0.2, above=0, most=1)
    """Lower clip of the ratio, at 1 - clip_range; also the upper one unless `clip_range_high` is set."""
    clip_range_high: float | None = limit(None, above=0)
    """Upper clip, at 1 + clip_range_high; None is `clip_range`."""
    dual_clip: float | None = limit(None, above=1)
    """Upper bound on the loss of tokens with negative advantage, as a multiple of |advantage|; above 1 + the upper
    clip. None: no bound, exactly as in the papers. If a few tokens that became far more likely dominate the gradient,
    3.0 (verl's default) removes them."""
    truncated: str = one_of("keep", "mask", default="keep")
    """Completions cut off by the length limit: `keep` trains on them, `mask` leaves them out of the loss. Either way
    their rewards count in the group mean."""
    entropy_coef: float = limit(0.0, least=0)
    """Coefficient of the entropy bonus: the loss then raises the entropy of the token distributions."""
    tis: str = one_of("none", "token", "sequence", default="none")
    """Truncated importance sampling, for engines whose log-probs differ from the trainer's: a token is weighted by
    min(p_old / p_engine, tis_cap), with the ratio of the token (`token`) or of its completion (`sequence`). `none`
    turns it off. A run still stops at `train.logp_mismatch_max` and `train.logp_mismatch_mean`."""
    tis_cap: float = limit(2.0, above=0)
    """Cap on the weights of `tis`."""

    @property
    def clip_bounds(self) -> tuple[float, float]:
        """Lower and upper clip range."""
        return self.clip_range, self.clip_range if self.clip_range_high is None else self.clip_range_high

    @property
    def has_clipped_loss(self) -> bool:
        """The loss is the clipped surrogate, so the dual clip must lie outside its clip range."""
        return True

    def problems(self, plan: Plan | None, stage: Stage | None) -> Iterable[Reason]:
        """Also a dual clip inside the clip range, and importance weights without engine log-probs to compare with."""
        yield from super().problems(plan, stage)
        least = 1 + self.clip_bounds[1]
        if self.has_clipped_loss and self.dual_clip is not None and self.dual_clip <= least:
            yield Reason(
                key=".dual_clip",
                text=f"got {self.dual_clip}, expected more than {least:g}, the upper clip, such as 3; or null.",
            )
        if self.tis == "none" or stage is None:
            return
        if stage.train.old_log_probs == "engine":
            yield Reason(
                key=".tis",
                text="with train.old_log_probs=engine the old log-probs are the engine's, so every weight would be 1; "
                "set train.old_log_probs=replay, or algorithm.tis=none.",
            )
        if Cap.LOG_PROBS_TOKEN not in stage.engine.spec.capabilities:
            yield Reason(
                key=".tis",
                text=f"got {self.tis!r}, which needs the engine's token log-probs; engine {stage.engine.name!r} does "
                "not return any. Set algorithm.tis=none.",
            )
