from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import StableDiffusion3Pipeline
from torch import Tensor
from unirl.conformance.doubles import tiny_denoiser as workbench
from unirl.core.errors import EchoMismatch, RecipeError
from unirl.core.roles import WeightUpdate
from unirl.core.types.data import MediaRef
from unirl.core.types.inputs import Inputs
from unirl.core.types.request import LatentRequest, Request, TextRequest
from unirl.core.types.rollout import verify_echo
from unirl.core.types.sampling import LatentSamplingConfig, TextSamplingConfig
from unirl.core.types.track import Status, Track
from unirl.engines.trainside.config import TrainsideConfig
from unirl.engines.trainside.engine import TrainsideEngine, build
from unirl.engines.trainside.input_cache import InputCache
from unirl.engines.trainside.plugin import SPEC
from unirl.models.sd3.model import Sd3Model
from unirl.numerics.diffusion.denoise import all_positions
from unirl.numerics.diffusion.kernels import KERNELS
from unirl.numerics.diffusion.sampler import with_every_option
from unirl.numerics.noise import INITIAL, noise, noise_digest
from unirl.numerics.pixels import levels

STEPS = 4
SHAPE = (16, 4, 4)
SAMPLING = LatentSamplingConfig(num_inference_steps=STEPS, height=32, width=32, max_sequence_length=16, eta=0.7)
# A forward at another batch size adds up in another order: rounding of fp32 over four forwards.
ROUNDING = 1e-5
LEVEL = 1 / 255 + ROUNDING
"""Pixels have 8 bits: rounding may move one across the middle of two levels."""


def a_request(
    model: Sd3Model,
    *,
    prompts: Sequence[str] = ("a red ring", "a red ring", "a disc", "a disc"),
    steps: Sequence[Sequence[int]] | None = None,
    version: int = 3,
    same_noise: bool = False,
    keeps_all: bool = False,
    **changes: Any,
) -> Request:
    """Samples of one prompt form a group."""
    sampling = with_every_option(dataclasses.replace(SAMPLING, **changes))
    rows = range(len(prompts))
    groups = tuple(f"g/{prompt}" for prompt in prompts)
    samples = tuple(f"{groups[row]}/{row}" for row in rows)
    ids = groups if same_noise else samples
    latent = LatentRequest(
        sampling=sampling,
        sigmas=model.schedule(sampling),
        sde_steps=torch.tensor([[0, 1]] * len(prompts) if steps is None else steps, dtype=torch.int64).reshape(
            len(prompts), -1
        ),
        noise_ids=ids,
        initial_noise=tuple(
            noise_digest(noise(seed=5, rollout=2, ids=ids, step=INITIAL, shape=model.latent_shape(sampling)))
        ),
        keep=all_positions(len(prompts), num_steps=STEPS)[:, : (STEPS + 1) * keeps_all],
    )
    return Request(
        track="image",
        sample_ids=samples,
        group_ids=groups,
        inputs=Inputs.of_texts(prompts),
        metadata=tuple({"row": row} for row in rows),
        params=latent,
        seed=5,
        rollout=2,
        policy_version=version,
    )


def an_engine(model: Sd3Model, **settings: int) -> TrainsideEngine:
    engine = build(TrainsideConfig(**settings), model=model, device="cpu")
    engine.version = 3
    return engine


def generate(model: Sd3Model, request: Request, **settings: int) -> Track:
    track = an_engine(model, **settings).generate(request)
    verify_echo(request, track)
    return track


@contextmanager
def recorded(module: torch.nn.Module) -> Iterator[list[int]]:
    """Rows of each forward of a module."""
    rows: list[int] = []

    def record(_module: torch.nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Tensor]) -> None:
        rows.append((args[0] if args else kwargs["hidden_states"]).shape[0])

    handle = module.register_forward_pre_hook(record, with_kwargs=True)
    try:
        yield rows
    finally:
        handle.remove()


