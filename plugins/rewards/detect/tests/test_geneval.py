"""Detection and colours against transformers' pipelines on random checkpoints, and the reward as a whole."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from transformers import CLIPImageProcessorPil, CLIPModel, CLIPTokenizer, pipeline
from unirl.core.errors import RecipeError, RewardFailed
from unirl.core.roles import ScoreInput
from unirl.core.types.inputs import Inputs
from unirl.core.types.media import Media
from unirl.rewards.detect import geneval, tiny
from unirl.rewards.detect.config import GenevalConfig
from unirl.rewards.detect.detector import Detector
from unirl.rewards.detect.geneval_metadata import COLORS, read_scene
from unirl.rewards.detect.geneval_rules import Detection, judge
from unirl.rewards.detect.object_color import ColorNamer, crop

KEY = "reward.geneval.detector"
# The same weights on the same pixels, one image or two at a time: sums in fp32 in another order.
ROUNDING = 1e-5


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An OWLv2, a Grounding DINO and a CLIP."""
    result = tmp_path_factory.mktemp("checkpoints")
    tiny.write(result, seed=0)
    tiny.write_grounding_dino(result / "grounding-dino", seed=0)
    return result


def photos(count: int, *, height: int = 48, width: int = 64) -> list[Image.Image]:
    random = np.random.default_rng(0)
    return [Image.fromarray(random.integers(0, 256, (height, width, 3), dtype=np.uint8)) for _ in range(count)]


def as_samples(images: list[Image.Image], metadata: dict[str, Any], **fields: Any) -> ScoreInput:
    names = tuple(f"s{index}" for index in range(len(images)))
    pixels = tuple(torch.from_numpy(np.asarray(image) / np.float32(255)).permute(2, 0, 1) for image in images)
    return ScoreInput(
        **{
            "sample_ids": names,
            "group_ids": names,
            "inputs": Inputs.of_texts(["a photo"] * len(images)),
            "metadata": (metadata,) * len(images),
            "media": Media(kind="image", values=pixels),
            **fields,
        }
    )


def config(folder: Path, **settings: Any) -> GenevalConfig:
    return GenevalConfig(**{"detector": str(folder / "detector"), "clip_path": str(folder / "clip"), **settings})


@pytest.mark.parametrize(("name", "text"), [("detector", "a photo of a Hot dog"), ("grounding-dino", "hot dog.")])
@pytest.mark.parametrize("size", [(48, 64), (80, 40)])
def test_objects_are_those_of_transformers_pipeline(folder: Path, name: str, text: str, size: tuple[int, int]) -> None:
    height, width = size
    images = photos(3, height=height, width=width)
    result = Detector(str(folder / name), key=KEY, batch_size=2, device="cpu").find(images, "Hot dog", threshold=0.2)
    oracle = pipeline("zero-shot-object-detection", model=str(folder / name))
    total = 0
    for image, found in zip(images, result, strict=True):
        expected = oracle(image, candidate_labels=[text], threshold=0.2)
        boxes = [(one["box"], one["score"]) for one in expected]
        # The pipeline truncates boxes to whole pixels, and keeps those in OWLv2's padding.
        kept = [(box, score) for box, score in boxes if _is_inside(box, image)]
        ours = sorted(found, key=lambda one: -one.score)
        assert len(ours) >= len(kept) and len(boxes) >= len(ours)
        scores = [score for _, score in boxes]
        for one in ours:
            number = min(range(len(scores)), key=lambda index: abs(scores[index] - one.score))
            assert one.score == pytest.approx(scores[number], abs=ROUNDING)
            box = boxes[number][0]
            bounds = (width, height, width, height)
            for edge, whole, most in zip(one.box, box.values(), bounds, strict=True):
                # A truncated number lies within a pixel of its own; rounding may move it across.
                assert abs(edge - min(max(whole, 0), most)) < 1 + 1e-3
            total += 1
    assert total > 3


def _is_inside(box: dict[str, int], image: Image.Image) -> bool:
    """Whether a box truncated to whole pixels certainly has an area inside the image."""
    wide = min(box["xmax"], image.width) - max(box["xmin"], 0) >= 2
    return wide and min(box["ymax"], image.height) - max(box["ymin"], 0) >= 2


def test_boxes_are_inside_the_image(folder: Path) -> None:
    for found in Detector(str(folder / "detector"), key=KEY, batch_size=4, device="cpu").find(
        photos(4), "cat", threshold=0.0
    ):
        for left, top, right, bottom in (one.box for one in found):
            assert 0 <= left < right <= 64 and 0 <= top < bottom <= 48


