"""Cells of text of which one part is broken, next to healthy ones: an engine that shares the weights, one that is sent
them, and backends."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from unirl.algorithms.grpo import plugin as grpo
from unirl.backends.fsdp2.plugin import SPEC as FSDP2
from unirl.conformance.doubles import tiny_decoder as text_model
from unirl.conformance.doubles.tiny_decoder import TinyDecoder
from unirl.core.plugins.catalog import Catalog
from unirl.core.roles import Job, WeightReceipt, WeightUpdate
from unirl.core.specs.capability import Cap
from unirl.core.types.request import Request
from unirl.core.types.track import Track

from conformance_mutants import cell
from conformance_mutants.backend_wrapped import each_job
from conformance_mutants.cell import GAPS, NEWEST, engine_log_probs_moved
from conformance_mutants.engine_changes import TEXT_ONLY, rollout
from conformance_mutants.engine_copying import SPEC as COPYING
from conformance_mutants.engine_copying import CopyingEngine
from conformance_mutants.engine_text import scored
from conformance_mutants.mutant import Mutant, builder, catalog_of, plugin, specs

SENT = replace(
    COPYING,
    name="sent",
    build=f"{__name__}:build_sent",
    kernels=(),
    capabilities=COPYING.capabilities - {Cap.LATENT_ROLLOUT},
)
"""An engine with separate weights, as one in another process has."""


# What is sent weights begins with those of the miniature, whatever the backend has put into the model that trains.
def build_sent(config: Any, *, model: Any, device: Any) -> CopyingEngine:
    return CopyingEngine(config, model=TinyDecoder(device=device))


def keeps_its_weights(engine: CopyingEngine, load_weights: Any, update: WeightUpdate) -> WeightReceipt:
    """Answers that it holds what was sent, and samples from what it was built with."""
    held = {name: weight.detach().clone() for name, weight in engine._module.named_parameters()}
    receipt = load_weights(update)
    with torch.no_grad():
        for name, weight in engine._module.named_parameters():
            weight.copy_(held[name])
    return receipt


def ordered_by_length(_: Any, track: Track) -> tuple[Tensor, ...]:
    """The log-probs of a group's texts in the order in which they ended."""
    assert track.text.log_probs is not None
    return torch.cat(sorted(track.text.log_probs, key=len)).split(list(track.text.lengths))


def one_late(_: Any, track: Track) -> tuple[Tensor, ...]:
    assert track.text.log_probs is not None
    return tuple(row.roll(1) for row in track.text.log_probs)


def rescored(name: str, breaks: str, log_probs: Callable[[Any, Track], tuple[Tensor, ...]]) -> Mutant:
    """Gives other log-probs than those of the policy that sampled."""

    def segment(engine: Any, request: Request, track: Track) -> dict[str, Any]:
        return {"log_probs": tuple(log_probs(engine, track))}

    return Mutant(name=name, claim=GAPS, breaks=breaks, spec=TEXT_ONLY, changes={"_text": rollout(segment=segment)})


def of_text(mutant: Mutant) -> Mutant:
    breaks = mutant.breaks.replace("1e-5", "1e-3")
    changes = engine_log_probs_moved(1e-3) if mutant.name == "replays-off" else mutant.changes
    return replace(mutant, name=f"text-{mutant.name}", breaks=f"in rounds of text {breaks}", changes=changes)


ENGINES = [
    Mutant(
        name="keeps-weights",
        claim=NEWEST,
        breaks="is sent weights and keeps those it had",
        also=(GAPS,),
        spec=SENT,
        changes={"load_weights": keeps_its_weights},
    ),
    rescored(
        "raw-logits",
        "gives log-probs of raw logits in rounds of text",
        lambda engine, track: scored(engine, track, temperature=1.0),
    ),
    rescored("swaps-rows", "swaps the log-probs of texts in rounds", ordered_by_length),
    rescored("one-late", "gives log-probs one token late in rounds", one_late),
]


def unmasked(_: Any, job: Job) -> dict[str, Any]:
    return {"track": replace(job.track, segment=replace(job.track.text, mask=None))}


BACKENDS = [
    # Mutants that fail in rounds of latents, tried in rounds of text.
    *(of_text(mutant) for mutant in cell.BROKEN),
    cell.cell("trains-observations", "observations-get-no-gradient", "trains on every token of an episode",
              each_job(unmasked)),
]  # fmt: skip
MUTANTS = [*ENGINES, *BACKENDS]
build = builder(MUTANTS)


def broken_engines() -> Catalog:
    """Engines that are broken and healthy ones, with a healthy backend."""
    return catalog_of(healthy(engines=[TEXT_ONLY, SENT], backends=[FSDP2]), engines=specs(ENGINES, module=__name__))


def broken_backends() -> Catalog:
    """Backends that are broken, with an engine that shares their weights."""
    return catalog_of(healthy(engines=[TEXT_ONLY]), backends=specs(BACKENDS, module=__name__))


def healthy(**parts: Any) -> Any:
    algorithms = [spec for spec in grpo.unirl_algorithms() if spec.name == "grpo"]
    return plugin(models=[text_model.SPEC], algorithms=algorithms, **parts)
