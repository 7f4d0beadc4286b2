"""One rank of a group that shares the tokens of every sample: `python sequence_ranks.py RANK RANKS FOLDER`.

Each rank leaves what it finds in FOLDER.
"""

import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from diffusers import HunyuanVideo15Transformer3DModel, HunyuanVideoTransformer3DModel, WanTransformer3DModel
from diffusers.models.attention_processor import AttnProcessor
from torch.distributed.device_mesh import init_device_mesh
from unirl.core.errors import RecipeError
from unirl.model_host.diffusion.sequence_parallel import TokenSplit, split_transformer

JOINT = {"attention": "attn", "rotary": "image_rotary_emb", "rotary_dim": 0, "joins_texts": True}
SPLITS = {
    "wan": TokenSplit(blocks=("blocks",), attention="attn1", rotary="rotary_emb", rotary_dim=1),
    "hunyuan": TokenSplit(blocks=("transformer_blocks", "single_transformer_blocks"), **JOINT),
    "hunyuan15": TokenSplit(blocks=("transformer_blocks",), **JOINT),
}
SHAPE = {"num_attention_heads": 4, "attention_head_dim": 12, "num_layers": 2}
ROPE = {"rope_axes_dim": (4, 4, 4)}
# 3 x 3 x 5 = 45 tokens, 2 x 2 x 4 = 16, and one more than four ranks.
LATENTS = {"odd": (3, 6, 10), "even": (2, 4, 8), "few": (1, 2, 10)}
CASES = [(name, latents) for name in SPLITS for latents in LATENTS]


def transformer(name, *, heads=4):
    torch.manual_seed(0)
    shape = {**SHAPE, "num_attention_heads": heads}
    if name == "wan":
        return WanTransformer3DModel(in_channels=4, out_channels=4, text_dim=6, freq_dim=8, ffn_dim=32, **shape).eval()
    shape = {**shape, **ROPE, "in_channels": 4, "out_channels": 4, "text_embed_dim": 6, "num_refiner_layers": 1}
    if name == "hunyuan":
        return HunyuanVideoTransformer3DModel(num_single_layers=2, pooled_projection_dim=5, **shape).eval()
    return HunyuanVideo15Transformer3DModel(
        **shape, patch_size=2, text_embed_2_dim=5, image_embed_dim=7, target_size=64
    ).eval()


def arguments(name, latents):
    """Inputs of two samples, texts of different lengths; with few latents the texts are shorter than four ranks."""
    random = torch.Generator().manual_seed(1)
    numbers = {"dtype": torch.float64, "generator": random}
    long = 3 if latents == "few" else 7
    draw = lambda *size: torch.randn(*size, **numbers)  # noqa: E731
    texts = {"encoder_hidden_states": draw(2, long, 6)}
    given = {"hidden_states": draw(2, 4, *LATENTS[latents]), "timestep": torch.tensor([300.0, 900.0]).double(), **texts}
    if name == "wan":
        return given
    given["encoder_attention_mask"] = (torch.arange(long) < torch.tensor([[long], [2]])).double()
    if name == "hunyuan":
        return {**given, "pooled_projections": draw(2, 5), "guidance": torch.tensor([6000.0, 4000.0]).double()}
    glyphs = 0 if latents == "few" else 3
    return {
        **given,
        "encoder_hidden_states_2": draw(2, glyphs, 5),
        "encoder_attention_mask_2": (torch.arange(glyphs) < torch.tensor([[1], [glyphs]])).double(),
        "image_embeds": draw(2, 0, 7),
    }


def run(name, latents, mesh=None, *, recomputes=False):
    """The output, and the gradients of one loss of it; with a mesh, only of this rank's tokens."""
    net = transformer(name).double()
    if recomputes:
        net.enable_gradient_checkpointing()
        net.train()
    if mesh is not None:
        split_transformer(net, mesh, SPLITS[name])
    given = arguments(name, latents)
    target = torch.randn(given["hidden_states"].shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    output = net(**given, return_dict=False)[0]
    if recomputes:
        # Another length before the backward pass, which computes the blocks of this one again.
        with torch.no_grad():
            net(**arguments(name, "even"), return_dict=False)
    (output - target).square().mean().backward()
    return output.detach(), {key: param.grad for key, param in net.named_parameters() if param.grad is not None}


def refusals(mesh):
    said = {}
    for case, change in {
        "heads": lambda: split_transformer(transformer("wan", heads=3), mesh, SPLITS["wan"]),
        "processor": lambda: split_transformer(plain(), mesh, SPLITS["wan"]),
        "tokens": lambda: short(mesh),
        "kernel": lambda: other_kernel(mesh),
    }.items():
        try:
            change()
        except RecipeError as error:
            said[case] = str(error)
    return said


def plain():
    net = transformer("wan")
    net.blocks[1].attn1.processor = AttnProcessor()
    return net


def short(mesh):
    net = transformer("wan").double()
    split_transformer(net, mesh, SPLITS["wan"])
    net(**{**arguments("wan", "few"), "hidden_states": torch.zeros(2, 4, 1, 2, 2).double()})


def other_kernel(mesh):
    """Attention that is not torch's function, by a processor that looks like those of diffusers."""
    net = transformer("wan").double()
    net.blocks[1].attn1.processor = Mean()
    split_transformer(net, mesh, SPLITS["wan"])
    net(**arguments("wan", "odd"))


class Mean:
    _parallel_config = None

    def __call__(self, attn, hidden_states, encoder_hidden_states=None, attention_mask=None, rotary_emb=None):
        return hidden_states.mean(dim=1, keepdim=True)


def main():
    rank, ranks, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=60))
    mesh = init_device_mesh("cpu", (ranks,))
    results = {(name, latents): run(name, latents, mesh) for name, latents in CASES}
    results |= {(name, "again"): run(name, "odd", mesh, recomputes=True) for name in SPLITS}
    torch.save((results, refusals(mesh)), folder / f"{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
