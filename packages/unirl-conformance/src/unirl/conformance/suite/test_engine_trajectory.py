"""Trajectories: stored latents, the steps between them, their log-probs, and conditions."""

from __future__ import annotations

from contextlib import nullcontext

import torch
from unirl.conformance.claims import claim
from unirl.conformance.doubles.expected_trajectory import distance
from unirl.conformance.doubles.samplers import GUIDANCE, KERNEL
from unirl.conformance.fixtures.engine import ROUNDING
from unirl.conformance.fixtures.latent_engine import LatentEngineCase
from unirl.conformance.verdicts import NotApplicable
from unirl.core.errors import RecipeError
from unirl.core.specs.capability import Cap
from unirl.core.types.request import Request
from unirl.core.types.track import Track
from unirl.numerics.train.track_replay import TrackReplay

GAP = 5e-5
"""Bound of a log-prob mismatch: half of 1e-4, the narrowest clip range in common use, which the ratio must not reach by
rounding. Log-probs are means over elements, so fp32 rounding leaves 1e-7 to 1e-6."""
GUIDED = {"guidance_scale": 3.0, "negative_prompt": "blurry"}
BOUNDARY = 0.875
"""Default of `two-scale`, and where the experts of Wan 2.2's miniature change."""


@claim("engine", proves=(Cap.TRAJECTORY_WINDOW, Cap.SDE_STEPS))
def test_a_window_holds_the_latents_around_sde_steps_and_the_end(case: LatentEngineCase) -> None:
    """A window is {i, i + 1} of every SDE step i and the final latent: exactly the latents that training needs.

    If it fails: store position i before step i and i + 1 after it, each once, rising; count positions like `sigmas`.
    """
    model = case.model()
    steps = torch.tensor([[1, 4]] * 6)
    sampling = case.with_kernel(case.stochastic_kernels[0]) | {"num_inference_steps": 7}
    request = case.with_params(case.request(model, sampling=sampling, keeps_all=False), sde_steps=steps)
    with case.engine(model) as engine:
        track = case.sample(engine, request)
    result = track.latent.positions.tolist()
    assert result == [[1, 2, 4, 5, 7]] * 6, (
        f"SDE steps 1 and 4 of 7 need positions [1, 2, 4, 5, 7]; stored are {result}"
    )
    assert track.latent.latents.shape[:2] == (6, 5), f"latents are {list(track.latent.latents.shape)}"
    trajectory = case.expected_trajectory(request, track)
    assert bool(trajectory.stochastic.any()), "no stochastic step is stored"
    if case.provides(Cap.STEP_NOISE):
        case.record("off the way", trajectory.error(trajectory.stochastic, with_noise=True), bound=ROUNDING)


@claim("engine", proves=Cap.TRAJECTORY_FULL)
def test_a_full_trajectory_holds_every_latent(case: LatentEngineCase) -> None:
    """The latents at the positions that a request keeps come back, of each row its own, whatever the SDE steps are: all
    of them from x_T to the end, or some.

    If it fails: store T + 1 latents, also at deterministic steps, and before the first one.
    """
    quiet = case.with_kernel(case.deterministic_kernel)
    segment = case.generate(sampling=quiet, keeps_all=True)[1].latent
    expected = [list(range(segment.num_steps + 1))] * segment.num_rows
    assert segment.positions.tolist() == expected, (
        f"positions: got {segment.positions.tolist()}, expected {expected[0]} in each row"
    )
    assert segment.latents.shape[1] == segment.num_steps + 1, f"latents are {list(segment.latents.shape)}"
    assert bool(torch.isfinite(segment.latents).all()), "some latents are not finite"
    _check_some_positions(case)


def _check_some_positions(case: LatentEngineCase) -> None:
    model = case.model()
    request = case.request(model, sampling=case.with_kernel(case.deterministic_kernel), keeps_all=False)
    keep = torch.tensor([[1, 3], [-1, 2], [-1, -1]] * 2)
    request = case.with_params(request, keep=keep)
    with case.engine(model) as engine:
        segment = case.sample(engine, request).latent
    end = segment.num_steps
    for row, own in enumerate(keep.tolist()):
        expected = sorted({*own, end} - {-1})
        result = [position for position in segment.positions[row].tolist() if position >= 0]
        assert result == expected, f"row {row} keeps {own} of {end} steps: expected {expected}, stored are {result}"


