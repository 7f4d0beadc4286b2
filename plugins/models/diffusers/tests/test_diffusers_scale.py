"""Pipelines whose transformer is larger than a rank: two ranks build one, and their tensors are counted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from pipeline_inputs import FP32, SMALL, words_of
from rank_processes import launch
from test_diffusers_families import WARNINGS
from tiny_pipelines.families import write
from torch import nn

pytestmark = [*WARNINGS, pytest.mark.slow, pytest.mark.nightly]
SCRIPT = Path(__file__).with_name("diffusers_scale_ranks.py")
RANKS = 2
LARGER = {
    "StableDiffusion3Pipeline": {
        "num_layers": 12,
        "num_attention_heads": 24,
        "caption_projection_dim": 192,
        "pos_embed_max_size": 16,
    },
    "FluxPipeline": {"num_layers": 8, "num_single_layers": 14, "num_attention_heads": 12},
}
"""Settings of transformers of 192 channels, and of so many blocks that they outweigh all else."""


def enlarge(folder: Path, **settings: int) -> nn.Module:
    """Write the folder's transformer anew, of random weights, with these settings."""
    config = json.loads((folder / "transformer" / "config.json").read_text())
    cls = getattr(diffusers, config["_class_name"])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = cls.from_config({**config, **settings})
    module.save_pretrained(folder / "transformer")
    return module


def blocks(module: nn.Module) -> list[nn.Module]:
    """Blocks that FSDP2 gathers one at a time, besides the root."""
    return [block for part in module.children() if isinstance(part, nn.ModuleList) for block in part]


def num_bytes(module: nn.Module) -> int:
    return sum(param.nbytes for param in module.parameters())


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[nn.Module, list[Any]]]:
    """Transformer of each pipeline, and results of every rank after a lazy build and after an eager one."""
    folder = tmp_path_factory.mktemp("ranks")
    (folder / "prompts.txt").write_text("a ring\n")
    transformers, cases = dict[str, nn.Module](), dict[str, list[str]]()
    for name, settings in LARGER.items():
        write(folder / name, name)
        transformers[name] = enlarge(folder / name, **settings)
        paths = [f"model.path={folder / name}", f"data.train={folder / 'prompts.txt'}"]
        cases[name] = [*SMALL, *FP32, "backend.trains=full", *words_of(name), *paths]
    (folder / "cases.json").write_text(json.dumps(cases))
    launch(SCRIPT, folder / "store", folder, ranks=RANKS, deadline_s=560)
    found = [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(RANKS)]
    return {name: (module, [of_rank[name] for of_rank in found]) for name, module in transformers.items()}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", LARGER)
def test_no_rank_ever_holds_a_lazily_built_transformer_whole(
    name: str, ranks: dict[str, tuple[nn.Module, list[Any]]]
) -> None:
    transformer, found = ranks[name]
    whole, block = num_bytes(transformer), max(map(num_bytes, blocks(transformer)))
    params = dict(transformer.named_parameters())
    # FSDP2 cuts the first dimension, and pads the last shard.
    share = {key: -(-len(param) // RANKS) for key, param in params.items()}
    half = sum(rows * params[key].nbytes // len(params[key]) for key, rows in share.items())
    for rank, (lazy, eager) in enumerate(found):
        for result in (lazy, eager):
            assert result["held"] == half
            rows = {key: min(count, len(params[key]) - rank * count) for key, count in share.items()}
            assert result["rows"] == rows
            # Encoders, VAE and tables of positions, whole on every rank.
            assert result["others"] < 0.01 * whole
        # A part of one tensor is read at a time. What encoders compute, and read for that, is smaller than a block.
        assert half <= lazy["filled"] <= half + lazy["others"] + block
        assert eager["filled"] >= whole
        # In the pipeline's own run, its activations included.
        assert lazy["filled"] < lazy["peak"] < whole
