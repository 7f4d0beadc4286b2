"""The workers of a run by role, and the versions of the weights that they hold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from unirl.core.roles import Policy

from .actors import Actor
from .cluster import Cluster
from .turns import Turns

__all__ = ["NOTHING", "Session", "WeightVersions"]

NOTHING = -1
"""Version of an engine whose weights match no trained version."""


@dataclass(kw_only=True)
class WeightVersions:
    """Versions of the weights, as the driver knows them."""

    trained: dict[str, int]
    """Optimizer steps taken by each learner's live policy on the train ranks."""
    sampled: dict[str, int]
    """Version on the generating workers of the policy that each stage samples with."""


@dataclass(frozen=True, kw_only=True)
class Session:
    """The built workers of a run. The driver's proxies share it."""

    cluster: Cluster
    train: Sequence[Actor]
    rollout: Sequence[Actor]
    """Empty when the train ranks generate."""
    reference: Sequence[Actor]
    """Empty when the reference policy runs on the train ranks."""
    reward: Sequence[Actor]
    copies: Mapping[str, int]
    """Number of neighbouring train ranks of each learner that split the layers (tensor parallelism), and so work on the
    same rows."""
    turns: Turns
    versions: WeightVersions

    def generating(self, stage: str) -> Sequence[Actor]:
        """Workers that generate a stage."""
        return [actor for actor in self.rollout if actor.place.hosts(stage)] or self.train

    def scoring(self, reward: str) -> Sequence[Actor]:
        """Workers that score a reward."""
        return [actor for actor in self.reward if actor.place.hosts(reward)]

    def version_of(self, learner: str, policy: Policy) -> int:
        """Version of a learner's policy on the train ranks."""
        if policy == "live":
            return self.versions.trained[learner]
        version: int = self.cluster.call(self.train[:1], "version_of", learner, policy, phase="sync")[0]
        return version
