"""LoRA adapters sent to an engine."""

from __future__ import annotations

import torch
from unirl.conformance.claims import claim
from unirl.conformance.doubles.weight_updates import full_update, lora_update, perturb, with_adapter
from unirl.conformance.fixtures.engine import EngineCase
from unirl.conformance.fixtures.engine_weights import (
    REFUSES,
    check_receipt,
    check_recovers,
    check_refusals,
    check_samples,
    damaged_full,
    damaged_lora,
)
from unirl.core.specs.capability import Cap
from unirl.core.specs.spec import Kind

LORA: dict[Kind, tuple[Cap, ...]] = {"model": (Cap.LORA,)}


@claim("engine", proves=Cap.WEIGHTS_LORA, needs=LORA, track="any")
def test_the_receipt_of_an_adapter_is_of_what_the_engine_holds(case: EngineCase) -> None:
    """After an adapter sync the engine reports its version, checksum, number of tensors and bytes.

    If it fails: compute the checksum of the adapter's tensors on the engine's side, under the trainer's names.
    """
    model = case.fresh_model()
    update, _ = lora_update(model, case.model_spec, version=7, seed=1, scale=2.0)
    with case.engine(model, enable=Cap.WEIGHTS_LORA) as engine:
        check_receipt(case, engine, update, request=case.plain_request(model))


@claim("engine", proves=Cap.WEIGHTS_LORA, needs=LORA, track="any")
def test_an_adapter_is_sampled_with_at_its_scale(case: EngineCase) -> None:
    """After an adapter sync the samples are those of a model with W + scale B A; the next adapter replaces it.

    The scales are 2 and 0.5, so an engine that takes alpha / rank from elsewhere is caught.

    If it fails: use `adapter_scale` of the update as the factor; start from the base weights at every sync, and let no
    cache (of adapters by name, of captured graphs) keep the old one.
    """
    model = case.fresh_model()
    request = case.deterministic_request(model)
    with case.engine(model, enable=Cap.WEIGHTS_LORA) as engine:
        before = case.sample(engine, request)
        for version, scale in ((7, 2.0), (8, 0.5)):
            update, added = lora_update(model, case.model_spec, version=version, seed=version, scale=scale)
            engine.load_weights(update)
            track = case.sample(engine, request)
            trained = with_adapter(case.fresh_model(), added)
            check_samples(case, request, track, model=trained, unlike=before, name=f"off the adapter x {scale:g}")
            before = track
    base = case.model().trainable.state_dict()
    same = all(torch.equal(weight, base[name]) for name, weight in model.trainable.state_dict().items())
    assert same, "loading an adapter into the engine changed the model that it was built with"


@claim("engine", proves=Cap.WEIGHTS_LORA, needs=LORA, track="any")
def test_an_adapter_that_does_not_fit_is_refused(case: EngineCase) -> None:
    """Names under another prefix, another dtype or shape, a tensor that ends early, a layer that the model has not, one
    half of a pair, no tensor at all, and bits that do not match the checksum each raise: an adapter that matched no
    layer is not an adapter.

    If it fails: resolve every name to a layer and compare shapes before the first one is applied; several engines skip
    unknown names with a warning.
    """
    model = case.fresh_model()
    update, _ = lora_update(model, case.model_spec, version=7, seed=1, scale=2.0)
    with case.engine(model, enable=Cap.WEIGHTS_LORA) as engine:
        check_refusals(engine, damaged_lora(update))


@claim("engine", proves=Cap.WEIGHTS_LORA, needs=LORA, track="any")
def test_a_refused_adapter_is_never_half_applied(case: EngineCase) -> None:
    """After an adapter was rejected the engine samples as before, under its old version, or refuses to sample until a
    full sync, which then works.

    If it fails: check everything before applying anything, or mark the engine as unusable before the first layer.
    """
    good, added = lora_update(case.model(), case.model_spec, version=7, seed=1, scale=1.0)
    trained = with_adapter(case.fresh_model(), added)
    check_recovers(case, Cap.WEIGHTS_LORA, damaged_lora(good), good, trained=trained)


@claim("engine", proves=(Cap.WEIGHTS_FULL, Cap.WEIGHTS_LORA), needs=LORA, track="any")
def test_adapters_go_on_the_newest_full_weights_and_with_the_next(case: EngineCase) -> None:
    """An adapter is applied to the full weights sent last, not to those of the checkpoint, and the next full weights
    remove it completely.

    If it fails: an engine that merges adapters keeps a copy of the weights without them; renew it at every full sync.
    One that computes them apart has to drop them then, from its caches too.
    """
    model, trainer, later = case.fresh_model(), case.fresh_model(), case.fresh_model()
    request = case.deterministic_request(model)
    perturb(trainer, seed=1)
    perturb(later, seed=2)
    adapter, added = lora_update(model, case.model_spec, version=8, seed=8, scale=1.0)
    with case.engine(model, enable=Cap.WEIGHTS_LORA) as engine:
        engine.load_weights(full_update(trainer, version=7))
        engine.load_weights(adapter)
        with_it = case.sample(engine, request)
        engine.load_weights(full_update(later, version=9))
        without = case.sample(engine, request)
    check_samples(case, request, with_it, model=with_adapter(trainer, added), name="off newer weights with an adapter")
    check_samples(case, request, without, model=later, unlike=with_it, name="off full weights after an adapter")


@claim("engine", proves=(Cap.WEIGHTS_FULL, Cap.WEIGHTS_LORA), needs=LORA, track="any")
def test_an_adapter_does_not_mend_refused_weights(case: EngineCase) -> None:
    """After a rejected update of full weights an adapter is rejected as well, or applied to the previous weights: it
    does not repair a partial update.

    If it fails: let full weights alone clear the mark of an update that broke off.
    """
    model, trainer = case.fresh_model(), case.fresh_model()
    request = case.deterministic_request(model)
    perturb(trainer, seed=1)
    adapter, added = lora_update(model, case.model_spec, version=8, seed=8, scale=1.0)
    with case.engine(model, enable=Cap.WEIGHTS_LORA) as engine:
        try:
            engine.load_weights(damaged_full(full_update(trainer, version=7))["a missing tensor"])
        except REFUSES:
            pass
        else:  # of which another claim speaks
            return
        try:
            engine.load_weights(adapter)
            track = case.sample(engine, request)
        except REFUSES:
            return
    check_samples(case, request, track, model=with_adapter(case.fresh_model(), added), name="off the adapter")
