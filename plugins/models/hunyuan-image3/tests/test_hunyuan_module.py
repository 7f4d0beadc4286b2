"""The transformer and the VAE against HunyuanImage-3.0's formula, the ViT against transformers."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from plain_hunyuan import PlainHunyuan
from safetensors.torch import load_file
from torch import Tensor
from transformers import Siglip2VisionConfig, Siglip2VisionModel
from unified_models import given
from unirl.core.errors import BatchError
from unirl.core.types.data import MediaRef
from unirl.core.types.sampling import LatentSamplingConfig, TextSamplingConfig
from unirl.models.hunyuan_image3.images import cropped
from unirl.models.hunyuan_image3.model import HunyuanImageModel
from unirl.numerics.tokens.batches import pack_batch, pad_batch

CLOSE = 1e-5
"""Of the largest value: rounding of fp32 through two layers is about 1e-6. A wrong position, mask or expert moves them
by 1e-3 and more."""
IMAGE = LatentSamplingConfig(num_inference_steps=4, height=64, width=48)
"""The ratio after 1:1, which is number 16."""
TEXT = TextSamplingConfig(max_new_tokens=4)
GRIDS = [[(3, 4, 3, 4)], [(4, 3, 4, 3)], [(4, 4, 3, 3), (3, 5, 3, 4)]]
"""Sides in latents and in patches of the sources of `tiny.media`, 64 x 80, 96 x 64, 64 x 64 and 40 x 60: that of the
nearest ratio in steps of 16 pixels, and at most 12 patches of 8 pixels."""
RATIOS = {(3, 5): 12, (3, 4): 13, (4, 4): 16, (4, 3): 17}


@pytest.fixture(scope="module")
def plain(tiny_folder: Path) -> PlainHunyuan:
    return PlainHunyuan(tiny_folder)


def close(result: Tensor, expected: Tensor) -> None:
    assert result.shape == expected.shape
    assert float((result - expected).abs().max()) <= CLOSE * float(expected.abs().max())


def sources(plain: PlainHunyuan, conditions: dict[str, Any], row: int) -> list[Any]:
    """The source images of a sample by hand."""
    result: list[Any] = []
    latents, features = conditions["latents"][row], conditions["features"][row]
    grids = zip(conditions["latent_sizes"][row].tolist(), conditions["feature_sizes"][row].tolist(), strict=True)
    for (height, width), (high, wide) in grids:
        ratio = RATIOS[height, width]
        own = latents[: height * width].T.reshape(-1, height, width)
        result.append(("text", plain.ids("<boi>", "<img_size_64>", f"<img_ratio_{ratio}>")))
        result.append(("source", own, features[:12], high, wide, plain.ids("<eoi>")))
        latents, features = latents[height * width :], features[12:]
    assert not len(latents) and not len(features)
    return result


def before(plain: PlainHunyuan, text: str, conditions: dict[str, Any], row: int) -> list[Any]:
    """The sequence of a prompt up to the assistant's words, by hand."""
    first, last = plain.ids("<|startoftext|>", "User: "), plain.ids(text, "\n\nAssistant: ")
    return [("text", first), *sources(plain, conditions, row), ("text", last)]


def size(plain: PlainHunyuan, ratio: int) -> tuple[str, list[int]]:
    return "text", plain.ids("<answer>", "<boi>", "<img_size_64>", f"<img_ratio_{ratio}>")


def test_velocities_are_those_of_the_formula(
    model: HunyuanImageModel, plain: PlainHunyuan, media: list[tuple[MediaRef, ...]]
) -> None:
    """Rows without images, with one and with two, of texts of different lengths, in one batch."""
    texts = ("a ring", "make it red, please", "both")
    conditions = dict(model.encode(given(texts, ((), media[1], media[2])), sampling=IMAGE))
    assert [conditions["latent_sizes"][row].tolist() for row in (1, 2)] == [
        [[height, width] for height, width, _, _ in GRIDS[row]] for row in (1, 2)
    ]
    assert [conditions["feature_sizes"][row].tolist() for row in (1, 2)] == [
        [[high, wide] for _, _, high, wide in GRIDS[row]] for row in (1, 2)
    ]
    x = torch.randn(3, *model.latent_shape(IMAGE), generator=torch.Generator().manual_seed(1))
    sigma = torch.tensor([0.9, 0.5, 0.1])
    with torch.no_grad():
        result = model.velocity(x, sigma, conditions)
    for row in range(3):
        pieces = [*before(plain, texts[row], conditions, row), size(plain, 17)]
        close(result[row].double(), plain.velocity(pieces, x[row], float(sigma[row])))


