"""What an engine says of the way: the stored latents, the steps between them, their log-probs, the conditions."""

from __future__ import annotations

from contextlib import nullcontext

import torch
from unirl.conformance.benches.engine import ROUNDING
from unirl.conformance.benches.latent_engine import LatentEngineBench
from unirl.conformance.claims import claim
from unirl.conformance.verdicts import NotApplicable
from unirl.core.capability import Cap
from unirl.core.errors import RecipeError
from unirl.core.request import Request
from unirl.core.rollout import Rollout
from unirl.numerics.track_replay import TrackReplay

GAP = 5e-5
"""Bound of a log-prob gap: half of 1e-4, the narrowest clip range in common use, which the ratio must not reach by
rounding. Log-probs are means over elements, so fp32 rounding leaves 1e-7 to 1e-6."""
GUIDED = {"guidance_scale": 3.0, "negative_prompt": "blurry"}


@claim("engine", proves=(Cap.TRAJECTORY_WINDOW, Cap.SDE_STEPS))
def test_a_window_holds_the_latents_around_sde_steps_and_the_end(bench: LatentEngineBench) -> None:
    """A window is {i, i + 1} of every SDE step i and the final latent, nothing else: what training needs, and what it
    pays for in memory.

    If it fails: store position i before step i and i + 1 after it, each once, rising; count positions like `sigmas`.
    """
    model = bench.model()
    steps = torch.tensor([[1, 4]] * 6)
    sampling = bench.with_kernel(bench.noisy_kernels[0]) | {"steps": 7}
    request = bench.with_sde_steps(bench.request(model, sampling=sampling, trajectory="window"), steps)
    with bench.engine(model) as engine:
        track = bench.sample(engine, request)
    found = track.latent.positions.tolist()
    assert found == [[1, 2, 4, 5, 7]] * 6, f"SDE steps 1 and 4 of 7 need positions [1, 2, 4, 5, 7]; stored are {found}"
    assert track.latent.latents.shape[:2] == (6, 5), f"latents are {list(track.latent.latents.shape)}"
    walk = bench.walk(request, track)
    assert bool(walk.stochastic.any()), "no stochastic step is stored"
    if bench.native(Cap.STEP_NOISE):
        bench.record("off the way", walk.error(walk.stochastic, with_noise=True), bound=ROUNDING)


@claim("engine", proves=Cap.TRAJECTORY_FULL)
def test_a_full_trajectory_holds_every_latent(bench: LatentEngineBench) -> None:
    """On request the latents of every step come back, from x_T to the end, whatever the SDE steps are.

    If it fails: store T + 1 latents, also at deterministic steps, and before the first one.
    """
    quiet = bench.with_kernel(bench.quiet_kernel)
    _, rollout = bench.generate(sampling=quiet, trajectory="full")
    segment = rollout.tracks[bench.track].latent
    wanted = [list(range(segment.num_steps + 1))] * segment.num_rows
    assert segment.positions.tolist() == wanted, f"positions {wanted[0]} are wanted, {segment.positions.tolist()} found"
    assert segment.latents.shape[1] == segment.num_steps + 1, f"latents are {list(segment.latents.shape)}"
    assert bool(torch.isfinite(segment.latents).all()), "some latents are not finite"


@claim("engine", proves=Cap.LATENT_ROLLOUT)
def test_every_kernel_of_the_spec_steps_by_its_formula(bench: LatentEngineBench) -> None:
    """Each latent follows from the one before by the formula of its kernel, for every kernel that the spec names, with
    the velocity of the model that trains. Otherwise the ratio of the first update is not 1.

    If it fails: the number says which kernel. Look at the velocity first (timestep scaling, conditions, dtype), then at
    mean and std; std is that of the transition, g sqrt(-dt), not the diffusion coefficient g.
    """
    if not bench.native(Cap.TRAJECTORY_FULL) and not bench.native(Cap.INITIAL_NOISE):
        raise NotApplicable(f"engine {bench.spec.name!r} promises neither a full trajectory nor a known start")
    for kernel in bench.kernels:
        # Not the last step: that of cps and ddim-eta has no noise.
        sampling = bench.with_kernel(kernel, sde_steps=(0, 1, 2) if bench.native(Cap.SDE_STEPS) else ())
        request, rollout = bench.generate(sampling=sampling, **bench.storing_most())
        walk = bench.walk(request, rollout.tracks[bench.track])
        if bench.native(Cap.STEP_NOISE):
            bench.record(f"{kernel} off", walk.error(walk.seen, with_noise=True), bound=ROUNDING)
            continue
        bench.record(f"{kernel} off", walk.error(walk.deterministic), bound=ROUNDING)
        if bool(walk.stochastic.any()):
            spread = float(walk.drawn().square().mean().sqrt())
            # The rms of n standard normal numbers has a deviation of 1 / sqrt(2 n), 0.04 for the smallest miniature.
            assert 0.75 < spread < 1.25, f"{kernel}: the noise of its steps has an rms of {spread:.3g}; 1 is wanted"


@claim("engine", proves=Cap.LOG_PROBS_GAUSSIAN)
def test_log_probs_are_those_of_the_replay(bench: LatentEngineBench) -> None:
    """The engine's log-prob of each SDE step is what training finds for the same latents and weights: ratio 1. The
    number is the largest gap, over all kernels with noise, against the replay and against the kernel's formula.

    If it fails: log-probs are means over elements, not sums, in fp32, of the latent that was stored (after rounding),
    with the transition's std and the constants. A gap of 1e-5 to 1e-3 alone is mostly a dtype of the engine.
    """
    for kernel in bench.noisy_kernels:
        sampling = bench.with_kernel(kernel, sde_steps=(0, 1, 2))
        request, rollout = bench.generate(sampling=sampling, **bench.storing_most())
        check_log_probs(bench, request, rollout, name=f"log-prob gap {kernel}")
    if "cps" in bench.kernels:
        bare = bench.with_kernel("cps", sde_steps=(0, 1, 2)) | {"kernel_options": {"constants": False}}
        check_log_probs(bench, *bench.generate(sampling=bare), name="log-prob gap cps without constants")


