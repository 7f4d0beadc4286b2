"""Settings of DRPO and of SPO, which differ in one default."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from unirl.core.limits import Reason, limit, one_of
from unirl.numerics.loss.kl_config import TokenKlConfig
from unirl.numerics.tokens.policy_config import AGGREGATIONS

if TYPE_CHECKING:
    from unirl.core.specs.plan import Plan, Stage

__all__ = ["DrpoConfig", "SpoConfig"]


@dataclass
class DrpoConfig(TokenKlConfig):
    delta: float = limit(12.5, above=0)
    """Trust-region size: the quadratic penalty towards the old policy is divided by it. A token's gradient is weighted
    by 1 - |change of its probability| / delta if it moved with its advantage, else by 1 + that."""
    weighs_by_old: bool = True
    """Weight a token's penalty by its old probability, so that rare tokens can become likelier (DRPO); False
    penalises all tokens equally (SPO)."""
    aggregation: str = one_of(*AGGREGATIONS, default="seq-mean-token-sum-norm")
    """How token losses are aggregated. `seq-mean-token-sum-norm`: sum over each completion, divided by `horizon`;
    `seq-mean-token-sum`: that sum undivided; `seq-mean-token-mean`: mean over each completion, so that its length does
    not matter; `token-mean`: mean over all tokens."""
    horizon: float = limit(8192.0, above=0)
    """Constant that `seq-mean-token-sum-norm` divides by, in tokens; other aggregations ignore it."""
    truncated: str = one_of("keep", "mask", default="keep")
    """Completions cut off by the length limit: `keep` trains on them, `mask` leaves them out of the loss. Either way
    their rewards count in the group mean."""

    def problems(self, plan: Plan | None, stage: Stage | None) -> Iterator[Reason]:
        """Also advantages divided by the group's standard deviation."""
        yield from super().problems(plan, stage)
        if stage is not None and stage.algorithm is not None and stage.advantage.normalize:
            yield Reason(
                key="advantage.normalize",
                text=f"got true, but {stage.algorithm.name} is defined with rewards centred within their group and not "
                "divided by its standard deviation. Set advantage.normalize=false.",
            )


@dataclass
class SpoConfig(DrpoConfig):
    weighs_by_old: bool = False
    """All tokens are penalised equally, whatever their old probability."""