def test_a_track_holds_everything_of_its_request(model: Sd3Model) -> None:
    request = a_request(model)
    track = generate(model, request)
    assert track.name == "image"
    assert track.sample_ids == request.sample_ids
    assert track.group_ids == request.group_ids
    assert track.parent_track is None
    assert track.parent_ids == request.inputs.ids
    assert track.inputs == request.inputs
    assert track.metadata == request.metadata
    assert track.status == (Status.COMPLETED,) * 4
    assert track.policy_version == (3,) * 4
    assert track.sample_weights.tolist() == [1.0] * 4
    assert track.groups() == {"g/a red ring": [0, 1], "g/a disc": [2, 3]}
    assert track.conditions["positive"].index.tolist() == [0, 0, 1, 1]
    assert track.conditions["positive"].values["prompt_embeds"].shape[0] == 2
    assert set(track.conditions) == {"positive"}
    assert track.media is not None
    assert track.media.stacked.shape == (4, 3, 32, 32)
    # Steps 0 and 1 need the latents at 0, 1 and 2; the end is always there.
    assert track.latent.positions.tolist() == [[0, 1, 2, 4]] * 4
    assert track.latent.latents.shape == (4, 4, *SHAPE)
    assert track.latent.log_probs is not None
    assert track.latent.log_probs.shape == (4, 2)
    assert torch.isfinite(track.latent.log_probs).all()
    assert not track.latent.latents.requires_grad
    with torch.no_grad():
        assert torch.equal(levels(model.decode(track.latent.final)), track.media.values)


def test_noise_is_what_the_recipe_says(model: Sd3Model) -> None:
    request = a_request(model)
    segment = generate(model, request).latent
    start = noise(seed=5, rollout=2, ids=request.sample_ids, step=INITIAL, shape=SHAPE)
    assert torch.equal(segment.latents[:, 0], start)
    assert segment.initial_noise == noise_digest(start)
    # Flow-SDE's first step: s = eta, x' = mean + s e. Its log-prob is then -mean e^2 / 2 - ln s - ln(2 pi) / 2.
    drawn = noise(seed=5, rollout=2, ids=request.sample_ids, step=0, shape=SHAPE)
    expected = -drawn.square().flatten(1).mean(1) / 2 - np.log(0.7) - np.log(2 * np.pi) / 2
    assert segment.log_probs is not None
    torch.testing.assert_close(segment.log_probs[:, 0], expected, rtol=0, atol=1e-5)


def test_a_group_can_share_its_initial_noise_but_not_its_step_noise(model: Sd3Model) -> None:
    segment = generate(model, a_request(model, same_noise=True)).latent
    assert torch.equal(segment.latents[0, 0], segment.latents[1, 0])
    assert not torch.equal(segment.latents[0, 0], segment.latents[2, 0])
    assert not torch.equal(segment.latents[0, 1], segment.latents[1, 1])


@pytest.mark.parametrize("scale", [1.0, 3.0])
def test_a_request_split_in_two_gives_the_latents_of_the_whole(model: Sd3Model, scale: float) -> None:
    # Batches of two rows in both cases, so the arithmetic is the same to the last bit.
    request = a_request(model, guidance_scale=scale)
    whole = generate(model, request, forward_batch=2)
    halves = Track.concat([generate(model, half) for half in request.split([2, 2])])
    assert whole.media is not None
    assert halves.media is not None
    assert torch.equal(whole.latent.latents, halves.latent.latents)
    assert torch.equal(whole.media.stacked, halves.media.stacked)
    assert whole.latent.log_probs is not None
    assert halves.latent.log_probs is not None
    assert torch.equal(whole.latent.log_probs, halves.latent.log_probs)
    for name, one in whole.conditions["positive"].expanded().items():
        assert torch.equal(one, halves.conditions["positive"].expanded()[name])


@pytest.mark.parametrize("batch", [1, 3, 4, 100])
def test_chunking_changes_nothing_but_rounding(model: Sd3Model, batch: int) -> None:
    request = a_request(model)
    whole = generate(model, request)
    with recorded(model.transformer) as rows:
        chunked = generate(model, request, forward_batch=batch)
    sizes = {1: [1, 1, 1, 1], 3: [3, 1], 4: [4], 100: [4]}[batch]
    assert rows == [size for size in sizes for _ in range(STEPS)]
    torch.testing.assert_close(chunked.latent.latents, whole.latent.latents, rtol=0, atol=ROUNDING)
    torch.testing.assert_close(chunked.media.stacked, whole.media.stacked, rtol=0, atol=LEVEL)
    assert chunked.sample_ids == whole.sample_ids
    assert chunked.latent.initial_noise == whole.latent.initial_noise


