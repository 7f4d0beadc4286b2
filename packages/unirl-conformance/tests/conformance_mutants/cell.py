"""Cells of which one part is broken, next to a healthy one.

The broken part is always the backend: it sees everything that passes, and parts broken in two places would need
separate cells.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from unirl.algorithms.diffusion_nft import plugin as diffusion_nft
from unirl.algorithms.flow_grpo.plugin import FLOW_GRPO
from unirl.backends.fsdp2.plugin import SPEC as FSDP2
from unirl.conformance.doubles import tiny_denoiser as latent_model
from unirl.core.plugins.catalog import Catalog
from unirl.core.roles import Job, Losses, Policy, TrainReport, WeightUpdate
from unirl.core.types.track import Track
from unirl.engines.trainside import plugin as trainside

from conformance_mutants.backend_wrapped import (
    LIVE_ALONE,
    SPEC,
    Wrapped,
    copies,
    each_algorithm,
    each_job,
    put,
    scaled,
    with_tensors,
)
from conformance_mutants.changes import Change, Proxy, changed, with_log_probs_moved
from conformance_mutants.mutant import Mutant, builder, catalog_of, plugin, specs

NEWEST, POLICIES = "second-rollout-is-made-with-the-new-weights", "options-on-other-policies-change-the-loss"
GAPS = "log-probs-of-the-engine-are-those-of-training"


def counts_nan(training: str) -> dict[str, Change]:
    """Reports a norm that is NaN, under one way of training."""

    def train(part: Wrapped, train: Any, jobs: Sequence[Job], *, progress: float) -> TrainReport:
        report = train(jobs, progress=progress)
        wrong = {"grad_norm": math.nan} if part.config.trains == training else {}
        return replace(report, metrics={job: {**metrics, **wrong} for job, metrics in report.metrics.items()})

    return {"train": train}


def trains_a_copy(part: Wrapped, train: Any, jobs: Sequence[Job], *, progress: float) -> TrainReport:
    """Leaves the weights of the module, from which is sampled, as they were."""
    before = copies(part.trained())
    report = train(jobs, progress=progress)
    part.kept["trained"] = copies(part.trained())
    put(part.trained(), before)
    return report


def exports_the_copy(part: Wrapped, export: Any, **asked: Any) -> WeightUpdate:
    if "trained" not in part.kept:
        return export(**asked)
    with part.holding(part.kept["trained"]):
        update = export(**asked)
        return replace(update, tensors=dict(update.tensors))


def doubling_all_but_the_last(_: Wrapped, job: Job) -> dict[str, Any]:
    anchored, seen = [0], [0]
    """Micro-batches of an update, and those whose loss was taken."""

    def with_old_log_probs(_: Any, anchor: Any, track: Track, forward: Any) -> Track:
        anchored[0] += 1
        return anchor(track, forward)

    def loss(_: Any, loss: Any, track: Track, forward: Any, *, progress: float) -> Losses:
        losses = loss(track, forward, progress=progress)
        seen[0] += 1
        return losses if seen[0] % anchored[0] == 0 else scaled(losses, 2)

    return {"algorithm": changed(Proxy(job.algorithm), {"with_old_log_probs": with_old_log_probs, "loss": loss})}


def rounds_on_resume(part: Wrapped, load: Any, folder: Path) -> None:
    load(folder)
    update = part.inner.export_weights(kind=part.config.trains)
    rounded = {name: value.bfloat16().float() for name, value in update.tensors.items()}
    part.inner.adopt(with_tensors(update, rounded))


def engine_log_probs_moved(by: float) -> dict[str, Change]:
    """Compares with other log-probs of the engine, each time that they are compared with its own."""
    return each_job(lambda _, job: {"track": with_log_probs_moved(job.track, by)})


@contextmanager
def live_for_lagged(part: Wrapped, policy: Any, which: Policy = "live") -> Iterator[None]:
    # The first rollout, where both are the same, and the kit's own question behind the engine's.
    part.num_asked = vars(part).get("num_asked", 0) + (which == "lagged")
    with policy("live" if which == "lagged" and part.num_asked <= 2 else which):
        yield


def cell(name: str, claim: str, breaks: str, changes: dict[str, Change], *, also: tuple[str, ...] = ()) -> Mutant:
    return Mutant(name=name, claim=claim, breaks=breaks, also=also, spec=SPEC, changes=changes)


# fmt: off
BROKEN = [
    cell("counts-no-adapters", "a-round-trains-adapters", "reports NaN where it trains adapters", counts_nan("lora")),
    cell("counts-no-weights", "a-round-trains-all-weights", "reports NaN where it trains all weights",
         counts_nan("full")),
    # What never moves stays where the reference policy is.
    cell("trains-a-copy", NEWEST, "trains a copy of what is sampled from",
         {"train": trains_a_copy, "export_weights": exports_the_copy}, also=(POLICIES,)),
    cell("counts-twice", "micro-batches-of-a-round-give-the-same-update",
         "counts all but the last micro-batch twice", each_job(doubling_all_but_the_last)),
    cell("forgets", "a-run-resumes-exactly", "rounds the weights to bf16 on resume", {"load": rounds_on_resume}),
    cell("moves-anchor", "first-update-in-process-has-ratio-1", "moves the old log-probs by 1e-6",
         each_algorithm({"with_old_log_probs": lambda _, anchor, track, forward: with_log_probs_moved(
             anchor(track, forward), 1e-6)})),
    cell("replays-off", GAPS, "compares with log-probs of the engine that are 1e-5 off", engine_log_probs_moved(1e-5)),
    cell("one-policy", POLICIES, "takes the live weights for the reference policy",
         {**each_algorithm(LIVE_ALONE), "policy": lambda *_: nullcontext(),
          "with_reference": lambda _, with_reference, track, **__: with_reference(track, policy="live")}),
]
LAGGED = [
    cell("samples-live", "rollouts-come-from-the-policy-whose-samples-are-trained-on",
         "lets the live policy sample for the lagged one", {"policy": live_for_lagged}),
]
# fmt: on
MUTANTS = [*BROKEN, *LAGGED]
build = builder(MUTANTS)


def catalog() -> Catalog:
    # One algorithm: they are broken with any, and each more is a cell more for every one of them.
    healthy = plugin(models=[latent_model.SPEC], algorithms=[FLOW_GRPO], backends=[FSDP2])
    return catalog_of(healthy, trainside, backends=specs(BROKEN, module=__name__))


def catalog_of_lagged() -> Catalog:
    """An algorithm that trains on samples of a lagged policy, and a backend that does not switch to it."""
    healthy = plugin(models=[latent_model.SPEC], backends=[FSDP2])
    return catalog_of(healthy, diffusion_nft, trainside, backends=specs(LAGGED, module=__name__))
