from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from checkpoints import cut
from PIL import Image
from unirl.core.errors import DataError, RecipeError
from unirl.core.match.match import match
from unirl.core.plugins.catalog import Catalog
from unirl.core.recipe.compose import compose
from unirl.core.types.data import MediaRef
from unirl.core.types.inputs import Inputs
from unirl.core.types.sampling import LatentSamplingConfig
from unirl.models.hunyuan_video15 import image, model, tiny
from unirl.models.hunyuan_video15.config import HunyuanVideo15Config, HunyuanVideo15ImageConfig
from unirl.models.hunyuan_video15.image import HunyuanVideo15ImageModel
from unirl.models.hunyuan_video15.model import HunyuanVideo15Model
from unirl.models.hunyuan_video15.plugin import SPEC


def test_the_latent_of_a_video(of_text: HunyuanVideo15Model, sampling: LatentSamplingConfig) -> None:
    """One latent frame for the first frame and for every four after it; a sixteenth of each side."""
    assert of_text.latent_shape(sampling) == (4, 3, 2, 4)
    assert of_text.latent_shape(dataclasses.replace(sampling, frames=1)) == (4, 1, 2, 4)
    assert of_text.num_tokens((4, 3, 2, 4)) == 3 * 2 * 4


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"frames": 8}, r"sampling\.frames: got 8, expected a multiple of 4 plus 1\. Nearest: 5 or 9\."),
        ({"height": 40}, r"sampling\.height: got 40, expected a multiple of 16\. Nearest: 32 or 48\."),
    ],
)
def test_a_size_that_does_not_fit_is_refused_with_one_that_does(
    of_text: HunyuanVideo15Model, sampling: LatentSamplingConfig, changes: dict[str, int], message: str
) -> None:
    with pytest.raises(RecipeError, match=message):
        of_text.latent_shape(dataclasses.replace(sampling, **changes))


def test_prompts_longer_than_the_encoder_takes_are_refused(
    of_text: HunyuanVideo15Model, sampling: LatentSamplingConfig
) -> None:
    with pytest.raises(RecipeError, match=r"sampling\.max_sequence_length: got 1001; .* 1 to 1000"):
        of_text.encode(Inputs.of_texts(["a ring"]), sampling=dataclasses.replace(sampling, max_sequence_length=1001))


def test_encoders_and_vae_are_frozen_and_the_transformer_is_not(of_image: HunyuanVideo15ImageModel) -> None:
    parts = {n: p for n, p in of_image.pipeline.components.items() if isinstance(p, torch.nn.Module)}
    assert {n for n, part in parts.items() if any(p.requires_grad for p in part.parameters())} == {"transformer"}
    assert not any(part.training for part in parts.values())
    assert getattr(of_image, SPEC.trainable) is of_image.trainable


def test_every_encoder_has_the_dtype_for_texts(image_folder: Path) -> None:
    config = HunyuanVideo15ImageConfig(path=str(image_folder), text_dtype="bfloat16")
    parts = image.build(config, device="cpu").pipeline.components
    names = ("text_encoder", "text_encoder_2", "image_encoder", "vae", "transformer")
    dtypes = [next(parts[name].parameters()).dtype for name in names]
    assert dtypes == 3 * [torch.bfloat16] + 2 * [torch.float32]


def test_a_process_that_encodes_nothing_has_no_encoders(image_folder: Path) -> None:
    config = HunyuanVideo15ImageConfig(path=str(image_folder))
    parts = image.build(config, device="cpu", serves=frozenset()).pipeline.components
    for name in ("text_encoder", "text_encoder_2", "image_encoder", "vae"):
        assert next(parts[name].parameters()).is_meta


def test_videos_are_decoded_one_at_a_time(tiny_folder: Path, of_text: HunyuanVideo15Model) -> None:
    latents = torch.randn(3, 4, 2, 2, 4, generator=torch.Generator().manual_seed(0))
    at_once = model.build(HunyuanVideo15Config(path=str(tiny_folder), decode_batch=0), device="cpu")
    with torch.no_grad():
        videos = of_text.decode(latents)
        # Another place in memory, another order of sums in the convolutions.
        torch.testing.assert_close(at_once.decode(latents), videos, rtol=0, atol=1e-5)
        assert torch.equal(videos[1], of_text.decode(latents[1:2])[0])
    assert videos.shape == (3, 5, 3, 32, 64)


