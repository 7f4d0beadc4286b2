"""What comes back of a request: its samples, their latents and media, the version, the echo of its settings."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from unirl.conformance.benches.engine import ROUNDING, EngineBench
from unirl.conformance.benches.latent_engine import LatentEngineBench
from unirl.conformance.claims import claim
from unirl.conformance.workbench.walk import distance
from unirl.core.capability import Cap
from unirl.core.errors import EchoMismatch, UniRLError
from unirl.core.rollout import verify_echo
from unirl.core.track import KernelChoice, Status

MIXED = (0, 3, 1, 4, 2, 5)
"""Rows of a request so that its groups take turns."""


@claim("engine", proves=Cap.LATENT_ROLLOUT)
def test_every_sample_comes_back_with_its_lineage(bench: LatentEngineBench) -> None:
    """Every sample that was asked for comes back once, in the order of the request, with its ids, group, prompt,
    metadata and parent, completed and at weight 1, made from its own noise. Rewards and advantages are assigned by
    them.

    The request's groups take turns, so an engine that sorts by prompt and forgets to sort back is caught.

    If it fails: carry the fields of the request over row by row; `parent_ids` of a root track are the prompt ids, see
    `unirl.numerics.latent_rollout.latent_track`.
    """
    model = bench.model()
    request = bench.request(model).select(MIXED)
    with bench.engine(model) as engine:
        rollout = engine.generate(dataclasses.replace(request, policy_version=engine.version))
    assert set(rollout.tracks) == {bench.track}, f"{bench.track!r} was asked for, {sorted(rollout.tracks)} came back"
    track = rollout.tracks[bench.track]
    wanted = {
        "sample_ids": request.sample_ids,
        "group_ids": request.group_ids,
        "parent_track": None,
        "parent_ids": request.prompt_ids,
        "prompts": request.prompts,
        "metadata": tuple(dict(one) for one in request.metadata),
        "status": (Status.COMPLETED,) * request.num_rows,
    }
    for name, value in wanted.items():
        found = getattr(track, name)
        found = tuple(dict(one) for one in found) if name == "metadata" else found
        assert found == value, f"{name}: the request says {value}, the track has {found}"
    assert track.weights.tolist() == [1.0] * request.num_rows, f"weights are {track.weights.tolist()}, 1 is wanted"
    if bench.native(Cap.INITIAL_NOISE):
        bench.check_start(request, track)


@claim("engine", proves=Cap.LATENT_ROLLOUT)
def test_latents_and_media_are_whole_and_of_the_asked_size(bench: LatentEngineBench) -> None:
    """The final latents are finite, fp32, without gradient and of the model's shape; the media are these latents
    decoded, at the height, width and frames that were asked for, in [0, 1]; without `decode` there are none.

    If it fails: return latents before any scaling for the VAE, in the model's layout (unpacked where the engine packs
    them), and the image that was decoded from the same row. Eight bits a channel are enough; another row is not.
    """
    model = bench.model()
    request, rollout = bench.generate()
    track, sampling = rollout.tracks[bench.track], request.latent(bench.track).sampling
    latents, shape = track.latent.latents, model.latent_shape(sampling)
    final = track.latent.final
    assert tuple(final.shape) == (request.num_rows, *shape), (
        f"final latents are {list(final.shape)}, [{request.num_rows}, *{list(shape)}] was asked for"
    )
    assert latents.dtype is torch.float32, f"latents are {latents.dtype}; float32 is wanted"
    assert bool(torch.isfinite(latents).all()), "some latents are not finite"
    assert not latents.requires_grad, "the latents carry a gradient; sample under no_grad"
    if sampling.frames > 1:
        assert track.videos is not None, "no videos came back, though `decode` was asked for"
        media, size = torch.stack(list(track.videos)), (sampling.frames, 3, sampling.height, sampling.width)
    else:
        assert track.images is not None, "no images came back, though `decode` was asked for"
        media, size = track.images, (3, sampling.height, sampling.width)
    assert tuple(media.shape) == (request.num_rows, *size), (
        f"media are {list(media.shape)}, {[request.num_rows, *size]} was asked for"
    )
    assert media.dtype is torch.float32, f"media are {media.dtype}; float32 is wanted"
    assert 0 <= float(media.min()) <= float(media.max()) <= 1, (
        f"media go from {float(media.min()):g} to {float(media.max()):g}; [0, 1] is wanted"
    )
    with torch.no_grad():
        decoded = model.decode(final.to(model.device))
    # Two levels of eight bits: an engine may hand its images over as PNG. Images of other rows differ by far more.
    bench.record("media off", float((media.to(model.device) - decoded).abs().max()), bound=2.5 / 255)
    bare = bench.generate(sampling={"decode": False})[1].tracks[bench.track]
    assert bare.images is None and bare.videos is None, "media came back, though `decode: false` was asked for"


@claim("engine", track="any")
def test_a_stale_version_is_detected(bench: EngineBench) -> None:
    """Every sample carries the version of the weights that the engine has, not the one that was asked for: so a run
    in which a weight sync was lost stops, instead of training on samples of an old policy.

    If it fails: take `policy_version` of the samples from the engine's own `version`, which only `load_weights` (or,
    for shared weights, the run) moves; never from the request.
    """
    model = bench.model()
    with bench.engine(model) as engine:
        held = engine.version
        request = dataclasses.replace(bench.plain_request(model), policy_version=held + 1)
        try:
            rollout = engine.generate(request)
        except UniRLError:
            return
        found = rollout.tracks[bench.track].policy_version
        assert found == (held,) * request.num_rows, f"the engine has version {held}, its samples say {found}"
        try:
            verify_echo(request, rollout)
        except EchoMismatch:
            return
    raise AssertionError(f"version {held + 1} was asked for, the engine has {held}, and nothing was raised")


@claim("engine", proves=Cap.LATENT_ROLLOUT)
def test_kernel_and_its_settings_are_echoed(bench: LatentEngineBench) -> None:
    """Name, eta and options of the kernel come back on the segment as they were asked for, for every kernel of the
    spec: training recomputes the steps from them.

    If it fails: fill `KernelChoice` from what the engine really ran with; options sorted by name.
    """
    asked: list[tuple[str, dict[str, Any]]] = [(kernel, {}) for kernel in bench.kernels]
    asked += [("cps", {"constants": False})] if "cps" in bench.kernels else []
    for kernel, options in asked:
        sampling = bench.with_kernel(kernel, eta=0.37) | {"kernel_options": options}
        request, rollout = bench.generate(sampling=sampling)
        wanted = KernelChoice(
            name=kernel, eta=request.latent(bench.track).sampling.eta, options=tuple(sorted(options.items()))
        )
        found = rollout.tracks[bench.track].latent.kernel
        assert found == wanted, f"kernel: {wanted} was asked for, {found} is echoed"


@claim("engine", proves=(Cap.INITIAL_NOISE, Cap.LATENT_ROLLOUT))
def test_samples_do_not_depend_on_how_a_request_is_split(bench: LatentEngineBench) -> None:
    """A request in one piece, in pieces of any size (groups cut in two as well) and in another order gives the same
    samples but for rounding, and the pieces join to one track: so ranks, batch sizes and retries change nothing.

    If it fails: draw noise by sample id, never by the place in a batch, and let nothing look at the number of rows.
    """
    model = bench.model()
    request = bench.request(model, sampling=bench.by_recipe())
    with bench.engine(model) as engine:
        whole = bench.sample(engine, request)
        pieces = [bench.sample(engine, piece) for piece in request.split([2, 3, 1])]
        backwards = bench.sample(engine, request.select(range(request.num_rows - 1, -1, -1)))
    joined = type(whole).concat(pieces)
    assert joined.sample_ids == request.sample_ids
    bench.record("split", distance(joined.latent.final, whole.latent.final), bound=ROUNDING)
    bench.record("reversed", distance(backwards.latent.final.flip(0), whole.latent.final), bound=ROUNDING)


@claim("engine", proves=(Cap.INITIAL_NOISE, Cap.LATENT_ROLLOUT))
def test_the_same_request_gives_the_same_samples_again(bench: LatentEngineBench) -> None:
    """A request that is sent again, to the same engine after other work or to a new one, gives the same samples;
    another rollout number or seed gives others. Resumed runs and retries rest on it.

    If it fails: look for a generator that lives on between requests, or a cache whose key lacks something.
    """
    model = bench.model()
    sampling = bench.by_recipe()
    request = bench.request(model, sampling=sampling)
    with bench.engine(model) as engine:
        first = bench.sample(engine, request).latent.final
        others = {
            name: bench.sample(engine, bench.request(model, sampling=sampling, **{name: number})).latent.final
            for name, number in (("rollout", 6), ("seed", 12))
        }
        again = bench.sample(engine, request).latent.final
    with bench.engine(model) as engine:
        anew = bench.sample(engine, request).latent.final
    bench.record("again", distance(again, first), bound=ROUNDING)
    bench.record("new engine", distance(anew, first), bound=ROUNDING)
    for name, final in others.items():
        assert distance(final, first) > 0.01, f"another {name} gives the same samples"