def test_colors_are_those_of_clips_zero_shot_classifier(folder: Path) -> None:
    """The texts' mean in fp64, from the embeddings of the whole model, one image at a time."""
    images = photos(12, height=40, width=60)
    model = CLIPModel.from_pretrained(folder / "clip").eval()
    tokenizer = CLIPTokenizer.from_pretrained(folder / "clip")
    processor = CLIPImageProcessorPil.from_pretrained(folder / "clip")
    expected, margins = [], []
    for image in images:
        pixels, columns = processor(image, return_tensors="pt"), []
        for color in COLORS:
            texts = (f"a photo of a {color} cup", f"a photo of a {color}-colored cup", f"a photo of a {color} object")
            with torch.no_grad():
                outputs = [model(**tokenizer(text, return_tensors="pt"), **pixels) for text in texts]
            mean = torch.stack([one.text_embeds[0].double() for one in outputs]).mean(dim=0)
            columns.append(float(mean / mean.norm() @ outputs[0].image_embeds[0].double()))
        best, second = sorted(columns, reverse=True)[:2]
        expected.append(COLORS[columns.index(best)])
        margins.append(best - second)
    result = ColorNamer(str(folder / "clip"), key="reward.geneval.clip_path", batch_size=5, device="cpu").name(
        images, "cup"
    )
    # Where two colours are as good as equal, rounding decides.
    certain = [row for row, margin in enumerate(margins) if margin > ROUNDING]
    assert len(certain) > 6 and len(set(expected)) > 1
    assert [result[row] for row in certain] == [expected[row] for row in certain]


def test_a_crop_has_the_pixels_of_its_box() -> None:
    (image,) = photos(1)
    pixels = np.asarray(image)
    np.testing.assert_array_equal(np.asarray(crop(image, (10.4, 5.6, 30.4, 20.2))), pixels[6:20, 10:30])
    assert crop(image, (64, 48, 64, 48)).size == (1, 1)
    assert crop(image, (3.2, 3.2, 3.3, 3.3)).size == (1, 1)


def test_the_ends_of_a_long_crop_do_not_reach_clip() -> None:
    processor = CLIPImageProcessorPil(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32})
    (image,) = photos(1, height=48, width=1024)
    cut = crop(image, (0, 10, 1024, 20))
    assert cut.size == (160, 10)
    whole = processor(image.crop((0, 10, 1024, 20)), return_tensors="pt")["pixel_values"]
    # Both lengths become whole pixels by rounding, half a pixel apart at most, where neighbours are unrelated noise; a
    # shift by a source pixel, of 3.2 pixels here, makes a mean difference of about 0.5.
    assert float((whole - processor(cut, return_tensors="pt")["pixel_values"]).abs().mean()) < 0.1


METADATA = {
    "tag": "position",
    "include": [
        {"class": "cat", "count": 1},
        {"class": "dog", "count": 1, "color": "red", "position": ["right of", 0]},
    ],
}


def test_the_score_is_the_judgement_of_what_was_found(folder: Path) -> None:
    images = [*photos(3), *photos(2, height=40, width=40)]
    settings = {"threshold": 0.4, "max_overlap": 1.0}
    scores = geneval.build(config(folder, **settings), device="cpu").score(as_samples(images, METADATA))
    detector = Detector(str(folder / "detector"), key=KEY, batch_size=1, device="cpu")
    namer = ColorNamer(str(folder / "clip"), key="reward.geneval.clip_path", batch_size=1, device="cpu")
    for row, image in enumerate(images):
        found: dict[str, list[Detection]] = {}
        for name in ("cat", "dog"):
            (objects,) = detector.find([image], name, threshold=0.4)
            found[name] = [
                Detection(box=one.box, score=one.score, color=namer.name([crop(image, one.box)], name)[0])
                for one in objects
            ]
        expected = judge(read_scene(METADATA), found)
        assert float(scores.values[row]) == pytest.approx(expected.soft, abs=1e-6)  # fp32
        parts = {name: float(values[row]) for name, values in scores.parts.items()}
        assert parts == pytest.approx(dataclasses.asdict(expected), abs=1e-6)


