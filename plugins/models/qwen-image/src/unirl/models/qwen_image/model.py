# diffusers exports its classes lazily, which pyright cannot see.
# pyright: reportPrivateImportUsage=false
"""Qwen-Image as a diffusion stage, on the components of diffusers' own pipeline.

Source: Qwen-Image technical report, arXiv 2508.02324; verified against diffusers' `QwenImagePipeline`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, cast

import torch
import torch.nn.functional as F
from diffusers import QwenImageTransformer2DModel
from torch import Tensor
from unirl.core.specs.spec import MODEL_PARTS, ModelPart
from unirl.core.types.sampling import LatentSamplingConfig
from unirl.model_host.diffusion.pipeline_config import PipelineConfig
from unirl.model_host.diffusion.pipeline_files import PipelineFiles, num_longer
from unirl.model_host.diffusion.pipeline_model import PipelineModel

from .checkpoint import FILES
from .config import PATCH, QwenImageConfig
from .plugin import SPEC

__all__ = ["QwenImageModel", "build"]


def build(
    config: QwenImageConfig, *, device: Any, lazy: bool = False, serves: frozenset[ModelPart] = MODEL_PARTS
) -> QwenImageModel:
    """The model, its encoder and VAE frozen. Raises RecipeError when the checkpoint or a setting is wrong."""
    return QwenImageModel(config, device=torch.device(device), lazy=lazy, serves=serves)


class QwenImageModel(PipelineModel):
    """A `unirl.core.roles.DiffusionModel`.

    Latents: [4 C, H / 16, W / 16], the C channels of the VAE at the four places of a patch, as channels 4 c + 2 y + x.
    A token of the transformer is one place of it, so the norms of "norm-corrected" guidance are those of tokens.
    Conditions: `prompt_embeds` [n, L, D], zeros after the last token; `prompt_mask` [n, L] bool, true up to there.
    """

    spec = SPEC
    files: ClassVar[PipelineFiles] = FILES
    vae_of_videos = True

    def __init__(
        self, config: PipelineConfig, *, device: torch.device, lazy: bool, serves: frozenset[ModelPart] = MODEL_PARTS
    ) -> None:
        super().__init__(
            config,
            find=self.files.find,
            load=self.files.load,
            transformer=QwenImageTransformer2DModel,
            device=device,
            lazy=lazy,
            serves=serves,
        )
        self.max_sequence_length = self.pipeline.tokenizer_max_length

    def encode_texts(self, texts: Sequence[str], *, sampling: LatentSamplingConfig) -> Mapping[str, Tensor]:
        """Each prompt is put into the pipeline's template, whose tokens before it are dropped after the encoder has
        read them; those behind it count towards the length."""
        length = sampling.max_sequence_length
        template, prefix = self.pipeline.prompt_template_encode, self.pipeline.prompt_template_encode_start_idx
        tokens = self.pipeline.tokenizer(
            [template.format(text) for text in texts],
            max_length=prefix + length,
            padding=True,
            truncation=True,
            return_tensors="pt",
        ).to(self.device)
        # Without the language model's head, whose logits over the vocabulary are not used.
        states: Tensor = self.pipeline.text_encoder.model(
            input_ids=tokens.input_ids, attention_mask=tokens.attention_mask, use_cache=False
        ).last_hidden_state
        embeds = states.new_zeros((len(texts), length, states.shape[-1]))
        mask = torch.zeros((len(texts), length), dtype=torch.bool, device=self.device)
        for row, is_token in enumerate(tokens.attention_mask.bool()):
            kept = states[row, is_token][prefix:]
            embeds[row, : len(kept)] = kept
            mask[row, : len(kept)] = True
        return {"prompt_embeds": embeds, "prompt_mask": mask}

    def num_cut(self, texts: Sequence[str], *, sampling: LatentSamplingConfig) -> int | None:
        template, prefix = self.pipeline.prompt_template_encode, self.pipeline.prompt_template_encode_start_idx
        texts = [template.format(text) for text in texts]
        return num_longer(self.pipeline.tokenizer, texts, prefix + sampling.max_sequence_length)

    def velocity(self, x: Tensor, sigma: Tensor, conditions: Mapping[str, Tensor]) -> Tensor:
        """Velocity x1 - x0. The text is cut to the longest prompt of the batch; what is padding then is masked."""
        return self.transformed(x, sigma, conditions["prompt_embeds"], conditions["prompt_mask"])

    def transformed(
        self,
        x: Tensor,
        sigma: Tensor,
        embeds: Tensor,
        mask: Tensor,
        *,
        source: Tensor | None = None,
        shapes: Sequence[Sequence[int]] = (),
    ) -> Tensor:
        """The velocity by one forward.

        embeds, mask: [B, L, D] and [B, L], as `prompt_embeds` and `prompt_mask`.  source: [B, S, 4 C] tokens that
        follow those of x.  shapes: frames, rows and columns of each image that they are of.
        """
        dtype = self.compute_dtype
        rows, _, height, width = x.shape
        lengths: list[int] = mask.sum(dim=1).tolist()
        longest = max(lengths)
        given = x.to(dtype).flatten(2).transpose(1, 2)
        with self.computing():
            tokens: Tensor = self.transformer(
                hidden_states=given if source is None else torch.cat([given, source.to(dtype)], dim=1),
                # The pipeline's arithmetic: in 16 bits its timestep is rounded twice.
                timestep=(sigma.float() * 1000.0).to(dtype) / 1000.0,
                encoder_hidden_states=embeds[:, :longest].to(dtype),
                encoder_hidden_states_mask=None if min(lengths) == longest else mask[:, :longest],
                img_shapes=[[(1, height, width), *map(tuple, shapes)]] * rows,
                return_dict=False,
            )[0]
        return tokens[:, : height * width].float().transpose(1, 2).reshape(x.shape).contiguous()

    def latent_shape(self, sampling: LatentSamplingConfig) -> tuple[int, ...]:
        """[4 C, H / 16, W / 16] of one latent. Raises RecipeError, with the nearest size that fits, for any other."""
        return cast(Any, self.transformer.config).in_channels, *self.checked_latent(sampling)

    def vae_latents(self, latents: Tensor) -> Tensor:
        """Latents of one frame without patches: the VAE is one of videos."""
        return super().vae_latents(F.pixel_shuffle(latents, PATCH)[:, :, None])

    def of_vae(self, encoded: Tensor) -> Tensor:
        """Latents of one frame, in patches."""
        return F.pixel_unshuffle(super().of_vae(encoded)[:, :, 0], PATCH)
