"""The reward `ocr`: reads the text in each image and compares it with the prompt's target."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from PIL import Image
from unirl.core.errors import RewardFailed
from unirl.core.roles import ScoreInput, Scores
from unirl.core.specs.check import check_config

from .config import OcrConfig
from .image_input import pictures_of
from .text_target import Agreement, agreement, target_of

if TYPE_CHECKING:
    from rapidocr.utils.output import RapidOCROutput

__all__ = ["OcrReward", "TextReader", "build"]

_NAME = "reward.ocr"


def build(config: OcrConfig, *, device: Any) -> OcrReward:
    return OcrReward(config)


class OcrReward:
    """Runs on the CPU, whatever the device."""

    def __init__(self, config: OcrConfig) -> None:
        check_config(config, key=_NAME)
        self._score = config.score
        self._reader = TextReader(
            min_confidence=config.min_confidence, min_side_px=config.min_side_px, threads=config.threads
        )

    def score(self, samples: ScoreInput) -> Scores:
        """The component `config.score`; parts, each [N]: those of `Agreement`.

        Raises RewardFailed, naming the sample, for a prompt without a target.
        """
        targets = [_target(samples, row) for row in range(samples.num_rows)]
        images = pictures_of(samples, reward="ocr")
        results = [agreement(self._reader.read(image), target) for image, target in zip(images, targets, strict=True)]
        parts = {
            item.name: torch.tensor([float(getattr(one, item.name)) for one in results])
            for item in dataclasses.fields(Agreement)
        }
        return Scores(values=parts[self._score].clone(), parts=parts)

    def close(self) -> None:
        pass


class TextReader:
    """PP-OCRv6 (small) as RapidOCR ships it, on ONNX Runtime. Nothing is fetched: the models are in its wheel."""

    def __init__(self, *, min_confidence: float, min_side_px: int, threads: int) -> None:
        try:
            import onnxruntime  # noqa: F401 - RapidOCR imports it late
            import rapidocr
        except ModuleNotFoundError as error:
            error.add_note("The reward `ocr` needs more packages: pip install 'unirl-reward-detect[ocr]'")
            raise
        models = Path(rapidocr.__file__).parent / "models"
        self._engine = rapidocr.RapidOCR(
            params={
                # Its own log writes a line about each image without text.
                "Global.log_level": "critical",
                "Global.text_score": min_confidence,
                # Upside-down text is not what the prompt asks for.
                "Global.use_cls": False,
                # A path, because RapidOCR downloads a model that it knows by name and does not find.
                "Det.model_path": str(models / "PP-OCRv6_det_small.onnx"),
                "Det.limit_side_len": min_side_px,
                "Rec.model_path": str(models / "PP-OCRv6_rec_small.onnx"),
                "EngineConfig.onnxruntime.intra_op_num_threads": threads,
                "EngineConfig.onnxruntime.inter_op_num_threads": 1,
            }
        )

    def read(self, image: Image.Image) -> str:
        """All text in an RGB image, line by line from top to bottom."""
        # RapidOCR takes arrays as OpenCV has them: blue, green, red.
        result = cast("RapidOCROutput", self._engine(np.ascontiguousarray(np.asarray(image)[:, :, ::-1])))
        return "\n".join(result.txts or ())


def _target(samples: ScoreInput, row: int) -> str:
    prompt = samples.inputs.prompts[row]
    try:
        return target_of(prompt, samples.metadata[row])
    except ValueError as error:
        raise RewardFailed(f"{_NAME}: sample {samples.sample_ids[row]!r} (prompt {prompt[:80]!r}): {error}") from error
