"""Finding and loading: every way in which a checkpoint can be wrong is one clear error."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from checkpoints import as_hub_id, cut
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from unirl.core.errors import RecipeError
from unirl.core.specs.facts import names_in
from unirl.models.qwen3 import tiny
from unirl.models.qwen3.config import Qwen3Config
from unirl.models.qwen3.model import Qwen3Model, build, build_moe
from unirl.models.qwen3.plugin import MOE, SPEC


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: shutil.rmtree(folder), r"there is no folder .* not a hub id either"),
        (
            lambda folder: (folder / "config.json").unlink(),
            r"has no config\.json, so it is not in the transformers layout",
        ),
        (lambda folder: (folder / "config.json").write_text("{"), r"cannot be read as JSON|must be a JSON object"),
        (lambda folder: (folder / "model.safetensors").unlink(), r"does not load"),
        (cut, r"does not load"),
        (lambda folder: forget(folder / "model.safetensors"), r"lack 'model\.layers\.1\.mlp\.up_proj\.weight'\. Fetch"),
        (lambda folder: (folder / "tokenizer.json").unlink(), r"has no vocabulary"),
        (lambda folder: (folder / "tokenizer.json").write_text("{"), r"cannot be read as JSON"),
    ],
    ids=["absent", "no-config", "bad-config", "no-weights", "cut", "a-weight-less", "no-tokenizer", "bad-tokenizer"],
)
def test_a_damaged_checkpoint_is_one_clear_error(
    tmp_path: Path, folder: Callable[..., Path], damage: Callable[[Path], None], message: str
) -> None:
    shutil.copytree(folder(), tmp_path / "damaged")
    damage(tmp_path / "damaged")
    with pytest.raises(RecipeError, match=message) as caught:
        build(Qwen3Config(path=str(tmp_path / "damaged")), device="cpu")
    assert str(caught.value).startswith("model.path: ")


def forget(file: Path) -> None:
    weights = load_file(file)
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, file, metadata={"format": "pt"})


def test_another_architecture_is_refused_with_the_model_to_choose(tmp_path: Path, folder: Callable[..., Path]) -> None:
    with pytest.raises(RecipeError, match=r"'Qwen3MoeForCausalLM'; this model loads .*Choose model=qwen3-moe"):
        build(Qwen3Config(path=str(folder("moe"))), device="cpu")
    with pytest.raises(RecipeError, match=r"'Qwen3ForCausalLM'; this model loads .*Choose model=qwen3,"):
        build_moe(Qwen3Config(path=str(folder())), device="cpu")
    shutil.copytree(folder(), tmp_path / "llama")
    config = json.loads((tmp_path / "llama" / "config.json").read_text())
    (tmp_path / "llama" / "config.json").write_text(json.dumps({**config, "architectures": ["LlamaForCausalLM"]}))
    with pytest.raises(RecipeError, match=r"'LlamaForCausalLM'; .*the model plugin of that architecture"):
        build(Qwen3Config(path=str(tmp_path / "llama")), device="cpu")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dtype": "fp16"}, r"model\.dtype: got 'fp16'.*float32, bfloat16, float16"),
        ({"autocast": "half"}, r"model\.autocast: got 'half'"),
        ({"attention": "flash"}, r"model\.attention: got 'flash'.*sdpa, eager, flash_attention_2"),
        ({"attention": "flex_attention"}, r"model\.attention: .* but the model runs on cpu"),
        ({"logits_chunk": -1}, r"model\.logits_chunk: got -1"),
    ],
)
def test_settings_out_of_range_are_refused(
    folder: Callable[..., Path], settings: dict[str, object], message: str
) -> None:
    with pytest.raises(RecipeError, match=message):
        build(Qwen3Config(path=str(folder()), **settings), device="cpu")  # type: ignore[arg-type]


def test_a_hub_id_is_read_from_the_cache_and_an_absent_one_is_one_clear_error(
    folder: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub_id = as_hub_id(folder(), tmp_path, monkeypatch)
    fetched = build(Qwen3Config(path=hub_id), device="cpu")
    local = build(Qwen3Config(path=str(folder())), device="cpu")
    for name, weight in local.trainable.state_dict().items():
        assert torch.equal(weight, fetched.trainable.state_dict()[name]), name
    with pytest.raises(RecipeError, match=r"^model\.path: there is no folder 'acme/other'.*hub"):
        build(Qwen3Config(path="acme/other"), device="cpu")


@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_what_it_saves_is_an_ordinary_checkpoint(
    kind: str, load: Callable[..., Qwen3Model], folder: Callable[..., Path], tmp_path: Path
) -> None:
    load(kind).trainable.save_pretrained(tmp_path)  # type: ignore[operator]
    saved, original = (json.loads((path / "config.json").read_text()) for path in (tmp_path, folder(kind)))
    assert saved["architectures"] == original["architectures"]
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(again).__module__.startswith("transformers.")
    kept = again.state_dict()
    assert all(torch.equal(weight, kept[name]) for name, weight in load(kind).trainable.state_dict().items())


@pytest.mark.parametrize("write", [tiny.write, tiny.write_moe])
def test_the_miniature_is_the_same_bytes_for_the_same_seed(tmp_path: Path, write: Callable[..., None]) -> None:
    state = torch.get_rng_state()
    for name, seed in (("one", 0), ("same", 0), ("other", 1)):
        write(tmp_path / name, seed=seed)
    assert torch.equal(torch.get_rng_state(), state)
    files = {name: {f.name: f.read_bytes() for f in (tmp_path / name).iterdir()} for name in ("one", "same", "other")}
    assert files["one"] == files["same"]
    assert files["one"]["model.safetensors"] != files["other"]["model.safetensors"]
    assert sum(map(len, files["one"].values())) < 1_000_000


@pytest.mark.parametrize(
    ("kind", "spec", "block"), [("dense", SPEC, "Qwen3DecoderLayer"), ("moe", MOE, "Qwen3MoeDecoderLayer")]
)
def test_what_the_spec_names_exists(kind: str, spec, block: str, load: Callable[..., Qwen3Model]) -> None:
    model = load(kind)
    assert model.spec is spec
    assert getattr(model, spec.trainable) is model.trainable
    assert not model.trainable.training
    names = {name for name, part in model.trainable.named_modules() if isinstance(part, torch.nn.Linear)}
    targets = names_in(spec.lora_targets, model.trainable)
    assert targets == tuple(f"self_attn.{name}_proj" for name in "qkvo")
    for target in targets:
        assert sum(name.endswith(f".{target}") for name in names) == 2, target
    classes = [type(part).__name__ for part in model.trainable.modules()]
    assert names_in(spec.wrap_blocks, model.trainable) == (block,)
    assert classes.count(block) == spec.tiny.wrap_blocks
    for pattern in spec.tensor_parallel:
        assert {pattern.replace("*", layer) for layer in "01"} <= names
