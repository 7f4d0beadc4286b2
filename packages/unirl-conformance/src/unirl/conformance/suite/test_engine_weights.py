"""Weights of an engine: shared with training, or received in full. For adapters see `test_engine_lora`."""

from __future__ import annotations

from typing import Literal

import torch
from unirl.conformance.claims import claim
from unirl.conformance.doubles.weight_updates import full_update, perturb
from unirl.conformance.fixtures.engine import ROUNDING, EngineCase
from unirl.conformance.fixtures.engine_weights import (
    REFUSES,
    check_as_before,
    check_receipt,
    check_recovers,
    check_refusals,
    check_samples,
    damaged_full,
)
from unirl.core.errors import UniRLError
from unirl.core.specs.capability import Cap


@claim("engine", proves=Cap.WEIGHTS_SHARED, track="any")
def test_shared_weights_are_sampled_as_they_train(case: EngineCase) -> None:
    """The engine samples from the trained module itself: a change of a weight shows in the next sample.

    If it fails: look for a copy, a compiled graph or a cast of the weights that was made when the engine was built.
    """
    model = case.fresh_model()
    request = case.deterministic_request(model)
    with case.engine(model) as engine:
        before = case.sample(engine, request)
        perturb(model, seed=1)
        track = case.sample(engine, request)
        engine.version = 7
        versions = case.sample(engine, request).policy_version
    check_samples(case, request, track, model=model, unlike=before, name="off the changed weights")
    assert versions == (7,) * request.num_rows, f"the run says version 7, the samples carry {versions}"


@claim("engine", proves=Cap.WEIGHTS_SHARED, track="any")
def test_an_engine_that_shares_its_weights_refuses_others(case: EngineCase) -> None:
    """An engine that samples from the trained module rejects weight updates: it has nothing to load them into, and
    ignoring them would hide a misconfiguration.

    If it fails: raise a RecipeError in `load_weights`.
    """
    model = case.fresh_model()
    trainer = case.fresh_model()
    perturb(trainer, seed=1)
    update = full_update(trainer, version=9)
    before = {name: weight.detach().clone() for name, weight in model.trainable.named_parameters()}
    with case.engine(model) as engine:
        try:
            engine.load_weights(update)
        except UniRLError:
            changed = [name for name, weight in model.trainable.named_parameters() if not weight.equal(before[name])]
            assert not changed, f"the weights were refused, and yet changed {changed[:3]} of the module that trains"
            return
    raise AssertionError("weights of version 9 were taken by an engine that shares those that train")


@claim("engine", proves=Cap.WEIGHTS_FULL, track="any")
def test_the_receipt_is_of_what_the_engine_holds(case: EngineCase) -> None:
    """After a weight sync the engine answers with the version, the checksum, the number and the bytes of the weights
    that it then holds, all of the trainer's; its own version and that of its samples move along.

    If it fails: compute the checksum with `unirl.core.types.weights.checksum` from the weights on the engine's side,
    under the trainer's names and dtypes.
    """
    model, trainer = case.fresh_model(), case.fresh_model()
    perturb(trainer, seed=1)
    with case.engine(model, enable=Cap.WEIGHTS_FULL) as engine:
        check_receipt(case, engine, full_update(trainer, version=7), request=case.plain_request(model))


@claim("engine", proves=Cap.WEIGHTS_FULL, track="any")
def test_full_weights_are_used_for_sampling(case: EngineCase) -> None:
    """After a sync of full or merged weights, the samples are those of a model with these weights; the trained model is
    unchanged.

    If it fails: a name that maps to nothing, fused projections (q, k, v) loaded in another order, a weight that is
    held twice, or a captured graph that still has the old ones.
    """
    model, trainer = case.fresh_model(), case.fresh_model()
    request = case.deterministic_request(model)
    untouched = {name: weight.detach().clone() for name, weight in model.trainable.named_parameters()}
    with case.engine(model, enable=Cap.WEIGHTS_FULL) as engine:
        before = case.sample(engine, request)
        kinds: tuple[Literal["full", "merged"], ...] = ("full", "merged")
        for version, kind in enumerate(kinds, start=7):
            perturb(trainer, seed=version)
            engine.load_weights(full_update(trainer, version=version, kind=kind))
            track = case.sample(engine, request)
            check_samples(case, request, track, model=trainer, unlike=before, name=f"off the {kind} weights")
            before = track
    same = all(torch.equal(weight, untouched[name]) for name, weight in model.trainable.named_parameters())
    assert same, "loading weights into the engine changed the model that it was built with"