@claim("engine", proves=Cap.LATENT_ROLLOUT)
def test_every_kernel_of_the_spec_steps_by_its_formula(case: LatentEngineCase) -> None:
    """Each latent follows from the one before by the formula of its kernel, for every kernel that the spec names, with
    the velocity of the trained model. Otherwise the ratio of the first update is not 1.

    If it fails: the number says which kernel. Look at the velocity first (timestep scaling, conditions, dtype), then at
    mean and std; std is that of the transition, g sqrt(-dt), not the diffusion coefficient g.
    """
    if not case.provides(Cap.TRAJECTORY_FULL) and not case.provides(Cap.INITIAL_NOISE):
        raise NotApplicable(f"engine {case.spec.name!r} promises neither a full trajectory nor a known start")
    for kernel in case.kernels:
        # Not the last step: that of cps and ddim-eta has no noise.
        sampling = case.with_kernel(kernel, sde_steps=(0, 1, 2) if case.provides(Cap.SDE_STEPS) else ())
        trajectory = case.expected_trajectory(*case.generate(sampling=sampling, **case.storing_most()))
        if case.provides(Cap.STEP_NOISE):
            case.record(f"{kernel} off", trajectory.error(trajectory.seen, with_noise=True), bound=ROUNDING)
            continue
        case.record(f"{kernel} off", trajectory.error(trajectory.deterministic), bound=ROUNDING)
        if bool(trajectory.stochastic.any()):
            spread = float(trajectory.drawn().square().mean().sqrt())
            # The rms of n standard normal numbers has a deviation of 1 / sqrt(2 n), 0.04 for the smallest miniature.
            assert 0.75 < spread < 1.25, f"{kernel}: the noise of its steps has an rms of {spread:.3g}, expected 1"


@claim("engine", proves=Cap.LOG_PROBS_GAUSSIAN)
def test_log_probs_are_those_of_the_replay(case: LatentEngineCase) -> None:
    """The engine's log-prob of each SDE step equals training's for the same latents and weights: ratio 1. The number is
    the maximum mismatch, over all kernels with noise, against the replay and against the kernel's formula.

    If it fails: log-probs are means over elements, not sums, in fp32, of the latent that was stored (after rounding),
    with the transition's std and the constants. A gap of 1e-5 to 1e-3 alone is mostly a dtype of the engine.
    """
    for kernel in case.stochastic_kernels:
        sampling = case.with_kernel(kernel, sde_steps=(0, 1, 2))
        sampled = case.generate(sampling=sampling, **case.storing_most())
        check_log_probs(case, *sampled, name=f"log-prob gap {kernel}")
    if "cps" in case.kernels:
        bare = case.with_kernel("cps", sde_steps=(0, 1, 2)) | {"kernel_options": {"constants": False}}
        check_log_probs(case, *case.generate(sampling=bare), name="log-prob gap cps without constants")


@claim("engine", proves=(Cap.LOG_PROBS_GAUSSIAN, Cap.SDE_STEPS, Cap.INITIAL_NOISE, Cap.STEP_NOISE))
def test_only_requested_steps_are_scored(case: LatentEngineCase) -> None:
    """A request may ask for the log-probs of some SDE steps of each sample. Those of `train_steps` are scored and no
    others, in the order of the request; the samples are those of a request that scores every SDE step.

    If it fails: pass `train_steps` of the request on to whatever scores the steps, row by row, and echo what it scored.
    An engine that scores every SDE step anyway trains the policy on steps that the recipe left out.
    """
    # Not the first two of each row: that is what an engine scores which takes the number of steps alone.
    steps = torch.tensor([[0, 2], [1, 2], [0, 2]] * 2)
    sampling = case.with_kernel(case.stochastic_kernels[0], sde_steps=(0, 1, 2))
    whole = case.generate(sampling=sampling, **case.storing_most())[1].latent
    model = case.model()
    request = case.with_params(case.request(model, sampling=sampling, **case.storing_most()), train_steps=steps)
    with case.engine(model) as engine:
        some = case.sample(engine, request).latent
    echoed = some.train_steps
    assert echoed is not None, "the request says which steps are scored; the engine scored every SDE step"
    assert echoed.tolist() == steps.tolist(), f"{steps.tolist()} were to be scored; {echoed.tolist()} are echoed"
    assert whole.log_probs is not None and some.log_probs is not None, "no log-probs came back"
    # SDE steps 0, 1 and 2 are in columns 0, 1 and 2.
    expected = whole.log_probs.cpu().gather(1, steps)
    shape = list(some.log_probs.shape)
    assert shape == [6, 2], f"log-probs are {shape}; expected [samples, steps] [6, 2]"
    case.record("log-prob gap to scoring every step", float((some.log_probs.cpu() - expected).abs().max()), bound=GAP)
    case.record("final latents off", distance(some.final, whole.final), bound=ROUNDING)


