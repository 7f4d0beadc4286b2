"""How an export is used: its task on the hub, a snippet that loads it, and samples of the run that it comes from."""

from __future__ import annotations

import inspect
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unirl.core.types.sampling import LatentSamplingConfig, TextSamplingConfig

from ..kept_media import kept_media

if TYPE_CHECKING:
    from unirl.core.specs.plan import Stage

    from .source import TrainedModel

__all__ = ["Shown", "copy_samples", "pipeline_tag", "snippet", "trained_stages"]

MOST_SAMPLES = 4
SAMPLES = "samples"
"""Folder of their files in an export."""


@dataclass(frozen=True, kw_only=True)
class Shown:
    """A held-out image or video that a card shows."""

    file: str
    """Below the folder of the card."""
    prompt: str
    step: int
    has_inputs: bool
    """Whether it was made from an image, too."""


def pipeline_tag(stages: Sequence[Stage], shown: Sequence[Shown]) -> str:
    """The task of a model by the hub's names. stages: those that train it.  shown: samples, which say whether a model
    that may be given images was given some."""
    media = {stage.medium for stage in stages}
    if len(media) > 1:
        return "any-to-any"
    (medium,) = media
    uses = {use for stage in stages for use in stage.model.spec.inputs.get(stage.track, {}).values()}
    if medium == "text":
        return "image-text-to-text" if uses else "text-generation"
    is_edited = uses - {"takes"} or any(one.has_inputs for one in shown)
    return f"{'image' if is_edited else 'text'}-to-{medium}"


def copy_samples(source: TrainedModel, folder: Path, *, step: int) -> list[Shown]:
    """Copy held-out images or videos of the last evaluation up to a step, of different prompts, into the folder of an
    export. Empty where the run kept none."""
    stages = trained_stages(source)
    medium = "image" if all(stage.medium == "image" for stage in stages) else "video"
    # With one stage the key is `eval` alone.
    keys = {"eval", *(f"eval/{stage.name}" for stage in stages)}
    found = [one for one in kept_media(source.folder) if one.key in keys and one.step <= step]
    last = {one.prompt: one for one in reversed(found) if one.step == found[-1].step}
    shown: list[Shown] = []
    for one in [*reversed(last.values())][:MOST_SAMPLES]:
        # Of a video, the PNG is a strip of frames.
        moving = one.file.with_suffix(".webp")
        file = moving if medium == "video" and moving.is_file() else one.file
        target = folder / SAMPLES / f"{len(shown)}{file.suffix}"
        target.parent.mkdir(exist_ok=True)
        shutil.copyfile(file, target)
        shown.append(
            Shown(file=f"{SAMPLES}/{target.name}", prompt=one.prompt, step=one.step, has_inputs=one.has_inputs)
        )
    return shown


def snippet(
    source: TrainedModel, *, task: str, base: str, name: str, layout: str | None, pipeline: str, prompt: str
) -> str:
    """Python that loads an export and samples as the run was evaluated; empty where that takes more than a few lines.

    task: see `pipeline_tag`.  base: path or id of the base checkpoint.  name: of the export.  layout: of adapters, None
    for a complete checkpoint.  pipeline: class of diffusers that the base has, "" for none.
    """
    stages = trained_stages(source)
    if len(stages) != 1 or layout not in (None, "diffusers", "peft"):
        return ""
    sampling = stages[0].evaluation
    revision = source.setting("revision")
    # As arguments of `from_pretrained`.
    own = f"{base!r}, revision={revision!r}" if revision else repr(base)
    shared: dict[str, Any] = {"base": own, "name": name, "is_adapter": layout is not None, "prompt": prompt}
    if isinstance(sampling, TextSamplingConfig):
        return _text_snippet(sampling, **shared) if task == "text-generation" and not sampling.options else ""
    if not task.startswith("text-to-") or layout == "peft":
        return ""
    return _latent_snippet(sampling, pipeline=pipeline, seed=source.plan.eval.seed, **shared)


def trained_stages(source: TrainedModel) -> list[Stage]:
    """The stages that train a model."""
    return [stage for stage in source.plan.trained if stage.learner.name == source.learner.name]


def _latent_snippet(
    sampling: LatentSamplingConfig, *, pipeline: str, seed: int, base: str, name: str, is_adapter: bool, prompt: str
) -> str:
    import diffusers

    published = getattr(diffusers, pipeline, None) if pipeline else None
    if published is None:
        return ""
    known, is_video = inspect.signature(published.__call__).parameters, sampling.frames > 1
    # Pipelines of guided models that were distilled first have a scale of that name, too.
    guidance = "true_cfg_scale" if "true_cfg_scale" in known else "guidance_scale"
    settings: dict[str, Any] = {
        **({"negative_prompt": sampling.negative_prompt} if sampling.negative_prompt else {}),
        "height": sampling.height,
        "width": sampling.width,
        **({"num_frames": sampling.frames} if is_video else {}),
        "num_inference_steps": sampling.num_inference_steps,
        guidance: float(sampling.guidance_scale),
    }
    lines = [
        "import torch",
        f"from diffusers import {pipeline}",
        *(["from diffusers.utils import export_to_video"] if is_video else []),
        "",
        f"pipeline = {pipeline}.from_pretrained({base if is_adapter else repr(name)})",
        *([f"pipeline.load_lora_weights({name!r})"] if is_adapter else []),
        "result = pipeline(",
        f"    {prompt!r},",
        *(f"    {key}={value!r}," for key, value in settings.items() if key in known),
        f"    generator=torch.Generator().manual_seed({seed}),",
        ")",
        'export_to_video(result.frames[0], "sample.mp4")' if is_video else 'result.images[0].save("sample.png")',
    ]
    return "\n".join(lines)


def _text_snippet(sampling: TextSamplingConfig, *, base: str, name: str, is_adapter: bool, prompt: str) -> str:
    model = "AutoPeftModelForCausalLM" if is_adapter else "AutoModelForCausalLM"
    how = "do_sample=False"
    if sampling.temperature:
        # transformers' own default of top_k is 50.
        how = f"do_sample=True, temperature={sampling.temperature:g}, top_p={sampling.top_p:g}, top_k={sampling.top_k}"
    imports = ["from transformers import AutoModelForCausalLM, AutoTokenizer"]
    if is_adapter:
        imports = ["from peft import AutoPeftModelForCausalLM", "from transformers import AutoTokenizer"]
    if sampling.chat:
        thinking = "" if sampling.thinking is None else f", enable_thinking={sampling.thinking}"
        turns = [*([("system", sampling.system_prompt)] if sampling.system_prompt else []), ("user", prompt)]
        chat = ", ".join(f'{{"role": "{role}", "content": {words!r}}}' for role, words in turns)
        encoded = [
            f"messages = [{chat}]",
            "inputs = tokenizer.apply_chat_template(",
            f'    messages, add_generation_prompt=True, return_dict=True, return_tensors="pt"{thinking}',
            ")",
        ]
    else:
        encoded = [f'inputs = tokenizer({prompt!r}, return_tensors="pt")']
    return "\n".join(
        [
            *imports,
            "",
            f"model = {model}.from_pretrained({name!r})",
            f"tokenizer = AutoTokenizer.from_pretrained({base if is_adapter else repr(name)})",
            *encoded,
            f"tokens = model.generate(**inputs, max_new_tokens={sampling.max_new_tokens}, {how})",
            'print(tokenizer.decode(tokens[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))',
        ]
    )