@claim("engine", proves=Cap.WEIGHTS_FULL, track="any")
def test_full_weights_that_do_not_fit_are_refused(case: EngineCase) -> None:
    """Names under another prefix, another dtype or shape, a tensor that ends early, a name too many, one too few, and
    bits that do not match the checksum each raise: an engine that skips what it does not know samples from an old
    policy for ever.

    If it fails: compare names, shapes and dtypes with what the engine holds, both ways, and the checksum with the
    tensors, before the first weight is written.
    """
    trainer = case.fresh_model()
    perturb(trainer, seed=1)
    with case.engine(case.fresh_model(), enable=Cap.WEIGHTS_FULL) as engine:
        check_refusals(engine, damaged_full(full_update(trainer, version=7)))


@claim("engine", proves=Cap.WEIGHTS_FULL, track="any")
def test_refused_full_weights_are_never_half_applied(case: EngineCase) -> None:
    """After weights were rejected the engine samples as before, under its old version, or refuses to sample until a
    full sync, which then works.

    If it fails: check everything before writing anything, or mark the engine as unusable before the first write.
    """
    trainer = case.fresh_model()
    perturb(trainer, seed=1)
    good = full_update(trainer, version=7)
    check_recovers(case, Cap.WEIGHTS_FULL, damaged_full(good), good, trained=trainer)


@claim("engine", proves=Cap.SLEEP, track="any")
def test_sleep_and_wake_give_the_same_samples(case: EngineCase) -> None:
    """After sleep and wake an engine samples as before, from the weights last sent, under their version.

    If it fails: sleeping dropped weights, or brought back those of the checkpoint; sync again in `wake`, or keep them.
    """
    model, trainer = case.fresh_model(), case.fresh_model()
    request = case.deterministic_request(model)
    with case.engine(model, enable=Cap.SLEEP) as engine:
        if case.provides(Cap.WEIGHTS_FULL):
            perturb(trainer, seed=1)
            engine.load_weights(full_update(trainer, version=7))
        before = case.sample(engine, request)
        engine.sleep()
        engine.wake()
        after = case.sample(engine, request)
    versions = [track.policy_version[0] for track in (before, after)]
    assert versions[0] == versions[1], f"it slept at version {versions[0]} and woke at {versions[1]}"
    check_samples(case, request, after, model=trainer, name="off after sleep")
    moved = case.moved(after, before)
    case.record("sleep changed", moved, bound=ROUNDING)


@claim("engine", proves=Cap.SLEEP, track="any")
def test_generating_asleep_is_refused(case: EngineCase) -> None:
    """A request to a sleeping engine raises: waking by itself would take memory that training uses. After `wake` it
    works.

    If it fails: keep a flag and raise in `generate`.
    """
    model = case.model()
    request = case.plain_request(model)
    with case.engine(model, enable=Cap.SLEEP) as engine:
        engine.sleep()
        try:
            case.sample(engine, request)
        except UniRLError:
            engine.wake()
            case.sample(engine, request)
            return
    raise AssertionError("a sleeping engine generated samples")


@claim("engine", proves=(Cap.SLEEP, Cap.WEIGHTS_FULL), track="any")
def test_weights_sent_to_a_sleeping_engine_are_refused_or_kept(case: EngineCase) -> None:
    """A weight update sent while asleep is rejected, or takes effect on wake-up; it is never lost. A sync after waking
    works.

    If it fails: refuse updates while asleep, before the version moves; or wake first.
    """
    model, trainer = case.fresh_model(), case.fresh_model()
    request = case.deterministic_request(model)
    perturb(trainer, seed=1)
    update = full_update(trainer, version=7)
    with case.engine(model, enable=Cap.SLEEP) as engine:
        before, version = case.sample(engine, request), engine.version
        engine.sleep()
        try:
            engine.load_weights(update)
        except REFUSES:
            engine.wake()
            check_as_before(case, engine, request, before, version=version, what="an update while asleep")
            engine.load_weights(update)
        else:
            engine.wake()
        track = case.sample(engine, request)
    check_samples(case, request, track, model=trainer, unlike=before, name="off the weights")
