"""VideoAlign's VideoReward: visual quality, motion quality and text alignment, from a reward head on Qwen2-VL.

Source: Improving Video Generation with Human Feedback, arXiv 2501.13918, section 3; layout of the checkpoint
KwaiVGI/VideoReward, and the code of its repository VideoAlign under transformers 4.45.2.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from unirl.core.errors import RecipeError, RewardFailed
from unirl.core.roles import ScoreInput, Scores
from unirl.core.specs.check import check_config
from unirl.model_host.chat_templates import render_chat
from unirl.numerics.pixels import resize, widened

from .config import DIMENSIONS, VideoAlignConfig, instruction_of
from .video_input import videos_of
from .videoalign_files import Checkpoint, load_checkpoint

__all__ = ["VideoAlignReward", "build", "frame_size", "sampled"]

_NAME = "videoalign"
_KEY = f"reward.{_NAME}"
_PAD = "<|video_pad|>"
_MIN_FRAMES, _MAX_FRAMES = 4, 768


def build(config: VideoAlignConfig, *, device: Any) -> VideoAlignReward:
    """Raises RecipeError for settings or a checkpoint that cannot be used."""
    return VideoAlignReward(config, device=device)


class VideoAlignReward:
    def __init__(self, config: VideoAlignConfig, *, device: Any) -> None:
        check_config(config, key=_KEY)
        self._config, self._device = config, torch.device(device)
        self._instruction = instruction_of(Path(config.instruction).expanduser())
        self._checkpoint: Checkpoint = load_checkpoint(config, key=_KEY)
        self.trunk = self._checkpoint.trunk.to(device)
        self._head = self._checkpoint.head.to(device)
        tokenizer = self._checkpoint.tokenizer
        self._control_tokens: Sequence[str] = list(tokenizer.get_added_vocab())
        self._tokens = torch.tensor(tokenizer.convert_tokens_to_ids(list(DIMENSIONS.values())), device=device)
        if (count := self._chat("").count(_PAD)) != 1:
            raise RecipeError(
                f"{_KEY}.base: the chat template of {config.base!r} shows a video as {count} {_PAD}, expected 1. Give "
                "Qwen2-VL-2B-Instruct."
            )

    def score(self, samples: ScoreInput) -> Scores:
        """[N] fp32, the sum of the standardised dimensions or one of them; the gradient flows into the frames it reads.

        Components: `vq`, `mq`, `ta`, each (raw - mean) / std with the checkpoint's numbers; `raw_vq` and so on are the
        head's outputs. Raises RewardFailed as `videos_of` for fewer than two frames, and for a prompt with a control
        token of the checkpoint.
        """
        videos, rate = videos_of(samples, reward=_NAME, least=2)
        size = self._config.batch_size
        # Autocast would resize in 16 bits.
        with torch.autocast(self._device.type, enabled=False):
            raw = torch.cat(
                [
                    self._batch(samples.inputs.prompts[start : start + size], videos[start : start + size], rate)
                    for start in range(0, len(videos), size)
                ]
            )
        mean, std = (raw.new_tensor(values) for values in (self._checkpoint.mean, self._checkpoint.std))
        standardised = (raw - mean) / std
        parts = {name: standardised[:, column] for column, name in enumerate(DIMENSIONS)}
        values = standardised.sum(dim=1) if self._config.score == "overall" else parts[self._config.score]
        return Scores(values=values, parts=parts | {f"raw_{name}": raw[:, k] for k, name in enumerate(DIMENSIONS)})

    def close(self) -> None:
        """Nothing to release."""

    def _batch(self, prompts: Sequence[str], videos: Sequence[Tensor], rate: float) -> Tensor:
        """[n, 3] fp32."""
        vision = self._checkpoint.vision
        patches, grids = zip(*(self._patches(frames, rate) for frames in videos), strict=True)
        tokens = [
            self._read(prompt, count=math.prod(grid) // vision.spatial_merge_size**2)
            for prompt, grid in zip(prompts, grids, strict=True)
        ]
        ids = pad_sequence(tokens, batch_first=True, padding_value=self._checkpoint.tokenizer.pad_token_id)
        mask = pad_sequence([torch.ones_like(row) for row in tokens], batch_first=True)
        hidden: Tensor = self.trunk(
            input_ids=ids,
            attention_mask=mask,
            pixel_values_videos=torch.cat(patches),
            video_grid_thw=torch.tensor(grids, device=self._device),
            # The reward head was trained and is published on plain positions: in transformers 4.45 it was
            # `generate` alone that gave Qwen2-VL those of time, height and width.
            position_ids=torch.arange(ids.shape[1], device=self._device).expand(3, *ids.shape),
            use_cache=False,
        ).last_hidden_state
        places = (ids[:, None] == self._tokens[:, None]).int().argmax(dim=2)
        read = hidden.gather(1, places[..., None].expand(-1, -1, hidden.shape[2]))
        return (read.float() * self._head).sum(dim=2)

    def _patches(self, frames: Tensor, rate: float) -> tuple[Tensor, tuple[int, int, int]]:
        """Frames as the encoder's rows, [T x H x W, 3 x 2 x 14 x 14], and the grid (T, H, W)."""
        checkpoint, vision = self._checkpoint, self._checkpoint.vision
        edge, merge, span = vision.patch_size, vision.spatial_merge_size, vision.temporal_patch_size
        chosen = widened(frames[sampled(len(frames), rate=rate, fps=checkpoint.fps)].to(self._device))
        size = frame_size(
            (chosen.shape[2], chosen.shape[3]),
            factor=edge * merge,
            least_px=self._config.min_frame_pixels,
            most_px=checkpoint.max_frame_pixels,
        )
        mean, std = (
            chosen.new_tensor(values).view(3, 1, 1) for values in (checkpoint.pixel_mean, checkpoint.pixel_std)
        )
        pixels = (resize(chosen, size, filter="bicubic") - mean) / std
        grid = (len(pixels) // span, size[0] // edge, size[1] // edge)
        blocks = pixels.view(grid[0], span, 3, grid[1] // merge, merge, edge, grid[2] // merge, merge, edge)
        # The order in which the encoder merges patches: those of a block of 2 x 2 come together.
        rows = blocks.permute(0, 3, 6, 4, 7, 2, 1, 5, 8).reshape(math.prod(grid), -1)
        return rows.to(self.trunk.dtype), grid

    def _read(self, prompt: str, *, count: int) -> Tensor:
        """Token ids of the whole question, with `count` places for the video."""
        if special := next((word for word in self._control_tokens if word in prompt), None):
            raise RewardFailed(
                f"{_KEY}: got the prompt {prompt[:200]!r} with {special!r}, expected text without control tokens of "
                "the checkpoint. Take it out of the prompt."
            )
        text = self._chat(prompt).replace(_PAD, _PAD * count)
        ids = self._checkpoint.tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
        return ids[0].to(self._device)

    def _chat(self, prompt: str) -> str:
        text = self._instruction.replace("{text_prompt}", prompt)
        turn = {"role": "user", "content": [{"type": "video"}, {"type": "text", "text": text}]}
        checkpoint = self._checkpoint
        return render_chat(
            checkpoint.tokenizer,
            [turn],
            key=f"{_KEY}.base",
            chat_template=checkpoint.chat_template,
            add_generation_prompt=True,
        )


def sampled(total: int, *, rate: float, fps: float) -> list[int]:
    """Places of the frames that are shown: `fps` a second, an even number from 4 to 768 where there are so many, at
    equal distances, the first and the last among them. total: 2 or more."""
    most = min(_MAX_FRAMES, total) // 2 * 2
    count = round(min(max(total / rate * fps, _MIN_FRAMES), most) / 2) * 2
    return torch.linspace(0, total - 1, count).round().long().tolist()


def frame_size(size: tuple[int, int], *, factor: int, least_px: int, most_px: int) -> tuple[int, int]:
    """Height and width, multiples of `factor`, near the given ones in aspect and, where these allow it, in size."""
    height, width = (max(factor, round(edge / factor) * factor) for edge in size)
    if height * width > most_px:
        scale = math.sqrt(math.prod(size) / most_px)
        height, width = (max(factor, math.floor(edge / scale / factor) * factor) for edge in size)
    elif height * width < least_px:
        scale = math.sqrt(least_px / math.prod(size))
        height, width = (math.ceil(edge * scale / factor) * factor for edge in size)
    return height, width
