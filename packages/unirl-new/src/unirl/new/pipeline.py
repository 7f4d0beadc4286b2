"""A plugin for a pipeline in the diffusers layout.

It has its own code where the pipeline calls its transformer with x, sigma and the encoded inputs; else it is a thin
alias of the generic plugin, pinned to its facts.
"""

from __future__ import annotations

import math
import re
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from shutil import copytree
from typing import Any

from unirl.core.errors import RecipeError
from unirl.core.plugins.catalog import Catalog
from unirl.core.types.sampling import LatentSamplingConfig
from unirl.new.generic import build_generic, checkpoint_license, outside_requirements, readable
from unirl.new.kinds import Shape
from unirl.new.miniature import LEVELS, names_below, write_pipeline
from unirl.new.names import Names
from unirl.new.render import render, write
from unirl.new.transformer_call import Call, argument_table, recorded_call
from unirl.new.trials import Guidance, found_guidance, idle_layers, same_numbers, tells_prompts_apart

__all__ = ["files"]

_PARTS = ("unirl-engine-trainside", "unirl-backend-fsdp2", "unirl-algo-flow-grpo")
_FAILURES = (RecipeError, ValueError, TypeError, RuntimeError, KeyError, IndexError, AttributeError, AssertionError)
_WIDE = (
    "It has the widths of the checkpoint: with smaller ones this pipeline could not be run; change them in its "
    "`config.json` files."
)
_VOCABULARIES = ("tokenizer.json", "vocab.json", "spiece.model", "tokenizer.model")


def files(folder: Path, names: Names, *, generic: str, catalog: Catalog, author: str) -> dict[str, str | bytes]:
    """See `from_checkpoint.files_from`."""
    whole = build_generic(folder, generic, catalog=catalog)
    parameters = sum(parameter.numel() for parameter in whole.trainable.parameters())
    length = whole.blank_length
    spec: Any = catalog.get("model", generic).spec
    # Of the whole checkpoint: the miniature may lack kinds of its blocks.
    targets: tuple[str, ...] = catalog.resolve(spec.lora_targets)(whole.trainable)
    blocks: tuple[str, ...] = catalog.resolve(spec.wrap_blocks)(whole.trainable)
    del whole
    with tempfile.TemporaryDirectory() as scratch:
        place, small, level = _miniature(folder, Path(scratch), generic, catalog)
        checkpoint = Path(scratch) / f"{level}-whole"
        media = _media(small, Path(scratch))
        sampling = _sampling(small, most_tokens=length, media=media)
        guidance = found_guidance(small, checkpoint, sampling=sampling, media=media)
        facts = _facts(small, targets=targets, blocks=blocks, sampling=sampling, guidance=guidance, media=media) | {
            "generic": generic,
            "generic_package": spec.build.partition(":")[0].rpartition(".")[0],
            "parameters": readable(parameters),
            "license": checkpoint_license(folder),
            "max_sequence_length": length,
            "miniature_text": "" if level == LEVELS[0] else _WIDE,
        }
        call, why = recorded_call(small, sampling=sampling, media=media)
        if targets and not facts["lora_targets"]:
            call, why = None, "endings of its attention layers are names of other modules, too"
        miniature = {
            f"src/{names.package}/miniature/{name}": (place / name).read_bytes() for name in names_below(place)
        }
        written: dict[str, str] = {}
        if call is not None:
            written = _rendered(names, catalog, author=author, generic=generic, facts=facts, call=call, why="")
            write({**written, **miniature}, Path(scratch) / "plugin")
            try:
                same_numbers(small, checkpoint, Path(scratch) / "plugin" / "src", names, sampling=sampling)
            except _FAILURES as error:
                call, why = None, f"written out, its call does not give the pipeline's numbers: {error}"
        if call is None:
            facts |= {"arguments": argument_table(small, sampling=sampling, media=media)}
            written = _rendered(names, catalog, author=author, generic=generic, facts=facts, call=None, why=why)
    return dict(sorted({**written, **miniature}.items()))


def _rendered(
    names: Names,
    catalog: Catalog,
    *,
    author: str,
    generic: str,
    facts: Mapping[str, Any],
    call: Call | None,
    why: str,
) -> dict[str, str]:
    dist = catalog.get("model", generic).dist
    shape = Shape(
        prefix="model",
        description="The model {name} for UniRL: " + f"{facts['pipeline']} of diffusers",
        modules=("model", "parity", "tiny"),
        requires=(
            *("unirl-core", "unirl-model-host", "unirl-numerics", *(() if call else (dist,))),
            *outside_requirements(generic, catalog=catalog),
        ),
        proves_with=_PARTS,
    )
    every = {**facts, "call": call, "why": why, "vocabularies": _VOCABULARIES}
    return render(names, author=author, templates="pipeline", shape=shape, facts=every)


