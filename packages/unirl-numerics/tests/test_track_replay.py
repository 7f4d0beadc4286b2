"""Replay of a track reads everything from the track."""

from __future__ import annotations

import dataclasses
from contextlib import contextmanager

import pytest
import torch
from unirl.core.errors import BatchError
from unirl.core.types.inputs import Inputs
from unirl.core.types.track import Conditions, LatentSegment, Sampler, Status, TextSegment, Track
from unirl.numerics.diffusion.denoise import denoise
from unirl.numerics.diffusion.guidance import make_guidance
from unirl.numerics.diffusion.kernels import make_kernel
from unirl.numerics.diffusion.replay import check_stored_steps
from unirl.numerics.diffusion.through_sampler import with_step_means
from unirl.numerics.train.track_replay import TrackReplay

SIGMAS = torch.tensor([1.0, 0.75, 0.4, 0.0])
STEPS = torch.tensor([[0, 1], [1, -1], [0, -1]])


class Model:
    """A linear velocity with one weight."""

    def __init__(self):
        self.weight = torch.tensor(0.7, requires_grad=True)
        self.calls = 0
        self.spec, self.device = None, "cpu"

    def velocity(self, x, sigma, conditions):
        self.calls += 1
        return self.weight * x * sigma[:, None, None] + conditions["text"][:, :, None]


def make_track(model, *, kernel="flow-sde", eta=0.7, options=(), scale=1.0, mode="batched"):
    generator = torch.Generator().manual_seed(0)
    index = torch.tensor([1, 0, 1])
    positive = Conditions(values={"text": torch.randn(2, 2, generator=generator)}, index=index)
    negative = Conditions(values={"text": torch.randn(1, 2, generator=generator)}, index=index * 0)
    noise = torch.randn(3, 3, 2, 2, generator=generator)
    conditions = {"positive": positive, **({"negative": negative} if scale != 1.0 else {})}
    with torch.no_grad():
        path = denoise(
            model.velocity,
            torch.randn(3, 2, 2, generator=generator),
            sigmas=SIGMAS,
            kernel=make_kernel(kernel, eta=eta, **dict(options)),
            sde_steps=STEPS.numpy(),
            conditions={branch: one.expanded() for branch, one in conditions.items()},
            guidance=make_guidance(mode, scale=scale),
            step_noise=lambda step, rows: noise[step][rows],
        ).segment()
    segment = LatentSegment(
        latents=path.latents,
        positions=path.positions,
        sde_steps=STEPS,
        log_probs=path.log_probs,
        sigmas=SIGMAS,
        sampler=Sampler(kernel=kernel, eta=eta, options=options, guidance_scale=scale, guidance_mode=mode),
    )
    return Track(
        name="image",
        sample_ids=("a", "b", "c"),
        group_ids=("a", "b", "c"),
        inputs=Inputs.of_texts(("",) * 3),
        metadata=({},) * 3,
        conditions=conditions,
        segment=segment,
        sample_weights=torch.ones(3),
        status=(Status.COMPLETED,) * 3,
        policy_version=(0,) * 3,
    )


@contextmanager
def no_policy(which):
    raise AssertionError(f"policy {which} was not asked for")
    yield


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"kernel": "dance-sde", "eta": 0.3},
        {"kernel": "cps", "eta": 0.8, "options": (("constants", False),)},
        {"scale": 4.5},
        {"scale": 3.0, "mode": "two-pass"},
        {"scale": 3.0, "mode": "norm-corrected"},
    ],
)
def test_the_replay_of_a_track_repeats_its_rollout(settings):
    model = Model()
    track = make_track(model, **settings)
    valid = STEPS >= 0
    serial = TrackReplay(model, stacked=False, policy_context=no_policy)(track)
    assert torch.equal(serial.log_probs[valid], track.latent.log_probs[valid])
    assert torch.equal(serial.valid, valid)
    stacked = TrackReplay(model, stacked=True, policy_context=no_policy)(track)
    torch.testing.assert_close(stacked.log_probs, serial.log_probs, rtol=1e-6, atol=1e-6)


def test_stacked_is_one_forward_and_serial_one_for_each_column():
    for stacked, expected in ((True, 1), (False, 2)):
        model = Model()
        track = make_track(model)
        model.calls = 0
        TrackReplay(model, stacked=stacked, policy_context=no_policy)(track)
        assert model.calls == expected


