"""Velocities and logits of vLLM-Omni's BAGEL for `test_bagel_vllm_omni.py`, whose docstring lists what is changed; runs
in that engine's environment.

    python bagel_in_vllm_omni.py CHECKPOINT INPUTS OUTPUTS
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

os.environ.setdefault("VLLM_CPU_CI_ENV", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import vllm_omni.diffusion.models.bagel as package
from safetensors.torch import load_file
from torch import Tensor
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel
from vllm.transformers_utils.configs.bagel import BagelConfig

PIXELS = 16
"""Side of a latent token, of both patch and VAE."""
PATCH = 14


def main(folder: Path, inputs: Path, outputs: Path) -> None:
    given = torch.load(inputs, weights_only=True)
    with set_current_vllm_config(VllmConfig()), torch.no_grad():
        file = outputs.with_suffix(".rendezvous")
        init_distributed_environment(
            world_size=1, rank=0, distributed_init_method=f"file://{file}", local_rank=0, backend="gloo"
        )
        initialize_model_parallel(1)
        theirs = in_fp32()
        model = made(theirs, folder)
        result: dict[str, Tensor] = {}
        caches: dict[str, tuple[Any, int, int]] = {}
        for name, pieces in given["branches"].items():
            cache, length, position, _ = walked(theirs, model, pieces, marks=given["marks"])
            caches[name] = (cache, length, position)
            result[name] = model(**noisy(model, given, caches[name]))
        result |= guided(model, given, caches)
        for name, pieces in given["texts"].items():
            result[name] = walked(theirs, model, pieces, marks=given["marks"])[3]
        torch.save(result, outputs)


def in_fp32() -> Any:
    """vLLM-Omni's module with its hard-wired bf16 replaced, which nothing else in its text changes."""
    text = (Path(package.__path__[0]) / "bagel_transformer.py").read_text()
    result = ModuleType("bagel_in_fp32")
    sys.modules[result.__name__] = result
    exec(compile(text.replace("torch.bfloat16", "torch.float32"), result.__name__, "exec"), vars(result))
    return result


def made(theirs: Any, folder: Path) -> torch.nn.Module:
    """The model with a checkpoint's weights, through its own loader. Every parameter must be given one."""
    settings, language, vision = (
        json.loads((folder / f"{name}config.json").read_text()) for name in ("", "llm_", "vit_")
    )
    config = theirs.Qwen2MoTConfig(**{**language, "tie_word_embeddings": False})
    model = theirs.Bagel(
        language_model=theirs.Qwen2MoTForCausalLM(config),
        vit_model=None,
        config=BagelConfig(
            llm_config=config,
            vae_config=SimpleNamespace(**settings["vae_config"]),
            vit_config=SimpleNamespace(patch_size=vision["patch_size"], hidden_size=vision["hidden_size"]),
            vit_max_num_patch_per_side=vision["image_size"] // vision["patch_size"],
            latent_patch_size=settings["latent_patch_size"],
            max_latent_size=settings["max_latent_size"],
            connector_act=settings["connector_act"],
        ),
    ).eval()
    stored, start = load_file(folder / "ema.safetensors"), "language_model."
    own = {name: value for name, value in stored.items() if not name.startswith((start, "vit_model."))}
    loaded = model.language_model.load_weights(
        (name[len(start) :], value) for name, value in stored.items() if name.startswith(start)
    )
    others = {name for name, _ in model.named_parameters() if not name.startswith(start)}
    assert {name for name, _ in model.language_model.named_parameters()} == loaded and others == own.keys()
    model.load_state_dict(own, strict=False)
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if hasattr(method, "process_weights_after_loading"):
            method.process_weights_after_loading(module)
    return model


def walked(theirs: Any, model: Any, pieces: list[Any], *, marks: dict[str, int]) -> tuple[Any, int, int, Tensor]:
    """A sequence, piece by piece into a cache: that, its length, its next position and the logits after its texts'
    tokens. Pieces: ("text", ids), ("latent", values [n, C], [h, w]), ("feature", values [n, V], [h, w])."""
    cache, length, position = theirs.NaiveCache(model.config.llm_config.num_hidden_layers), 0, 0
    logits: list[Tensor] = []
    for kind, values, *grid in pieces:
        if kind == "text":
            places = torch.arange(position, position + len(values))
            output = model.language_model(
                packed_text_ids=values,
                query_lens=torch.tensor([len(values)], dtype=torch.int),
                packed_query_position_ids=places,
                past_key_values=cache,
                mode="und",
            )
            logits.append(model.language_model.lm_head(output.packed_query_sequence))
            cache, length, position = output.past_key_values, length + len(values), position + len(values)
            continue
        high, wide = grid[0].tolist()
        side = PIXELS if kind == "latent" else PATCH
        prepare = model.prepare_vae_images if kind == "latent" else model.prepare_vit_images
        arguments, (length,), (position,) = prepare(
            [length], [position], [torch.zeros(3, high * side, wide * side)], lambda image: image, marks
        )
        if kind == "latent":
            # [C, 2 h, 2 w] of tokens in the order row, column, channel.
            split = values.view(high, wide, 2, 2, -1).permute(4, 0, 2, 1, 3).reshape(-1, 2 * high, 2 * wide)
            cache = model.forward_cache_update_vae(
                SimpleNamespace(encode=lambda _, own=split: own[None]), cache, **arguments
            )
        else:
            model.vit_model = lambda own=values, **_: own
            cache = model.forward_cache_update_vit(cache, **arguments)
    return cache, length, position, torch.cat(logits) if logits else torch.zeros(0)


def noisy(model: Any, given: dict[str, Any], context: tuple[Any, int, int]) -> dict[str, Any]:
    """Arguments of a forward of the image behind a context."""
    cache, length, position = context
    size = tuple((given["grid"] * PIXELS).tolist())
    arguments = model.prepare_vae_latent([length], [position], [size], given["marks"])
    del arguments["packed_init_noises"]
    return {**arguments, "x_t": given["x"], "timestep": given["t"].expand(len(given["x"])), "past_key_values": cache}


def guided(model: Any, given: dict[str, Any], caches: dict[str, tuple[Any, int, int]]) -> dict[str, Tensor]:
    """The three branches in one forward, combined, by each renormalisation."""
    branches = [caches[name] for name in ("positive", "negative", "no-image")]
    positions = [noisy(model, given, one)["packed_position_ids"] for one in branches]
    text, image = given["scales"]
    return {
        f"guided.{kind}": model(
            **noisy(model, given, branches[0]),
            cfg_renorm_type=kind,
            cfg_renorm_min=given["least"],
            cfg_text_scale=text,
            cfg_img_scale=image,
            cfg_branch_pids=positions,
            cfg_branch_caches=[cache for cache, _, _ in branches],
        )
        for kind in ("global", "channel", "text_channel")
    }


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