def test_large_videos_are_decoded_in_tiles_if_asked(tiny_folder: Path) -> None:
    """Sides of 272 pixels, one tile more than 256."""
    latents = torch.randn(1, 4, 1, 17, 2, generator=torch.Generator().manual_seed(0))
    sizes: dict[bool, list[int]] = {False: [], True: []}
    for tiled, heights in sizes.items():
        whole = model.build(HunyuanVideo15Config(path=str(tiny_folder), vae_tiling=tiled), device="cpu")
        whole.vae.decoder.register_forward_pre_hook(lambda _m, args, kept=heights: kept.append(args[0].shape[3]))
        with torch.no_grad():
            assert whole.decode(latents).shape == (1, 3, 272, 32)
    # Of 16 latents, each twelve further on.
    assert sizes == {False: [17], True: [16, 5]}


def test_a_video_has_a_gradient_to_its_latent(of_text: HunyuanVideo15Model) -> None:
    latents = torch.zeros(2, 4, 2, 2, 2, requires_grad=True)
    of_text.decode(latents).sum().backward()
    assert latents.grad is not None
    assert bool((latents.grad.abs().sum(dim=(1, 3, 4)) > 0).all())


def change(file: str, **values: object) -> Callable[[Path], None]:
    """Set keys of a JSON file of the checkpoint."""

    def done(folder: Path) -> None:
        path = folder / file
        path.write_text(json.dumps({**json.loads(path.read_text()), **values}))

    return done


def without_indentation(folder: Path) -> None:
    """A chat template that collapses the spaces of the pipeline's system message."""
    path = folder / "tokenizer" / "chat_template.jinja"
    path.write_text(path.read_text().replace("message.content", "message.content.split() | join(' ')"))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (change("model_index.json", _class_name="HunyuanVideoPipeline"), r"'HunyuanVideoPipeline'; hunyuan-video15"),
        (
            change("model_index.json", _class_name="HunyuanVideo15ImageToVideoPipeline"),
            r"of 'HunyuanVideo15ImageToVideoPipeline'\. Choose model=hunyuan-video15-i2v\.$",
        ),
        (change("transformer/config.json", use_meanflow=True), r"use_meanflow = true, .* depends on the next step"),
        (
            change("model_index.json", guider=["diffusers", "AdaptiveProjectedGuidance"]),
            r"AdaptiveProjectedGuidance with its settings; expected ClassifierFreeGuidance",
        ),
        (change("guider/guider_config.json", guidance_rescale=0.7), r"ClassifierFreeGuidance with .*rescale': 0\.7"),
        (lambda folder: shutil.rmtree(folder / "text_encoder_2"), r"lacks text_encoder_2/"),
        (lambda folder: (folder / "tokenizer" / "tokenizer.json").unlink(), r"has no vocabulary in tokenizer/"),
        (lambda folder: (folder / "tokenizer" / "chat_template.jinja").unlink(), r"has no chat template"),
        (without_indentation, r"makes 103 tokens of the text before the prompt, .* drops 108"),
        (lambda folder: cut(folder / "transformer"), r"a component does not load"),
    ],
    ids=[
        "other-model",
        "image-to-video",
        "meanflow",
        "guider",
        "rescaled",
        "no-byt5",
        "no-tokens",
        "no-template",
        "collapsed",
        "cut",
    ],
)
def test_a_checkpoint_that_does_not_fit_is_one_clear_error(
    tmp_path: Path, tiny_folder: Path, damage: Callable[[Path], None], message: str
) -> None:
    folder = tmp_path / "damaged"
    shutil.copytree(tiny_folder, folder)
    damage(folder)
    with pytest.raises(RecipeError, match=message) as caught:
        model.build(HunyuanVideo15Config(path=str(folder)), device="cpu")
    assert str(caught.value).startswith("model.path: ")


def test_a_checkpoint_for_texts_is_refused_for_first_frames(tiny_folder: Path) -> None:
    with pytest.raises(
        RecipeError, match=r"^model\.path: .* of 'HunyuanVideo15Pipeline'\. Choose model=hunyuan-video15\.$"
    ):
        image.build(HunyuanVideo15ImageConfig(path=str(tiny_folder)), device="cpu")


