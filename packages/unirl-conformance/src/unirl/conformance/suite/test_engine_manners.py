"""Behaviour of an engine within a run: side effects, unsupported requests, shutdown."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Mapping

import numpy as np
import torch
from unirl.conformance.claims import claim
from unirl.conformance.doubles.model_state import changes_of, mix_modes, model_state
from unirl.conformance.doubles.processes import Running
from unirl.conformance.doubles.requests import params_of_another_kind
from unirl.conformance.fixtures.engine import ROUNDING, EngineCase
from unirl.conformance.fixtures.latent_engine import LatentEngineCase
from unirl.conformance.verdicts import NotApplicable
from unirl.core.specs.capability import Cap
from unirl.core.types.request import Request
from unirl.core.types.rollout import verify_echo


@claim("engine", track="any")
def test_sampling_does_not_modify_torch_or_the_model(case: EngineCase) -> None:
    """After a rollout training mode, gradients, weights, random generators, grad mode and default dtype are as before:
    training continues from exactly where it was.

    If it fails: restore each submodule's own mode (not `train()` on the whole), sample under no_grad inside the call,
    and draw noise from the recipe, so that no global generator moves.
    """
    model = case.fresh_model()
    request = case.plain_request(model)
    mix_modes(model)
    with case.engine(model) as engine:
        before = {**model_state(model), **_torch_state()}
        case.sample(engine, request)
        changes = changes_of(before, {**model_state(model), **_torch_state()})
    assert not changes, f"a rollout changed: {changes}"


@claim("engine", proves=Cap.WEIGHTS_SHARED, track="any")
def test_dropout_is_off_while_sampling(case: EngineCase) -> None:
    """A model that is in training mode, as it is between updates, is sampled in evaluation mode.

    If it fails: set `eval()` on the trained module for the time of the rollout.
    """
    model = case.fresh_model()
    request = case.deterministic_request(model)
    with case.engine(model) as engine, torch.random.fork_rng():
        quiet = case.sample(engine, request)
        model.trainable.train()
        busy = case.sample(engine, request)
    case.record("off in training mode", case.moved(busy, quiet), bound=ROUNDING)


@claim("engine", track="any")
def test_any_stage_of_its_kind_is_generated_and_another_kind_refused(case: EngineCase) -> None:
    """A track is called what its stage is called, whatever the model's spec names it. A request for text from a model
    of latents alone, or the other way round, is rejected by an error that names the track, and the engine still
    works afterwards.

    If it fails: look at the kind of `params`, not at the name, and compare it with `model.spec.tracks` before anything
    is generated.
    """
    model = case.model()
    request = case.plain_request(model)
    with case.engine(model) as engine:
        case.sample(engine, dataclasses.replace(request, track="a stage"))
    if len(set(model.spec.tracks.values())) > 1:
        return  # the model has tracks of both kinds
    _refuses(
        case, dataclasses.replace(request, track="another", params=params_of_another_kind(request)), naming="another"
    )


@claim("engine", proves=Cap.LATENT_ROLLOUT)
def test_a_kernel_that_is_not_in_its_spec_is_refused(case: LatentEngineCase) -> None:
    """A kernel that the spec does not name is rejected by an error that names it, even if the engine could run
    it: it has not been tested.

    If it fails: compare `sampling.kernel` with the spec's `kernels` before anything is generated.
    """
    others = [name for name in ("ddim-eta", "dpm2", "cps", "dance-sde") if name not in case.kernels]
    for kernel in ("no-such-kernel", *others[:1]):
        request = case.request(case.model(), sampling=case.with_kernel(kernel))
        _refuses(case, request, naming=kernel)


@claim("engine", proves=Cap.LATENT_ROLLOUT, needs={"model": (Cap.GUIDANCE,)})
def test_guidance_that_it_does_not_state_is_refused(case: LatentEngineCase) -> None:
    """An engine whose spec does not state guidance rejects a request with guidance, or echoes that it used none: it
    never silently ignores it.

    If it fails: refuse a `guidance_scale` other than 1, or echo 1.
    """
    if case.provides(Cap.GUIDANCE):
        raise NotApplicable(f"engine {case.spec.name!r} states guidance")
    model = case.model()
    request = case.request(model, sampling={"guidance_scale": 3.0, "negative_prompt": "blurry"})
    with case.engine(model) as engine, case.refusal("a guidance scale of 3", naming="guidance"):
        request = dataclasses.replace(request, policy_version=engine.version)
        verify_echo(request, engine.generate(request))


@claim("engine", track="any", own_engine=True)
def test_closing_leaves_nothing_running_and_may_be_done_twice(case: EngineCase) -> None:
    """After `close` no process and no thread of the engine is left, and closing again is not an error: a run that
    fails half-way ends and frees its GPU memory.

    If it fails: end worker processes and wait for them, join threads, shut down executors and servers; keep a flag so
    that the second call does nothing.
    """
    model = case.model()
    request = case.plain_request(model)
    # What the first use of a model starts for good in any process (progress bars, pools of a library) is not the
    # engine's: so that has happened before counting.
    case.warm_up(model, request)
    running = Running.now()
    with case.engine(model) as engine:
        case.sample(engine, request)
        engine.close()
        engine.close()
        left = running.left(within_s=2.0 if case.device == "cpu" else 10.0)
    assert not left, f"after close there still run: {', '.join(left)}"


def _refuses(case: EngineCase, request: Request, *, naming: str) -> None:
    """The request is rejected, and the engine samples as before it."""
    model = case.model()
    good = case.plain_request(model)
    with case.engine(model) as engine:
        with case.refusal(f"a request with {naming!r}", naming=naming):
            engine.generate(dataclasses.replace(request, policy_version=engine.version))
        case.sample(engine, good)


def _torch_state() -> Mapping[str, object]:
    return {
        "torch's random generator": torch.get_rng_state(),
        "the random generators of the GPUs": dict(enumerate(torch.cuda.get_rng_state_all())),
        "numpy's random generator": np.random.get_state(legacy=False)["state"],
        "python's random generator": random.getstate(),
        "grad mode": torch.is_grad_enabled(),
        "torch's default dtype": torch.get_default_dtype(),
        "torch's deterministic mode": torch.are_deterministic_algorithms_enabled(),
    }
