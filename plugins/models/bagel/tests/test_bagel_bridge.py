"""The half of the bridge to vLLM-Omni that runs in UniRL's process."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
from safetensors.torch import load_file
from unirl.core.errors import RecipeError
from unirl.engine_host.probe import probe_requests
from unirl.engine_host.source_files import source_files
from unirl.models.bagel.bridges.fused_layers import FUSED, held_as
from unirl.models.bagel.bridges.vllm_omni import BRIDGE
from unirl.models.bagel.config import BagelConfig
from unirl.models.bagel.model import BagelModel, build


@pytest.mark.parametrize(
    ("stored", "held"),
    [
        ("language_model.model.layers.1.self_attn.q_proj.weight", ("language_model.model.layers.1.self_attn.qkv.weight", "q")),
        ("language_model.model.layers.0.self_attn.v_proj_moe_gen.bias", ("language_model.model.layers.0.self_attn.qkv_moe_gen.bias", "v")),
        ("language_model.model.layers.0.self_attn.o_proj_moe_gen.weight", ("language_model.model.layers.0.self_attn.o_moe_gen.weight", None)),
        ("language_model.model.layers.0.mlp_moe_gen.up_proj.weight", ("language_model.model.layers.0.mlp_moe_gen.gate_up_proj.weight", 1)),
        ("language_model.model.layers.0.self_attn.k_norm_moe_gen.weight", ("language_model.model.layers.0.self_attn.k_norm.gen_weight", None)),
        ("language_model.model.layers.0.self_attn.k_norm.weight", ("language_model.model.layers.0.self_attn.k_norm.weight", None)),
        ("language_model.model.norm_moe_gen.weight", ("language_model.model.norm.gen_weight", None)),
        ("vae2llm.weight", ("vae2llm.weight", None)),
    ],
)  # fmt: skip
def test_stored_tensors_are_parts_of_vllm_omni_s_parameters(stored: str, held: tuple[str, str | None]) -> None:
    assert held_as(stored) == held


def test_every_tensor_of_the_checkpoint_has_a_place_of_its_own(model: BagelModel, tiny_folder: Path) -> None:
    """Three parts in a projection of queries, keys and values, two in one of gates, one elsewhere."""
    places = [held_as(name) for name in load_file(tiny_folder / "ema.safetensors")]
    assert len(set(places)) == len(places)
    counts = Counter(name for name, _ in places)
    sizes = {f".{end}.": len(parts) for end, parts in FUSED.items()}
    for name, count in counts.items():
        assert count == next((size for end, size in sizes.items() if end in f".{name}."), 1), name


def test_the_checkpoint_is_the_model_s_unless_the_engine_has_its_own(
    model: BagelModel, tiny_folder: Path, tmp_path: Path
) -> None:
    assert BRIDGE.checkpoint(model, "") == model.folder
    assert BRIDGE.checkpoint(model, str(tiny_folder)) == tiny_folder
    with pytest.raises(RecipeError, match=r"^model\.path: "):
        BRIDGE.checkpoint(model, str(tmp_path))


def test_the_vit_and_the_vae_have_the_dtypes_of_training(tiny_folder: Path) -> None:
    config = BagelConfig(path=str(tiny_folder), vision_dtype="bfloat16")
    result = BRIDGE.settings(build(config, device="cpu"))
    assert json.loads(json.dumps(result)) == {"vision_dtype": "bfloat16", "vae_dtype": "float32"}


def test_the_engine_is_probed_without_sources_with_some_and_with_turns(model: BagelModel) -> None:
    plain, shown, continued = (request.inputs for request in probe_requests(model))
    assert not any(plain.media) and all(shown.media) and shown.turns is None
    assert all(continued.media) and continued.turns is not None
    tokens = [turn.tokens for own in continued.turns for turn in own]
    assert all(tokens) and max(map(max, tokens)) < len(model.vocabulary)
    assert len(set(tokens)) == len(set(continued.texts))


def test_all_that_the_engine_s_process_imports_is_sent_to_it() -> None:
    """The pipeline, which only that process can import, included; and nothing that trains."""
    names = source_files([BRIDGE.__module__])
    assert "unirl.models.bagel.bridges.vllm_omni_pipeline" in names
    assert not names.keys() & {"unirl.models.bagel.model", "unirl.models.bagel.plugin"}