@pytest.mark.parametrize(
    "wrong",
    [
        "sigma in [0, 1]",
        "norm before the image head",
        "one dimension",
        "queries, keys, values after each other",
        "norm before the rotation",
        "weights of experts as they are",
        "gate first",
    ],
)
def test_the_miniature_shows_every_mistake(plain: PlainHunyuan, tiny_folder: Path, wrong: str) -> None:
    x = torch.randn(4, 4, 3, generator=torch.Generator().manual_seed(1))
    pieces = [("text", plain.ids("<|startoftext|>", "a ring")), size(plain, 17)]
    right, result = (one.velocity(pieces, x, 0.5) for one in (plain, PlainHunyuan(tiny_folder, wrong=wrong)))
    assert float((result - right).abs().max()) > 100 * CLOSE * float(right.abs().max())


def test_log_probs_are_those_of_the_formula(
    model: HunyuanImageModel, plain: PlainHunyuan, media: list[tuple[MediaRef, ...]]
) -> None:
    """Padded rows with and without images, their entropies, and a text without any image in its batch."""
    texts, tokens = ("what is it", "and here"), [torch.tensor([5, 7, 9]), torch.tensor([11, 2])]
    for images in ((media[0], ()), ((), ())):
        inputs = given(texts, images)
        conditions = dict(model.conditions(inputs, sampling=TEXT))
        prompts = model.prompt_tokens(inputs, sampling=TEXT)
        batch = pad_batch(prompts, tokens, pad_token=model.pad_token, conditions=conditions)
        with torch.no_grad():
            log_probs, entropy = model.score(batch, temperature=0.7, with_entropy=True)
        assert entropy is not None
        for row, (part, own) in enumerate(zip(log_probs.split([3, 2]), entropy.split([3, 2]), strict=True)):
            completion = tokens[row].tolist()
            logits = plain.logits([*before(plain, texts[row], conditions, row), ("text", completion)])
            expected = (logits[-len(completion) - 1 : -1] / 0.7).log_softmax(-1)
            close(part.double(), expected.gather(1, tokens[row][:, None])[:, 0])
            close(own.double(), -(expected.exp() * expected).sum(-1))


def test_a_cache_gives_the_logits_of_the_whole(
    model: HunyuanImageModel, plain: PlainHunyuan, media: list[tuple[MediaRef, ...]]
) -> None:
    """Prompts of different lengths padded on the left, one of them with an image; then a row leaves."""
    texts = ("what is it", "a b")
    inputs = given(texts, (media[0], ()))
    prompts, conditions = model.prompt_tokens(inputs, sampling=TEXT), dict(model.conditions(inputs, sampling=TEXT))
    longest = max(map(len, prompts))
    tokens = torch.stack([torch.cat([row.new_full((longest - len(row),), 3), row]) for row in prompts])
    keep = torch.stack([torch.arange(longest) >= longest - len(row) for row in prompts])
    positions = (keep.long().cumsum(1) - 1).clamp(min=0)
    own = [before(plain, texts[row], conditions, row) for row in range(2)]
    logits, cache = model.next_logits(
        tokens, positions=positions, attention_mask=keep, cache=None, conditions=conditions
    )
    for row in range(2):
        close(logits[row].double(), plain.logits(own[row])[-1])
    for step in range(2):
        keep = torch.cat([keep, keep.new_ones(len(keep), 1)], dim=1)
        positions = positions[:, -1:] + 1
        drawn = torch.full((len(keep), 1), 7 + step)
        logits, cache = model.next_logits(drawn, positions=positions, attention_mask=keep, cache=cache)
        close(logits[0].double(), plain.logits([*own[0], ("text", [7, 8][: 1 + step])])[-1])
        cache, keep, positions = model.select_cache(cache, torch.tensor([0])), keep[:1], positions[:1]


