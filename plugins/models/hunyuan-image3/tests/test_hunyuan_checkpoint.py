"""Checkpoints that do not fit, a model that is filled once it is built, and one that is written again."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from unirl.core.errors import RecipeError
from unirl.models.hunyuan_image3 import tiny
from unirl.models.hunyuan_image3.config import HunyuanImageConfig
from unirl.models.hunyuan_image3.model import HunyuanImageModel, build

FILE = "model.safetensors"


def edit(**settings: Any) -> Callable[[Path], Any]:
    def change(folder: Path) -> None:
        file = folder / "config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **settings}))

    return change


def part(name: str, **settings: Any) -> Callable[[Path], Any]:
    def change(folder: Path) -> None:
        edit(**{name: {**json.loads((folder / "config.json").read_text())[name], **settings}})(folder)

    return change


def change(action: Callable[[dict[str, Tensor]], Any]) -> Callable[[Path], Any]:
    def of_folder(folder: Path) -> None:
        tensors = load_file(folder / FILE)
        action(tensors)
        save_file(tensors, folder / FILE)

    return of_folder


def without(name: str) -> Callable[[Path], Any]:
    return change(lambda tensors: tensors.pop(name))


def extra(name: str) -> Callable[[Path], Any]:
    return change(lambda tensors: tensors.update({name: torch.zeros(1)}))


def rename(token: str) -> Callable[[Path], Any]:
    def of_folder(folder: Path) -> None:
        for file in (folder / "tokenizer.json", folder / "tokenizer_config.json"):
            file.write_text(file.read_text().replace(token, "<other>"))

    return of_folder


@pytest.mark.parametrize(
    ("breaks", "message"),
    [
        (lambda folder: (folder / "config.json").unlink(), r"lacks config\.json"),
        (lambda folder: (folder / FILE).unlink(), r"has neither model\.safetensors"),
        (without("model.layers.1.mlp.experts.2.gate_and_up_proj.weight"), r"lack 'model\.layers\.1\.mlp\.experts\.2\.gate"),
        (without("model.layers.0.self_attn.query_layernorm.weight"), r"lack 'model\.layers\.0\.self_attn\.query"),
        (without("vision_aligner.layers.2.bias"), r"lack 'vision_aligner\.layers\.2\.bias'"),
        (without("vision_model.post_layernorm.bias"), "lack 'vision_model"),
        (without("vae.decoder.up.3.upsample.conv.bias"), "lack 'vae"),
        (extra("model.layers.0.mlp.experts.4.down_proj.weight"), r"have 'model\.layers\.0\.mlp\.experts\.4"),
        (extra("guidance_emb.mlp.0.weight"), r"have 'guidance_emb"),
        (extra("vae.other"), r"have 'vae\.other'"),
        (extra("vision_model.other"), r"have 'vision_model\.other'"),
        (change(lambda one: one.update({"model.layers.0.mlp.experts.0.gate_and_up_proj.weight": torch.zeros(32, 64)})), r"as \[32, 64\], expected \[64, 64\]"),
        (edit(cfg_distilled=True), "cfg_distilled is true: the checkpoint is distilled"),
        (edit(use_meanflow=True), "use_meanflow is true: the checkpoint is distilled"),
        (edit(moe_topk=5), "moe_topk is 5, expected at most num_experts, 4"),
        (edit(moe_topk=[2, 2, 2]), "moe_topk has 3 entries, expected 2"),
        (edit(num_key_value_heads=3), "num_attention_heads is 4, expected a multiple of 3"),
        (edit(attention_head_dim=18), "attention_head_dim is 18, expected a multiple of 4"),
        (edit(patch_embed_hidden_dim=48), "patch_embed_hidden_dim is 48, expected a multiple of 32"),
        (edit(use_qk_norm=False), "use_qk_norm is False, expected True"),
        (edit(rope_scaling={"type": "yarn"}), r"rope_scaling\.type is 'yarn'"),
        (part("vit_aligner", projector_type="linear"), r"vit_aligner\.projector_type is 'linear'"),
        (part("vae", ffactor_spatial=8), "vae has 5 widths"),
        (edit(vocab_size=100), "has the token .* expected ids below 100"),
        (rename("<joint_img_sep>"), "lacks <joint_img_sep>"),
        (rename("<img_ratio_7>"), "lacks <img_ratio_7>"),
    ],
)  # fmt: skip
def test_a_checkpoint_that_does_not_fit_is_refused_by_its_path(
    tiny_folder: Path, tmp_path: Path, breaks: Callable[[Path], Any], message: str
) -> None:
    folder = tmp_path / "broken"
    shutil.copytree(tiny_folder, folder)
    breaks(folder)
    with pytest.raises(RecipeError, match=rf"^model\.path: (.|\n)*{message}"):
        build(HunyuanImageConfig(path=str(folder)), device="cpu")


@pytest.mark.parametrize(
    ("breaks", "message"),
    [
        (lambda folder: (folder / "config.json").unlink(), r"lacks config\.json, expected the published layout"),
        (
            edit(cfg_distilled=True),
            r"cfg_distilled is true: the checkpoint is distilled .* Choose another checkpoint\.",
        ),
        (edit(moe_topk=5), "moe_topk is 5"),
        (lambda folder: (folder / "config.json").write_text("{}"), r"lacks '.*', expected that of 'tencent/Hunyuan"),
    ],
)
def test_a_folder_of_another_kind_is_refused_before_anything_is_loaded(
    tiny_folder: Path, tmp_path: Path, breaks: Callable[[Path], Any], message: str
) -> None:
    folder = tmp_path / "broken"
    shutil.copytree(tiny_folder, folder)
    assert list(HunyuanImageConfig(path=str(folder)).problems(None, None)) == []
    breaks(folder)
    (reason,) = HunyuanImageConfig(path=str(folder)).problems(None, None)
    assert reason.key == ".path" and re.search(message, reason.text)


def test_a_pooling_head_of_the_vit_is_left_alone(tiny_folder: Path, tmp_path: Path) -> None:
    folder = tmp_path / "headed"
    shutil.copytree(tiny_folder, folder)
    extra("vision_model.head.probe")(folder)
    build(HunyuanImageConfig(path=str(folder)), device="cpu")


def test_experts_are_joined_gate_first(model: HunyuanImageModel, tiny_folder: Path) -> None:
    """Each is stored by itself, up first."""
    stored, own = load_file(tiny_folder / FILE), model.trainable.state_dict()
    for layer in range(2):
        name = f"model.layers.{layer}.mlp.experts"
        for expert in range(4):
            up, gate = stored[f"{name}.{expert}.gate_and_up_proj.weight"].chunk(2)
            assert torch.equal(own[f"{name}.gate_up_proj"][expert], torch.cat([gate, up]))
            assert torch.equal(own[f"{name}.down_proj"][expert], stored[f"{name}.{expert}.down_proj.weight"])
    joined = {name for name in own if ".experts." in name}
    assert all(torch.equal(own[name], stored[name]) for name in own.keys() - joined)


def test_experts_are_in_the_layout_that_is_split_over_ranks(model: HunyuanImageModel) -> None:
    """VeOmni's: two weights, gate first, and an activation by name."""
    layer: Any = model.trainable.get_submodule("model.layers.0.mlp.experts")
    assert {name: tuple(weight.shape) for name, weight in layer.named_parameters()} == {
        "gate_up_proj": (4, 64, 64),
        "down_proj": (4, 64, 32),
    }
    assert type(layer.act_fn).__name__ in ("SiLU", "SiLUActivation")


