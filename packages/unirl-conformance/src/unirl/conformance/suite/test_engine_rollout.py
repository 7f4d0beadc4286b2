"""The track of a latent request: samples, latents, media, version, and the echo of its settings."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from PIL import Image
from unirl.conformance.claims import claim
from unirl.conformance.doubles.expected_trajectory import distance
from unirl.conformance.fixtures.engine import ROUNDING, EngineCase
from unirl.conformance.fixtures.latent_engine import LatentEngineCase
from unirl.conformance.verdicts import NotApplicable
from unirl.core.errors import EchoMismatch, UniRLError
from unirl.core.specs.capability import Cap
from unirl.core.types.batch import same
from unirl.core.types.data import MediaRef
from unirl.core.types.inputs import Turn
from unirl.core.types.rollout import verify_echo
from unirl.core.types.track import Status

MIXED = (0, 3, 1, 4, 2, 5)
"""Rows of a request so that its groups take turns."""


@claim("engine", proves=Cap.LATENT_ROLLOUT)
def test_every_sample_comes_back_with_its_lineage(case: LatentEngineCase) -> None:
    """Every requested sample comes back once, in the order of the request, with its ids, group, prompt, metadata and
    parent, completed and at weight 1, generated from its own noise. Rewards and advantages are assigned by them.

    The request's groups take turns, so an engine that sorts by prompt and forgets to sort back is caught.

    If it fails: carry the fields of the request over row by row; `parent_ids` of a root track are the prompt ids, see
    `unirl.numerics.diffusion.rollout.latent_track`.
    """
    model = case.model()
    request = case.request(model).select(MIXED)
    with case.engine(model) as engine:
        track = case.sample(engine, request)
    case.check_lineage(request, track)
    completed = (Status.COMPLETED,) * request.num_rows
    assert track.status == completed, f"status: got {track.status}, expected {completed}"
    if case.provides(Cap.INITIAL_NOISE):
        case.check_start(request, track)


@claim("engine", proves=Cap.MEDIA_REFS)
def test_inputs_of_one_text_are_not_shared(case: LatentEngineCase) -> None:
    """Rows of one id are encoded once, and rows of different ids each with their own media, also where their texts are
    the same: edit sets repeat an instruction over different images.

    If it fails: group rows by `unirl.core.types.inputs.distinct`, and keep encodings by id, text and media.
    """
    model = case.model()
    roles = model.spec.inputs.get(case.track)
    if not roles or not case.provides(Cap.CONDITIONS):
        raise NotApplicable(f"model {model.spec.name!r} takes no media, or no conditions come back")
    request = case.request(model)
    inputs = request.inputs
    images = {name: case.folder / f"{number}.png" for number, name in enumerate(dict.fromkeys(inputs.ids))}
    for number, file in enumerate(images.values()):
        Image.new("RGB", (32, 32), (255, 80 * number, 0)).save(file)
    media = tuple(
        tuple(MediaRef(modality="image", role=role, uri=str(images[name])) for role in roles) for name in inputs.ids
    )
    inputs = dataclasses.replace(inputs, texts=("make it red",) * request.num_rows, media=media)
    request = dataclasses.replace(request, inputs=inputs).select(MIXED)
    with case.engine(model) as engine:
        track = case.sample(engine, request)
    conditions = track.conditions["positive"]
    (count,) = {len(value) for value in conditions.values.values()}
    assert count == len(images), f"{count} inputs were encoded, {len(images)} are distinct"
    first, second = (request.inputs.ids.index(name) for name in images)
    assert any(not same(value[first], value[second]) for value in conditions.expanded().values()), (
        "two images under one instruction have one encoding"
    )
    case.check_conditions(request, track, "positive")


@claim("engine", proves=Cap.TURNS)
def test_a_sample_goes_on_from_its_own_turns(case: LatentEngineCase) -> None:
    """Rows of one text that go on from different turns have the conditions of these: one token of a turn that differs
    is another input.

    If it fails: give the model the whole `Inputs` of each row, and keep encodings by their turns as well.
    """
    model = case.model()
    if case.track not in model.spec.continues or not case.provides(Cap.CONDITIONS):
        raise NotApplicable(f"model {model.spec.name!r} does not continue from turns, or no conditions come back")
    request = case.request(model)
    numbers = {name: number for number, name in enumerate(dict.fromkeys(request.inputs.ids))}
    turns = tuple((Turn(stage="text", text="so", tokens=(1, 2 + numbers[name])),) for name in request.inputs.ids)
    inputs = dataclasses.replace(request.inputs, texts=("make it red",) * request.num_rows, turns=turns)
    request = dataclasses.replace(request, inputs=inputs).select(MIXED)
    with case.engine(model) as engine:
        track = case.sample(engine, request)
    first, second = (request.inputs.ids.index(name) for name in list(numbers)[:2])
    assert any(not same(value[first], value[second]) for value in track.conditions["positive"].expanded().values()), (
        "turns of other tokens have one encoding"
    )
    case.check_conditions(request, track, "positive")


@claim("engine", proves=Cap.LATENT_ROLLOUT)
def test_latents_and_media_have_the_requested_size(case: LatentEngineCase) -> None:
    """The final latents are finite, fp32, without gradient and of the model's shape; the media are these latents
    decoded, at the requested height, width and frames, in [0, 1]; without `decode` there are none.

    If it fails: return latents before any scaling for the VAE, in the model's layout (unpacked where the engine packs
    them), and the image that was decoded from the same row. Eight bits a channel are enough; another row is not.
    """
    model = case.model()
    request, track = case.generate()
    sampling = request.latent.sampling
    latents, shape = track.latent.latents, model.latent_shape(sampling)
    final = track.latent.final
    assert tuple(final.shape) == (request.num_rows, *shape), (
        f"final latents: got {list(final.shape)}, expected [{request.num_rows}, *{list(shape)}]"
    )
    assert latents.dtype is torch.float32, f"latents: got {latents.dtype}, expected float32"
    assert bool(torch.isfinite(latents).all()), "some latents are not finite"
    assert not latents.requires_grad, "the latents carry a gradient; sample under no_grad"
    kind, frames = ("video", (sampling.frames,)) if sampling.frames > 1 else ("image", ())
    assert track.media is not None, f"no {kind}s came back, although `decode` is true"
    assert track.media.kind == kind, f"media: got {track.media.kind}, expected {kind}"
    media, size = track.media.stacked, (*frames, 3, sampling.height, sampling.width)
    assert tuple(media.shape) == (request.num_rows, *size), (
        f"media: got {list(media.shape)}, expected {[request.num_rows, *size]}"
    )
    assert media.dtype is torch.float32, f"media: got {media.dtype}, expected float32"
    assert 0 <= float(media.min()) <= float(media.max()) <= 1, (
        f"media: got {float(media.min()):g} to {float(media.max()):g}, expected [0, 1]"
    )
    with torch.no_grad():
        decoded = model.decode(final.to(model.device))
    # Two levels of eight bits: an engine may hand its images over as PNG. Images of other rows differ by far more.
    case.record("media off", float((media.to(model.device) - decoded).abs().max()), bound=2.5 / 255)
    bare = case.generate(sampling={"decode": False})[1]
    assert bare.media is None, "media came back, although `decode` is false"


@claim("engine", track="any")
def test_a_stale_version_is_detected(case: EngineCase) -> None:
    """Every sample carries the version of the engine's weights, not the requested one: after a lost weight sync a run
    stops instead of training on samples of an old policy.

    If it fails: take `policy_version` of the samples from the engine's own `version`, which only `load_weights` (or,
    for shared weights, the run) moves; never from the request.
    """
    model = case.model()
    with case.engine(model) as engine:
        held = engine.version
        request = dataclasses.replace(case.plain_request(model), policy_version=held + 1)
        try:
            track = engine.generate(request)
        except UniRLError:
            return
        result = track.policy_version
        assert result == (held,) * request.num_rows, f"the engine has version {held}, its samples say {result}"
        try:
            verify_echo(request, track)
        except EchoMismatch:
            return
    raise AssertionError(f"got a request for version {held + 1} with weights of version {held}, and nothing was raised")


@claim("engine", proves=Cap.LATENT_ROLLOUT)
def test_kernel_and_its_settings_are_echoed(case: LatentEngineCase) -> None:
    """Name, eta and options of the kernel come back on the segment as requested, for every kernel of the
    spec: training recomputes the steps from them.

    If it fails: fill `Sampler` from the objects that computed, as `unirl.numerics.diffusion.sampler.sampler_of` does;
    options are all of the kernel's, sorted by name.
    """
    asked: list[tuple[str, dict[str, Any]]] = [(kernel, {}) for kernel in case.kernels]
    asked += [("cps", {"constants": False})] if "cps" in case.kernels else []
    for kernel, options in asked:
        sampling = case.with_kernel(kernel, eta=0.37) | {"kernel_options": options}
        request, track = case.generate(sampling=sampling)
        expected, result = request.latent.sampler, track.latent.sampler
        assert dict(options).items() <= dict(expected.options).items()
        assert result == expected, f"got {result} in the echo, expected {expected}"


@claim("engine", proves=(Cap.INITIAL_NOISE, Cap.LATENT_ROLLOUT))
def test_samples_do_not_depend_on_how_a_request_is_split(case: LatentEngineCase) -> None:
    """A request in one piece, in pieces of any size (even splitting groups) and in another order gives the same samples
    up to rounding, and the pieces can be concatenated: ranks, batch sizes and retries change nothing.

    If it fails: draw noise by sample id, never by the place in a batch, and let nothing look at the number of rows.
    """
    model = case.model()
    request = case.request(model, sampling=case.by_recipe())
    with case.engine(model) as engine:
        whole = case.sample(engine, request)
        pieces = [case.sample(engine, piece) for piece in request.split([2, 3, 1])]
        backwards = case.sample(engine, request.select(range(request.num_rows - 1, -1, -1)))
    joined = type(whole).concat(pieces)
    assert joined.sample_ids == request.sample_ids
    case.record("split", distance(joined.latent.final, whole.latent.final), bound=ROUNDING)
    case.record("reversed", distance(backwards.latent.final.flip(0), whole.latent.final), bound=ROUNDING)


@claim("engine", proves=(Cap.INITIAL_NOISE, Cap.LATENT_ROLLOUT))
def test_the_same_request_gives_the_same_samples(case: LatentEngineCase) -> None:
    """Repeating a request, on the same engine after other work or on a new one, gives the same samples; another rollout
    number or seed gives others. Resumed runs and retries depend on it.

    If it fails: look for a generator that lives on between requests, or a cache whose key lacks something.
    """
    model = case.model()
    sampling = case.by_recipe()
    request = case.request(model, sampling=sampling)
    with case.engine(model) as engine:
        first = case.sample(engine, request).latent.final
        others = {
            name: case.sample(engine, case.request(model, sampling=sampling, **{name: number})).latent.final
            for name, number in (("rollout", 6), ("seed", 12))
        }
        again = case.sample(engine, request).latent.final
    with case.engine(model) as engine:
        anew = case.sample(engine, request).latent.final
    case.record("again", distance(again, first), bound=ROUNDING)
    case.record("new engine", distance(anew, first), bound=ROUNDING)
    for name, final in others.items():
        assert distance(final, first) > 0.01, f"another {name} gives the same samples"
