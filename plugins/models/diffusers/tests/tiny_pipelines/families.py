# diffusers exports its classes lazily, and annotates arguments with less than it takes.
# pyright: reportPrivateImportUsage=false, reportArgumentType=false, reportCallIssue=false
"""Tiny random pipelines of many families."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import diffusers
import torch
from torch import nn

from . import images, sources, videos

__all__ = ["FAMILIES", "REFUSED", "TWO_RANKS", "Family", "class_name", "write"]


NEEDS, TAKES = frozenset({True}), frozenset({False, True})


@dataclass(frozen=True, kw_only=True)
class Family:
    parts: Callable[[], dict[str, Any]]
    """Components by name. The class of the pipeline is the family's name up to the first space."""
    call: dict[str, Any] = field(default_factory=lambda: dict[str, Any]())
    """`model.call`."""
    guided: Callable[[float], dict[str, Any]] | None = None
    """Arguments with which the pipeline guides itself as ours does by this scale; None where ours has no such."""
    guidance: str = "two-pass"
    """Ours that is the same."""
    negative: dict[str, Any] | None = field(default_factory=lambda: {"negative_prompt": ["blurred"]})
    """Arguments for this negative prompt; None where the pipeline always takes the empty one."""
    sign: int = 1
    """-1 where the pipeline predicts x0 - x1."""
    frames: int = 1
    takes_row_sigmas: bool = True
    is_ragged: bool = False
    is_single: bool = False
    takes_lists: bool = True
    """Of prompts."""
    images: int = 0
    """Source images of its prompts."""
    modes: frozenset[bool] = frozenset({False})
    """Whether prompts may have images."""
    most_images: int = 0
    idle: int = 0
    """Layers of attention whose output the transformer drops."""


def class_name(name: str) -> str:
    return name.partition(" ")[0]


