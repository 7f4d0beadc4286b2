"""Trees of samples: shared noise, shared forwards, and what they leave unchanged."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import pytest
import torch
from torch import Tensor
from unirl.core.errors import EchoMismatch
from unirl.core.types.inputs import Inputs
from unirl.core.types.request import Request
from unirl.core.types.rollout import verify_echo
from unirl.core.types.sampling import LatentSamplingConfig, SdeStepsConfig
from unirl.core.types.serial import from_bytes, to_bytes
from unirl.core.types.track import Conditions, LatentSegment, Track
from unirl.engine_host.latent_rows import joined, rows_of
from unirl.numerics.diffusion.branching import branch_noise_ids
from unirl.numerics.diffusion.request import plan_latents
from unirl.numerics.diffusion.rollout import latent_track, sample_latents

SHAPE = (2, 3)
STEPS = 4


class Counting:
    """The velocity to the point of the conditions, elementwise: a row's bits do not depend on its batch."""

    def __init__(self) -> None:
        self.rows: list[int] = []

    def __call__(self, x: Tensor, sigma: Tensor, conditions: Mapping[str, Tensor]) -> Tensor:
        self.rows.append(x.shape[0])
        assert conditions["point"].shape[0] == x.shape[0]
        return (x - conditions["point"]) / sigma.view(-1, 1, 1)


def a_request(
    branch_steps: Sequence[int] = (0, 2), *, factor: int = 2, groups: int = 2, size: int | None = None
) -> Request:
    size = factor ** len(branch_steps) if size is None else size
    group_ids = tuple(f"r0/p{group}" for group in range(groups) for _ in range(size))
    sample_ids = tuple(f"{group}/{row % size}" for row, group in enumerate(group_ids))
    sampling = LatentSamplingConfig(
        num_inference_steps=STEPS,
        eta=0.7,
        same_initial_noise=True,
        sde=SdeStepsConfig(branch_steps=list(branch_steps), branch_factor=factor),
    )
    params = plan_latents(
        sampling,
        sigmas=torch.tensor([1.0, 0.8, 0.6, 0.3, 0.0]),
        latent_shape=SHAPE,
        seed=1,
        rollout=0,
        sample_ids=sample_ids,
        group_ids=group_ids,
        trajectory="full",
    )
    return Request(
        track="image",
        sample_ids=sample_ids,
        group_ids=group_ids,
        inputs=Inputs.of_texts(group_ids),
        metadata=({},) * len(sample_ids),
        params=params,
        seed=1,
        rollout=0,
        policy_version=0,
    )


def conditions_of(request: Request) -> Conditions:
    """The point of a row is a number of its text alone."""
    points = torch.tensor([float(sum(map(ord, text)) % 7) for text in request.inputs.texts])
    return Conditions(
        values={"point": points.view(-1, 1, 1).expand(-1, *SHAPE).clone()}, index=torch.arange(request.num_rows)
    )


def sample(request: Request) -> tuple[LatentSegment, Counting]:
    velocity = Counting()
    conditions = {"positive": conditions_of(request)}
    return sample_latents(velocity, request, latent_shape=SHAPE, conditions=conditions), velocity


def track_of(request: Request) -> Track:
    segment, _ = sample(request)
    return latent_track(request, segment=segment, conditions={}, media=None, policy_version=(0,) * request.num_rows)


def test_keys_follow_the_tree() -> None:
    ids = [f"g/{row}" for row in range(8)]
    keys = branch_noise_ids(ids, ["g"] * 8, branch_steps=(1, 2, 4), factor=2, num_steps=5)
    places = [[int(key[2:]) for key in own] for own in keys]
    # Written down by hand: one path at step 0, two at 1, four at 2 and 3, eight at 4.
    assert places == [
        [0, 0, 0, 0, 0],
        [0, 0, 0, 0, 1],
        [0, 0, 2, 2, 2],
        [0, 0, 2, 2, 3],
        [0, 4, 4, 4, 4],
        [0, 4, 4, 4, 5],
        [0, 4, 6, 6, 6],
        [0, 4, 6, 6, 7],
    ]


def test_groups_that_stand_mixed_have_the_same_trees() -> None:
    ids, groups = ["a/0", "b/0", "a/1", "b/1"], ["a", "b", "a", "b"]
    keys = branch_noise_ids(ids, groups, branch_steps=(1,), factor=2, num_steps=2)
    assert keys == (("a/0", "a/0"), ("b/0", "b/0"), ("a/0", "a/1"), ("b/0", "b/1"))


def test_every_path_goes_through_the_model_once() -> None:
    segment, velocity = sample(a_request())
    # A group's latents before steps 0 to 3: x_T, two after the branch at 0, still two before that at 2, then four.
    assert velocity.rows == [2 * paths for paths in (1, 2, 2, 4)]
    for rows in range(4), range(4, 8):
        stored = segment.latents[list(rows)]
        assert [len(stored[:, position].unique(dim=0)) for position in range(STEPS + 1)] == [1, 2, 2, 4, 4]
        # Siblings part last.
        assert torch.equal(stored[0, 2], stored[1, 2]) and torch.equal(stored[2, 2], stored[3, 2])