@claim("engine", proves=(Cap.LOG_PROBS_GAUSSIAN, Cap.GUIDANCE), needs={"model": (Cap.GUIDANCE,)})
def test_log_probs_under_guidance_are_those_of_the_replay(bench: LatentEngineBench) -> None:
    """The same under classifier-free guidance: the policy that samples is the guided one.

    If it fails: score with the guided velocity that the step was taken with, not the conditional one, and return the
    negative conditions.
    """
    check_log_probs(bench, *bench.generate(sampling=GUIDED), name="log-prob gap")


@claim("engine", proves=Cap.GUIDANCE, needs={"model": (Cap.GUIDANCE,)})
def test_guidance_and_its_mode_are_honoured(bench: LatentEngineBench) -> None:
    """Scale and mode of guidance are echoed, and the steps are those of the guided velocity: v- + scale (v+ - v-), in
    `norm-corrected` with the norm of v+.

    If it fails: look for a scale of the engine's own (diffusers pipelines have one), a conditional and an unconditional
    half that are swapped, or a mode that is ignored; a mode other than `batched` that it cannot do must be refused with
    its name.
    """
    for mode in ("batched", "two-pass", "norm-corrected"):
        sampling = bench.with_kernel(bench.quiet_kernel) | GUIDED | {"guidance_mode": mode}
        try:
            request, rollout = bench.generate(sampling=sampling, **bench.storing_most())
        except RecipeError as refusal:
            assert mode != "batched" and f"guidance_mode: {mode!r}" in str(refusal), f"{mode!r}: {refusal}"
            continue
        segment = rollout.tracks[bench.track].latent
        echoed = (segment.guidance_scale, segment.guidance_mode)
        assert echoed == (3.0, mode), f"guidance 3.0, {mode!r} was asked for; {echoed} is echoed"
        walk = bench.walk(request, rollout.tracks[bench.track])
        if not bool(walk.deterministic.any()):
            raise NotApplicable(f"engine {bench.spec.name!r} promises neither a known start nor a trajectory to see")
        bench.record(f"{mode} off", walk.error(walk.deterministic), bound=ROUNDING)


@claim("engine", proves=(Cap.GUIDANCE, Cap.CONDITIONS), needs={"model": (Cap.GUIDANCE,)})
def test_negative_prompts_are_used_and_returned(bench: LatentEngineBench) -> None:
    """Under guidance the negative prompt of the request is encoded, used, and comes back as conditions `negative`;
    without guidance there are none.

    If it fails: look for an empty negative prompt that is always used, and return what went into the forward.
    """
    request, rollout = bench.generate(sampling=GUIDED)
    track = rollout.tracks[bench.track]
    assert set(track.conditions) == {"positive", "negative"}, f"conditions are {sorted(track.conditions)}"
    bench.check_conditions(request, track, "negative")
    bare = bench.generate()[1].tracks[bench.track]
    assert set(bare.conditions) == {"positive"}, f"without guidance there are conditions {sorted(bare.conditions)}"


@claim("engine", proves=Cap.CONDITIONS)
def test_conditions_are_those_that_it_generated_from(bench: LatentEngineBench) -> None:
    """The prompt embeddings that come back belong to each sample's prompt, agree with the model's own, and are what
    the sample was made from: training replays with them.

    The request's groups take turns, so embeddings in the order of the prompts are caught.

    If it fails: look at the `index` of the conditions, at padding to the longest prompt, and at the encoders' dtype.
    """
    model = bench.model()
    sampling = bench.with_kernel(bench.quiet_kernel)
    request = bench.request(model, sampling=sampling, **bench.storing_most()).select((0, 3, 1, 4, 2, 5))
    with bench.engine(model) as engine:
        track = bench.sample(engine, request)
    bench.check_conditions(request, track, "positive")
    walk = bench.walk(request, track)
    if bool(walk.deterministic.any()):
        bench.record("off the way of these conditions", walk.error(walk.deterministic), bound=ROUNDING)


def check_log_probs(bench: LatentEngineBench, request: Request, rollout: Rollout, *, name: str) -> None:
    """Against the replay, as training does it, and against the formula."""
    segment = rollout.tracks[bench.track].latent
    found = segment.log_probs
    assert found is not None, "no log-probs came back"
    shape = (segment.num_rows, segment.sde_steps.shape[1])
    assert tuple(found.shape) == shape, f"log-probs are {list(found.shape)}, [samples, SDE steps] {shape} are wanted"
    assert found.dtype is torch.float32, f"log-probs are {found.dtype}; float32 is wanted"
    model = bench.model()
    track = rollout.tracks[bench.track].to(model.device)
    with torch.no_grad():
        replay = TrackReplay(model, stacked=True, policy_context=lambda _: nullcontext())
        again = replay(track).log_probs
    bench.record(name, float((found.to(again.device) - again).abs().max()), bound=GAP)
    walk = bench.walk(request, rollout.tracks[bench.track])
    steps = segment.sde_steps.to(model.device)
    formula = walk.log_probs.gather(1, steps.clamp_min(0)) * (steps >= 0)
    seen = walk.seen.gather(1, steps.clamp_min(0))
    assert bool(seen.all()), "an SDE step is not stored"
    bench.record(f"{name}, formula", float((found.to(model.device) - formula).abs().max()), bound=GAP)
