"""The reward `geneval`: detects the objects of each image and judges them by GenEval's rules."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from PIL import Image
from unirl.core.errors import RewardFailed
from unirl.core.roles import ScoreInput, Scores
from unirl.core.specs.check import check_config

from .config import GenevalConfig
from .detector import Detector
from .geneval_metadata import COUNTING, Scene, read_scene
from .geneval_rules import Detection, Judgement, judge, without_overlaps
from .image_input import pictures_of
from .object_color import ColorNamer, crop

__all__ = ["GenevalReward", "build"]

_NAME = "reward.geneval"


def build(config: GenevalConfig, *, device: Any) -> GenevalReward:
    return GenevalReward(config, device=device)


class GenevalReward:
    def __init__(self, config: GenevalConfig, *, device: Any) -> None:
        check_config(config, key=_NAME)
        self._config = config
        size = config.batch_size
        self._detector = Detector(config.detector, key=f"{_NAME}.detector", batch_size=size, device=device)
        self._colors = ColorNamer(config.clip_path, key=f"{_NAME}.clip_path", batch_size=size, device=device)

    def score(self, samples: ScoreInput) -> Scores:
        """The judgement of each image, by `config.score`; parts, each [N]: those of `Judgement`.

        Raises RewardFailed, naming the sample, for metadata that `read_scene` refuses.
        """
        images = pictures_of(samples, reward="geneval")
        scenes = [_scene(samples, row) for row in range(samples.num_rows)]
        found = self._detected(images, scenes)
        for row, scene in enumerate(scenes):
            for objects in scene.include:
                if objects.color is not None:
                    found[row][objects.name] = self._colored(images[row], found[row], objects.name, objects.count)
        judgements = [judge(scene, result) for scene, result in zip(scenes, found, strict=True)]
        parts = {
            item.name: torch.tensor([float(getattr(one, item.name)) for one in judgements])
            for item in dataclasses.fields(Judgement)
        }
        return Scores(values=parts[self._config.score].clone(), parts=parts)

    def close(self) -> None:
        pass

    def _detected(self, images: Sequence[Image.Image], scenes: Sequence[Scene]) -> list[dict[str, list[Detection]]]:
        """The objects of each class that each image's scene names. A batch has one class, size and threshold."""
        config = self._config
        batches: dict[tuple[str, tuple[int, int], float], list[int]] = {}
        for row, (image, scene) in enumerate(zip(images, scenes, strict=True)):
            threshold = config.counting_threshold if scene.tag == COUNTING else config.threshold
            for name in scene.names:
                batches.setdefault((name, image.size, threshold), []).append(row)
        result: list[dict[str, list[Detection]]] = [{} for _ in images]
        for (name, _, threshold), rows in batches.items():
            detections = self._detector.find([images[row] for row in rows], name, threshold=threshold)
            for row, one in zip(rows, detections, strict=True):
                result[row][name] = without_overlaps(one, most=config.max_overlap)
        return result

    def _colored(self, image: Image.Image, found: dict[str, list[Detection]], name: str, count: int) -> list[Detection]:
        """The detections of a class; the first `count` of them, by falling score, with their colours."""
        crops = [crop(image, one.box) for one in found[name][:count]]
        colors = self._colors.name(crops, name)
        named = [dataclasses.replace(one, color=color) for one, color in zip(found[name], colors, strict=False)]
        return [*named, *found[name][count:]]


def _scene(samples: ScoreInput, row: int) -> Scene:
    try:
        return read_scene(samples.metadata[row])
    except ValueError as error:
        raise RewardFailed(
            f"{_NAME}: metadata of sample {samples.sample_ids[row]!r} (prompt "
            f"{samples.inputs.prompts[row][:80]!r}): {error}"
        ) from error
