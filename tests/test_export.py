"""`unirl export`: diffusers, transformers and peft load what it writes, and compute what the run's own model does."""

from __future__ import annotations

import json
import re
import resource
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from diffusers import StableDiffusion3Pipeline, WanPipeline
from peft import PeftModel
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer
from unirl.core.cli import main
from unirl.core.errors import CheckpointError, DiskFull, RunFolderError
from unirl.core.plugins.catalog import Catalog
from unirl.core.recipe.compose import compose
from unirl.loop.build import build_parts
from unirl.loop.parts import Parts
from unirl.loop.run import train
from unirl.models.wan.tiny import write_wan21, write_wan22
from unirl.quickstart import checkpoint_path
from unirl.tools.export import exporting
from unirl.tools.export.card import base_license
from unirl.tools.export.exporting import export
from unirl.train_host import checkpoint as train_host_checkpoint

LORA = ["backend.trains=lora", "backend.lora.rank=4", "backend.lora.alpha=6", "backend.lr=1e-2"]
"""A scale of 1.5, and a rate that moves the outputs far within two steps."""
SMALL = [
    "run.max_steps=2",
    "run.save_every=1",
    "run.media_every=0",
    "run.threads=1",
    "data.prompts_per_step=2",
    "advantage.constant_reward=skip",
]
EVALUATED = ["eval.every=1", "eval.num_prompts=2", "eval.samples_per_prompt=1"]
# No two images are equally bright, so that each group has advantages.
IMAGES = ["data.samples_per_prompt=4", *EVALUATED, "+reward@reward.light=brightness", "~tracker.report"]
# So many that some group has right and wrong completions.
TEXTS = ["data.prompts_per_step=8", "data.samples_per_prompt=8", "eval.every=0", "data.eval=''", "~tracker.report"]
JOINT = [
    "stages.rewrite.samples=2",
    "stages.image.samples=2",
    "data.eval=''",
    "+reward@reward.light=brightness",
    "~tracker.report",
]
EMA = ["backend.ema.kind=constant", "backend.ema.decay=0.5"]

LORA_FILE = "pytorch_lora_weights.safetensors"

Trained = Callable[..., Path]


@pytest.fixture(scope="module")
def catalog() -> Catalog:
    return Catalog.discover()


