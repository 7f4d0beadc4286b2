"""Qwen-Image-Edit and Qwen-Image-Edit-Plus in vLLM-Omni: what `unirl.engines.vllm_omni.bridge.Bridge` asks of a model.

Sources are encoded as in training, by vLLM-Omni's components: its pipelines scale images to fixed areas.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from unirl.models.qwen_image.bridges.vllm_omni import QwenImageInVllmOmni
from unirl.models.qwen_image.sources import PICTURE, EditSources, held_processor

if TYPE_CHECKING:
    from torch import Tensor
    from unirl.core.types.array import Ragged
    from unirl.core.types.sampling import LatentSamplingConfig
    from unirl.numerics.media import LoadedImage

__all__ = ["BRIDGE", "BRIDGE_PLUS", "QwenImageEditInVllmOmni", "QwenImageEditPlusInVllmOmni"]


class QwenImageEditInVllmOmni(EditSources, QwenImageInVllmOmni):
    pipeline = "vllm_omni.diffusion.models.qwen_image.pipeline_qwen_image_edit:QwenImageEditPipeline"
    architecture = "QwenImageEditPipeline"

    def settings(self, model: Any) -> dict[str, Any]:
        return model.source_settings

    def encode_with_media(
        self, pipeline: Any, prompt: str, media: Sequence[LoadedImage], sampling: LatentSamplingConfig
    ) -> dict[str, Ragged]:
        # vLLM-Omni's own may scale with torchvision.
        pipeline.processor = held_processor(f"{pipeline.od_config.model}/processor")
        with torch.no_grad():
            each = self.edit_conditions(
                pipeline,
                prompt,
                media,
                name=prompt,
                length=sampling.max_sequence_length,
                **pipeline.unirl_settings,
            )
        return {name: (value,) for name, value in each.items()}

    def velocity(self, pipeline: Any, x: Tensor, sigma: Tensor, conditions: Mapping[str, Any]) -> Tensor:
        """Rows whose sources have equal shapes go through the transformer together."""
        from torch.nn.utils.rnn import pad_sequence
        from unirl.model_host.diffusion.equal_forwards import in_groups

        shapes = [tuple(map(tuple, own.tolist())) for own in conditions["source_shapes"]]

        def forward(rows: list[int]) -> Tensor:
            embeds = [conditions["prompt_embeds"][row] for row in rows]
            lengths = torch.tensor([len(own) for own in embeds], device=x.device)
            padded = pad_sequence(embeds, batch_first=True).to(x.device)
            return self.transformed(
                pipeline,
                x[rows],
                sigma[rows],
                padded,
                torch.arange(padded.shape[1], device=x.device) < lengths[:, None],
                source=torch.stack([conditions["source"][row] for row in rows]).to(x.device),
                shapes=shapes[rows[0]],
            )

        return in_groups(shapes, forward)


class QwenImageEditPlusInVllmOmni(QwenImageEditInVllmOmni):
    pipeline = "vllm_omni.diffusion.models.qwen_image.pipeline_qwen_image_edit_plus:QwenImageEditPlusPipeline"
    architecture = "QwenImageEditPlusPipeline"
    picture = PICTURE
    takes_several = True
    edits = "qwen-image-edit-plus"


BRIDGE = QwenImageEditInVllmOmni()
BRIDGE_PLUS = QwenImageEditPlusInVllmOmni()