@claim("engine", proves=(Cap.LOG_PROBS_GAUSSIAN, Cap.GUIDANCE), needs={"model": (Cap.GUIDANCE,)})
def test_log_probs_under_guidance_are_those_of_the_replay(case: LatentEngineCase) -> None:
    """The same under classifier-free guidance: the policy that samples is the guided one.

    If it fails: score with the guided velocity that the step was taken with, not the conditional one, and return the
    negative conditions.
    """
    check_log_probs(case, *case.generate(sampling=GUIDED), name="log-prob gap")


@claim("engine", proves=Cap.GUIDANCE, needs={"model": (Cap.GUIDANCE,)})
def test_guidance_and_its_mode_are_honoured(case: LatentEngineCase) -> None:
    """Scale and mode of guidance are echoed, and the steps are those of the guided velocity: v- + scale (v+ - v-), in
    `norm-corrected` with the norm of v+; `interval` and `two-scale` take a scale for each sigma; `text-image`
    scales down to the norm of v+.

    If it fails: look for a scale of the engine's own (diffusers pipelines have one), a conditional and an unconditional
    half that are swapped, or a mode that is ignored; a mode other than `batched` that it cannot do must be rejected
    with its name.
    """
    quiet = case.with_kernel(case.deterministic_kernel)
    sigmas = case.request(case.model(), sampling=quiet).latent.sigmas
    # Two steps of four on either side.
    middle = float(sigmas[1] + sigmas[2]) / 2
    # Wan 2.2 takes no other boundary than that of its experts, which has steps on either side as well.
    boundary = BOUNDARY if float(sigmas[-2]) < BOUNDARY <= float(sigmas[0]) else middle
    options = {"interval": {"low": middle}, "two-scale": {"scale_low": 1.5, "boundary": boundary}}
    for mode in case.spec.guidances:
        sampling = quiet | GUIDED | {"guidance_mode": mode, "guidance_options": options.get(mode, {})}
        try:
            request, track = case.generate(sampling=sampling, **case.storing_most())
        except RecipeError as refusal:
            assert mode != "batched" and f"guidance_mode: {mode!r}" in str(refusal), f"{mode!r}: {refusal}"
            continue
        sampler = track.latent.sampler
        echoed = (sampler.guidance_scale, sampler.guidance_mode)
        assert echoed == (3.0, mode), f"guidance: got {echoed} in the echo, expected (3.0, {mode!r})"
        trajectory = case.expected_trajectory(request, track)
        if not bool(trajectory.deterministic.any()):
            raise NotApplicable(f"engine {case.spec.name!r} promises neither a known start nor a trajectory to see")
        case.record(f"{mode} off", trajectory.error(trajectory.deterministic), bound=ROUNDING)


