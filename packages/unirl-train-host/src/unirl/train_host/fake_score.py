"""The fake score: a second copy of the weights that train, in the place of the live ones while it trains."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from unirl.numerics.train.stack import StepReport

    from .optimizer import Optimizer
    from .policies import Policies
    from .sections import FakeScoreConfig
    from .updater import ShardedUpdater

__all__ = ["FakeScore"]


class FakeScore:
    """Implements `unirl.numerics.train.updater.FakeScoreUpdater`. It takes the memory of one more copy of what trains,
    and of its moments; the module, with all that is frozen in it, is the policy's."""

    def __init__(
        self, config: FakeScoreConfig, *, optimizer: Optimizer, updater: ShardedUpdater, policies: Policies
    ) -> None:
        """optimizer: over the parameters of the module.  updater: that uses it.  policies: with a copy named `fake`."""
        self.optimizer, self._updater, self._policies = optimizer, updater, policies
        self._warmup_steps = config.warmup_steps
        self.steps_per_update = config.steps_per_update

    @property
    def is_alone(self) -> bool:
        return self.optimizer.num_steps < self._warmup_steps

    @property
    def weights(self) -> Mapping[str, Tensor]:
        """Its weights by name, while it is not in use."""
        self._policies.check_live("the weights of the fake score are in the module")
        return self._policies.copies["fake"].values

    def in_use(self) -> AbstractContextManager[None]:
        return self._policies.use("fake")

    def zero_grad(self) -> None:
        self._updater.zero_grad()

    def backward(self, loss: Tensor, *, last: bool) -> None:
        self._updater.backward(loss, last=last)

    def step(self) -> StepReport:
        return self._updater.step()
