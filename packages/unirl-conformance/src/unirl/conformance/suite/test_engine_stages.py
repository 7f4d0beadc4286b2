"""An engine that generates the texts and the images of one model."""

from __future__ import annotations

import copy
from typing import Any

from unirl.conformance.claims import claim
from unirl.conformance.doubles.weight_updates import full_update, lora_update, perturb, with_adapter
from unirl.conformance.fixtures.engine import EngineCase
from unirl.conformance.fixtures.engine_stages import stages_of
from unirl.conformance.fixtures.engine_weights import check_samples
from unirl.core.roles import Engine, Model, WeightReceipt, WeightUpdate
from unirl.core.specs.capability import Cap
from unirl.core.types.track import Track


@claim("engine", proves=(Cap.LATENT_ROLLOUT, Cap.TEXT_ROLLOUT), track="any")
def test_two_stages_of_an_engine_share_one_set_of_weights(case: EngineCase) -> None:
    """Texts and images of a model are made by the same weights. Full weights, or an adapter, are sent once and counted
    once; the next sample of either stage, whichever comes first, is the one that a model with these weights makes, and
    carries their version. An engine that shares its weights follows the trained module with both.

    If it fails: look for a second copy of the module, or a second process, that a sync does not reach or reaches late;
    for keys and values of prompts that outlive the weights; and for a version that each stage has for itself.
    """
    stages = stages_of(case)
    is_shared = case.provides(Cap.WEIGHTS_SHARED)
    model: Any = case.fresh_model()
    trainer: Any = model if is_shared else case.fresh_model()
    requests = {stage.track: stage.deterministic_request(model) for stage in stages}

    def check(engine: Engine, made_by: Model, before: dict[str, Track], *, version: int, what: str) -> dict[str, Track]:
        """Both stages by these weights and under this version, in an order that changes with the version."""
        result: dict[str, Track] = {}
        for stage in stages if version % 2 else reversed(stages):
            request, track = requests[stage.track], stage.sample(engine, requests[stage.track])
            name = f"track {stage.track!r} off the {what}"
            check_samples(stage, request, track, model=made_by, unlike=before[stage.track], name=name)
            versions = set(track.policy_version)
            assert versions == {version}, f"version {version} is in use, samples of {stage.track!r} carry {versions}"
            result[stage.track] = track
        return result

    with case.engine(model, enable=None if is_shared else Cap.WEIGHTS_FULL) as engine:
        tracks = {stage.track: stage.sample(engine, requests[stage.track]) for stage in stages}
        for version in (7, 8):
            perturb(trainer, seed=version)
            if is_shared:
                engine.version = version
            else:
                _send_once(engine, full_update(trainer, version=version))
            tracks = check(engine, trainer, tracks, version=version, what=f"weights of version {version}")
        if case.provides(Cap.WEIGHTS_LORA) and Cap.LORA in case.model_spec.capabilities:
            update, added = lora_update(trainer, case.model_spec, version=9, seed=9, scale=1.3)
            _send_once(engine, update)
            check(engine, with_adapter(copy.deepcopy(trainer), added), tracks, version=9, what="adapter")


def _send_once(engine: Engine, update: WeightUpdate) -> None:
    """Send an update, of which the engine must then hold one copy."""
    receipt: WeightReceipt = engine.load_weights(update)
    size = sum(tensor.numel() * tensor.element_size() for tensor in update.tensors.values())
    held, sent = (receipt.num_tensors, receipt.size_bytes), (len(update.tensors), size)
    assert held == sent, (
        f"{sent[0]} tensors of {sent[1]} bytes were sent, the engine holds {held[0]} of {held[1]} bytes"
    )