def test_sharing_changes_no_bit_where_rows_do_not_depend_on_their_batch() -> None:
    request = a_request()
    shared, _ = sample(request)
    # Row by row nothing can be shared, and the request still says which noise each row draws.
    alone = LatentSegment.concat([sample(request.select([row]))[0] for row in range(request.num_rows)])
    for name in ("latents", "positions", "log_probs", "step_noise_ids", "initial_noise"):
        one, other = getattr(shared, name), getattr(alone, name)
        assert torch.equal(one, other) if isinstance(one, Tensor) else one == other, name


def test_sharing_agrees_with_a_network_to_rounding() -> None:
    torch.manual_seed(0)
    layer = torch.nn.Linear(6, 6).double()

    def velocity(x: Tensor, sigma: Tensor, conditions: Mapping[str, Tensor]) -> Tensor:
        return layer(x.double().flatten(1)).tanh().view_as(x).float()

    def sampled(request: Request) -> LatentSegment:
        conditions = {"positive": conditions_of(request)}
        with torch.no_grad():
            return sample_latents(velocity, request, latent_shape=SHAPE, conditions=conditions)

    request = a_request()
    alone = LatentSegment.concat([sampled(request.select([row])) for row in range(request.num_rows)])
    # The products differ by 1e-15 between batches, so the velocities by one rounding to fp32 at most, in four steps of
    # latents of order 1.
    torch.testing.assert_close(sampled(request).latents, alone.latents, rtol=0, atol=4 * 2.0**-22)


def test_one_branch_at_the_first_step_is_independent_noise_from_a_shared_start() -> None:
    tree = a_request((0,), factor=4)
    plain = dataclasses.replace(tree, params=dataclasses.replace(tree.latent, step_noise_ids=None))
    one, velocity = sample(tree)
    other, every = sample(plain)
    assert torch.equal(one.latents, other.latents)
    assert one.log_probs is not None and other.log_probs is not None
    assert torch.equal(one.log_probs, other.log_probs)
    assert velocity.rows == [2, 8, 8, 8] and every.rows == [8] * 4


def test_rows_of_other_inputs_are_not_taken_for_one_path() -> None:
    request = a_request((2,), factor=2, groups=1)
    mixed = dataclasses.replace(request, inputs=Inputs.of_texts(("one", "another")))
    _, velocity = sample(mixed)
    assert velocity.rows == [2] * 4


def test_an_engine_that_draws_other_noise_is_found_by_its_echo() -> None:
    request = a_request()
    track = track_of(request)
    verify_echo(request, track)
    plain = dataclasses.replace(request, params=dataclasses.replace(request.latent, step_noise_ids=None))
    with pytest.raises(EchoMismatch, match=r"step_noise_ids: the request says .*, the engine used None"):
        verify_echo(request, track_of(plain))
    with pytest.raises(EchoMismatch, match="step_noise_ids: the request says None"):
        verify_echo(plain, track)


def test_keys_go_to_engines_and_come_back() -> None:
    request = from_bytes(to_bytes(a_request()), Request)
    segment, _ = sample(request)
    rows = rows_of(
        request,
        segment=segment,
        conditions={},
        media=None,
        texts=request.inputs.texts,
        negative_prompt=None,
        sources={"positive": [[]] * request.num_rows},
        version=0,
    )
    _, data = joined(request, rows)
    track = from_bytes(data["track"].numpy().tobytes(), Track)
    verify_echo(a_request(), track)


def test_a_group_that_does_not_fill_the_tree_is_refused() -> None:
    with pytest.raises(ValueError, match=r"got 6 samples in group 'r0/p0', expected 4: branch_factor 2 at the 2 steps"):
        a_request(size=6)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"branch_steps": [0, 4]}, r"got \[0, 4\], expected rising stochastic steps, some of \[0, 1, 2, 3\]"),
        ({"branch_steps": [2, 0]}, r"got \[2, 0\], expected rising"),
        ({"branch_steps": [1, 1]}, r"got \[1, 1\], expected rising"),
        ({"branch_steps": [0, 1, 2, 3, 4]}, "expected rising stochastic steps"),
        ({"branch_steps": [2], "mode": "fraction", "last": 0.5}, r"some of \[0, 1\]"),
        ({"branch_steps": [2], "mode": "fixed", "steps": [3, 1]}, r"some of \[1, 3\]"),
        ({"branch_steps": [0], "mode": "window"}, "mode 'window' may leave these steps out"),
        ({"branch_steps": [0], "mode": "none"}, "mode 'none' may leave these steps out"),
    ],
)
def test_steps_that_cannot_branch_are_refused(settings: dict[str, object], text: str) -> None:
    (reason,) = SdeStepsConfig(**settings).problems(STEPS)  # type: ignore[arg-type]
    assert reason.key == ".branch_steps"
    with pytest.raises(AssertionError, match=text):
        raise AssertionError(reason.text)


def test_steps_that_can_branch_are_accepted() -> None:
    for settings in ({}, {"mode": "fraction", "last": 0.5}, {"mode": "fixed", "steps": [1, 0]}):
        assert not list(SdeStepsConfig(branch_steps=[0, 1], **settings).problems(STEPS))  # type: ignore[arg-type]
