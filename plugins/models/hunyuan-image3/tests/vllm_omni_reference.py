"""Velocities, logits and VAE of vLLM-Omni's HunyuanImage-3.0 for `test_hunyuan_vllm_omni.py`, whose docstring lists
what is changed; runs in that engine's environment.

    python vllm_omni_reference.py CHECKPOINT INPUTS OUTPUTS
"""

from __future__ import annotations

import inspect
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

os.environ.setdefault("VLLM_CPU_CI_ENV", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from safetensors.torch import load_file
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel
from vllm.forward_context import set_forward_context
from vllm_omni.diffusion.models.hunyuan_image3 import hunyuan_image3_transformer as theirs
from vllm_omni.diffusion.models.hunyuan_image3.autoencoder import AutoencoderKLConv3D


def main(folder: Path, inputs: Path, outputs: Path) -> None:
    given = torch.load(inputs, weights_only=True)
    stored = load_file(folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    rotary = inspect.getsource(theirs.HunYuanRotary2DEmbedder).replace("torch.bfloat16", "torch.float32")
    exec(compile(rotary, "rotary", "exec"), theirs.__dict__)
    theirs.get_pp_group = lambda: SimpleNamespace(is_first_rank=True, is_last_rank=True, rank_in_group=0, world_size=1)
    for name, value in (
        ("sequence_parallel_world_size", 1),
        ("allgather_parallel_world_size", 1),
        ("sequence_parallel_rank", 0),
    ):
        setattr(theirs, f"get_{name}", lambda value=value: value)
    settings = VllmConfig()
    with set_current_vllm_config(settings), torch.no_grad():
        file = outputs.with_suffix(".rendezvous")
        init_distributed_environment(
            world_size=1, rank=0, distributed_init_method=f"file://{file}", local_rank=0, backend="gloo"
        )
        initialize_model_parallel(1)
        with set_forward_context(None, settings):
            torch.save({**transformer(given, stored, config), **vae(given, stored, config)}, outputs)


def part(module: torch.nn.Module, stored: dict[str, torch.Tensor], start: str) -> torch.nn.Module:
    own = {name.removeprefix(start): value for name, value in stored.items() if name.startswith(start)}
    module.load_state_dict(own)
    return module.float().eval()


def transformer(given: dict, stored: dict, config: dict) -> dict[str, torch.Tensor]:
    """Of each branch `velocity` and `logits` after every token, and the velocities combined.

    A branch has `tokens` [L] with negative numbers for other inputs: -1 a latent of a source image, -2 a feature,
    -3 a noisy latent, -4 the timestep 0, -5 that of the image.
    """
    kept = {name: value for name, value in config.items() if name not in ("vae", "vit", "vit_processor", "vit_aligner")}
    model = theirs.HunyuanImage3Model(theirs.HunyuanImage3Config(**kept)).float().eval()
    start = "model."
    loaded = model.load_weights((name[len(start) :], value) for name, value in stored.items() if name.startswith(start))
    assert {name for name, _ in model.named_parameters()} == set(loaded)
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if hasattr(method, "process_weights_after_loading"):
            method.process_weights_after_loading(module)
    result: dict[str, torch.Tensor] = {}
    for name, branch in given["branches"].items():
        velocity, states = of_branch(model, {**given, **branch}, stored, config)
        result[f"{name}.velocity"] = velocity
        result[f"{name}.logits"] = model.norm(states[0]) @ stored["lm_head.weight"].T
    velocities = [result[f"{name}.velocity"] for name in ("positive", "negative")]
    return {**result, "guided": theirs.ClassifierFreeGuidance()(*velocities, given["scale"], step=0)}


def of_branch(model: torch.nn.Module, given: dict, stored: dict, config: dict) -> tuple[torch.Tensor, torch.Tensor]:
    width, patch, channels = config["hidden_size"], config["patch_embed_hidden_dim"], given["x"].shape[0]
    sizes = {"patch_size": 1, "emb_channels": width, "hidden_channels": patch}
    down = part(theirs.UNetDown(in_channels=channels, out_channels=width, **sizes), stored, "patch_embed.")
    up = part(theirs.UNetUp(in_channels=width, out_channels=channels, out_norm=True, **sizes), stored, "final_layer.")
    token_time, in_time, out_time = (
        part(theirs.TimestepEmbedder(width), stored, f"{name}.")
        for name in ("timestep_emb", "time_embed", "time_embed_2")
    )
    aligner = part(theirs.LightProjector(config["vit_aligner"]), stored, "vision_aligner.")
    tokens, zero, t = given["tokens"], torch.zeros(1), given["t"]
    states = stored["model.wte.weight"][tokens.clamp(min=0)].clone()
    sources = [down(one[None], in_time(zero))[0][0] for one in given["latents"]]
    if sources:
        states[tokens == -1] = torch.cat(sources)
        states[tokens == -2] = aligner(given["features"])
        states[tokens == -4] = token_time(zero).expand(len(sources), -1)
    noisy, height, columns = down(given["x"][None], in_time(t))
    states[tokens == -3] = noisy[0]
    states[tokens == -5] = token_time(t)
    images = [
        (slice(*span), tuple(grid)) for span, grid in zip(given["spans"].tolist(), given["grids"].tolist(), strict=True)
    ]
    cos, sin = theirs.build_2d_rope(len(tokens), config["attention_head_dim"], images, base=int(config["rope_theta"]))
    output = model(
        inputs_embeds=states[None],
        attention_mask=given["mask"][None, None],
        position_ids=torch.arange(len(tokens))[None],
        use_cache=False,
        return_dict=True,
        custom_pos_emb=(cos[None], sin[None]),
        mode="gen_image",
        first_step=True,
        query_lens=[len(tokens)],
        seq_lens=[len(tokens)],
        num_image_tokens=int((tokens == -3).sum()) + 1,
        gen_timestep_scatter_index=(tokens == -5).nonzero()[:, :1].T,
    ).last_hidden_state
    return up(output[:, tokens == -3], out_time(t), height, columns)[0], output


def vae(given: dict, stored: dict, config: dict) -> dict[str, torch.Tensor]:
    own = AutoencoderKLConv3D(**config["vae"], in_channels=3, out_channels=3, sample_size=64, sample_tsize=4)
    module = part(own, stored, "vae.")
    scale = config["vae"]["scaling_factor"]
    latents = module.encode(given["image"][None]).latent_dist.mean[0, :, 0] * scale
    return {"latents": latents, "decoded": module.decode(latents[None, :, None] / scale).sample[0, :, 0]}


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