def test_only_the_live_policy_has_a_gradient_and_others_run_inside_theirs():
    model = Model()
    track = make_track(model)
    entered = []

    @contextmanager
    def policy(which):
        entered.append(which)
        kept = model.weight.data.clone()
        model.weight.data.mul_(0.5)
        try:
            yield
        finally:
            model.weight.data.copy_(kept)
            entered.append("left")

    replay = TrackReplay(model, stacked=True, policy_context=policy)
    live, other = replay(track), replay(track, policy="reference")
    assert entered == ["reference", "left"]
    assert live.log_probs.requires_grad and not other.log_probs.requires_grad
    assert not torch.equal(live.log_probs.detach(), other.log_probs)
    with torch.no_grad():
        assert not replay(track).log_probs.requires_grad


def test_rows_may_be_taken_in_any_order():
    model = Model()
    track = make_track(model)
    replay = TrackReplay(model, stacked=True, policy_context=no_policy)
    whole = replay(track).log_probs
    torch.testing.assert_close(replay(track.select([2, 0])).log_probs, whole[[2, 0]], rtol=1e-6, atol=1e-6)


def test_what_cannot_be_replayed_is_refused():
    model = Model()
    track = make_track(model)
    replay = TrackReplay(model, stacked=True, policy_context=no_policy)
    one = torch.zeros(1, dtype=torch.int64)
    tokens = TextSegment(prompt_tokens=(one,) * 3, tokens=(one,) * 3)
    with pytest.raises(BatchError, match="it is a text track, but the trained model is not a TextModel"):
        replay(dataclasses.replace(track, segment=tokens))
    unguided = dataclasses.replace(track.latent, sampler=dataclasses.replace(track.latent.sampler, guidance_scale=2.0))
    with pytest.raises(ValueError, match="'negative' is missing"):
        replay(dataclasses.replace(track, segment=unguided))
    misspelt = dataclasses.replace(track.latent, sampler=Sampler(kernel="flow", eta=0.7))
    with pytest.raises(ValueError, match="flow-sde"):
        replay(dataclasses.replace(track, segment=misspelt))


def points_of(track, *, k=3):
    generator = torch.Generator().manual_seed(4)
    shape = track.latent.latents.shape[2:]
    x = torch.randn(3, k, *shape, generator=generator)
    return x, torch.rand(3, k, generator=generator)


@pytest.mark.parametrize("stacked", [True, False])
def test_the_velocity_at_any_points_is_that_of_the_model_for_each_row(stacked):
    model = Model()
    track = make_track(model, scale=2.0)
    x, sigma = points_of(track)
    forward = TrackReplay(model, stacked=stacked, policy_context=no_policy)
    model.calls = 0
    plain, guided = forward.velocity(track, x, sigma), forward.velocity(track, x, sigma, guided=True)
    assert model.calls == (2 if stacked else 6)
    positive = track.conditions["positive"].expanded()["text"][:, None, :, None]
    negative = track.conditions["negative"].expanded()["text"][:, None, :, None]
    moving = 0.7 * x * sigma[:, :, None, None]
    torch.testing.assert_close(plain.detach(), moving + positive)
    torch.testing.assert_close(guided.detach(), moving + negative + 2 * (positive - negative))
    one = forward.velocity(track, x[:, 0], sigma[:, 0])
    torch.testing.assert_close(one, plain[:, 0])


@pytest.mark.parametrize("guided", [False, True])
def test_the_reference_policy_may_have_a_guidance_of_its_own(guided):
    """In velocities, whatever the loss asks for, and in replays; that of the live policy stays."""
    model, teacher = Model(), Model()
    teacher.weight = torch.tensor(-0.4)
    track = make_track(model, scale=2.0)
    x, sigma = points_of(track)
    forward = TrackReplay(model, stacked=True, policy_context=no_policy)
    before, live = forward.velocity(track, x, sigma, guided=guided), forward(track)
    forward.teachers, forward.reference_guidance = {"": teacher}, 3.5
    assert torch.equal(forward.velocity(track, x, sigma, guided=guided), before)
    assert torch.equal(forward(track).means, live.means)
    given = {branch: one.expanded()["text"][:, None, :, None] for branch, one in track.conditions.items()}
    text = given["negative"] + 3.5 * (given["positive"] - given["negative"])
    result = forward.velocity(track, x, sigma, policy="reference", guided=guided)
    assert not result.requires_grad
    torch.testing.assert_close(result, -0.4 * x * sigma[:, :, None, None] + text)
    # The mean of a step is linear in the velocity: between 3.5 and 2 as 1.5 times that between 1 and 0.
    means = {scale: means_at(forward, track, scale) for scale in (0.0, 1.0, 2.0, 3.5)}
    torch.testing.assert_close(means[3.5] - means[2.0], 1.5 * (means[1.0] - means[0.0]), rtol=1e-4, atol=1e-6)
    assert not torch.equal(means[3.5], means[2.0])


