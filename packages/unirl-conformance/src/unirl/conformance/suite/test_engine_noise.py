"""Sigmas, initial noise, step noise and SDE steps of a rollout."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from unirl.conformance.claims import claim
from unirl.conformance.fixtures.engine import ROUNDING
from unirl.conformance.fixtures.latent_engine import LatentEngineCase
from unirl.conformance.verdicts import NotApplicable
from unirl.core.errors import EchoMismatch, UniRLError
from unirl.core.specs.capability import Cap
from unirl.core.types.request import Request
from unirl.core.types.rollout import verify_echo
from unirl.core.types.track import Track

ODD = (1.0, 0.7318273, 0.51234567, 0.2200001, 0.0)
"""Sigmas that no scheduler would make."""


@claim("engine", proves=Cap.SIGMAS)
def test_sigmas_are_echoed_bit_for_bit(case: LatentEngineCase) -> None:
    """The sigmas of the request come back bit for bit, in fp32: training recomputes the steps from them, and a
    difference stops the run.

    If it fails: look for a cast on the way (bf16, a timestep of 0 to 1000 divided again), and echo what was sent.
    """
    _, track = _sampled_at_odd_sigmas(case)
    result = track.latent.sigmas
    assert result.dtype == torch.float32, f"sigmas are echoed as {result.dtype}, float32 was sent"
    assert torch.equal(result.cpu(), torch.tensor(ODD)), f"the request says {ODD}, the engine echoes {result.tolist()}"


@claim("engine", proves=Cap.SIGMAS)
def test_echoed_sigmas_are_those_used(case: LatentEngineCase) -> None:
    """The engine uses the sigmas of the request, instead of its own schedule reported under their name.

    Deterministic steps with sigmas that no scheduler would make must end where the formula of the steps ends.

    If it fails: look for a scheduler in the engine that recomputes its sigmas (`set_timesteps`, a shift applied a
    second time, the resolution's own shift), and hand it the request's.
    """
    if not case.provides(Cap.INITIAL_NOISE) and not case.provides(Cap.TRAJECTORY_FULL):
        raise NotApplicable(f"engine {case.spec.name!r} promises neither a known start nor to return it")
    trajectory = case.expected_trajectory(*_sampled_at_odd_sigmas(case))
    case.record("off the sigmas' way", trajectory.error(trajectory.deterministic), bound=ROUNDING)


@claim("engine", proves=Cap.INITIAL_NOISE)
def test_initial_noise_follows_the_seed(case: LatentEngineCase) -> None:
    """Every sample starts from the noise that (seed, rollout, its id) gives, bit for bit, and the digests say so.

    If it fails: start from `unirl.numerics.noise.noise(..., ids=noise_ids, step=INITIAL)`, unscaled; where the engine
    multiplies by an initial sigma, divide first; pack or cast only inside the model.
    """
    request, track = started(case, same_initial_noise=False)
    case.check_start(request, track)


@claim("engine", proves=Cap.INITIAL_NOISE)
def test_a_group_shares_its_initial_noise_on_request(case: LatentEngineCase) -> None:
    """With `same_initial_noise` the samples of a group start from one x_T, another group's from another.

    If it fails: key the initial noise by the request's `noise_ids`, which then repeat, not by the sample ids.
    """
    request, track = started(case, same_initial_noise=True)
    case.check_start(request, track)


@claim("engine", proves=Cap.INITIAL_NOISE)
def test_echoed_noise_is_the_initial_noise(case: LatentEngineCase) -> None:
    """An engine with other initial noise than requested is caught by its echo: digests are computed from the denoised
    latents, not copied from the request.

    Here the request's digest is that of another noise, so an honest engine contradicts it.

    If it fails: fill `initial_noise` with `noise_digest` of the tensor that the first forward gets.
    """
    request = case.request(case.model())
    expected = request.latent
    false = ("0123456789abcdef", *expected.initial_noise[1:])
    with case.engine() as engine:
        request = dataclasses.replace(
            request,
            params=dataclasses.replace(expected, initial_noise=false),
            policy_version=engine.version,
        )
        try:
            verify_echo(request, engine.generate(request))
        except (EchoMismatch, UniRLError):
            return
    raise AssertionError("the request has the digest of another noise, and the echo agrees with it")


@claim("engine", proves=(Cap.STEP_NOISE, Cap.SDE_STEPS))
def test_step_noise_follows_the_seed(case: LatentEngineCase) -> None:
    """The noise of each SDE step is a function of (seed, rollout, key, step), the key being the sample's id or that of
    `step_noise_ids`: a sample can be reproduced anywhere, samples with the same initial noise still differ, and those
    of a tree differ from their branch step on.

    The noise is taken out of the latents: (x_next - mean) / std, with mean and std from the kernel's formula.

    If it fails: draw with `unirl.numerics.noise.noise(..., ids=sample_ids, step=i)`, i counted from 0 over all steps,
    where the request has no `step_noise_ids`, else by column i of these; never by `noise_ids`, which a group may share.
    """
    if not case.provides(Cap.TRAJECTORY_WINDOW) and not case.provides(Cap.TRAJECTORY_FULL):
        raise NotApplicable(f"engine {case.spec.name!r} returns no trajectory to take the noise from")
    kernel = case.stochastic_kernels[0]
    for shares, branches in (False, False), (True, False), (True, True):
        sampling = case.with_kernel(kernel, sde_steps=(0, 1, 2)) | {"same_initial_noise": shares}
        if branches:
            # The three samples of a group, see `LatentEngineCase.request`, share the noise of step 0.
            sampling |= {"sde.branch_steps": [1], "sde.branch_factor": 3}
        trajectory = case.expected_trajectory(*case.generate(sampling=sampling))
        assert bool(trajectory.stochastic.any()), "no stochastic step is stored"
        # Rounding of the mean (1e-7 to 1e-5) over a std of 0.1 and more; noise under another key is off by 1.
        off = float((trajectory.drawn() - trajectory.recipe()).abs().max())
        what = " in a tree" if branches else " with a shared start" if shares else ""
        case.record(f"step noise off{what}", off, bound=2e-3)


@claim("engine", proves=Cap.SDE_STEPS)
def test_only_requested_steps_are_stochastic(case: LatentEngineCase) -> None:
    """Noise is added at the SDE steps of the request and nowhere else, and the echoed set is the requested one.

    The set has a gap, so an engine that takes it for a range from first to last is caught.

    If it fails: look at how the engine turns the set into its loop (a window of first and length, an off-by-one, noise
    at the last step); elsewhere the step is that of the ODE.
    """
    check_steps(case, steps=[[1, 3]] * 6, num_steps=5)


@claim("engine", proves=(Cap.SDE_STEPS, Cap.SDE_STEPS_PER_GROUP))
def test_each_group_has_its_own_sde_steps(case: LatentEngineCase) -> None:
    """Groups of one request can have other SDE steps, also fewer of them; rows that have fewer are padded with -1.

    If it fails: look for the first row's steps used for all rows, or for -1 taken as the last step.
    """
    check_steps(case, steps=[[0, 1]] * 3 + [[2, -1]] * 3, num_steps=5)


def _sampled_at_odd_sigmas(case: LatentEngineCase) -> tuple[Request, Track]:
    sampling = case.with_kernel(case.deterministic_kernel)
    return case.generate(sampling=sampling, sigmas=torch.tensor(ODD), **case.storing_most())


def started(case: LatentEngineCase, *, same_initial_noise: bool) -> tuple[Request, Track]:
    """A track that stores the start, where the engine can store any of the trajectory."""
    sampling: dict[str, object] = {"same_initial_noise": same_initial_noise}
    keeps_all = not case.provides(Cap.TRAJECTORY_WINDOW, Cap.SDE_STEPS)
    return case.generate(sampling=sampling, keeps_all=keeps_all)


def check_steps(case: LatentEngineCase, *, steps: Sequence[Sequence[int]], num_steps: int) -> None:
    """Sample with these SDE steps of each row and look at every step that can be seen."""
    if not case.provides(Cap.TRAJECTORY_WINDOW) and not case.provides(Cap.TRAJECTORY_FULL):
        raise NotApplicable(f"engine {case.spec.name!r} returns no trajectory to see the steps in")
    model, chosen = case.model(), torch.tensor(steps)
    sampling = case.with_kernel(case.stochastic_kernels[0]) | {"num_inference_steps": num_steps}
    request = case.with_params(case.request(model, sampling=sampling, **case.storing_most()), sde_steps=chosen)
    with case.engine(model) as engine:
        track = case.sample(engine, request)
    result = track.latent.sde_steps.cpu()
    assert torch.equal(result, chosen), f"SDE steps: got {result.tolist()} in the echo, expected {chosen.tolist()}"
    trajectory = case.expected_trajectory(request, track)
    assert bool(trajectory.stochastic.any()), "no stochastic step is stored"
    case.record("off the ODE elsewhere", trajectory.error(trajectory.deterministic), bound=ROUNDING)
    # Rows of a step without noise have 0 here; standard normal noise of 20 and more numbers has an rms near 1.
    quietest = float(trajectory.drawn().square().flatten(1).mean(1).sqrt().min())
    assert quietest > 0.3, f"noise of a sample at an SDE step: got rms {quietest:.3g}, expected about 1"
