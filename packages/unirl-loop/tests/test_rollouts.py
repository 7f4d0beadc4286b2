"""Rollouts know their lineage, and an engine that did something else than it was asked is caught."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from unirl.core.errors import BatchError, EchoMismatch
from unirl.core.types.inputs import Inputs
from unirl.core.types.request import LatentRequest, Request, TextRequest
from unirl.core.types.rollout import Rollout, verify_echo
from unirl.core.types.sampling import LatentSamplingConfig, TextSamplingConfig
from unirl.core.types.track import LatentSegment, Sampler, Status, Track
from unirl.loop.parts import generate

SIGMAS = torch.tensor([1.0, 0.5, 0.0])


def make_request(rows: int = 3) -> Request:
    sampling = LatentSamplingConfig(num_inference_steps=2, kernel="cps", eta=0.5, kernel_options={"constants": False})
    return Request(
        track="image",
        sample_ids=tuple(f"s{row}" for row in range(rows)),
        group_ids=("g",) * rows,
        inputs=Inputs.of_texts(("a ring",) * rows),
        metadata=({},) * rows,
        params=LatentRequest(
            sampling=sampling,
            sigmas=SIGMAS,
            sde_steps=torch.zeros(rows, 1, dtype=torch.int64),
            noise_ids=tuple(f"s{row}" for row in range(rows)),
            initial_noise=("abc",) + ("",) * (rows - 1),
            keep=torch.full((rows, 1), -1),
        ),
        seed=1,
        rollout=2,
        policy_version=5,
    )


def sampler(**changed: Any) -> Sampler:
    return dataclasses.replace(Sampler(kernel="cps", eta=0.5, options=(("constants", False),)), **changed)


def faithful(request: Request) -> Track:
    """The track of an engine that did as it was asked."""
    rows, asked = request.num_rows, request.latent
    return make_track(
        request.track,
        sample_ids=request.sample_ids,
        group_ids=request.group_ids,
        policy_version=(request.policy_version,) * rows,
        segment=LatentSegment(
            latents=torch.zeros(rows, 3, 1),
            positions=torch.arange(3).repeat(rows, 1),
            sde_steps=asked.sde_steps.clone(),
            sigmas=asked.sigmas.clone(),
            sampler=sampler(),
            initial_noise=("abc",) * rows,
        ),
    )


def make_track(name: str, *, sample_ids: tuple[str, ...] = ("s0",), **changed: Any) -> Track:
    rows = len(sample_ids)
    fields: dict[str, Any] = {
        "group_ids": ("g",) * rows,
        "inputs": Inputs.of_texts(("a ring",) * rows),
        "metadata": ({},) * rows,
        "sample_weights": torch.ones(rows),
        "status": (Status.COMPLETED,) * rows,
        "policy_version": (0,) * rows,
    }
    return Track(name=name, sample_ids=sample_ids, **{**fields, **changed})


def test_a_faithful_engine_passes() -> None:
    request = make_request()
    verify_echo(request, faithful(request))


def test_kept_positions_that_did_not_come_back_are_named() -> None:
    request = make_request()
    params = dataclasses.replace(request.latent, keep=torch.tensor([[2, -1], [-1, 1], [0, 3]]))
    request = dataclasses.replace(request, params=params)
    with pytest.raises(
        EchoMismatch, match=r"positions of 's2': the request keeps \[0, 3\], and \[3\] did not come back"
    ):
        verify_echo(request, faithful(request))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"sigmas": SIGMAS + 1e-7}, "image.sigmas: the request says tensor"),
        ({"sde_steps": torch.tensor([[0], [1], [0]])}, "image.sde_steps"),
        ({"sampler": sampler(kernel="dance-sde")}, "image.sampler.kernel: the request says 'cps'"),
        ({"sampler": sampler(eta=0.4)}, "image.sampler.eta: the request says 0.5, the engine used 0.4"),
        ({"sampler": sampler(options=(("constants", True),))}, "image.sampler.options"),
        ({"sampler": sampler(guidance_scale=4.5)}, "guidance_scale: the request says 1.0, the engine used 4.5"),
        ({"sampler": sampler(guidance_mode="two-pass")}, "image.sampler.guidance_mode"),
        ({"initial_noise": ("xyz",) * 3}, "image.initial_noise of 's0': the request says 'abc', the engine used 'xyz'"),
        ({"initial_noise": None}, "the engine used ''"),
    ],
)
def test_an_engine_that_sampled_otherwise_is_caught(change: dict[str, Any], says: str) -> None:
    request = make_request()
    track = faithful(request)
    wrong = dataclasses.replace(track, segment=dataclasses.replace(track.latent, **change))
    with pytest.raises(EchoMismatch, match=says):
        verify_echo(request, wrong)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            {"sample_ids": ("s0", "s2", "s1")},
            r"image.sample_ids\[1\]: the request says 's1', the engine used 's2'",
        ),
        ({"group_ids": ("g", "g", "h")}, r"image.group_ids\[2\]"),
        ({"policy_version": (5, 5, 4)}, r"image.policy_version\[2\]: the request says 5, the engine used 4"),
    ],
)
def test_an_engine_that_mixes_samples_up_is_caught(change: dict[str, Any], says: str) -> None:
    request = make_request()
    with pytest.raises(EchoMismatch, match=says):
        verify_echo(request, dataclasses.replace(faithful(request), **change))


def test_a_sample_that_went_missing_is_caught() -> None:
    request = make_request()
    with pytest.raises(EchoMismatch, match="the request says '3 rows', the engine used '2 rows'"):
        verify_echo(request, faithful(request).select([0, 1]))


def test_another_track_than_the_one_of_the_request_is_caught() -> None:
    with pytest.raises(EchoMismatch, match=r"image\.name: the request says 'image', the engine used 'video'"):
        verify_echo(make_request(), make_track("video"))


class Painter:
    """Does as it is asked, except for samples of `forgotten` tracks."""

    def __init__(self, *forgotten: str) -> None:
        self.forgotten = forgotten

    def generate(self, request: Request) -> Track:
        track = faithful(request)
        return track.select([0]) if request.track in self.forgotten else track


def test_a_track_knows_the_stage_that_it_goes_on_from() -> None:
    engine: Any = Painter()
    track = generate(engine, dataclasses.replace(make_request(), track="final"), parent="draft")
    assert (track.name, track.parent_track, track.num_rows) == ("final", "draft", 3)


def test_the_echo_of_every_request_is_compared() -> None:
    engine: Any = Painter("final")
    generate(engine, dataclasses.replace(make_request(), track="draft"))
    with pytest.raises(EchoMismatch, match=r"final\.sample_ids: the request says '3 rows', the engine used '1 rows'"):
        generate(engine, dataclasses.replace(make_request(), track="final"))


def test_latents_come_back_in_the_dtype_that_was_asked_for() -> None:
    request = make_request()
    track = faithful(request)
    verify_echo(request, track)
    narrow = dataclasses.replace(track, segment=dataclasses.replace(track.latent, latents=track.latent.latents.half()))
    with pytest.raises(EchoMismatch, match=r"latents\.dtype: the request says 'float32', the engine used 'float16'"):
        verify_echo(request, narrow)
    sampling = dataclasses.replace(request.latent.sampling, trajectory_dtype="float16")
    asks = dataclasses.replace(request, params=dataclasses.replace(request.latent, sampling=sampling))
    verify_echo(asks, narrow)
    with pytest.raises(EchoMismatch, match="the request says 'float16', the engine used 'float32'"):
        verify_echo(asks, track)


def test_children_know_their_parents() -> None:
    text = make_track("text", sample_ids=("t0", "t1"))
    image = make_track("image", sample_ids=("a", "b", "c"), parent_track="text", parent_ids=("t0", "t0", "t1"))
    rollout = Rollout(tracks={"image": image, "text": text})
    assert rollout.num_samples == 2, "those of the root"


@pytest.mark.parametrize(
    ("tracks", "says"),
    [
        ({"image": make_track("image", parent_track="text", parent_ids=("t0",))}, "names the parent track 'text'"),
        (
            {"t": make_track("t"), "image": make_track("image", parent_track="t", parent_ids=("s9",))},
            r"lacks: \['s9'\]",
        ),
        ({"t": make_track("t"), "image": make_track("image", parent_track="t")}, "'t' and has no parent_ids"),
        ({"image": make_track("video")}, "calls itself 'video'"),
    ],
)
def test_a_lineage_that_cannot_be_is_refused(tracks: dict[str, Track], says: str) -> None:
    with pytest.raises(BatchError, match=says):
        Rollout(tracks=tracks)


def test_a_request_splits_with_its_parameters() -> None:
    request = make_request(4)
    pieces = request.chunks(3)
    assert [piece.latent.noise_ids for piece in pieces] == [("s0", "s1", "s2"), ("s3",)]
    assert Request.concat(pieces).latent.initial_noise == ("abc", "", "", "")


def test_requests_of_two_tracks_are_not_joined() -> None:
    other = dataclasses.replace(make_request(), track="video")
    with pytest.raises(BatchError, match=r"Request.track: piece 0 has 'image', piece 1 has 'video'"):
        Request.concat([make_request(), other])


def test_parameters_of_the_other_kind_are_refused() -> None:
    request = make_request()
    with pytest.raises(
        BatchError, match=r"Request.params of track 'image': got a LatentRequest, expected a TextRequest"
    ):
        _ = request.text
    texts = TextRequest(
        sampling=TextSamplingConfig(), prompt_tokens=(torch.ones(1),) * 3, stop_tokens=(), seeds=(0, 1, 2)
    )
    written = dataclasses.replace(request, track="text", params=texts)
    assert written.text is texts
    with pytest.raises(BatchError, match=r"track 'text': got a TextRequest, expected a LatentRequest"):
        _ = written.latent


def test_a_request_whose_parameters_have_other_rows_is_refused() -> None:
    request = make_request(3)
    with pytest.raises(BatchError, match=r"Request.params: 2 entries for 3 samples"):
        dataclasses.replace(request, params=request.latent.select([0, 1]))
    with pytest.raises(BatchError, match=r"LatentRequest.sde_steps: 1 entries for 3 samples"):
        dataclasses.replace(request.latent, sde_steps=torch.zeros(1, 1))
