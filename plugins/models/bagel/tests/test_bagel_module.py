"""The transformer against BAGEL's formula, and its frozen half against diffusers and transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers.loaders.single_file_utils import convert_ldm_vae_checkpoint
from PIL import Image
from plain_bagel import PlainBagel
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.utils import _apply_to_tensors
from torch.utils._pytree import tree_map_only
from transformers import SiglipVisionConfig, SiglipVisionModel
from unified_models import given
from unirl.core.errors import BatchError
from unirl.core.types.data import MediaRef
from unirl.core.types.sampling import LatentSamplingConfig, TextSamplingConfig
from unirl.models.bagel.config import BagelConfig
from unirl.models.bagel.model import BagelModel, build
from unirl.models.bagel.sources import Scale
from unirl.models.bagel.vae import pack, unpack
from unirl.numerics.tokens.batches import pack_batch, pad_batch
from unirl.train_host.sharding import cast_ends

CLOSE = 1e-5
"""Of the largest value: fp32 sums of two layers in another order differ by about 1e-6. A wrong position, mask or expert
moves them by 1e-2 and more."""
IMAGE = LatentSamplingConfig(num_inference_steps=4, height=32, width=48)
TEXT = TextSamplingConfig(max_new_tokens=4)


@pytest.fixture(scope="module")
def plain(tiny_folder: Path) -> PlainBagel:
    return PlainBagel(tiny_folder)


def close(result: Tensor, expected: Tensor) -> None:
    assert result.shape == expected.shape
    assert float((result - expected).abs().max()) <= CLOSE * float(expected.abs().max())


def grid(height: int, width: int) -> Tensor:
    return torch.tensor([(row, column) for row in range(height) for column in range(width)])


def pieces(
    plain: PlainBagel, text: str, conditions: dict[str, Any], row: int, sizes: list[tuple[int, int, int, int]]
) -> list[Any]:
    """The sequence of a sample by hand. sizes: height and width of each image, in latents and in patches."""
    start, end = plain.token("<|im_start|>"), plain.token("<|im_end|>")
    vocabulary: dict[str, int] = plain.tokenizer["model"]["vocab"]
    result: list[Any] = []
    latents, features = conditions["latents"][row], conditions["features"][row]
    for height, width, high, wide in sizes:
        result.append(("latent", latents[: height * width], 0.0, grid(height, width)))
        result.append(("feature", features[: high * wide], grid(high, wide)))
        latents, features = latents[height * width :], features[high * wide :]
    assert not len(latents) and not len(features)
    ids = [vocabulary["Ġ" if letter == " " else letter] for letter in text]
    return [*result, ("text", [start, *ids, end])]


# Sides of 64 x 80, 96 x 64, 64 x 64 and 40 x 60 (96 x 64 once its short side is 64): latents of 16, patches of 14 up
# to 56 pixels.
SIZES = [[(4, 5, 3, 4)], [(6, 4, 4, 3)], [(4, 4, 4, 4), (4, 6, 3, 4)]]


def test_velocities_are_those_of_the_formula(
    model: BagelModel, plain: PlainBagel, media: list[tuple[MediaRef, ...]]
) -> None:
    """Rows without images, with one and with two, of texts of different lengths, in one batch."""
    texts = ("a ring", "make it red, please", "both")
    conditions = dict(model.encode(given(texts, ((), media[1], media[2])), sampling=IMAGE))
    x = torch.randn(3, *model.latent_shape(IMAGE), generator=torch.Generator().manual_seed(1))
    sigma = torch.tensor([0.9, 0.5, 0.1])
    with torch.no_grad():
        result = model.velocity(x, sigma, conditions)
    for row, sizes in enumerate(([], SIZES[1], SIZES[2])):
        before = pieces(plain, texts[row], conditions, row, sizes)
        expected = plain.velocity(before, x[row].flatten(1).T, float(sigma[row]), grid(2, 3))
        close(result[row].flatten(1).T, expected)


def test_log_probs_are_those_of_the_formula(
    model: BagelModel, plain: PlainBagel, media: list[tuple[MediaRef, ...]]
) -> None:
    """Padded rows with and without images, their entropies, and a text without any image in its batch."""
    texts, tokens = ("what is it", "and here"), [torch.tensor([5, 7, 9]), torch.tensor([11, 2])]
    for images in ((media[0], ()), ((), ())):
        inputs = given(texts, images)
        prompts = model.prompt_tokens(inputs, sampling=TEXT)
        conditions = dict(model.conditions(inputs, sampling=TEXT))
        batch = pad_batch(prompts, tokens, pad_token=model.pad_token, conditions=conditions)
        with torch.no_grad():
            log_probs, entropy = model.score(batch, temperature=0.7, with_entropy=True)
        parts = log_probs.split([3, 2])
        assert entropy is not None
        for row, sizes in enumerate((SIZES[0] if images[0] else [], [])):
            before = pieces(plain, texts[row], conditions, row, sizes)
            completion = [plain.token("<|im_start|>"), *tokens[row].tolist()]
            logits = plain.logits([*before, ("text", completion)])[-len(completion) : -1] / 0.7
            expected = logits.log_softmax(-1)
            close(parts[row], expected.gather(1, tokens[row][:, None])[:, 0])
            close(entropy.split([3, 2])[row], -(expected.exp() * expected).sum(-1))


def test_a_cache_gives_the_logits_of_the_whole(
    model: BagelModel, plain: PlainBagel, media: list[tuple[MediaRef, ...]]
) -> None:
    """Prompts of different lengths padded on the left, one of them with an image; then a row leaves."""
    texts = ("what is it", "a b")
    inputs = given(texts, (media[0], ()))
    prompts, conditions = model.prompt_tokens(inputs, sampling=TEXT), model.conditions(inputs, sampling=TEXT)
    longest = max(map(len, prompts))
    tokens = torch.stack([torch.cat([row.new_full((longest - len(row),), 3), row]) for row in prompts])
    keep = torch.stack([torch.arange(longest) >= longest - len(row) for row in prompts])
    positions = (keep.long().cumsum(1) - 1).clamp(min=0)
    before = [pieces(plain, texts[row], dict(conditions), row, SIZES[0] if row == 0 else []) for row in range(2)]
    begin = plain.token("<|im_start|>")
    logits, cache = model.next_logits(
        tokens, positions=positions, attention_mask=keep, cache=None, conditions=conditions
    )
    for row in range(2):
        close(logits[row], plain.logits([*before[row], ("text", [begin])])[-1])
    for step in range(2):
        keep = torch.cat([keep, keep.new_ones(len(keep), 1)], dim=1)
        positions = positions[:, -1:] + 1
        drawn = torch.full((len(keep), 1), 7 + step)
        logits, cache = model.next_logits(drawn, positions=positions, attention_mask=keep, cache=cache)
        close(logits[0], plain.logits([*before[0], ("text", [begin, 7, 8][: 2 + step])])[-1])
        cache, keep, positions = model.select_cache(cache, torch.tensor([0])), keep[:1], positions[:1]


def test_mixed_precision_casts_the_logits_and_leaves_the_cache(tiny_folder: Path) -> None:
    """Casting every output of the root to fp32 would convert the cache for each token."""
    model = build(BagelConfig(path=str(tiny_folder), dtype="bfloat16"), device="cpu")
    cast_ends(model.trainable, torch.bfloat16)
    tokens, keep = torch.tensor([[5, 7]]), torch.ones(1, 2, dtype=torch.bool)
    logits, cache = model.next_logits(tokens, positions=torch.tensor([[0, 1]]), attention_mask=keep, cache=None)
    first = cache.kept.layers[0][0]
    assert logits.dtype is torch.float32 and first.dtype is torch.bfloat16
    for casts in (
        lambda kept: tree_map_only(Tensor, Tensor.float, kept),
        lambda kept: _apply_to_tensors(Tensor.float, kept),
    ):
        assert casts([cache.kept])[0].layers[0][0] is first


def test_packed_rows_are_refused(model: BagelModel) -> None:
    assert not model.packs
    batch = pack_batch([torch.tensor([1, 2])], [torch.tensor([3])])
    with pytest.raises(BatchError, match="got packed rows, expected padded ones"):
        model.score(batch, temperature=1.0)


def test_the_vae_has_the_tensors_that_diffusers_converts(model: BagelModel, tiny_folder: Path) -> None:
    converted = convert_ldm_vae_checkpoint(
        load_file(tiny_folder / "ae.safetensors"), dict(model.encoder.images.vae.config)
    )
    result = model.encoder.images.vae.state_dict()
    assert result.keys() == converted.keys()
    assert all(torch.equal(value, converted[name].view(value.shape)) for name, value in result.items())


def test_packing_latents_keeps_the_published_order_of_their_numbers() -> None:
    latents = torch.randn(2, 3, 4, 6)
    packed = pack(latents, patch=2)
    # Row, column and channel of a patch.
    assert torch.equal(packed[1, :, 1, 2].view(2, 2, 3)[1, 0], latents[1, :, 3, 4])
    assert torch.equal(unpack(packed, patch=2), latents)


def test_features_are_those_of_siglip(model: BagelModel, tiny_folder: Path) -> None:
    """An image as large as the table of places, and the convolution over pixels that the stored layer stands for."""
    settings = json.loads((tiny_folder / "vit_config.json").read_text())
    siglip = SiglipVisionModel(SiglipVisionConfig(**settings, vision_use_head=False)).eval()
    del siglip.encoder.layers[-1]
    start = "vit_model.vision_model."
    stored = {
        name.removeprefix(start): value
        for name, value in load_file(tiny_folder / "ema.safetensors").items()
        if name.startswith(start)
    }
    linear = stored["embeddings.patch_embedding.weight"]
    stored["embeddings.patch_embedding.weight"] = linear.view(-1, 14, 14, 3).permute(0, 3, 1, 2)
    siglip.load_state_dict(stored)
    pixels = torch.randn(1, 3, 56, 56, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        close(model.encoder.images.vision(pixels), siglip(pixels).last_hidden_state[0])


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        ((640, 480), (688, 512)),
        ((1024, 768), (1024, 768)),
        ((4000, 3000), (1024, 768)),
        ((100, 100), (512, 512)),
        ((2000, 300), (1024, 160)),
    ],
)
def test_sources_have_the_published_sizes(size: tuple[int, int], expected: tuple[int, int]) -> None:
    """By hand: sides of 512 to 1024 pixels in steps of 16; a long image keeps its ratio, whatever its short side."""
    scale = Scale(largest=1024, least=512, unit=16)
    assert scale.size(*size) == expected
    assert scale.scaled(Image.new("RGB", size)).size == expected


def test_latents_of_images_come_back(model: BagelModel) -> None:
    images = torch.rand(2, 3, 32, 48, generator=torch.Generator().manual_seed(1))
    latents = model.latents_of(images)
    assert latents.shape == (2, *model.latent_shape(IMAGE))
    vae = model.encoder.images.vae
    mean = vae.encode(2 * images - 1).latent_dist.mean
    # By the numbers of FLUX.1.
    close(unpack(latents, patch=2), (mean - 0.1159) * 0.3611)
    close(model.decode(latents), (vae.decode(mean).sample / 2 + 0.5).clamp(0, 1).detach())