def test_packed_rows_are_refused(model: HunyuanImageModel) -> None:
    assert not model.packs
    batch = pack_batch([torch.tensor([1, 2])], [torch.tensor([3])])
    with pytest.raises(BatchError, match="got packed rows, expected padded ones"):
        model.score(batch, temperature=1.0)


def test_the_vae_is_that_of_the_formula(model: HunyuanImageModel, plain: PlainHunyuan) -> None:
    """Latents of images, and images of latents, in one batch each."""
    images = torch.rand(2, 3, 64, 48, generator=torch.Generator().manual_seed(1))
    latents = model.latents_of(images)
    assert latents.shape == (2, *model.latent_shape(IMAGE))
    decoded = torch.cat([model.encoder.images.vae.decode(one[None]) for one in latents])
    for row in range(2):
        close(latents[row].double(), plain.encoded(2 * images[row] - 1))
        close(decoded[row].double(), plain.decoded(latents[row]))
    assert torch.equal(model.decode(latents), (decoded / 2 + 0.5).clamp(0, 1))


def test_features_are_those_of_siglip(model: HunyuanImageModel, tiny_folder: Path, tmp_path: Path) -> None:
    """All of them, those of padding too, of patches written out by hand: an image that needs no scaling."""
    settings = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = Siglip2VisionConfig(**settings, num_patches=16, patch_size=8, vision_use_head=False)
    siglip = Siglip2VisionModel(config).eval()
    stored = load_file(tiny_folder / "model.safetensors")
    start = "vision_model."
    siglip.load_state_dict({name.removeprefix(start): stored[name] for name in stored if name.startswith(start)})
    levels = torch.randint(0, 256, (24, 24, 3), generator=torch.Generator().manual_seed(1), dtype=torch.uint8)
    Image.fromarray(levels.numpy()).save(tmp_path / "a.png")
    source = MediaRef(modality="image", role="source", uri=str(tmp_path / "a.png"))
    conditions = model.encode(given(("",), ((source,),)), sampling=IMAGE)
    cells = levels.double() / 127.5 - 1
    rows = [cells[8 * (at // 3) : 8 * (at // 3) + 8, 8 * (at % 3) : 8 * (at % 3) + 8] for at in range(9)]
    patches = torch.stack([row.flatten() for row in rows] + [torch.zeros(192)] * 3).float()
    with torch.no_grad():
        output = siglip(patches[None], torch.tensor([[1] * 9 + [0] * 3]), torch.tensor([[3, 3]]))
    assert conditions["feature_sizes"][0].tolist() == [[3, 3]]
    close(conditions["features"][0], output.last_hidden_state[0])


@pytest.mark.parametrize(("size", "scaled"), [((100, 50), (128, 64)), ((50, 100), (64, 128)), ((64, 48), (85, 64))])
def test_sources_are_scaled_and_their_middle_is_taken(size: tuple[int, int], scaled: tuple[int, int]) -> None:
    """By hand: the side that is too short for 64 x 64 fills it."""
    image = Image.linear_gradient("L").resize(size).convert("RGB")
    left, top = round((scaled[0] - 64) / 2), round((scaled[1] - 64) / 2)
    expected = image.resize(scaled, Image.Resampling.LANCZOS).crop((left, top, left + 64, top + 64))
    assert cropped(image, height=64, width=64).tobytes() == expected.tobytes()


def test_log_probs_of_a_batch_are_those_of_its_rows(model: HunyuanImageModel) -> None:
    """Experts see the tokens of all rows at once; 1e-6 nats, as products have other shapes."""
    prompts = model.prompt_tokens(given(("a ring", "b")), sampling=dataclasses.replace(TEXT, chat=False))
    tokens = [torch.tensor([5, 7, 9]), torch.tensor([11, 2])]
    conditions = dict(model.conditions(given(("a ring", "b")), sampling=TEXT))

    def scored(rows: list[int]) -> Tensor:
        own = {name: tuple(values[row] for row in rows) for name, values in conditions.items()}
        batch = pad_batch([prompts[r] for r in rows], [tokens[r] for r in rows], pad_token=3, conditions=own)
        with torch.no_grad():
            return model.score(batch, temperature=1.0)[0]

    alone = torch.cat([scored([0]), scored([1])])
    assert float((scored([0, 1]) - alone).abs().max()) <= 1e-6