def test_order_does_not_matter(model: Sd3Model) -> None:
    request = a_request(model)
    straight = generate(model, request, forward_batch=1)
    turned = generate(model, request.select([3, 1, 0, 2]), forward_batch=1)
    assert turned.sample_ids == tuple(straight.sample_ids[row] for row in (3, 1, 0, 2))
    assert torch.equal(turned.latent.latents, straight.latent.latents[[3, 1, 0, 2]])


@pytest.mark.parametrize("batch", [0, 2])
def test_each_group_can_have_its_own_sde_steps(model: Sd3Model, batch: int) -> None:
    request = a_request(model, steps=[[0, 1], [0, 1], [2, -1], [2, -1]])
    track = generate(model, request, forward_batch=batch)
    segment = track.latent
    # The second group stores fewer positions; its rows are padded with -1.
    assert segment.positions.tolist() == [[0, 1, 2, 4]] * 2 + [[2, 3, 4, -1]] * 2
    assert segment.sde_steps.tolist() == [[0, 1], [0, 1], [2, -1], [2, -1]]
    assert segment.log_probs is not None
    assert segment.log_probs[2:, 1].tolist() == [0.0, 0.0]
    assert torch.isfinite(segment.final).all()
    # Without noise before step 2 the second group has walked the ODE until then.
    ode = generate(model, a_request(model, steps=[[]] * 4, keeps_all=True), forward_batch=batch).latent
    assert torch.equal(segment.latents[2:, 0], ode.latents[2:, 2])
    assert not torch.equal(segment.latents[2:, 1], ode.latents[2:, 3])


def test_a_full_trajectory_has_the_latent_of_every_step(model: Sd3Model) -> None:
    window = generate(model, a_request(model)).latent
    full = generate(model, a_request(model, keeps_all=True)).latent
    assert full.positions.tolist() == [[0, 1, 2, 3, 4]] * 4
    assert torch.equal(full.latents[:, [0, 1, 2, 4]], window.latents)


def test_negatives_are_encoded_only_under_guidance(model: Sd3Model) -> None:
    with recorded(model.pipeline.text_encoder) as encoded, recorded(model.transformer) as rows:
        plain = generate(model, a_request(model, negative_prompt="blurry"))
    assert len(encoded) == 2  # the two prompts
    assert rows == [4] * STEPS
    with recorded(model.pipeline.text_encoder) as encoded, recorded(model.transformer) as rows:
        guided = generate(model, a_request(model, negative_prompt="blurry", guidance_scale=3.0))
    assert len(encoded) == 3
    assert rows == [8] * STEPS
    assert set(plain.conditions) == {"positive"}
    assert guided.conditions["negative"].index.tolist() == [0, 0, 0, 0]
    assert guided.conditions["negative"].values["pooled"].shape[0] == 1
    assert guided.latent.sampler.guidance_scale == 3.0
    assert not torch.allclose(guided.latent.final, plain.latent.final, atol=1e-3)


@pytest.mark.parametrize("scale", [1.0, 4.5])
def test_a_rollout_without_noise_paints_what_the_diffusers_pipeline_paints(model: Sd3Model, scale: float) -> None:
    request = a_request(model, steps=[[]] * 4, kernel="euler", eta=0.0, guidance_scale=scale, negative_prompt="blurry")
    track = generate(model, request)
    pipeline = StableDiffusion3Pipeline(**model.pipeline.components)
    pipeline.set_progress_bar_config(disable=True)
    arguments: dict[str, Any] = {
        "negative_prompt": ["blurry"] * 4,
        "height": 32,
        "width": 32,
        "num_inference_steps": STEPS,
        # The pipeline's scheduler shifts what it is given, once: so it gets the unshifted grid.
        "sigmas": np.linspace(1.0, 1.0 / STEPS, STEPS).tolist(),
        "guidance_scale": scale,
        "max_sequence_length": 16,
    }
    x = noise(seed=5, rollout=2, ids=request.sample_ids, step=INITIAL, shape=SHAPE)
    latents = pipeline(list(request.inputs.texts), latents=x.clone(), output_type="latent", **arguments).images
    images = pipeline(list(request.inputs.texts), latents=x.clone(), output_type="pt", **arguments).images
    torch.testing.assert_close(track.latent.final, latents, rtol=ROUNDING, atol=ROUNDING)
    torch.testing.assert_close(track.media.stacked, images, rtol=0, atol=LEVEL)


