# diffusers exports its classes lazily, which pyright cannot see.
# pyright: reportPrivateImportUsage=false, reportPrivateUsage=false
"""Qwen-Image-Edit and Qwen-Image-Edit-Plus: the stage of Qwen-Image with source images as conditions.

Source: Qwen-Image technical report, arXiv 2508.02324; verified against diffusers' `QwenImageEditPipeline` and
`QwenImageEditPlusPipeline`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from unirl.core.specs.spec import MODEL_PARTS, ModelPart
from unirl.core.types.array import Ragged
from unirl.core.types.inputs import Inputs
from unirl.core.types.sampling import LatentSamplingConfig
from unirl.model_host.diffusion.equal_forwards import check_equal_forwards, in_groups

from .checkpoint import EDIT_FILES, EDIT_PLUS_FILES
from .config import QwenImageEditConfig, QwenImageEditPlusConfig
from .model import QwenImageModel
from .plugin import EDIT, EDIT_PLUS
from .sources import PICTURE, EditSources

__all__ = ["QwenImageEditModel", "QwenImageEditPlusModel", "build", "build_plus"]


def build(
    config: QwenImageEditConfig, *, device: Any, lazy: bool = False, serves: frozenset[ModelPart] = MODEL_PARTS
) -> QwenImageEditModel:
    """The model, its encoder and VAE frozen. Raises RecipeError when the checkpoint or a setting is wrong."""
    return QwenImageEditModel(config, device=torch.device(device), lazy=lazy, serves=serves)


def build_plus(
    config: QwenImageEditPlusConfig, *, device: Any, lazy: bool = False, serves: frozenset[ModelPart] = MODEL_PARTS
) -> QwenImageEditPlusModel:
    """The same for several source images."""
    return QwenImageEditPlusModel(config, device=torch.device(device), lazy=lazy, serves=serves)


class QwenImageEditModel(EditSources, QwenImageModel):
    """A `unirl.core.roles.DiffusionModel` that edits one image.

    Conditions: `prompt_embeds`, n times [L, D] without padding, of the image and the text; `source`, n times [S, 4 C],
    latents of the source images as tokens; `source_shapes`, n times [k, 3], frames, rows and columns of the tokens of
    each of the k images.
    """

    spec = EDIT
    files = EDIT_FILES

    def __init__(
        self, config: QwenImageEditConfig, *, device: torch.device, lazy: bool, serves: frozenset[ModelPart]
    ) -> None:
        super().__init__(config, device=device, lazy=lazy, serves=serves)
        self.source_area = self.condition_area = config.source_area
        self.token_types = config.token_types

    @property
    def source_settings(self) -> dict[str, Any]:
        """How source images are encoded: arguments of `edit_conditions`."""
        names = ("source_area", "condition_area", "token_types")
        return {name: getattr(self, name) for name in names}

    def encode_inputs(self, inputs: Inputs, *, sampling: LatentSamplingConfig) -> Mapping[str, Ragged]:
        """Row by row. Raises as `edit_conditions`."""
        self._check_served("decode", "VAE", "An engine that encodes source images")
        each = [
            self.edit_conditions(
                self.pipeline, text, media, name=name, length=sampling.max_sequence_length, **self.source_settings
            )
            for name, text, media in zip(inputs.ids, inputs.texts, inputs.media, strict=True)
        ]
        return {name: tuple(one[name] for one in each) for name in ("prompt_embeds", "source", "source_shapes")}

    def num_cut(self, texts: Sequence[str], *, sampling: LatentSamplingConfig) -> None:
        """None: images stand in the text, and their tokens count."""
        return None

    def velocity(self, x: Tensor, sigma: Tensor, conditions: Mapping[str, Any]) -> Tensor:
        """Velocity x1 - x0. Rows whose sources have equal shapes go through the transformer together."""
        if len(x) > 1:
            check_equal_forwards(
                self.transformer,
                reason="rows with source images of different sizes",
                instead="Set engine.forward_batch=1, train.micro_batch_size=1 and train.replay=serial, or train on one "
                "process.",
            )
        shapes = [tuple(map(tuple, own.tolist())) for own in conditions["source_shapes"]]

        def forward(rows: list[int]) -> Tensor:
            embeds = [conditions["prompt_embeds"][row] for row in rows]
            lengths = torch.tensor([len(own) for own in embeds], device=x.device)
            padded = pad_sequence(embeds, batch_first=True).to(x.device)
            return self.transformed(
                x[rows],
                sigma[rows],
                padded,
                torch.arange(padded.shape[1], device=x.device) < lengths[:, None],
                source=torch.stack([conditions["source"][row] for row in rows]).to(x.device),
                shapes=shapes[rows[0]],
            )

        return in_groups(shapes, forward)


class QwenImageEditPlusModel(QwenImageEditModel):
    """The same for several images, which the text counts: `Picture 1`, `Picture 2`, ... The text encoder reads them in
    another size than the VAE."""

    spec = EDIT_PLUS
    files = EDIT_PLUS_FILES
    picture = PICTURE
    takes_several = True
    edits = EDIT_PLUS.name

    def __init__(
        self, config: QwenImageEditPlusConfig, *, device: torch.device, lazy: bool, serves: frozenset[ModelPart]
    ) -> None:
        super().__init__(config, device=device, lazy=lazy, serves=serves)
        self.condition_area = config.condition_area