def means_at(forward, track, scale):
    forward.reference_guidance = scale
    return forward(track, policy="reference").means


def test_the_velocity_has_the_gradient_of_the_weights_and_of_the_points():
    model = Model()
    track = make_track(model)
    x, sigma = points_of(track)
    x.requires_grad_()
    TrackReplay(model, stacked=True, policy_context=no_policy).velocity(track, x, sigma).sum().backward()
    torch.testing.assert_close(model.weight.grad, (x.detach() * sigma[:, :, None, None]).sum())
    torch.testing.assert_close(x.grad, (0.7 * sigma)[:, :, None, None].expand_as(x))


def test_decoding_keeps_the_gradient_of_the_latents():
    model = Model()
    track = make_track(model)
    model.decode = lambda latents: latents.square()
    latents = torch.randn(3, 2, 2, requires_grad=True)
    TrackReplay(model, stacked=True, policy_context=no_policy).decode(track, latents).sum().backward()
    torch.testing.assert_close(latents.grad, 2 * latents.detach())


def test_points_that_are_not_those_of_the_rows_are_refused():
    model = Model()
    track = make_track(model)
    x, sigma = points_of(track)
    forward = TrackReplay(model, stacked=True, policy_context=no_policy)
    for wrong in (
        (x, sigma[:, 0]),
        (x[:, 0], sigma),
        (x[:2], sigma[:2]),
        (x[..., :1], sigma),
        (x[:, :0], sigma[:, :0]),
    ):
        with pytest.raises(BatchError, match=r"expected one sigma for each latent, \[3\] or \[3, k\]"):
            forward.velocity(track, *wrong)
    with pytest.raises(BatchError, match=r"to decode, expected \[3, 2, 2\]"):
        forward.decode(track, x)


def test_means_are_kept_of_the_stochastic_steps_that_the_gradient_goes_through():
    model = Model()
    track = make_track(model)
    forward = TrackReplay(model, stacked=True, policy_context=no_policy)
    whole = forward(track)
    result = with_step_means(track, forward, first=1).latent
    assert result.train_steps.tolist() == [[1], [1], [-1]] and result.log_probs is None
    # The steps 1 of the first two rows; stacked forwards of other sizes round differently, in numbers of order 1.
    expected = torch.stack([whole.means[0, 1], whole.means[1, 0]]).detach()
    torch.testing.assert_close(result.means[:2, 0], expected, rtol=1e-6, atol=1e-6)
    assert not result.means.requires_grad
    assert with_step_means(track, forward, first=2) is track


def test_a_track_is_checked_once_before_it_is_replayed_on_a_device():
    track = make_track(Model())
    check_stored_steps(track)

    def changed(**fields):
        return dataclasses.replace(track, segment=dataclasses.replace(track.latent, **fields))

    with pytest.raises(ValueError, match="row 1 has no stored latents for step 1"):
        positions = track.latent.positions.clone()
        positions[1][positions[1] == 2] = -1
        check_stored_steps(changed(positions=positions))
    with pytest.raises(ValueError, match="'cps': got a deterministic step"):
        last = Sampler(kernel="cps", eta=0.8)
        every = torch.arange(4).expand(3, 4)
        latents = track.latent.latents[:, :1].expand(3, 4, 2, 2)
        check_stored_steps(
            changed(sampler=last, sde_steps=torch.where(STEPS < 0, -1, STEPS + 1), positions=every, latents=latents)
        )
    # Nothing of it is replayed.
    check_stored_steps(changed(sde_steps=torch.zeros((3, 0), dtype=torch.int64), positions=torch.full((3, 1), 3)))