def test_prompts_are_encoded_once_in_a_run_and_the_cache_is_bounded(model: Sd3Model) -> None:
    engine = an_engine(model, cached_prompts=2)
    with recorded(model.pipeline.text_encoder) as encoded:
        engine.generate(a_request(model))
        engine.generate(a_request(model, steps=[[2]] * 4, eta=0.3))
    assert encoded == [1, 1]
    # A third prompt pushes out the one that was used longest ago.
    with recorded(model.pipeline.text_encoder) as encoded:
        engine.generate(a_request(model, prompts=["a disc", "a cross"]))
        engine.generate(a_request(model, prompts=["a disc"]))
        engine.generate(a_request(model, prompts=["a red ring"]))
    assert len(encoded) == 2
    # More prompts in a request than are kept.
    with recorded(model.pipeline.text_encoder) as encoded:
        track = engine.generate(a_request(model, prompts=["one", "two", "three", "one"]))
    assert len(encoded) == 3
    assert track.conditions["positive"].index.tolist() == [0, 1, 2, 0]
    with recorded(model.pipeline.text_encoder) as encoded:
        engine.generate(a_request(model, prompts=["two"], max_sequence_length=24))
    assert len(encoded) == 1  # another length is another embedding
    with recorded(model.pipeline.text_encoder) as encoded:
        none = an_engine(model, cached_prompts=0)
        none.generate(a_request(model, prompts=["two"]))
        none.generate(a_request(model, prompts=["two"]))
    assert len(encoded) == 2


class LooksAtImages:
    """A model whose conditions [U, 2] depend on text and media, and which counts what it encodes."""

    spec = workbench.SPEC
    device = "cpu"

    def __init__(self) -> None:
        self.encoded: list[tuple[str, ...]] = []

    def encode(self, inputs: Inputs, *, sampling: LatentSamplingConfig) -> dict[str, torch.Tensor]:
        self.encoded.append(inputs.ids)
        rows = zip(inputs.texts, inputs.media, strict=True)
        return {"text": torch.tensor([[float(len(text)), float(len(media[0].uri))] for text, media in rows])}


def test_the_cache_tells_inputs_apart_by_id_text_and_media() -> None:
    model: Any = LooksAtImages()
    cache, sampling = InputCache(model, size=8), LatentSamplingConfig()
    cat, tiger = ((MediaRef(modality="image", role="source", uri=f"/{name}.png"),) for name in ("cat", "tiger"))
    texts = ("make it red",) * 3
    edits = Inputs(ids=("a", "b", "a"), prompts=texts, texts=texts, media=(cat, tiger, cat))
    conditions = cache.conditions(edits, sampling=sampling)
    # Lengths of text and file name.
    assert conditions.expanded()["text"].tolist() == [[11.0, 8.0], [11.0, 10.0], [11.0, 8.0]]
    assert model.encoded == [("a",), ("b",)]
    cache.conditions(edits, sampling=sampling)
    assert len(model.encoded) == 2
    # The file for evaluation has other prompts of the same ids.
    other = dataclasses.replace(edits, ids=("b", "a", "b"))
    assert (
        cache.conditions(other, sampling=sampling).expanded()["text"].tolist() == conditions.expanded()["text"].tolist()
    )
    before = len(model.encoded)
    for value in (1, 1, 2):
        cache.conditions(edits, sampling=dataclasses.replace(sampling, options={"clip_skip": value}))
    assert len(model.encoded) == before + 4
    turned = dataclasses.replace(edits, texts=("make it blue!",) * 3)
    assert cache.conditions(turned, sampling=sampling).expanded()["text"][:, 0].tolist() == [13.0] * 3


def test_an_embedding_does_not_depend_on_what_else_was_asked(model: Sd3Model) -> None:
    alone = generate(model, a_request(model, prompts=["a disc"])).conditions["positive"]
    engine = an_engine(model)
    engine.generate(a_request(model, prompts=["a red ring", "two"]))
    among = engine.generate(a_request(model, prompts=["one", "a red ring", "a disc"]))
    for name, value in among.conditions["positive"].expanded().items():
        assert torch.equal(value[2], alone.values[name][0])


