"""A plugin file: models whose samples are no images of latents and no texts of tokens, and rewards of what they make."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from unirl.core.plugins.hookspec import hookimpl
from unirl.core.specs.capability import Cap
from unirl.core.specs.part_config import PartConfig, RewardConfig
from unirl.core.specs.spec import ModelSpec, RewardExample, RewardSpec


@dataclass
class Nothing(PartConfig):
    pass


SOUND = ModelSpec(
    name="tiny-sound",
    summary="Latents that become sound",
    build=f"{__name__}:sound",
    config=f"{__name__}:Nothing",
    capabilities={Cap.LATENT_STAGE, Cap.LORA, Cap.GUIDANCE},
    tracks={"melody": "latent"},
    media={"melody": "audio"},
    trainable="net",
    wrap_blocks=("Block",),
)
MOSAIC = ModelSpec(
    name="tiny-mosaic",
    summary="Tokens that become images of grey squares",
    build=f"{__name__}:mosaic",
    config=f"{__name__}:Nothing",
    capabilities={Cap.TEXT_STAGE, Cap.LORA},
    tracks={"squares": "text"},
    media={"squares": "image"},
    trainable="net",
    wrap_blocks=("TextBlock",),
)


def reward(name: str, media: Any) -> RewardSpec:
    return RewardSpec(
        name=name,
        summary="The mean square of what is scored",
        build=f"{__name__}:{name}",
        config="unirl.core.specs.part_config:RewardConfig",
        scale="[0, 1]",
        range=(0.0, 1.0),
        media=media,
        examples=(RewardExample(prompt="loud"),),
        capabilities={Cap.REWARD_SAMPLE},
    )


@hookimpl
def unirl_models() -> list[ModelSpec]:
    return [SOUND, MOSAIC]


@hookimpl
def unirl_rewards() -> list[RewardSpec]:
    return [reward("loudness", "audio"), reward("greyness", "image")]


def sound(config: Nothing, *, device: Any) -> Any:
    from unirl.conformance.doubles.tiny_denoiser import TinyDenoiser

    class Sound(TinyDenoiser):
        spec = SOUND

        def decode(self, latents: Any) -> Any:
            """[N, 4, S]: each channel of the latent is one of the sound."""
            return latents.flatten(2).float().tanh()

    return Sound(device=device)


def mosaic(config: Nothing, *, device: Any) -> Any:
    import torch
    from unirl.conformance.doubles.tiny_decoder import TinyDecoder
    from unirl.core.types.media import Media

    class Mosaic(TinyDecoder):
        spec = MOSAIC

        def media_of(self, tokens: Sequence[Any], *, sampling: Any) -> Media:
            """Columns of one level each; what a text lacks is black."""
            levels = torch.zeros(len(tokens), sampling.max_new_tokens)
            for row, each in enumerate(tokens):
                levels[row, : len(each)] = each.clamp(max=255).float() / 255
            return Media(kind="image", values=levels[:, None, None].expand(-1, 3, 8, -1).contiguous())

    return Mosaic(device=device)


@dataclass
class MeanSquare:
    medium: Any
    name: str

    def score(self, samples: Any) -> Any:
        from unirl.core.roles import Scores

        return Scores(values=samples.of(self.medium, reward=self.name).stacked.float().square().flatten(1).mean(1))

    def close(self) -> None: ...


def loudness(config: RewardConfig, *, device: Any) -> MeanSquare:
    return MeanSquare(medium="audio", name="loudness")


def greyness(config: RewardConfig, *, device: Any) -> MeanSquare:
    return MeanSquare(medium="image", name="greyness")
