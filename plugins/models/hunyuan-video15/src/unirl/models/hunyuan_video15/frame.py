"""First frames as conditions, in training and in engines. Imports nothing that is not also in their environments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from unirl.model_host.diffusion.first_frame import FirstFrame

if TYPE_CHECKING:
    from torch import Tensor
    from unirl.core.types.data import MediaRef
    from unirl.core.types.sampling import LatentSamplingConfig

__all__ = ["HunyuanVideo15Frame"]


class HunyuanVideo15Frame(FirstFrame):
    """A base of the model and of bridges."""

    crops_frame = True
    max_frame_ratio = 2.0

    @classmethod
    def cropped_frame(cls, media: Sequence[MediaRef], sampling: LatentSamplingConfig, *, prompt: str) -> Any:
        """The first frame, scaled and cropped about its middle to the size of the video, as in the pipeline. Raises as
        `first_frame`."""
        image = cls.first_frame(media, sampling, prompt=prompt)
        processor: Any = import_module("diffusers.video_processor").VideoProcessor()
        return processor.resize(image, height=sampling.height, width=sampling.width, resize_mode="crop")

    def known(self, x: Tensor, conditions: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """The first frame is known."""
        behind = (0, 0, 0, 0, 0, x.shape[2] - 1)
        frame = conditions["first_frame"].to(x)
        return F.pad(frame, behind), F.pad(torch.ones_like(frame[:, :1]), behind)
