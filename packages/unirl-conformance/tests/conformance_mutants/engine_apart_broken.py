"""External engines with separate weights and one fault: one start serves all claims of a row, and each fault is still
found."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from unirl.conformance.doubles import tiny_decoder as text_model
from unirl.conformance.doubles import tiny_denoiser as latent_model
from unirl.core.plugins.catalog import Catalog
from unirl.core.roles import WeightUpdate
from unirl.core.types.request import Request
from unirl.core.types.track import Track

from conformance_mutants import engine, engine_apart, engine_weights
from conformance_mutants.changes import Change
from conformance_mutants.engine_changes import TEXT_ONLY, Fields, rollout
from conformance_mutants.engine_copying import SPEC as COPYING
from conformance_mutants.engine_text import LINEAGE as TEXT_LINEAGE
from conformance_mutants.engine_text import SEEDS
from conformance_mutants.engine_weights import ASLEEP, HALF_FULL, HALF_LORA, MENDED, NEWEST, SCALED, SLEEP, USED
from conformance_mutants.mutant import Mutant, builder, catalog_of, plugin, specs

LINEAGE, SPLIT = "every-sample-comes-back-with-its-lineage", "samples-do-not-depend-on-how-a-request-is-split"
CONDITIONS, NOT_SHARED = "returned-conditions-are-those-used", "inputs-of-one-text-are-not-shared"
OF_PLUGINS = "kernels-and-guidances-of-plugins-are-computed"
TURNS = "a-sample-goes-on-from-its-own-turns"
# Without the process of an external engine.
LATENTS = replace(engine_apart.OF_LATENTS, build=COPYING.build)
TEXTS = replace(engine_apart.SPEC, build=COPYING.build)


def sorts_samples(_: Any, generate: Any, request: Request) -> Track:
    """Makes samples prompt after prompt, and gives them the ids of the request in its own order."""
    by_prompt = sorted(range(request.num_rows), key=lambda row: request.inputs.ids[row])
    return replace(
        generate(request.select(by_prompt)),
        sample_ids=request.sample_ids,
        group_ids=request.group_ids,
        parent_ids=request.inputs.ids,
        inputs=request.inputs,
        metadata=request.metadata,
    )


def sorts_texts(engine: Any, generate: Any, request: Request) -> Track:
    """The prompt tokens that it echoes are those of the request as well."""
    track = sorts_samples(engine, generate, request)
    return replace(track, segment=replace(track.text, prompt_tokens=request.text.prompt_tokens))


def without_last_word(_: Any, request: Request) -> Fields:
    """The conditions that come back are those that it used."""
    texts = tuple(text.rpartition(" ")[0] for text in request.inputs.texts)
    return {"inputs": replace(request.inputs, texts=texts)}


def binds_no_layer(_: Any, write_adapter: Any, update: WeightUpdate) -> dict[str, Any]:
    """Looks for the layers of adapters under another prefix, finds none, and calls it a success."""
    write_adapter(replace(update, tensors={}))
    return dict(update.tensors)


def apart(
    name: str, claim: str, breaks: str, changes: dict[str, Change], *, also: tuple[str, ...], spec: Any = LATENTS
) -> Mutant:
    return Mutant(name=name, claim=claim, breaks=breaks, also=also, spec=spec, changes=changes)


# fmt: off
OWN = [
    # Samples of other rows, with the conditions of those, wherever rows are not in that order.
    apart("sorts-its-samples", LINEAGE, "gives samples in the order of their prompts the ids of the request",
          {"generate": sorts_samples}, also=(CONDITIONS, NOT_SHARED, SPLIT, TURNS)),
    apart("sorts-its-texts", TEXT_LINEAGE, "gives texts in the order of their prompts the ids of the request",
          {"generate": sorts_texts}, also=(SEEDS,), spec=TEXTS),
    apart("drops-the-last-word", CONDITIONS, "encodes prompts without their last word",
          {"_latents": rollout(request=without_last_word, track=lambda _, request, track: {"inputs": request.inputs})},
          also=(NOT_SHARED, OF_PLUGINS, TURNS)),
    apart("stays-stale", USED, "answers full weights and keeps those that it had",
          {"write_full": lambda _, write_full, update: dict(update.tensors)}, also=(HALF_FULL, NEWEST, SLEEP, ASLEEP)),
    apart("binds-no-layer", SCALED, "takes adapters, and binds them to no layer",
          {"write_adapter": binds_no_layer}, also=(HALF_LORA, NEWEST, MENDED)),
]
# fmt: on
IN_PROCESS = (
    "keeps-its-schedule",
    "echoes-versions",
    "numbers-samples",
    "draws-by-place",
    "forgets-the-scale",
    "is-mended-by-a-refusal",
    "strips-prefixes-of-adapters",
    "writes-as-it-checks",
)
"""Names of in-process mutants that are tried as external engines, too."""


def external(mutant: Mutant) -> Mutant:
    spec = TEXTS if mutant.spec is TEXT_ONLY else LATENTS
    if mutant.spec.build == engine_weights.BREAKS_OFF.build:
        spec = replace(spec, build=mutant.spec.build)
    breaks = f"as a program of its own {mutant.breaks}"
    return replace(mutant, name=f"{mutant.name}-apart", breaks=breaks, spec=spec)


MUTANTS = [*OWN, *(external(mutant) for mutant in engine.MUTANTS if mutant.name in IN_PROCESS)]
build = builder(MUTANTS)


def catalog() -> Catalog:
    """Broken engines, each for one kind of track, and a healthy one for each kind."""
    healthy = plugin(models=[latent_model.SPEC, text_model.SPEC], engines=[TEXTS, LATENTS])
    return catalog_of(healthy, engines=specs(MUTANTS, module=__name__))