def write(folder: Path, name: str) -> None:
    """Write the pipeline of this class; the same bytes each time."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        parts = (FAMILIES[name].parts if name in FAMILIES else REFUSED[name][0])()
        with torch.no_grad():
            # Every weight moved, so that no zero or one of the initialisation hides a term.
            for part in parts.values():
                if isinstance(part, nn.Module):
                    for parameter in part.parameters():
                        parameter.add_(0.05 * torch.randn(parameter.shape))
        getattr(diffusers, class_name(name))(**parts).save_pretrained(folder)


def _scale(scale: float) -> dict[str, Any]:
    return {"guidance_scale": scale}


def _added_scale(scale: float) -> dict[str, Any]:
    """Arguments of pipelines that add the scaled difference to the positive prediction; they are off at 0."""
    return {"guidance_scale": scale - 1}


def _true_scale(scale: float) -> dict[str, Any]:
    return {"true_cfg_scale": scale}


FAMILIES: dict[str, Family] = {
    "StableDiffusion3Pipeline": Family(parts=images.sd3, guided=_scale, idle=1),
    "FluxPipeline": Family(parts=images.flux_dev, call={"guidance_scale": 2.5}),
    "Flux2KleinPipeline": Family(
        parts=images.flux2_klein,
        call={"text_encoder_out_layers": [1]},
        guided=_scale,
        negative=None,
        most_images=8,
        modes=TAKES,
    ),
    "Flux2KleinPipeline two-images": Family(
        parts=images.flux2_klein,
        call={"text_encoder_out_layers": [1]},
        guided=_scale,
        negative=None,
        images=2,
        most_images=8,
        modes=TAKES,
        is_ragged=True,
    ),
    "ChromaPipeline": Family(parts=images.chroma, guided=_scale),
    "QwenImagePipeline": Family(
        parts=images.qwen_image,
        guided=_true_scale,
        guidance="norm-corrected",
        is_ragged=True,
        idle=2,
    ),
    "ZImagePipeline": Family(
        parts=images.z_image,
        guided=_added_scale,
        is_ragged=True,
    ),
    "SanaPipeline": Family(parts=images.sana, call={"complex_human_instruction": None}, guided=_scale),
    "Lumina2Pipeline": Family(parts=images.lumina2),
    "AuraFlowPipeline": Family(parts=images.aura_flow, guided=_scale, takes_row_sigmas=False),
    "OvisImagePipeline": Family(parts=images.ovis, guided=_scale),
    "Krea2Pipeline": Family(parts=images.krea2, guided=_added_scale),
    "BriaPipeline": Family(parts=images.bria, guided=_scale),
    "ErnieImagePipeline": Family(parts=images.ernie, guided=_scale, takes_row_sigmas=False, is_ragged=True),
    "WanPipeline": Family(parts=videos.wan, guided=_scale, frames=5),
    "HunyuanVideoPipeline": Family(
        parts=videos.hunyuan_video, call={"prompt_template": {"template": "{}", "crop_start": 0}}, frames=5
    ),
    "LTXPipeline": Family(parts=videos.ltx, guided=_scale, frames=9),
    "FluxKontextPipeline": Family(
        parts=images.flux,
        call={"_auto_resize": False},
        guided=_true_scale,
        images=1,
        most_images=1,
        modes=TAKES,
        is_ragged=True,
    ),
    "QwenImageEditPipeline": Family(
        parts=sources.qwen_edit,
        guided=_true_scale,
        guidance="norm-corrected",
        images=1,
        most_images=1,
        modes=NEEDS,
        idle=2,
        is_ragged=True,
        is_single=True,
    ),
    "QwenImageEditPlusPipeline": Family(
        parts=sources.qwen_edit,
        guided=_true_scale,
        guidance="norm-corrected",
        images=2,
        most_images=8,
        modes=NEEDS,
        idle=2,
        is_ragged=True,
        is_single=True,
    ),
    "LongCatImagePipeline": Family(
        parts=sources.longcat,
        call={"enable_prompt_rewrite": False},
        guided=lambda scale: {"guidance_scale": scale, "enable_cfg_renorm": False},
    ),
    "LuminaPipeline": Family(parts=images.lumina, is_ragged=True),
    "BriaFiboPipeline": Family(parts=images.bria_fibo, guided=_scale, is_ragged=True),
    "WanPipeline 2.2-5B": Family(parts=videos.wan_5b, guided=_scale, frames=5, takes_row_sigmas=False),
    "WanImageToVideoPipeline": Family(
        parts=sources.wan_i2v, guided=_scale, frames=5, images=1, most_images=1, modes=NEEDS
    ),
    "SkyReelsV2Pipeline": Family(parts=videos.skyreels, guided=_scale, frames=5),
    "SkyReelsV2ImageToVideoPipeline": Family(
        parts=sources.skyreels_i2v, guided=_scale, frames=5, images=1, most_images=1, modes=NEEDS
    ),
    "SanaVideoPipeline": Family(
        parts=videos.sana_video, call={"complex_human_instruction": None}, guided=_scale, frames=5
    ),
    "HunyuanVideo15Pipeline": Family(parts=videos.hunyuan_video15, frames=5, idle=2),
    "HunyuanSkyreelsImageToVideoPipeline": Family(
        parts=sources.hunyuan_skyreels,
        call={"prompt_template": {"template": "{}", "crop_start": 0}},
        frames=5,
        is_single=True,
        images=1,
        most_images=1,
        modes=NEEDS,
    ),
    "EasyAnimatePipeline": Family(parts=videos.easy_animate, guided=_scale, frames=5, takes_row_sigmas=False, idle=2),
    "Kandinsky5T2VPipeline": Family(
        parts=sources.kandinsky_video, guided=_scale, frames=5, is_ragged=True, is_single=True
    ),
    "QwenImage21Pipeline": Family(
        parts=sources.qwen_image21,
        guided=_true_scale,
        most_images=8,
        modes=TAKES,
        is_ragged=True,
    ),
    "WanVACEPipeline": Family(parts=videos.wan_vace, guided=_scale, frames=5, is_single=True, takes_lists=False),
    "MochiPipeline": Family(parts=videos.mochi, guided=_scale, sign=-1, frames=7, idle=1),
}
REFUSED: dict[str, tuple[Callable[[], dict[str, Any]], str, str]] = {
    "CogView4Pipeline": (
        images.cogview4,
        "its timesteps differ from 1000 sigma by 8",
        "its timestep is not a multiple of sigma",
    ),
    "HiDreamImagePipeline": (
        images.hidream,
        "its latents, [4, 104, 156], do not grow with the height",
        "it scales every size to a megapixel",
    ),
    "Kandinsky5T2IPipeline": (sources.kandinsky_image, "do not grow with the height", "it takes sizes of a list alone"),
    "FluxControlPipeline": (
        sources.flux_control,
        "a batch of rows with their own sigmas and its velocities differ by",
        "each run draws the control image from the VAE again",
    ),
    "LongCatImageEditPipeline": (
        sources.longcat,
        "has no arguments `height` and `width`",
        "the size of the result follows from the image",
    ),
    "ChronoEditPipeline": (
        sources.chrono_edit,
        "its latents are [4, 2, 8, 12] for 64 x 96 pixels and 1 frames",
        "it makes five frames whatever it is asked for",
    ),
    "LTXImageToVideoPipeline": (
        videos.ltx,
        "its latents are [8, 0, 2, 3] for 64 x 96 pixels and 1 frames",
        "its scheduler never sees the first frame",
    ),
    "FluxFillPipeline": (images.flux, "and also takes 'mask_image', 'strength'", "it needs a mask"),
    "FluxImg2ImgPipeline": (
        images.flux,
        "3 steps called the scheduler 2 times. It is given prompts and source images alone, and also takes 'strength'",
        "it starts from an image with noise, after a part of the steps",
    ),
    "StableDiffusion3PAGPipeline": (
        images.sd3,
        "its transformer is run for 6 rows in 3 steps of one prompt",
        "its own guidance cannot be turned off",
    ),
    "SkyReelsV2DiffusionForcingPipeline": (
        videos.skyreels,
        "3 steps called the scheduler 0 times",
        "each frame has a scheduler of its own",
    ),
    "WanImageToVideoPipeline 2.2-5B": (
        videos.wan_5b,
        "what it decodes depends on the image",
        "the first frame is replaced after the last step",
    ),
}
"""Pipelines that are refused when they are loaded, a part of the error, and why."""
TWO_RANKS = ("WanPipeline", "QwenImagePipeline")
"""Pipelines whose recipe runs on two ranks: latents of a video, and of an image with conditions of several lengths."""
