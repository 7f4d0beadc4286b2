"""Inputs of a vision-language model: one instruction for several images; bad files, prompts and checkpoints refused."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText
from unirl.core.errors import DataError, RecipeError
from unirl.core.types.data import MediaRef, Prompt
from unirl.core.types.inputs import Inputs
from unirl.core.types.sampling import TextSamplingConfig
from unirl.core.types.serial import from_bytes, to_bytes
from unirl.core.types.track import Track
from unirl.engines.trainside.config import TrainsideConfig
from unirl.engines.trainside.engine import build as build_engine
from unirl.loop.requests import build_request
from unirl.models.qwen_vl.config import QwenVlConfig
from unirl.models.qwen_vl.model import QwenVlModel, build
from unirl.models.qwen_vl.plugin import QWEN3, SPEC
from unirl.numerics.train.track_replay import TrackReplay


def image(folder: Path, name: str, colour: tuple[int, int, int], size: tuple[int, int] = (32, 32)) -> MediaRef:
    Image.new("RGB", size, colour).save(folder / name)
    return MediaRef(modality="image", role="condition", uri=str(folder / name))


def asked(model: QwenVlModel, prompts: list[Prompt], **settings: Any) -> Any:
    return build_request(
        prompts,
        track="text",
        sampling=TextSamplingConfig(**{"max_new_tokens": 6, **settings}),
        samples_per_prompt=2,
        model=model,
        trajectory="none",
        seed=3,
        rollout=0,
        policy_version=0,
    )


@pytest.mark.parametrize("cached", [0, 8])
@pytest.mark.parametrize("forward_batch", [0, 3])
def test_one_instruction_over_two_images_gives_each_its_own_text(
    cached: int, forward_batch: int, load: Callable[..., QwenVlModel], tmp_path: Path
) -> None:
    """The images have one size, so all prompts have the same tokens: whatever is kept by text or by tokens shows the
    first image to both. Through the cache (twice, so that it answers), a track in another process, and a replay."""
    model = load()
    red, blue = image(tmp_path, "red.png", (255, 0, 0)), image(tmp_path, "blue.png", (0, 0, 255))
    prompts = [
        Prompt(prompt_id=name, text="Which colour is it?", metadata={}, media=(ref,))
        for name, ref in (("red", red), ("blue", blue))
    ]
    engine = build_engine(
        TrainsideConfig(cached_prompts=cached, forward_batch=forward_batch), model=model, device="cpu"
    )
    request = asked(model, prompts)
    assert len({tuple(row.tolist()) for row in request.text.prompt_tokens}) == 1
    tracks = [engine.generate(request) for _ in range(2)]
    order = [3, 0, 2, 1]
    tracks.append(engine.generate(request.select(order)).select([order.index(row) for row in range(4)]))
    for track in tracks:
        track = from_bytes(to_bytes(track), Track)
        values = track.conditions["positive"].values["pixel_values"]
        assert len(values) == 2, "one entry per input"
        for row, ref in enumerate((red, red, blue, blue)):
            colour = Image.open(ref.uri).getpixel((0, 0))
            # What the processor makes of one colour: (c / 255 - mean) / std of each channel, everywhere.
            expected = [
                (level / 255 - mean) / std
                for level, mean, std in zip(
                    colour,
                    model.processor.image_processor.image_mean,
                    model.processor.image_processor.image_std,
                    strict=True,
                )
            ]
            patches = track.conditions["positive"].expanded()["pixel_values"][row]
            result = patches.unflatten(1, (3, -1)).mean(dim=(0, 2))
            torch.testing.assert_close(result, torch.tensor(expected, dtype=torch.float32), rtol=1e-4, atol=1e-4)
        replayed = TrackReplay(model, stacked=False, policy_context=lambda which: torch.no_grad())(track)
        kept = torch.nn.utils.rnn.pad_sequence(list(track.text.log_probs), batch_first=True)
        # fp32 log-probs of about 6 with a cache and without: 1e-6 of rounding each, in another order of sums.
        torch.testing.assert_close(replayed.log_probs.detach(), kept, rtol=0, atol=2e-5)
    first = [track.text.log_probs[row][0] for track in tracks[:1] for row in range(4)]
    assert len({round(float(value), 4) for value in first}) > 1


def one(media: MediaRef, text: str = "What is it?") -> Inputs:
    return Inputs(ids=("a",), prompts=(text,), texts=(text,), media=((media,),))


def broken(folder: Path) -> MediaRef:
    file = folder / "broken.png"
    Image.radial_gradient("L").save(file)
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    return MediaRef(modality="image", role="condition", uri=str(file))


def animated(folder: Path) -> MediaRef:
    frames = [Image.new("RGB", (8, 8), colour) for colour in ("red", "blue")]
    frames[0].save(folder / "moves.gif", save_all=True, append_images=frames[1:])
    return MediaRef(modality="image", role="condition", uri=str(folder / "moves.gif"))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda folder: MediaRef(modality="image", role="condition", uri=str(folder / "gone.png")),
            r"gone\.png' \(condition\): it cannot be opened",
        ),
        (broken, r"broken\.png' \(condition\): the image is broken"),
        (animated, r"moves\.gif' \(condition\): got an animation of 2 frames"),
        (lambda folder: image(folder, "huge.png", (0, 0, 0), (2**14, 2**13)), r"16384 x 8192 pixels, the limit is"),
        (lambda folder: image(folder, "thin.png", (0, 0, 0), (801, 4)), r"thin\.png': absolute aspect ratio"),
        (
            lambda folder: dataclasses.replace(image(folder, "a.png", (0, 0, 0)), modality="video"),
            r"modality 'video', expected 'image'",
        ),
    ],
)
def test_a_file_that_is_no_image_is_refused_before_anything_is_generated(
    make: Callable[[Path], MediaRef], message: str, load: Callable[..., QwenVlModel], tmp_path: Path
) -> None:
    with pytest.raises(DataError, match=message):
        load().prompt_tokens(one(make(tmp_path)), sampling=TextSamplingConfig())


def test_prompts_and_templates_that_lose_count_of_images_are_refused(
    load: Callable[..., QwenVlModel], folder: Callable[..., Path], tmp_path: Path
) -> None:
    ref = image(tmp_path, "a.png", (0, 0, 0))
    with pytest.raises(
        DataError, match=r"'a <\|image_pad\|>' has the token '<\|image_pad\|>', which stands for images"
    ):
        load().prompt_tokens(one(ref, "a <|image_pad|>"), sampling=TextSamplingConfig())
    shutil.copytree(folder(), tmp_path / "plain")
    (tmp_path / "plain" / "chat_template.jinja").write_text("{{ messages[0].role }}:")
    model = build(QwenVlConfig(path=str(tmp_path / "plain")), device="cpu")
    with pytest.raises(RecipeError, match=r"sampling\.chat: .* shows 0 of 1 images"):
        model.prompt_tokens(one(ref), sampling=TextSamplingConfig())


def test_other_and_incomplete_checkpoints_are_refused(folder: Callable[..., Path], tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"'Qwen3VLForConditionalGeneration'; this model loads .*model=qwen3-vl"):
        build(QwenVlConfig(path=str(folder("qwen3"))), device="cpu")
    shutil.copytree(folder(), tmp_path / "bare")
    (tmp_path / "bare" / "preprocessor_config.json").unlink()
    with pytest.raises(RecipeError, match=r"^model\.path: the image processor in .* does not load"):
        build(QwenVlConfig(path=str(tmp_path / "bare")), device="cpu")


@pytest.mark.parametrize(("kind", "spec"), [("qwen25", SPEC), ("qwen3", QWEN3)])
def test_what_it_saves_is_an_ordinary_checkpoint(
    kind: str, spec: Any, load: Callable[..., QwenVlModel], folder: Callable[..., Path], tmp_path: Path
) -> None:
    model = load(kind)
    assert model.spec is spec
    model.trainable.save_pretrained(tmp_path)  # type: ignore[operator]
    saved, original = (json.loads((path / "config.json").read_text()) for path in (tmp_path, folder(kind)))
    assert saved["architectures"] == original["architectures"]
    again = AutoModelForImageTextToText.from_pretrained(tmp_path)
    assert type(again).__module__.startswith("transformers.")
    kept = again.state_dict()
    assert all(torch.equal(weight, kept[name]) for name, weight in model.trainable.state_dict().items())


@pytest.mark.parametrize("write", ["write", "write_qwen3"])
def test_the_miniature_is_the_same_bytes_for_the_same_seed(write: str, tmp_path: Path) -> None:
    from unirl.models.qwen_vl import tiny

    for name, seed in (("one", 0), ("same", 0), ("other", 1)):
        getattr(tiny, write)(tmp_path / name, seed=seed)
    files = {name: {f.name: f.read_bytes() for f in (tmp_path / name).iterdir()} for name in ("one", "same", "other")}
    assert files["one"] == files["same"]
    assert files["one"]["model.safetensors"] != files["other"]["model.safetensors"]
    assert sum(map(len, files["one"].values())) < 1_000_000