def test_counting_has_its_own_threshold_and_the_score_may_be_the_verdict(folder: Path) -> None:
    images, include = photos(8), [{"class": "cat", "count": 1}]
    detector = Detector(str(folder / "detector"), key=KEY, batch_size=8, device="cpu")
    low, high = ([float(bool(one)) for one in detector.find(images, "cat", threshold=t)] for t in (0.0, 0.9))
    assert low == [1.0] * 8 and 0 < sum(high) < 8
    for settings, counting, other in (
        ({"threshold": 0.0, "counting_threshold": 0.9}, high, low),
        ({"threshold": 0.9, "counting_threshold": 0.0}, low, high),
    ):
        reward = geneval.build(config(folder, score="strict", **settings), device="cpu")
        for tag, expected in (("counting", counting), ("single_object", other)):
            scores = reward.score(as_samples(images, {"tag": tag, "include": include}))
            assert scores.values.tolist() == scores.parts["strict"].tolist() == expected


def remove_config(folder: Path) -> None:
    (folder / "config.json").unlink()


def remove_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def truncate_weights(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:5000])


def remove_head(folder: Path) -> None:
    file = folder / "model.safetensors"
    weights = {name: value for name, value in load_file(file).items() if not name.startswith("class_head")}
    save_file(weights, file, metadata={"format": "pt"})


def remove_tokenizer(folder: Path) -> None:
    for file in folder.glob("*token*"):
        file.unlink()


def remove_image_processor(folder: Path) -> None:
    for file in folder.glob("*processor*"):
        file.unlink()


def rename_kind(folder: Path) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "model_type": "no-such-model"}))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (remove_config, "has no config.json"),
        (remove_weights, "does not load"),
        (truncate_weights, "does not load"),
        (remove_head, "lacks .* weights of a owlv2 model, such as 'class_head"),
        (remove_tokenizer, "has no vocabulary"),
        (remove_image_processor, "does not load"),
        (rename_kind, "does not load"),
        (shutil.rmtree, "is not a folder"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_damaged_checkpoint_is_one_error(
    folder: Path, tmp_path: Path, damage: Callable[[Path], None], message: str
) -> None:
    copy = tmp_path / "detector"
    shutil.copytree(folder / "detector", copy)
    damage(copy)
    with pytest.raises(RecipeError, match=rf"^reward\.geneval\.detector: .*{message}"):
        geneval.build(config(folder, detector=str(copy)), device="cpu")


def test_a_checkpoint_of_another_model_is_named(folder: Path) -> None:
    with pytest.raises(RecipeError, match=r"detector: .* is a checkpoint of 'clip', expected grounding-dino or"):
        geneval.build(config(folder, detector=str(folder / "clip")), device="cpu")
    with pytest.raises(RecipeError, match=r"clip_path: .* is a checkpoint of 'owlv2', expected clip\."):
        geneval.build(config(folder, clip_path=str(folder / "detector")), device="cpu")


def test_both_checkpoints_must_be_given(folder: Path) -> None:
    with pytest.raises(
        RecipeError, match=r"reward\.geneval\.clip_path: got an empty path, expected the folder of a CLIP"
    ):
        geneval.build(config(folder, clip_path=""), device="cpu")
    with pytest.raises(RecipeError, match=r"reward\.geneval\.detector: got an empty path"):
        geneval.build(GenevalConfig(), device="cpu")


def test_bad_metadata_and_media_are_refused_with_the_sample(folder: Path) -> None:
    reward, (image,) = geneval.build(config(folder), device="cpu"), photos(1)
    with pytest.raises(RewardFailed, match=r"sample 's0' \(prompt 'a photo'\): include: missing"):
        reward.score(as_samples([image], {"tag": "counting"}))
    # One token a letter; "a photo of a", beginning and end make 11 more, a full stop, beginning and end 3.
    for name, result, limit in (("detector", 43, 32), ("grounding-dino", 259, 256)):
        long = {"tag": "single_object", "include": [{"class": " ".join("x" * limit), "count": 1}]}
        other = geneval.build(config(folder, detector=str(folder / name)), device="cpu")
        with pytest.raises(RewardFailed, match=rf"detector: got {result} tokens .* at most {limit}"):
            other.score(as_samples([image], long))
    video = Media(kind="video", values=torch.zeros(1, 2, 3, 8, 8), rate=8.0)
    with pytest.raises(RewardFailed, match=r"reward\.geneval: got video, expected image"):
        reward.score(as_samples([image], METADATA, media=video))
    for value, result in ((float("nan"), "NaN"), (1.5, "0 to 1.5")):
        pixels = torch.zeros(1, 3, 8, 8)
        pixels[0, 0, 0, 0] = value
        with pytest.raises(RewardFailed, match=rf"reward\.geneval: got pixels of {result} in sample 's0'"):
            reward.score(as_samples([image], METADATA, media=Media(kind="image", values=pixels)))