@pytest.fixture(scope="module")
def trained(catalog: Catalog, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """The folder of a run; one of the same words is trained once."""
    runs: dict[tuple[str, ...], Path] = {}

    def run(recipe: str, *overrides: str) -> Path:
        if (key := (recipe, *overrides)) not in runs:
            folder = tmp_path_factory.mktemp("runs") / "run"
            words = [*SMALL, *overrides, f"run.dir={folder}"]
            train(compose(recipe, words, catalog=catalog), catalog=catalog, overrides=words)
            runs[key] = folder
        return runs[key]

    return run


@contextmanager
def own_parts(run: Path, catalog: Catalog, *, step: int = 2) -> Iterator[Parts]:
    """The parts of a run with the weights of a checkpoint."""
    recorded = json.loads((run / "recipe.json").read_text())
    parts = build_parts(compose(recorded["recipe"], recorded["overrides"], catalog=catalog), catalog=catalog)
    for name, backend in parts.backends.items():
        backend.load(run / "checkpoints" / f"step-{step:06d}" / "backend" / name)
    try:
        with torch.no_grad():
            yield parts
    finally:
        for backend in parts.backends.values():
            backend.close()


def difference(left: Tensor, right: Tensor) -> float:
    """Largest difference, relative to the largest value."""
    return float((left.float() - right.float()).abs().max() / right.float().abs().max())


ROUNDING = 2e-5
"""fp32 rounds to 6e-8. Folding an adapter in, or its scale, changes the order of additions in each layer: 2e-7 of a
velocity, 3e-6 of an image after four steps. Several times as much leaves room for every instruction set."""
FAR = 1e-2
"""The least change that adapters make: more than a hundred times as much."""


def painted(pipeline: Any) -> Tensor:
    """An image of a fixed prompt and noise, before it is rounded to 8 bits."""
    pipeline.set_progress_bar_config(disable=True)
    side = 64 // pipeline.vae_scale_factor
    shape = (1, pipeline.transformer.config.in_channels, side, side)
    noise = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    words = {"prompt": "a red ring on the left", "max_sequence_length": 8, "height": 64, "width": 64}
    result = pipeline(**words, latents=noise, num_inference_steps=4, guidance_scale=1.0, output_type="pt")
    return result.images


def velocity(transformer: Any) -> Tensor:
    """Velocity of an SD3 transformer at fixed latents and conditions."""
    generator = torch.Generator().manual_seed(2)
    settings = transformer.config
    return transformer(
        hidden_states=torch.randn((2, settings.in_channels, 8, 8), generator=generator),
        timestep=torch.tensor([900.0, 300.0]),
        encoder_hidden_states=torch.randn((2, 20, settings.joint_attention_dim), generator=generator),
        pooled_projections=torch.randn((2, settings.pooled_projection_dim), generator=generator),
        return_dict=False,
    )[0]


def header(file: Path) -> dict[str, str]:
    """The metadata of a file of weights."""
    with safe_open(file, framework="pt") as opened:
        return opened.metadata()


def exported(run: Path, to: Path, catalog: Catalog, **options: Any) -> Path:
    export(run, to, catalog=catalog, **options)
    return to


@pytest.mark.slow
def test_diffusers_paints_the_runs_images_with_its_adapters(trained: Trained, catalog: Catalog, tmp_path: Path) -> None:
    run = trained("quickstart", *IMAGES, *LORA, *EMA)
    base = checkpoint_path()
    adapters = exported(run, tmp_path / "adapters", catalog)
    averaged = exported(run, tmp_path / "averaged", catalog, policy="ema")
    earlier = exported(run, tmp_path / "earlier", catalog, step=1)
    whole = exported(run, tmp_path / "whole", catalog, merge=True, dtype="float32")

    def loaded(folder: Path | None) -> Any:
        pipeline = StableDiffusion3Pipeline.from_pretrained(base)
        if folder is not None:
            pipeline.load_lora_weights(folder)
        return pipeline

    with own_parts(run, catalog) as parts:
        own: Any = parts.only.model
        image, speed = painted(own.pipeline), velocity(own.transformer)
        with parts.only.backend.policy("ema"):
            average = velocity(own.transformer)
    with own_parts(run, catalog, step=1) as parts:
        before = velocity(parts.only.model.trainable)
    with torch.no_grad():
        assert difference(velocity(loaded(adapters).transformer), speed) < ROUNDING
        assert difference(painted(loaded(adapters)), image) < ROUNDING
        assert difference(velocity(loaded(averaged).transformer), average) < ROUNDING
        assert difference(velocity(loaded(earlier).transformer), before) < ROUNDING
        merged = StableDiffusion3Pipeline.from_pretrained(whole)
        assert difference(velocity(merged.transformer), speed) < ROUNDING
        assert difference(painted(merged), image) < ROUNDING
        # Each of them is another one.
        assert difference(velocity(loaded(None).transformer), speed) > FAR
        assert difference(average, speed) > FAR and difference(before, speed) > FAR
        assert difference(painted(loaded(None)), image) > FAR


@pytest.mark.slow
def test_a_file_of_adapters_says_what_it_adapts_and_what_made_it(
    trained: Trained, catalog: Catalog, tmp_path: Path
) -> None:
    run = trained("quickstart", *IMAGES, *LORA, *EMA)
    state = json.loads((run / "checkpoints/step-000002/manifest.json").read_text())["state"]
    expected = {
        "format": "pt",
        "modelspec.sai_model_spec": "1.0.1",
        "modelspec.title": "quickstart, step 2",
        "modelspec.resolution": "64x64",
        "unirl.base_model": checkpoint_path().name,
        "unirl.base_digest": state["data"]["model.path"],
        "unirl.recipe": "quickstart",
        "unirl.step": "2",
        "unirl.version": version("unirl-tools"),
    }
    for layout, name in (
        ("diffusers", LORA_FILE),
        ("peft", "adapter_model.safetensors"),
        ("comfy", "comfy.safetensors"),
        ("kohya", "kohya.safetensors"),
        ("original", "original.safetensors"),
    ):
        folder = exported(run, tmp_path / layout, catalog, layout=layout, dtype="bfloat16")
        assert f"| layout | {layout} |" in (folder / "README.md").read_text()
        with safe_open(folder / name, framework="pt") as file:
            metadata = file.metadata()
            kinds = {key: file.get_slice(key).get_dtype() for key in file.keys()}  # noqa: SIM118
        assert {kind for key, kind in kinds.items() if not key.endswith(".alpha")} == {"BF16"}
        assert expected.items() <= metadata.items()
        assert datetime.fromisoformat(metadata["modelspec.date"]).tzinfo is not None
        kohya = {key: value for key, value in metadata.items() if key.startswith("ss_")}
        assert kohya == ({"ss_network_dim": "4", "ss_network_alpha": "4"} if layout == "kohya" else {})
        # Which machine and folder a run was on is nobody's business.
        assert not any("/" in value for key, value in metadata.items() if key != "modelspec.implementation")


@pytest.mark.slow
def test_a_merged_export_changes_the_transformer_and_the_card_alone(
    trained: Trained, catalog: Catalog, tmp_path: Path
) -> None:
    base = checkpoint_path()
    whole = exported(
        trained("quickstart", *IMAGES, *LORA, *EMA), tmp_path / "whole", catalog, merge=True, dtype="bfloat16"
    )
    names = {str(file.relative_to(base)) for file in base.rglob("*") if file.is_file()}
    assert {str(file.relative_to(whole)) for file in whole.rglob("*") if file.is_file()} == names
    changed = {name for name in names if (base / name).read_bytes() != (whole / name).read_bytes()}
    weights = "transformer/diffusion_pytorch_model.safetensors"
    assert changed == {"README.md", weights}
    with safe_open(whole / weights, framework="pt") as file:
        assert {file.get_slice(name).get_dtype() for name in file.keys()} == {"BF16"}  # noqa: SIM118
    # The big files of the other components take no space.
    assert (whole / "vae/diffusion_pytorch_model.safetensors").samefile(
        base / "vae/diffusion_pytorch_model.safetensors"
    )


@pytest.mark.slow
def test_full_training_is_exported_bit_for_bit(trained: Trained, catalog: Catalog, tmp_path: Path) -> None:
    for recipe, overrides, load in (
        ("quickstart", IMAGES, lambda folder: StableDiffusion3Pipeline.from_pretrained(folder).transformer),
        ("quickstart-text", TEXTS, AutoModelForCausalLM.from_pretrained),
    ):
        run = trained(recipe, *overrides, "backend.lr=1e-3")
        folder = exported(run, tmp_path / recipe, catalog, dtype="float32")
        with own_parts(run, catalog) as parts:
            expected = dict(parts.only.model.trainable.named_parameters())
            start = build_parts(
                compose(recipe, [], catalog=catalog), catalog=catalog, rewards="none"
            ).only.model.trainable
            moved = [name for name, value in start.named_parameters() if not torch.equal(value, expected[name])]
            assert len(moved) > len(expected) / 2
            result = dict(load(folder).named_parameters())
            assert result.keys() == expected.keys()
            for name, value in expected.items():
                assert torch.equal(result[name], value), name


def spoken(model: Any, tokenizer: Any) -> tuple[Tensor, str]:
    """Log-probs of every next token of a prompt, and its greedy completion."""
    tokens = tokenizer("12+7=", return_tensors="pt")
    log_probs = model(**tokens).logits.float().log_softmax(-1)
    result = model.generate(**tokens, do_sample=False, max_new_tokens=8, pad_token_id=0)
    return log_probs, tokenizer.decode(result[0])


@pytest.mark.slow
def test_peft_and_transformers_say_what_the_run_says(trained: Trained, catalog: Catalog, tmp_path: Path) -> None:
    run = trained("quickstart-text", *TEXTS, *LORA)
    adapters = exported(run, tmp_path / "adapters", catalog)
    whole = exported(run, tmp_path / "whole", catalog, merge=True)
    with own_parts(run, catalog) as parts:
        own: Any = parts.only.model
        base = own.folder
        log_probs, text = spoken(own.causal_lm, own.tokenizer)
    with torch.no_grad():
        merged = AutoModelForCausalLM.from_pretrained(whole)
        tokenizer = AutoTokenizer.from_pretrained(whole)
        plain = AutoModelForCausalLM.from_pretrained(base)
        assert difference(spoken(plain, tokenizer)[0], log_probs) > FAR
        for model in (PeftModel.from_pretrained(plain, adapters), merged):
            result, said = spoken(model, tokenizer)
            assert difference(result, log_probs) < ROUNDING
            assert said == text
    assert json.loads((adapters / "adapter_config.json").read_text())["target_modules"] == [
        "k_proj",
        "o_proj",
        "q_proj",
        "v_proj",
    ]


@pytest.mark.slow
def test_a_vision_language_model_is_exported_too(trained: Trained, catalog: Catalog, tmp_path: Path) -> None:
    run = trained("quickstart-vl", *TEXTS, *LORA)
    adapters = exported(run, tmp_path / "adapters", catalog)
    whole = exported(run, tmp_path / "whole", catalog, merge=True)
    tokens = torch.arange(10, 18)[None]
    with own_parts(run, catalog) as parts:
        own: Any = parts.only.model
        expected = own.causal_lm(input_ids=tokens).logits
        plain = AutoModelForImageTextToText.from_pretrained(own.folder)
        assert difference(plain(input_ids=tokens).logits, expected) > FAR
        for model in (
            PeftModel.from_pretrained(plain, adapters),
            AutoModelForImageTextToText.from_pretrained(whole),
        ):
            assert difference(model(input_ids=tokens).logits, expected) < ROUNDING


@pytest.mark.slow
def test_a_video_model_trained_in_another_wrapping_is_exported(
    trained: Trained, catalog: Catalog, tmp_path: Path
) -> None:
    base = tmp_path / "base"
    write_wan21(base, seed=0)
    (tmp_path / "prompts.txt").write_text("a cat\na dog\n")
    small = ["height=32", "width=32", "frames=5", "max_sequence_length=16", "num_inference_steps=3"]
    run = trained(
        "wan21/flow-grpo",
        f"data.train={tmp_path / 'prompts.txt'}",
        "data.samples_per_prompt=2",
        f"model={{path: {base}, dtype: float32, text_dtype: float32}}",
        "backend.mixed_precision=none",
        "backend.shard=always",
        "backend.lr=1e-2",
        "eval.every=0",
        *[f"sampling.{word}" for word in small],
    )
    folder = exported(run, tmp_path / "adapters", catalog)
    with own_parts(run, catalog) as parts:
        own: Any = parts.only.model
        settings = own.transformer.config
        x = torch.randn((2, settings.in_channels, 2, 4, 4), generator=torch.Generator().manual_seed(3))
        conditions = {
            "prompt_embeds": torch.randn((2, 16, settings.text_dim), generator=torch.Generator().manual_seed(4))
        }
        sigma = torch.tensor([0.9, 0.3])
        expected = own.velocity(x, sigma, conditions)
        pipeline: Any = WanPipeline.from_pretrained(base)
        own.transformer = pipeline.transformer
        assert difference(own.velocity(x, sigma, conditions), expected) > FAR
        pipeline.load_lora_weights(folder)
        own.transformer = pipeline.transformer
        assert difference(own.velocity(x, sigma, conditions), expected) < ROUNDING


@pytest.mark.slow
def test_both_experts_of_a_model_are_exported(trained: Trained, catalog: Catalog, tmp_path: Path) -> None:
    base = tmp_path / "base"
    write_wan22(base, seed=0)
    (tmp_path / "prompts.txt").write_text("a cat\na dog\n")
    small = ["height=32", "width=32", "frames=5", "max_sequence_length=16", "num_inference_steps=4"]
    run = trained(
        "wan22/flow-grpo",
        f"data.train={tmp_path / 'prompts.txt'}",
        "data.samples_per_prompt=2",
        f"model={{path: {base}, dtype: float32, text_dtype: float32}}",
        "backend.mixed_precision=none",
        "backend.lr=1e-2",
        "eval.every=0",
        *[f"sampling.{word}" for word in small],
    )
    adapters = exported(run, tmp_path / "adapters", catalog)
    comfy = exported(run, tmp_path / "comfy", catalog, layout="comfy")
    peft = exported(run, tmp_path / "peft", catalog, layout="peft")
    whole = exported(run, tmp_path / "whole", catalog, merge=True)
    with own_parts(run, catalog) as parts:
        own: Any = parts.only.model
        x = torch.randn((2, 4, 2, 4, 4), generator=torch.Generator().manual_seed(3))
        embeds = torch.randn((2, 16, 32), generator=torch.Generator().manual_seed(4))
        # The first row is of the one expert, the second of the other.
        expected = own.velocity(x, torch.tensor([0.9, 0.3]), {"prompt_embeds": embeds})

    def found(pipeline: Any) -> Tensor:
        rows = [
            expert(
                hidden_states=x[[row]],
                timestep=torch.tensor([sigma * 1000]),
                encoder_hidden_states=embeds[[row]],
                return_dict=False,
            )[0]
            for row, (expert, sigma) in enumerate(((pipeline.transformer, 0.9), (pipeline.transformer_2, 0.3)))
        ]
        return torch.cat(rows)

    with torch.no_grad():
        pipeline: Any = WanPipeline.from_pretrained(base)
        before = found(pipeline)
        assert all(difference(before[[row]], expected[[row]]) > FAR for row in (0, 1))
        pipeline.load_lora_weights(adapters)
        pipeline.load_lora_weights(
            adapters, weight_name="pytorch_lora_weights_2.safetensors", load_into_transformer_2=True
        )
        assert difference(found(pipeline), expected) < ROUNDING
        # As ComfyUI loads them: the expert of the noisier steps is `transformer`.
        pipeline.unload_lora_weights()
        assert torch.equal(found(pipeline), before)
        pipeline.load_lora_weights(comfy, weight_name="comfy_high_noise.safetensors")
        pipeline.load_lora_weights(comfy, weight_name="comfy_low_noise.safetensors", load_into_transformer_2=True)
        assert difference(found(pipeline), expected) < ROUNDING
        pipeline.unload_lora_weights()
        for name in ("transformer", "transformer_2"):
            PeftModel.from_pretrained(getattr(pipeline, name), peft / name)
        assert difference(found(pipeline), expected) < ROUNDING
        merged: Any = WanPipeline.from_pretrained(whole)
        assert merged.config.boundary_ratio == 0.875
        assert difference(found(merged), expected) < ROUNDING


@pytest.mark.slow
def test_each_of_several_models_is_exported_by_its_name(trained: Trained, catalog: Catalog, tmp_path: Path) -> None:
    run = trained("quickstart-enhancer-joint", *JOINT)
    writer = exported(run, tmp_path / "writer", catalog, model="writer", dtype="float32")
    painter = exported(run, tmp_path / "painter", catalog, model="painter", dtype="float32")
    start = build_parts(compose("quickstart-enhancer-joint", [], catalog=catalog), catalog=catalog, rewards="none")
    with own_parts(run, catalog) as parts:
        for name, model in (
            ("writer", AutoModelForCausalLM.from_pretrained(writer)),
            ("painter", StableDiffusion3Pipeline.from_pretrained(painter).transformer),
        ):
            expected, before = (dict(one.models[name].trainable.named_parameters()) for one in (parts, start))
            assert not any(torch.equal(before[key], expected[key]) for key in list(expected)[:3])
            for key, value in model.named_parameters():
                assert torch.equal(expected[key], value), key


def refused(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    """The one error of a command."""
    with pytest.raises(SystemExit) as caught:
        main([str(word) for word in words])
    assert caught.value.code in (1, 2)
    message = " ".join(capsys.readouterr().err.split())
    assert message.lower().count("error:") == 1 and "Traceback" not in message, message
    return message


@pytest.mark.slow
def test_an_export_that_cannot_be_made_gets_one_clear_error_and_leaves_nothing(
    trained: Trained, catalog: Catalog, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lora, to = trained("quickstart", *IMAGES, *LORA, *EMA), tmp_path / "out"
    full = trained("quickstart-text", *TEXTS, "backend.lr=1e-3")
    text = trained("quickstart-text", *TEXTS, *LORA)
    joint = trained("quickstart-enhancer-joint", *JOINT)
    (tmp_path / "there").mkdir()
    (tmp_path / "empty").mkdir()
    shutil.copytree(lora, tmp_path / "unsaved", ignore=shutil.ignore_patterns("step-*"))
    shutil.copytree(lora, tmp_path / "cut")
    with (tmp_path / "cut/checkpoints/step-000002/backend/__0_0.distcp").open("r+b") as file:
        file.truncate(1000)
    for words, says in (
        ([lora, "--to", tmp_path / "there"], f"--to: {tmp_path / 'there'} exists already"),
        ([tmp_path / "empty", "--to", to], "got no recipe.json in it, expected a run folder"),
        ([tmp_path / "unsaved", "--to", to], "got a run without a checkpoint"),
        ([tmp_path / "cut", "--to", to], "__0_0.distcp is truncated: 1000 bytes"),
        ([lora, "--to", to, "--step", 7], "--step: got 7, expected one of 1, 2"),
        ([full, "--to", to, "--merge"], "--merge:"),
        ([full, "--to", to, "--layout", "peft"], "--layout: got 'peft', but a complete checkpoint is written as trans"),
        ([lora, "--to", to, "--layout", "comfy", "--merge"], "--layout: got 'comfy', but a complete checkpoint is"),
        (
            [text, "--to", to, "--layout", "kohya"],
            "got 'kohya', which model 'qwen3' does not have; expected one of: peft",
        ),
        ([full, "--to", to, "--policy", "ema"], "--policy: got 'ema', but"),
        ([full, "--to", to, "--model", "writer"], "--model: got 'writer', which the run does not train"),
        ([joint, "--to", to], "--model: got none, but the run trains writer, painter; export each by its name"),
        ([joint, "--to", to, "--model", "reader"], "expected one of: writer, painter"),
    ):
        assert says in refused(capsys, "export", *words)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["cut", "empty", "there", "unsaved"]


@pytest.mark.slow
@pytest.mark.parametrize("when", ["before it is opened", "while it is read"])
def test_a_checkpoint_that_a_run_removes_during_an_export_gives_way_to_the_next(
    trained: Trained, catalog: Catalog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """As a run beside the export does with run.keep=1: the next one comes, then the old one goes, under another name."""
    whole, run = trained("quickstart", *IMAGES, *LORA, *EMA), tmp_path / "run"
    shutil.copytree(whole, run)
    old, new = (run / "checkpoints" / f"step-00000{step}" for step in (1, 2))
    new.rename(run / "next")
    place, name = (
        (exporting, "build_model") if when == "before it is opened" else (train_host_checkpoint, "read_tensors")
    )
    inner = getattr(place, name)

    def rotate(*args: Any, **named: Any) -> Any:
        if (run / "next").exists():
            (run / "next").rename(new)
            old.rename(old.with_name(f".old-{old.name}"))
        return inner(*args, **named)

    monkeypatch.setattr(place, name, rotate)
    assert export(run, tmp_path / "out", catalog=catalog).checkpoint.step == 2
    expected = exported(whole, tmp_path / "expected", catalog, step=2)
    # safetensors writes the entries of a header in any order.
    result, other = load_file(tmp_path / "out" / LORA_FILE), load_file(expected / LORA_FILE)
    assert result.keys() == other.keys() and all(torch.equal(result[name], other[name]) for name in result)
    assert all(result[name].dtype == other[name].dtype for name in result)
    assert header(tmp_path / "out" / LORA_FILE) == header(expected / LORA_FILE)
    first = load_file(exported(whole, tmp_path / "first", catalog, step=1) / LORA_FILE)
    assert any(not torch.equal(first[name], other[name]) for name in other)
    new.rename(run / "next")
    (old.parent / f".old-{old.name}").rename(old)
    with pytest.raises(CheckpointError, match=r"step-000001: there is no such checkpoint; .*step-000002"):
        export(run, tmp_path / "asked", catalog=catalog, step=1)
    assert not (tmp_path / "asked").exists()


@pytest.mark.slow
def test_a_run_whose_base_checkpoint_or_recipe_has_changed_is_refused(
    trained: Trained, catalog: Catalog, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base, recipe, to = tmp_path / "base", tmp_path / "mine.yaml", tmp_path / "out"
    shutil.copytree(checkpoint_path(), base)
    recipe.write_text("defaults: [quickstart, _self_]\nbackend: {trains: lora}\n")
    (base / "LICENSE.txt").write_text("mine")
    run = trained(str(recipe), *IMAGES, f"model.path={base}", "run.max_steps=1")
    adapters = exported(run, tmp_path / "adapters", catalog)
    assert (adapters / "LICENSE.txt").read_text() == "mine"
    assert 'license_link: "LICENSE.txt"' in (adapters / "README.md").read_text()
    file = base / "transformer" / "diffusion_pytorch_model.safetensors"
    whole = file.read_bytes()
    tensors = load_file(file)
    # One tensor, and neither names nor sizes.
    tensors["proj_out.weight"] *= 1.01
    save_file(tensors, file, metadata={"format": "pt"})
    message = refused(capsys, "export", run, "--to", to)
    assert f"model.path: the files of '{base}' have changed since the run" in message
    assert f"model.path: {base} has changed" in refused(capsys, "train", "--resume", run, "run.max_steps=2")
    file.write_bytes(whole)
    recipe.write_text("defaults: [quickstart, _self_]\nbackend: {trains: lora, lora: {alpha: 3}}\n")
    assert "has changed since this checkpoint was written" in refused(capsys, "export", run, "--to", to)
    recipe.write_text("defaults: [quickstart, _self_]\nbackend: {trains: lora}\n")
    shutil.rmtree(base)
    assert f"model.path: there is no folder '{base}'" in refused(capsys, "export", run, "--to", to)
    assert not to.exists()


@pytest.mark.slow
def test_an_export_that_does_not_fit_on_the_disk_leaves_nothing(
    trained: Trained, catalog: Catalog, tmp_path: Path
) -> None:
    run = trained("quickstart", *IMAGES, *LORA, *EMA)
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    # Of one file; the weights have megabytes. Python ignores the signal, so that writing fails.
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, limit[1]))
    try:
        with pytest.raises((RunFolderError, DiskFull), match="out"):
            export(run, tmp_path / "out", catalog=catalog, merge=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_the_card_states_base_recipe_and_scores(trained: Trained, catalog: Catalog, tmp_path: Path) -> None:
    run = trained("quickstart", *IMAGES, *LORA, *EMA)
    card = (exported(run, tmp_path / "one", catalog, step=1) / "README.md").read_text()
    scores = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    metrics = {event["step"]: event["metrics"]["score_mean"] for event in scores if event["kind"] == "evaluated"}
    assert metrics.keys() == {0, 1, 2}
    assert f"- score_mean: {metrics[0]:.4g} at step 0, {metrics[1]:.4g} at step 1" in card
    rows = [line for line in card.splitlines() if re.match(r"\| \d+ \|", line)]
    assert [row.split("|")[1].strip() for row in rows] == ["0", "1"]
    assert f"| base | {checkpoint_path()} |" in card and "| license of the base | not stated in its files |" in card
    assert "| algorithm | flow-grpo |" in card and "| steps | 1 of 2, trained weights |" in card
    (config,) = re.findall(r"```yaml\n(.*?)```", card, flags=re.DOTALL)
    assert yaml.safe_load(config)["backend"]["lora"]["alpha"] == 6


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        (
            {"README.md": "---\nlicense: other\nlicense_name: acme\nlicense_link: LICENSE.md\n---\n"},
            ("other", "other, acme, LICENSE.md (by its README.md)"),
        ),
        ({"README.md": "# No head\nlicense: mit\n", "LICENSE": "MIT"}, ("other", "see LICENSE")),
        ({"config.json": '{"license": "apache-2.0"}'}, ("apache-2.0", "apache-2.0 (by its config.json)")),
        ({"config.json": "{}"}, (None, None)),
    ],
)
def test_the_license_is_what_the_base_states(
    tmp_path: Path, files: dict[str, str], expected: tuple[str | None, str | None]
) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    terms = base_license(tmp_path)
    assert (terms.get("license"), terms.get("stated")) == expected