def _miniature(folder: Path, scratch: Path, generic: str, catalog: Catalog) -> tuple[Path, Any, str]:
    """Folder of the miniature's files, the model that the generic plugin builds and verifies on it, and its level."""
    from unirl.model_host.diffusion.miniature import save_random_components

    reasons: list[str] = []
    for level in LEVELS:
        place, whole = scratch / level, scratch / f"{level}-whole"
        write_pipeline(folder, place, level=level)
        copytree(place, whole)
        try:
            save_random_components(whole, seed=0)
            return place, build_generic(whole, generic, catalog=catalog), level
        except _FAILURES as error:
            reasons.append(f"with smaller {level}: {type(error).__name__}: {error}")
    raise RecipeError(
        f"--from: a miniature of {str(folder)!r} cannot be made from its config.json files ({'; '.join(reasons)}). "
        f"Scaffold with `unirl new model NAME` and write its tiny.py by hand; model={generic} trains the checkpoint "
        "meanwhile."
    )


def _sampling(model: Any, *, most_tokens: int, media: Sequence[Any]) -> LatentSamplingConfig:
    """Small sizes that the pipeline takes, and as few tokens as tell prompts apart: some pipelines put a long
    instruction before each."""
    grid = model.grid
    side = grid.unit * math.ceil(64 / grid.unit)
    result = LatentSamplingConfig(height=side, width=side, frames=1 + grid.frame_step, max_sequence_length=most_tokens)
    for length in (128, 256, 512):
        asked = replace(result, max_sequence_length=min(length, most_tokens))
        if tells_prompts_apart(model, sampling=asked, media=media):
            return asked
    return result


def _media(model: Any, folder: Path) -> tuple[Any, ...]:
    """Images for a pipeline that generates nothing without them."""
    if False in model.facts.layouts:
        return ()
    from unirl.model_host.tokens.image_miniature import media

    return media(folder, number=0)


def _facts(
    model: Any,
    *,
    targets: Sequence[str],
    blocks: Sequence[str],
    sampling: LatentSamplingConfig,
    guidance: Guidance,
    media: Sequence[Any],
) -> dict[str, Any]:
    grid = model.grid
    layers = dict(model.trainable.named_modules())
    adapted = [name for name in layers if any(name == end or name.endswith(f".{end}") for end in targets)]
    components = [name for name, part in sorted(model.pipeline.components.items()) if part is not None]
    takes = "" if model.session.image_name is None else "needs" if False not in model.facts.layouts else "takes"
    used = {
        "height": sampling.height,
        "width": sampling.width,
        **({"frames": sampling.frames} if grid.frame_step else {}),
        "max_sequence_length": sampling.max_sequence_length,
        **({"guidance_mode": guidance.mode} if guidance.mode == "norm-corrected" else {}),
    }
    return {
        "pipeline": type(model.pipeline).__name__,
        "transformer": type(model.trainable).__name__,
        "scheduler": type(model.pipeline.scheduler).__name__,
        "components": components,
        "encoders": [name for name in components if re.match(r"(text|image)_encoder", name)],
        "track": "video" if grid.frame_step else "image",
        "takes": takes,
        "most_images": model.facts.most_images,
        "channels": model.facts.channels,
        "grid": grid,
        "layout": "tokens" if grid.is_packed else "channels-last" if grid.is_channels_last else "places",
        "variant": _variant(model, sampling),
        "embedded": model.session.has_embedded_guidance,
        "guidance": guidance,
        "is_inverted": model.facts.is_inverted,
        # Whole names count the blocks of a checkpoint; the function finds those of any.
        "lora_targets": targets if not any(re.search(r"\.\d+\.", f".{name}") for name in targets) else (),
        "lora_names": targets,
        "lora_layers": len(adapted),
        "idle_layers": tuple(idle_layers(model, adapted, sampling=sampling, media=media)),
        "wrap_blocks": blocks,
        "num_blocks": sum(type(part).__name__ in blocks for part in layers.values()),
        "sampling": used,
    }


def _variant(model: Any, sampling: LatentSamplingConfig) -> str:
    """The schedule's variant that is the pipeline's own where that is not the default; else empty."""
    from unirl.numerics.diffusion.schedules import sigmas_from_scheduler_config

    expected = model.schedule(sampling)
    tokens = math.prod(model.latent_shape(sampling)[1:]) // max(model.grid.unit // model.grid.side, 1) ** 2
    for variant in ("exact", "diffusers-default"):
        try:
            result = sigmas_from_scheduler_config(
                dict(model.pipeline.scheduler.config),
                num_steps=sampling.num_inference_steps,
                image_seq_len=tokens,
                variant=variant,
            )
        except ValueError:
            return ""
        if result.shape == expected.shape and float((result - expected).abs().max()) < 1e-6:
            return "" if variant == "exact" else variant
    return ""