@claim("engine", proves=Cap.PLUGIN_SAMPLERS, needs={"model": (Cap.GUIDANCE,)})
def test_kernels_and_guidances_of_plugins_are_computed(case: LatentEngineCase) -> None:
    """A kernel and a guidance named `module:Class` take the steps and combine the branches as their classes say, and
    are echoed with their options; each branch gets the velocity under its own conditions, which come back.

    The guidance has a third branch, of the empty prompt.

    If it fails: take kernel and guidance of the request's sampler by name, encode `branch_inputs(request)`, and hand
    the velocities to `combine` under the names of their branches.
    """
    stochastic = (0, 1, 2) if case.provides(Cap.SDE_STEPS) else ()
    sampling = case.with_kernel(KERNEL, eta=0.25, sde_steps=stochastic) | GUIDED
    sampling |= {"kernel_options": {"factor": 1.5}, "guidance_mode": GUIDANCE, "guidance_options": {"away": 0.5}}
    request, track = case.generate(sampling=sampling, **case.storing_most())
    sampler = track.latent.sampler
    echoed = (sampler.kernel, dict(sampler.options), sampler.guidance_mode, dict(sampler.guidance_options))
    expected = (KERNEL, {"factor": 1.5}, GUIDANCE, {"away": 0.5})
    assert echoed == expected, f"got {echoed} in the echo, expected {expected}"
    if case.provides(Cap.CONDITIONS):
        for branch in ("positive", "negative", "empty"):
            case.check_conditions(request, track, branch)
    trajectory = case.expected_trajectory(request, track)
    chosen = trajectory.seen if case.provides(Cap.STEP_NOISE) else trajectory.deterministic
    if not bool(chosen.any()):
        raise NotApplicable(f"engine {case.spec.name!r} promises neither a known start nor a trajectory to see")
    case.record("off the way", trajectory.error(chosen, with_noise=True), bound=ROUNDING)


@claim("engine", proves=(Cap.GUIDANCE, Cap.CONDITIONS), needs={"model": (Cap.GUIDANCE,)})
def test_negative_prompts_are_used_and_returned(case: LatentEngineCase) -> None:
    """Under guidance the negative prompt of the request is encoded, used, and comes back as conditions `negative`;
    without guidance there are none.

    If it fails: look for an empty negative prompt that is always used, and return what went into the forward.
    """
    request, track = case.generate(sampling=GUIDED)
    assert set(track.conditions) == {"positive", "negative"}, f"conditions are {sorted(track.conditions)}"
    case.check_conditions(request, track, "negative")
    bare = case.generate()[1]
    assert set(bare.conditions) == {"positive"}, f"without guidance there are conditions {sorted(bare.conditions)}"


@claim("engine", proves=Cap.CONDITIONS)
def test_returned_conditions_are_those_used(case: LatentEngineCase) -> None:
    """The prompt embeddings that come back belong to each sample's prompt, agree with the model's own, and are what
    the sample was made from: training replays with them.

    The request's groups take turns, so embeddings in the order of the prompts are caught.

    If it fails: look at the `index` of the conditions, at padding to the longest prompt, and at the encoders' dtype.
    """
    model = case.model()
    sampling = case.with_kernel(case.deterministic_kernel)
    request = case.request(model, sampling=sampling, **case.storing_most()).select((0, 3, 1, 4, 2, 5))
    with case.engine(model) as engine:
        track = case.sample(engine, request)
    case.check_conditions(request, track, "positive")
    trajectory = case.expected_trajectory(request, track)
    if bool(trajectory.deterministic.any()):
        case.record("off the way of these conditions", trajectory.error(trajectory.deterministic), bound=ROUNDING)


def check_log_probs(case: LatentEngineCase, request: Request, track: Track, *, name: str) -> None:
    """Compare with the replay, as training does it, and with the formula."""
    segment = track.latent
    result = segment.log_probs
    assert result is not None, "no log-probs came back"
    shape = (segment.num_rows, segment.sde_steps.shape[1])
    assert tuple(result.shape) == shape, f"log-probs: got {list(result.shape)}, expected [samples, SDE steps] {shape}"
    assert result.dtype is torch.float32, f"log-probs: got {result.dtype}, expected float32"
    model = case.model()
    with torch.no_grad():
        replay = TrackReplay(model, stacked=True, policy_context=lambda _: nullcontext())
        again = replay(track.to(model.device)).log_probs
    case.record(name, float((result.to(again.device) - again).abs().max()), bound=GAP)
    trajectory = case.expected_trajectory(request, track)
    steps = segment.sde_steps.to(model.device)
    formula = trajectory.log_probs.gather(1, steps.clamp_min(0)) * (steps >= 0)
    seen = trajectory.seen.gather(1, steps.clamp_min(0))
    assert bool(seen.all()), "an SDE step is not stored"
    case.record(f"{name}, formula", float((result.to(model.device) - formula).abs().max()), bound=GAP)