def test_a_written_checkpoint_has_the_published_tensors(
    model: HunyuanImageModel, tiny_folder: Path, tmp_path: Path
) -> None:
    """As it was, with values of the module in its place, the frozen halves included."""
    model.transformer.save_pretrained(tmp_path)
    result, stored = load_file(tmp_path / FILE), load_file(tiny_folder / FILE)
    assert result.keys() == stored.keys() and all(torch.equal(result[name], stored[name]) for name in stored)


def test_what_draws_and_writes_trains_and_nothing_else(model: HunyuanImageModel) -> None:
    fixed = {name.split(".")[0] for name, param in model.trainable.named_parameters() if not param.requires_grad}
    assert fixed == {"vision_aligner"}
    assert not any(
        param.requires_grad
        for part in (model.encoder.images.vision, model.encoder.images.vae)
        for param in part.parameters()
    )


def test_a_lazy_model_has_no_values_until_it_is_filled(model: HunyuanImageModel, tiny_folder: Path) -> None:
    lazy = build(HunyuanImageConfig(path=str(tiny_folder)), device="cpu", lazy=True)
    assert all(param.is_meta for param in lazy.trainable.parameters())
    lazy.trainable.to_empty(device="cpu")
    lazy.fill(lazy.trainable.state_dict(keep_vars=True))
    expected = dict(model.trainable.named_parameters())
    for name, param in lazy.trainable.named_parameters():
        assert torch.equal(param, expected[name]) and param.requires_grad == expected[name].requires_grad


def test_a_miniature_is_small_and_the_same_for_a_seed(tiny_folder: Path, tmp_path: Path) -> None:
    tiny.write(tmp_path, seed=0)
    files = [file for file in tiny_folder.iterdir() if file.is_file()]
    assert sum(file.stat().st_size for file in files) < 25e6
    assert all(file.read_bytes() == (tmp_path / file.name).read_bytes() for file in files)