def test_guidance_on_a_distilled_checkpoint_is_refused(tmp_path: Path, sampling: LatentSamplingConfig) -> None:
    tiny.write(tmp_path, seed=0, guidance_scale=1.0)
    distilled = model.build(HunyuanVideo15Config(path=str(tmp_path)), device="cpu")
    assert distilled.latent_shape(sampling)
    with pytest.raises(RecipeError, match=r"sampling\.guidance_scale: got 6 for a checkpoint whose guidance is disti"):
        distilled.latent_shape(dataclasses.replace(sampling, guidance_scale=6.0))


def test_what_a_local_checkpoint_says_is_known_before_anything_is_loaded(
    tiny_folder: Path, image_folder: Path, tmp_path: Path
) -> None:
    tiny.write(tmp_path, seed=0, guidance_scale=1.0)
    catalog = Catalog.discover()

    def reasons(*words: str) -> list[str]:
        recipe = compose("hunyuan-video15/dance-grpo", ["data.train=prompts.txt", *words], catalog=catalog)
        return [str(reason) for reason in match(recipe, catalog=catalog).reasons]

    assert reasons(f"model.path={tiny_folder}", "sampling.guidance_scale=6") == []
    (other,) = reasons(f"model.path={image_folder}")
    assert "model.path: " in other and other.endswith("Choose model=hunyuan-video15-i2v.")
    distilled, evaluated = reasons(f"model.path={tmp_path}", "sampling.guidance_scale=6", "eval=null")
    assert distilled.startswith("sampling.guidance_scale: got 6, but the guidance of ")
    assert evaluated == f"eval.{distilled}", "the recipe evaluates at the same scale"


def test_engines_without_a_bridge_are_refused_when_the_recipe_is_composed(image_folder: Path) -> None:
    catalog = Catalog.discover()

    def reasons(engine: str) -> list[str]:
        words = ["model=hunyuan-video15-i2v", "data.train=prompts.jsonl", f"model.path={image_folder}"]
        words = [*words, f"engine={engine}", "eval=null"]
        recipe = compose("hunyuan-video15/dance-grpo", words, catalog=catalog)
        return [str(reason) for reason in match(recipe, catalog=catalog).reasons]

    assert reasons("vllm-omni") == []
    found = reasons("sglang")
    assert any("'sglang'" in one and "model 'hunyuan-video15-i2v' has none for it" in one for one in found), found


def first_frame(folder: Path, *sizes: tuple[int, int]) -> Inputs:
    media: list[MediaRef] = []
    for number, size in enumerate(sizes):
        Image.new("RGB", size).save(file := folder / f"{number}.png")
        media.append(MediaRef(modality="image", role="source", uri=str(file)))
    return Inputs(ids=("a",), prompts=("it moves",), texts=("it moves",), media=(tuple(media),))


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((), r"^prompt 'a' \('it moves'\): got no source image, expected one, the first frame of the video"),
        (((64, 32), (64, 32)), r"got 2 source images"),
        (
            ((64, 72),),
            r"^prompt 'a' \('it moves'\), media '.*0\.png': got 64 x 72 pixels for a video of 64 x 32, which would "
            r"show 44% of it, expected at least 50%\. Crop it beforehand, or change",
        ),
        (((136, 32),), r"got 136 x 32 pixels .* show 47% of it"),
    ],
    ids=["none", "two", "tall", "wide"],
)
def test_first_frames_that_do_not_fit_are_refused(
    of_image: HunyuanVideo15ImageModel,
    sampling: LatentSamplingConfig,
    tmp_path: Path,
    sizes: tuple[tuple[int, int], ...],
    message: str,
) -> None:
    with pytest.raises(DataError, match=message):
        of_image.encode(first_frame(tmp_path, *sizes), sampling=sampling)


def test_the_layers_that_may_be_split_exist_in_every_block(of_text: HunyuanVideo15Model) -> None:
    linear = {name for name, module in of_text.trainable.named_modules() if isinstance(module, torch.nn.Linear)}
    for pattern in SPEC.tensor_parallel:
        assert {pattern.replace("*", block) for block in "01"} <= linear