def test_modes_and_gradients_are_as_before_also_after_an_error(model: Sd3Model) -> None:
    engine = an_engine(model)
    try:
        model.transformer.train()
        frozen = model.transformer.transformer_blocks[0].eval()
        before = [module.training for module in model.transformer.modules()]
        seen: list[tuple[bool, bool]] = []
        handle = model.transformer.register_forward_pre_hook(
            lambda module, _args: seen.append((module.training, torch.is_grad_enabled()))
        )
        engine.generate(a_request(model))
        with pytest.raises(ValueError, match="deterministic"):
            engine.generate(a_request(model, kernel="euler", eta=0.0))
        handle.remove()
        assert seen == [(False, False)] * STEPS
        assert [module.training for module in model.transformer.modules()] == before
        assert not frozen.training
        assert torch.is_grad_enabled()
    finally:
        model.transformer.eval()


def test_the_version_is_the_one_that_it_was_given(model: Sd3Model) -> None:
    engine = an_engine(model)
    engine.version = 7
    request = a_request(model, version=3)
    track = engine.generate(request)
    assert track.policy_version == (7,) * 4
    with pytest.raises(EchoMismatch, match="policy_version"):
        verify_echo(request, track)


def test_an_echo_tells_what_was_used_rather_than_what_was_asked(model: Sd3Model) -> None:
    request = a_request(model)
    track = an_engine(model).generate(request)
    elsewhere = dataclasses.replace(request, seed=6)
    verify_echo(request, track)
    other = an_engine(model).generate(elsewhere)
    with pytest.raises(EchoMismatch, match="initial_noise"):
        verify_echo(request, other)
    later = dataclasses.replace(request.latent, sigmas=request.latent.sigmas * 0.999)
    with pytest.raises(EchoMismatch, match="sigmas"):
        verify_echo(dataclasses.replace(request, params=later), track)


def test_decoding_can_be_left_out(model: Sd3Model) -> None:
    track = generate(model, a_request(model, decode=False))
    assert track.media is None


@pytest.mark.parametrize("kernel", SPEC.kernels)
def test_every_kernel_of_the_spec_runs(model: Sd3Model, kernel: str) -> None:
    has_noise = kernel not in ("euler", "dpm2")
    request = a_request(
        model, kernel=kernel, eta=0.5 if has_noise else 0.0, steps=[[0, 1]] * 4 if has_noise else [[]] * 4
    )
    assert torch.isfinite(generate(model, request).latent.final).all()


def test_every_kernel_of_the_spec_is_one_of_numerics() -> None:
    assert set(SPEC.kernels) < set(KERNELS)


def test_kernel_options_are_used_and_echoed(model: Sd3Model) -> None:
    dense = generate(model, a_request(model, kernel="cps", eta=0.5)).latent
    bare = generate(model, a_request(model, kernel="cps", eta=0.5, kernel_options={"constants": False})).latent
    assert bare.sampler.options == (("constants", False),)
    assert torch.equal(dense.latents, bare.latents)
    assert not torch.equal(dense.log_probs, bare.log_probs)  # type: ignore[arg-type]


def test_what_it_cannot_do_is_refused_in_one_sentence(model: Sd3Model) -> None:
    engine = an_engine(model)
    with pytest.raises(RecipeError, match=r"version 9, but .* shares the trained module's weights"):
        engine.load_weights(WeightUpdate(version=9, tensors={}, kind="full"))
    request = a_request(model)
    text = TextRequest(
        sampling=TextSamplingConfig(),
        prompt_tokens=(torch.tensor([1]),) * request.num_rows,
        stop_tokens=(),
        seeds=(0,) * request.num_rows,
    )
    with pytest.raises(RecipeError, match=r"got text track 'image', but model 'sd3' has image \(latent\)"):
        engine.generate(dataclasses.replace(request, params=text))
    with pytest.raises(RecipeError, match=r"sampling\.kernel: got 'ddim-eta'; trainside supports flow-sde, dance-sde"):
        engine.generate(a_request(model, kernel="ddim-eta"))
    with pytest.raises(RecipeError, match=r"engine\.forward_batch: got -1"):
        build(TrainsideConfig(forward_batch=-1), model=model, device="cpu")
    with pytest.raises(RecipeError, match=r"engine\.cached_prompts: got -1"):
        build(TrainsideConfig(cached_prompts=-1), model=model, device="cpu")
    with pytest.raises(RecipeError, match="samples on the training device"):
        build(TrainsideConfig(), model=model, device="meta")


def test_sleep_and_wake_change_nothing(model: Sd3Model) -> None:
    engine, request = an_engine(model), a_request(model)
    first = engine.generate(request)
    engine.sleep()
    engine.wake()
    second = engine.generate(request)
    assert torch.equal(first.latent.latents, second.latent.latents)
    engine.close()
