"""Backends that lose something between two steps, or whose critic or fake score is wrong."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from unirl.core.errors import CheckpointError
from unirl.core.roles import WeightUpdate
from unirl.core.specs.capability import Cap
from unirl.core.types.track import Track

from conformance_mutants.backend_wrapped import FULL, Wrapped, backend, each_algorithm, exports, is_enabled, scaled
from conformance_mutants.changes import Change, closes_once, if_refused, returns, then, with_segment

RESUMED, CRITIC = "a-resumed-training-is-the-uninterrupted-one", (*FULL, Cap.CRITIC)
FAKE_SCORE = (*FULL, Cap.FAKE_SCORE)
SNAPSHOT = "a-snapshot-keeps-the-state-of-its-moment"
FOREIGN = ("belongs to another set-up", "was made with")
"""Words of the error about a foreign checkpoint."""


def keeps_the_average(part: Wrapped, load: Any, folder: Path) -> None:
    before = dict(part.inner.export_weights(policy="ema", kind="full").tensors) if is_enabled(part, Cap.EMA) else {}
    load(folder)
    if before:
        part.kept["ema"] = before


def silent(is_silent: Callable[[bool], bool]) -> dict[str, Change]:
    """Loads nothing from checkpoints that are refused. is_silent: whether so, given whether it is a foreign one."""

    def load(_: Wrapped, load: Any, folder: Path) -> None:
        try:
            load(folder)
        except CheckpointError as error:
            if not is_silent(any(words in str(error) for words in FOREIGN)):
                raise

    return {"load": load}


def adopts_known(part: Wrapped, adopt: Any, update: WeightUpdate) -> None:
    held = part.export_weights(kind=update.kind).tensors
    known = {name: value for name, value in update.tensors.items() if name in held}
    adopt(replace(update, tensors={**held, **known}))


def halved(track: Track) -> Track:
    values = track.text.values
    assert values is not None
    return with_segment(track, values=tuple(row / 2 for row in values))


def with_critic(part: Wrapped, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    return {**tensors, "critic.head.weight": torch.zeros(1)} if is_enabled(part, Cap.CRITIC) else tensors


@torch.no_grad()
def leaks(part: Wrapped, *_: Any, **__: Any) -> None:
    fake = part.inner.export_weights(policy="fake", kind="full").tensors if is_enabled(part, Cap.FAKE_SCORE) else {}
    for name, param in part.trained().items() if fake else ():
        param.add_(0.001 * fake[name])


def stays_fake(_: Wrapped, policy: Any, which: str = "live") -> AbstractContextManager[None]:
    return nullcontext() if which == "live" else policy(which)


def takes_live(part: Wrapped, policy: Any, which: str = "live") -> AbstractContextManager[None]:
    return nullcontext() if which == "fake" and not is_enabled(part, Cap.FAKE_SCORE) else policy(which)


# fmt: off
MUTANTS = [
    backend("forgets-moments", RESUMED, "starts the optimizer anew after loading", also=(SNAPSHOT,),
            changes={"load": then(lambda part, *_: part.restart())}),
    backend("forgets-the-average", RESUMED, "does not load the average", (*FULL, Cap.EMA), also=(SNAPSHOT,),
            changes={"load": keeps_the_average}),
    backend("snaps-late", SNAPSHOT, "writes what it is when a snapshot is written",
            changes={"snapshot": lambda part, _: part.save}),
    backend("goes-on-without-files", "a-damaged-checkpoint-is-refused-and-changes-nothing",
            "loads nothing from a damaged checkpoint, in silence", changes=silent(lambda is_foreign: not is_foreign)),
    backend("goes-on-without-weights", "a-foreign-checkpoint-is-refused-and-changes-nothing",
            "loads nothing from a foreign checkpoint, in silence", changes=silent(lambda is_foreign: is_foreign)),
    backend("drops-moments", "offload-and-onload-keep-every-number", "starts the optimizer anew after onload",
            changes={"onload": then(lambda part, *_: part.restart())}),
    backend("closes-once", "a-backend-may-be-closed-twice", "fails when it is closed again",
            changes={"close": closes_once}),
    backend("adopts-without-version", "adopted-weights-compute-what-the-trainer-computes",
            "keeps its own version when it takes weights over",
            changes={"adopt": lambda part, adopt, update: adopt(replace(update, version=part.version))}),
    backend("adopts-what-it-knows", "weights-that-do-not-fit-are-not-adopted",
            "takes over the tensors whose names it knows, and no others", changes={"adopt": adopts_known}),
    backend("halves-the-values", "a-critic-starts-at-zero-and-trains-by-torchs-adamw",
            "gives half of what the critic expects", CRITIC, changes={"with_values": returns(halved)}),
    backend("sends-the-critic", "a-critic-stays-with-the-backend", "sends a weight of the critic to engines", CRITIC,
            changes=exports(with_critic)),
    backend("forgets-the-critic", "a-resumed-critic-is-the-uninterrupted-one",
            "starts the critic anew after a checkpoint", CRITIC,
            changes={"load": then(lambda part, _: is_enabled(part, Cap.CRITIC) and part.restart())}),
    backend("no-values", "values-without-a-critic-are-refused",
            "gives a track without values where it keeps no critic", CRITIC,
            changes={"with_values": if_refused(lambda _, with_values, track: track)}),
    backend("climbs", "a-fake-score-starts-as-the-policy-and-trains-by-torchs-adamw",
            "trains the fake score away from its target", FAKE_SCORE,
            changes=each_algorithm({"fake_score_loss": returns(lambda losses: scaled(losses, -1.0))})),
    backend("stays-fake", "a-loss-of-the-fake-score-sees-the-live-policy",
            "gives the fake score for the live policy while it is in use", FAKE_SCORE, changes={"policy": stays_fake}),
    backend("leaks-the-fake-score", "a-fake-score-stays-with-the-backend",
            "adds some of the fake score to the policy", FAKE_SCORE, changes={"train": then(leaks)}),
    backend("forgets-the-fake-score", "a-resumed-fake-score-is-the-uninterrupted-one",
            "starts the fake score anew after a checkpoint", FAKE_SCORE,
            changes={"load": then(lambda part, _: is_enabled(part, Cap.FAKE_SCORE) and part.restart())}),
    backend("takes-live-for-fake", "a-fake-score-that-is-not-kept-is-refused",
            "gives the live policy for a fake score that it does not keep", FAKE_SCORE,
            changes={"policy": takes_live}),
]
# fmt: on
