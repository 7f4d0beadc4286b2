"""Ways to change what an algorithm computes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, cast

from torch import Tensor
from unirl.core.roles import Losses, LossTerm
from unirl.core.specs.spec import AlgorithmSpec, Gap
from unirl.core.types.track import Track

from conformance_mutants.changes import Change, with_log_probs_moved
from conformance_mutants.mutant import Mutant

REFERENCE = "the-loss-agrees-with-its-numpy-reference"
AGE, MICRO = "stale-samples-are-weighted-as-declared", "micro-batches-do-not-change-the-gradient"
SERIAL = "one-step-at-a-time-does-not-change-the-gradient"
NEEDS, PADDING = "only-declared-needs-are-read", "padding-changes-nothing"
ZERO, FAVOURS = "zero-advantages-give-no-gradient", "a-step-favours-samples-with-advantage"
RATIO, RESUMED = "the-first-ratio-is-exactly-one", "a-resumed-algorithm-goes-on-as-it-was"
ANCHOR_MOVED: dict[str, Change] = {
    "with_old_log_probs": lambda _, anchor, track, forward: with_log_probs_moved(anchor(track, forward), 1e-3)
}
TWICE_THE_CLIP = {"config": lambda config: replace(config, clip_range=min(2 * config.clip_range, 1.0))}
"""At the end of its limit, 1, it is as it should be."""
REPLAYS = {"train": lambda train: replace(train, old_log_probs="replay")}


def algorithm(
    healthy: AlgorithmSpec,
    name: str,
    claim: str,
    breaks: str,
    *,
    gap: bool = False,
    spec: Any = None,
    **differences: Any,
) -> Mutant:
    """gap: its loss is no longer the paper's, so it declares that.  spec: fields of its spec that differ."""
    gaps = (Gap(claim=REFERENCE, reason=breaks),) if gap else ()
    stated = replace(healthy, **{"gaps": gaps, **(spec or {})})
    return Mutant(name=name, claim=claim, breaks=breaks, spec=stated, **differences)


def trains_on(change: Callable[[Track], Mapping[str, Any]]) -> dict[str, Change]:
    """A loss of a track with other fields."""
    return {"loss": lambda _, loss, track, *rest, **how: loss(replace(track, **change(track)), *rest, **how)}


def values(change: Callable[..., Tensor], *, of: str = "loss") -> dict[str, Change]:
    """A loss with other values of its first term, which is the policy's. change: gets track, values and progress."""

    def loss(_: Any, loss: Any, track: Track, *rest: Any, progress: float, **more: Any) -> Losses:
        losses: Losses = loss(track, *rest, progress=progress, **more)
        first, *others = (cast(LossTerm, term) for term in losses.terms)
        return replace(losses, terms=[replace(first, values=change(track, first.values, progress)), *others])

    return {of: loss}


def advantages(change: Callable[[Track, Tensor], Tensor]) -> dict[str, Change]:
    """Other advantages. change: gets the samples that are left and their healthy ones."""

    def advantages(_: Any, advantages: Any, track: Track) -> tuple[Track, Mapping[str, float]]:
        result, metrics = advantages(track)
        return replace(result, advantages=change(result, result.advantages)), metrics

    return {"advantages": advantages}


def turned(_: Track, values: Tensor, progress: float) -> Tensor:
    return -values if progress > 0.1 else values
