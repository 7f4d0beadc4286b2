# diffusers exports its classes lazily, which pyright cannot see.
# pyright: reportPrivateImportUsage=false
"""Wan 2.1 and Wan 2.2 as diffusion stages, on the components of diffusers' own pipelines.

Source: Wan technical report, arXiv 2503.20314; verified against diffusers' `WanPipeline` and `WanImageToVideoPipeline`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from diffusers import WanTransformer3DModel
from diffusers.pipelines.wan.pipeline_wan import prompt_clean
from torch import Tensor, nn
from unirl.core.errors import RecipeError
from unirl.core.specs.spec import MODEL_PARTS, ModelPart
from unirl.core.types.array import Ragged
from unirl.core.types.inputs import Inputs
from unirl.core.types.sampling import LatentSamplingConfig
from unirl.model_host.diffusion.pipeline_files import num_longer
from unirl.model_host.diffusion.pipeline_model import PipelineModel, own_memory
from unirl.model_host.diffusion.sequence_parallel import TokenSplit

from . import checkpoints, plugin
from .config import Wan22Config, WanConfig
from .experts import Experts
from .loading import pipeline_files
from .source import WanSource

__all__ = ["Wan21I2VModel", "Wan21Model", "Wan22I2VModel", "Wan22Model", "WanFirstFrame", "WanModel", "build"]

_EXPERTS = {"high": "transformer", "low": "transformer_2"}
"""Noise -> component of Wan 2.2."""


def build(
    config: WanConfig, *, device: Any, lazy: bool = False, serves: frozenset[ModelPart] = MODEL_PARTS
) -> WanModel:
    """The model of the config, its encoders and VAE frozen. Raises RecipeError when the checkpoint or a setting is
    wrong."""
    return _MODELS[config.checkpoints.model](config, device=torch.device(device), lazy=lazy, serves=serves)


class WanModel(PipelineModel):
    """A `unirl.core.roles.DiffusionModel` on the components of a `WanPipeline`.

    Latents: [C, 1 + (F - 1) / 4, H / 8, W / 8].
    Conditions: `prompt_embeds` [n, L, D], zeros after the last token. They are not masked: the transformer attends to
    the zeros too, as it did in training, where L was 512.
    """

    vae_of_videos = True
    max_sequence_length = 512
    sequence = TokenSplit(blocks=("blocks",), attention="attn1", rotary="rotary_emb", rotary_dim=1)

    def __init__(
        self, config: WanConfig, *, device: torch.device, lazy: bool, serves: frozenset[ModelPart] = MODEL_PARTS
    ) -> None:
        files = pipeline_files(config.checkpoints)
        super().__init__(
            config,
            find=files.find,
            load=files.load,
            transformer=WanTransformer3DModel,
            device=device,
            lazy=lazy,
            serves=serves,
        )
        for name in self.experts:
            expert: Any = self.pipeline.components[name]
            self.token_side = expert.config.patch_size[-1]
            self.keep_timestep_fp32(cast(nn.Module, expert.condition_embedder))
            expert.register_forward_hook(own_memory)

    def encode_texts(self, texts: Sequence[str], *, sampling: LatentSamplingConfig) -> Mapping[str, Tensor]:
        embeds, _ = self.pipeline.encode_prompt(
            prompt=list(texts),
            do_classifier_free_guidance=False,
            device=self.device,
            max_sequence_length=sampling.max_sequence_length,
        )
        return {"prompt_embeds": embeds}

    def num_cut(self, texts: Sequence[str], *, sampling: LatentSamplingConfig) -> int:
        return num_longer(self.pipeline.tokenizer, [prompt_clean(text) for text in texts], sampling.max_sequence_length)

    def velocity(self, x: Tensor, sigma: Tensor, conditions: Mapping[str, Tensor]) -> Tensor:
        """Velocity x1 - x0. The timestep is formed in fp32 and stays so: in bf16 it would be off by up to 2."""
        with self.computing():
            velocity = self.trainable(
                timestep=sigma.float() * 1000.0, **self.arguments(x, conditions), return_dict=False
            )[0]
        return velocity.float()

    def arguments(self, x: Tensor, conditions: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Inputs of the transformer besides the timestep, by name, in the dtype that it computes in."""
        dtype = self.compute_dtype
        return {"hidden_states": x.to(dtype), "encoder_hidden_states": conditions["prompt_embeds"].to(dtype)}

    def latent_shape(self, sampling: LatentSamplingConfig) -> tuple[int, ...]:
        """[C, F, H, W] of one latent. Raises RecipeError, with the nearest size that fits, for any other."""
        return cast(Any, self.transformer).config.out_channels, *self.checked_latent(sampling)


