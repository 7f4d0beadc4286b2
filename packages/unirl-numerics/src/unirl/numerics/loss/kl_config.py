"""Settings of the KL penalty to the reference policy, shared by every algorithm that has one, with their limits."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from unirl.core.limits import Reason, limit, one_of
from unirl.core.specs.part_config import PartConfig

if TYPE_CHECKING:
    from unirl.core.specs.plan import Plan, Stage

__all__ = ["KlConfig", "TokenKlConfig"]


@dataclass
class KlConfig(PartConfig):
    """Coefficient of the KL penalty. An algorithm's config inherits from it."""

    kl_coef: float = limit(0.0, least=0)
    """Coefficient of the KL penalty to the reference policy (the initial weights); at 0 that policy is not run."""
    kl_target: float | None = limit(None, above=0)
    """Target KL for an adaptive coefficient, in the unit of the metric `kl`, a mean over tokens or SDE steps. The
    coefficient starts at `kl_coef`, rises after steps above the target and falls after steps below it. None keeps it
    fixed."""
    kl_horizon: float = limit(10_000.0, above=0)
    """Time scale of an adaptive coefficient, in samples: a step of n samples changes it by at most a fraction
    0.2 n / kl_horizon."""
    kl_gate: float = limit(1.0, above=0, most=1)
    """Share of the samples of each group that get the KL penalty, in (0, 1]: the most uncertain ones, which the trained
    reward ranks furthest above their place by the single rewards, those of weight 0 included. The term is still divided
    by the number of all samples, and `kl` in the log is the mean over all. 1 penalises every sample (GARDO, arXiv
    2512.24138, which starts at 0.1 with a coefficient of 0.04 and adapts the share)."""

    def problems(self, plan: Plan | None, stage: Stage | None) -> Iterable[Reason]:
        """A target that the coefficient cannot reach, and a gate without a penalty or without rewards to compare."""
        yield from self._of_the_gate(plan, stage)
        if self.kl_target is None:
            return
        if self.kl_coef == 0:
            yield Reason(
                key=".kl_target",
                text=f"got {self.kl_target}, but a coefficient of 0 stays 0. Set algorithm.kl_coef to its start value, "
                "such as 0.01.",
            )
        if plan is None or stage is None:
            return
        samples = plan.data.prompts_per_step * plan.rows_per_prompt(stage)
        if self.kl_horizon < samples:
            yield Reason(
                key=".kl_horizon",
                text=f"got {self.kl_horizon:g}, expected at least the {samples} samples of one step; otherwise the "
                "coefficient oscillates. Use a multiple, such as ten times as many.",
            )

    def _of_the_gate(self, plan: Plan | None, stage: Stage | None) -> Iterable[Reason]:
        if self.kl_gate == 1:
            return
        if self.kl_coef == 0:
            yield Reason(
                key=".kl_gate",
                text=f"got {self.kl_gate:g}, but there is no KL penalty: algorithm.kl_coef is 0. Set it to a number "
                "such as 0.04, or leave kl_gate out.",
            )
        if plan is None or stage is None or stage.algorithm is None:
            return
        if not stage.needs.compares_groups:
            yield Reason(
                key=".kl_gate",
                text=f"got {self.kl_gate:g}, but algorithm {stage.algorithm.name!r} does not compare the samples of a "
                "group. Leave it out.",
            )
        elif plan.rows_compared(stage) < 2:
            yield Reason(
                key=".kl_gate",
                text=f"got {self.kl_gate:g}, which ranks the samples of a group, and each group has one. Draw more, or "
                "leave it out.",
            )
        credited = sum(child.settings.credit != "none" for child in plan.children(stage.name))
        count = len(stage.rewards) + (stage.environment is not None) + credited
        if count < 2:
            yield Reason(
                key=".kl_gate",
                text=f"got {self.kl_gate:g}, which compares two rewards or more, and there is {count or 'none'}. Add "
                "another, with weight 0 if it should not be trained on, or leave it out.",
            )


@dataclass
class TokenKlConfig(KlConfig):
    """Adds the estimator of each token's KL."""

    kl_estimator: str = one_of("k1", "k2", "k3", default="k3")
    """Estimator of each token's KL. `k3`: never negative. `k2`: its gradient is that of the KL. `k1`: the log-prob
    difference; its gradient is 0 on average, so it needs one of the next two settings."""
    kl_straight_through: bool = False
    """Use the estimator's value with the gradient of `k2`."""
    kl_weighs_by_ratio: bool = False
    """Weight a token's KL by its importance ratio, so that its gradient is that of the KL on samples of the old policy,
    and the value of `k1` and `k3` is unbiased (DeepSeek-V3.2, arXiv 2512.02556; on by default in TRL). The ratio has a
    gradient where the estimator alone lacks part of it: `k1` and `k3` without `kl_straight_through`."""

    @property
    def kl_is_loss(self) -> bool:
        """The KL penalty is a term of the loss, so the gradient of its estimator matters."""
        return True

    def problems(self, plan: Plan | None, stage: Stage | None) -> Iterable[Reason]:
        """Also an estimator whose expected gradient is 0."""
        yield from super().problems(plan, stage)
        has_gradient = self.kl_estimator != "k1" or self.kl_straight_through or self.kl_weighs_by_ratio
        if self.kl_is_loss and self.kl_coef and not has_gradient:
            yield Reason(
                key=".kl_estimator",
                text="the gradient of 'k1' is 0 on average, so it has no effect as a loss. Use k2 or k3, or set "
                "algorithm.kl_straight_through=true or algorithm.kl_weighs_by_ratio=true.",
            )
