"""Checkpoints that do not fit, and a model that is filled once it is built."""

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
from unirl.models.bagel import tiny
from unirl.models.bagel.config import BagelConfig
from unirl.models.bagel.model import BagelModel, build


def edit(file: Path, **settings: Any) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **settings}))


def change(file: Path, action: Callable[[dict[str, Tensor]], Any]) -> None:
    tensors = load_file(file)
    action(tensors)
    save_file(tensors, file)


def without(name: str, file: str) -> Callable[[Path], None]:
    return lambda folder: change(folder / file, lambda tensors: tensors.pop(name))


def extra(name: str, file: str) -> Callable[[Path], None]:
    return lambda folder: change(folder / file, lambda tensors: tensors.update({name: torch.zeros(1)}))


def rename_token(folder: Path) -> None:
    file = folder / "tokenizer.json"
    file.write_text(file.read_text().replace("<|vision_end|>", "<|other|>"))


EMA, AE = "ema.safetensors", "ae.safetensors"


@pytest.mark.parametrize(
    ("breaks", "message"),
    [
        (lambda folder: (folder / "vit_config.json").unlink(), r"lacks vit_config\.json"),
        (lambda folder: (folder / EMA).unlink(), r"has neither ema\.safetensors"),
        (without("language_model.model.layers.1.mlp_moe_gen.up_proj.weight", EMA), r"lack 'language_model\.model\.layers\.1\.mlp_moe_gen"),
        (without("language_model.model.layers.0.self_attn.q_norm.weight", EMA), r"lack 'language_model\.model\.layers\.0\.self_attn\.q_norm"),
        (without("vit_model.vision_model.post_layernorm.bias", EMA), "lack 'vit_model"),
        (without("vit_pos_embed.pos_embed", EMA), "lack"),
        (extra("language_model.model.layers.0.adapter", EMA), r"have 'language_model\.model\.layers\.0\.adapter'"),
        (extra("vit_model.vision_model.head", EMA), r"have 'vit_model\.vision_model\.head'"),
        (extra("something_else", EMA), "have 'something_else'"),
        (without("decoder.conv_in.bias", AE), r"lacks 'decoder\.conv_in\.bias', expected the"),
        (extra("decoder.other", AE), r"has the unknown 'decoder\.other', expected the"),
        (lambda folder: save_file({"a": torch.zeros(1)}, folder / AE), "not an autoencoder"),
        (lambda folder: change(folder / AE, lambda one: one.update({"decoder.conv_in.bias": torch.zeros(3)})), r"as \[3\], expected \[32\]"),
        (lambda folder: edit(folder / "llm_config.json", hidden_size=32), r"have '.*' as \[.*\], expected"),
        (lambda folder: edit(folder / "llm_config.json", rope_scaling={"type": "yarn"}), "rope_scaling"),
        (lambda folder: edit(folder / "config.json", connector_act="relu"), "connector_act"),
        (lambda folder: edit(folder / "llm_config.json", vocab_size=100), r"has the token .* expected ids below 100"),
        (rename_token, r"lacks <\|vision_end\|>"),
    ],
)  # fmt: skip
def test_a_checkpoint_that_does_not_fit_is_refused_by_its_path(
    tiny_folder: Path, tmp_path: Path, breaks: Callable[[Path], Any], message: str
) -> None:
    folder = tmp_path / "broken"
    shutil.copytree(tiny_folder, folder)
    breaks(folder)
    with pytest.raises(RecipeError, match=rf"^model\.path: (.|\n)*{message}"):
        build(BagelConfig(path=str(folder)), device="cpu")


@pytest.mark.parametrize(
    ("breaks", "message"),
    [
        (
            lambda folder: (folder / "vit_config.json").unlink(),
            r"lacks vit_config\.json, expected the published layout",
        ),
        (lambda folder: edit(folder / "config.json", interpolate_pos=True), "interpolate_pos of config.json is true"),
        (lambda folder: (folder / "llm_config.json").write_text("{"), "llm_config.json"),
    ],
)
def test_a_folder_of_another_kind_is_refused_before_anything_is_loaded(
    tiny_folder: Path, tmp_path: Path, breaks: Callable[[Path], Any], message: str
) -> None:
    folder = tmp_path / "broken"
    shutil.copytree(tiny_folder, folder)
    assert list(BagelConfig(path=str(folder)).problems(None, None)) == []
    breaks(folder)
    (reason,) = BagelConfig(path=str(folder)).problems(None, None)
    assert reason.key == ".path" and re.search(message, reason.text)


def test_norms_and_the_output_projection_are_as_published_whatever_llm_config_says(
    model: BagelModel, tiny_folder: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(tiny_folder, folder)
    edit(folder / "llm_config.json", qk_norm=False, tie_word_embeddings=True)
    result = build(BagelConfig(path=str(folder)), device="cpu").trainable.state_dict()
    assert all(torch.equal(value, result[name]) for name, value in model.trainable.state_dict().items())


def test_the_file_and_the_modules_have_the_same_names(model: BagelModel, tiny_folder: Path) -> None:
    stored = load_file(tiny_folder / EMA)
    own = model.trainable.state_dict() | model.encoder.images.vision.state_dict()
    assert own.keys() == stored.keys()
    assert all(torch.equal(value, own[name]) for name, value in stored.items())


def test_a_written_checkpoint_has_the_published_tensors(model: BagelModel, tiny_folder: Path, tmp_path: Path) -> None:
    """As it was, with values of the module in its place, the frozen parts included."""
    model.transformer.save_pretrained(tmp_path)
    for file in (EMA, AE):
        result, stored = load_file(tmp_path / file), load_file(tiny_folder / file)
        assert result.keys() == stored.keys() and all(torch.equal(result[name], stored[name]) for name in stored)


def test_the_language_model_and_the_ends_of_latents_train_and_nothing_else(model: BagelModel) -> None:
    trains = {name.split(".")[0] for name, param in model.trainable.named_parameters() if param.requires_grad}
    assert trains == {"language_model", "time_embedder", "vae2llm", "llm2vae"}
    frozen = [*model.encoder.images.vision.parameters(), *model.encoder.images.vae.parameters()]
    assert not any(param.requires_grad for param in frozen)


def test_a_lazy_model_has_no_values_until_it_is_filled(model: BagelModel, tiny_folder: Path) -> None:
    lazy = build(BagelConfig(path=str(tiny_folder)), device="cpu", lazy=True)
    assert all(param.is_meta for param in lazy.trainable.parameters())
    lazy.trainable.to_empty(device="cpu")
    lazy.fill(lazy.trainable.state_dict(keep_vars=True))
    expected = dict(model.trainable.named_parameters())
    for name, param in lazy.trainable.named_parameters():
        assert torch.equal(param, expected[name]) and param.requires_grad == expected[name].requires_grad


def test_a_miniature_is_small_and_the_same_for_a_seed(tiny_folder: Path, tmp_path: Path) -> None:
    tiny.write(tmp_path, seed=0)
    files = [file for file in tiny_folder.iterdir() if file.is_file()]
    assert sum(file.stat().st_size for file in files) < 5e6
    assert all(file.read_bytes() == (tmp_path / file.name).read_bytes() for file in files)