class Wan21Model(WanModel):
    """Wan 2.1 from text."""

    spec = plugin.WAN21


class Wan22Model(WanModel):
    """Wan 2.2 from text: two experts, one policy. Rows of a batch may be of different noise."""

    spec = plugin.WAN22
    experts = checkpoints.WAN22.experts

    def __init__(
        self, config: Wan22Config, *, device: torch.device, lazy: bool, serves: frozenset[ModelPart] = MODEL_PARTS
    ) -> None:
        super().__init__(config, device=device, lazy=lazy, serves=serves)
        self.boundary: float = self.pipeline.config.boundary_ratio
        self.denoisers = Experts(self.transformer, self.pipeline.transformer_2, boundary=self.boundary)
        self.denoisers.eval()
        self._trained = tuple(_EXPERTS) if config.experts == "both" else (config.experts,)
        for noise, name in _EXPERTS.items():
            self.denoisers.get_submodule(name).requires_grad_(noise in self._trained)

    @property
    def trainable(self) -> torch.nn.Module:
        return self.denoisers

    def schedule(self, sampling: LatentSamplingConfig) -> Tensor:
        """See `PipelineModel`. Raises RecipeError, too, where no step is of an expert that alone is trained."""
        sigmas = super().schedule(sampling)
        is_high = sigmas[:-1] >= self.boundary
        if not (is_high if "high" in self._trained else ~is_high).any():
            raise RecipeError(
                f"model.experts: got {self._trained[0]!r}, but none of the {len(is_high)} steps has "
                f"{'at least' if 'high' in self._trained else 'less than'} sigma {self.boundary:g}, so nothing would "
                "be trained. Take more steps, or another shift."
            )
        return sigmas


class WanFirstFrame(WanSource, WanModel):
    """Wan from a first frame and text: the frame is a condition of every forward. A base class before that for text.

    Conditions: `prompt_embeds` as in `WanModel`; `source` [n, 4 + C, 1 + (F - 1) / 4, H / 8, W / 8] fp32, the mask of
    given frames and the latents of a video of the first frame with grey ones behind it; with an image encoder also
    `image_embeds` [n, S, D], its features of the frame. All of them are in guidance's negative branch, too.
    """

    def encode_inputs(self, inputs: Inputs, *, sampling: LatentSamplingConfig) -> Mapping[str, Ragged]:
        """The frame is stretched to the size of the video, as the pipeline does.

        Raises DataError unless each input has one source image that can be read, in the ratio of the video up to 5 %,
        and RecipeError for a length of prompts at which the transformer would take text for image features.
        """
        self._check_served("decode", "VAE", "An engine that encodes first frames")
        # Refuses sizes that are off the grid, before the VAE does.
        self.latent_shape(sampling)
        if self._reads_features:
            self.check_length(sampling)
        frames = [
            self.first_frame(media, sampling, prompt=f"{name!r} ({text!r})")
            for name, text, media in zip(inputs.ids, inputs.texts, inputs.media, strict=True)
        ]
        result: dict[str, Ragged] = dict(self.encode_texts(inputs.texts, sampling=sampling))
        result["source"] = torch.cat(
            [self.source(frame, sampling, vae=self.vae, device=self.device) for frame in frames]
        )
        if self._reads_features:
            result["image_embeds"] = torch.cat([self.pipeline.encode_image(frame, self.device) for frame in frames])
        return result

    def arguments(self, x: Tensor, conditions: Mapping[str, Tensor]) -> dict[str, Tensor]:
        result = super().arguments(x, conditions)
        source = conditions["source"]
        result["hidden_states"] = torch.cat([x, source.to(x)], dim=1).to(self.compute_dtype)
        if "image_embeds" in conditions:
            result["encoder_hidden_states_image"] = conditions["image_embeds"].to(self.compute_dtype)
        return result

    @property
    def _reads_features(self) -> bool:
        settings: Any = self.transformer.config
        return bool(settings.image_dim)


class Wan21I2VModel(WanFirstFrame, Wan21Model):
    """Wan 2.1 from a first frame and text."""

    spec = plugin.WAN21_I2V


class Wan22I2VModel(WanFirstFrame, Wan22Model):
    """Wan 2.2 from a first frame and text."""

    spec = plugin.WAN22_I2V


_MODELS: Mapping[str, Any] = {
    model.spec.name: model for model in (Wan21Model, Wan21I2VModel, Wan22Model, Wan22I2VModel)
}
