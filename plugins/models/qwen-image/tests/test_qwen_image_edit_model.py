"""Refusals of the editing models, their trainable parameters, and runs that edit images."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import ray_clusters
import torch
from PIL import Image
from qwen_image_editors import AREAS, Editor
from unirl.core.errors import DataError, RecipeError, RunFailed
from unirl.core.match.match import match
from unirl.core.plugins.catalog import Catalog
from unirl.core.recipe.compose import compose
from unirl.core.types.data import MediaRef
from unirl.core.types.inputs import Inputs
from unirl.core.types.sampling import LatentSamplingConfig
from unirl.loop.run import train
from unirl.models.qwen_image import edit, model, tiny
from unirl.models.qwen_image.config import QwenImageConfig, QwenImageEditConfig, QwenImageEditPlusConfig

pytestmark = [pytest.mark.slow, pytest.mark.nightly]


def inputs_of(*sources: tuple[MediaRef, ...], text: str = "make it red") -> Inputs:
    ids = tuple(map(str, range(len(sources))))
    return Inputs(ids=ids, prompts=(text,) * len(ids), texts=(text,) * len(ids), media=sources)


def picture(file: Path, height: int, width: int) -> tuple[MediaRef, ...]:
    Image.fromarray(np.zeros((height, width, 3), dtype=np.uint8)).save(file)
    return (MediaRef(modality="image", role="source", uri=str(file)),)


def test_a_prompt_without_a_source_is_refused(editor: Editor, sampling: LatentSamplingConfig) -> None:
    with pytest.raises(DataError, match=r"^prompt 'a ring' \('a ring'\): got no source image.*role `source`"):
        editor.model.encode(Inputs.of_texts(["a ring"]), sampling=sampling)


def test_several_sources_are_refused_with_the_model_that_takes_them(
    editor: Editor, sampling: LatentSamplingConfig, tmp_path: Path
) -> None:
    inputs = inputs_of(tiny.media_plus(tmp_path, number=0))
    if editor.name == "edit-plus":
        assert len(editor.model.encode(inputs, sampling=sampling)["source_shapes"][0]) == 2
        return
    with pytest.raises(DataError, match=r"got 2 source images, expected one; model=qwen-image-edit-plus"):
        editor.model.encode(inputs, sampling=sampling)


def test_a_source_that_cannot_be_read_or_scaled_is_an_error_that_names_it(
    editor: Editor, sampling: LatentSamplingConfig, tmp_path: Path
) -> None:
    (tmp_path / "text.png").write_text("not an image")
    of_text = (MediaRef(modality="image", role="source", uri=str(tmp_path / "text.png")),)
    for sources, message in (
        (of_text, r"text\.png' \(source\): not an image"),
        ((dataclasses.replace(of_text[0], uri="gone.png"),), r"'gone\.png'.*cannot be opened"),
        (picture(tmp_path / "thin.png", 2, 900), r"thin\.png': got 900 x 2 pixels.*scales to .*Crop it"),
    ):
        with pytest.raises(DataError, match=message):
            editor.model.encode(inputs_of(sources), sampling=sampling)


def test_a_text_with_the_token_of_an_image_is_refused(
    editor: Editor, sampling: LatentSamplingConfig, tmp_path: Path
) -> None:
    with pytest.raises(DataError, match=r"got '<\|image_pad\|>' in the text.*Remove it"):
        editor.model.encode(inputs_of(editor.sources(tmp_path, number=0), text="a <|image_pad|>"), sampling=sampling)


def test_a_checkpoint_of_another_of_the_pipelines_names_the_model_that_loads_it(
    tiny_folder: Path, editor: Editor, plus: Editor
) -> None:
    path = str(editor.folder)
    named = "qwen-image-edit" if editor.name == "edit" else "qwen-image-edit-plus"
    with pytest.raises(RecipeError, match=rf"^model\.path: .*qwen-image loads .*Choose model={named}, or another"):
        model.build(QwenImageConfig(path=path), device="cpu")
    with pytest.raises(
        RecipeError, match=r"^model\.path: .*qwen-image-edit loads .*Choose model=qwen-image, or another"
    ):
        edit.build(QwenImageEditConfig(path=str(tiny_folder)), device="cpu")
    with pytest.raises(RecipeError, match=r"Choose model=qwen-image-edit-plus"):
        edit.build(QwenImageEditConfig(path=str(plus.folder)), device="cpu")
    with pytest.raises(RecipeError, match=r"qwen-image-edit-plus loads .*Choose model=qwen-image, or another"):
        edit.build_plus(QwenImageEditPlusConfig(path=str(tiny_folder)), device="cpu")


def without_words(folder: Path) -> None:
    """A vocabulary of bytes alone, which makes more tokens of the template than the pipeline drops."""
    path = folder / "processor" / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    tokenizer["model"]["merges"] = []
    path.write_text(json.dumps(tokenizer))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: shutil.rmtree(folder / "processor"), r"lacks processor/"),
        (lambda folder: (folder / "processor" / "tokenizer.json").unlink(), r"has no vocabulary in processor/"),
        (lambda folder: (folder / "processor" / "preprocessor_config.json").unlink(), r"a component does not load"),
        (without_words, r"tokens of the text before the prompt, and QwenImageEdit(Plus)?Pipeline drops 64\. Use the"),
    ],
    ids=["no-processor", "no-vocabulary", "no-image-settings", "other-tokens"],
)
def test_a_processor_that_does_not_fit_is_one_clear_error(
    editor: Editor, tmp_path: Path, damage: Callable[[Path], None], message: str
) -> None:
    folder = tmp_path / "damaged"
    shutil.copytree(editor.folder, folder)
    damage(folder)
    with pytest.raises(RecipeError, match=rf"^model\.path: .*{message}"):
        dataclasses.replace(editor, folder=folder).built()


def test_a_size_off_the_grid_and_an_area_too_small_are_refused(editor: Editor, sampling: LatentSamplingConfig) -> None:
    with pytest.raises(RecipeError, match=r"^sampling\.height: got 40, expected a multiple of 16.*Nearest: 32 or 48"):
        editor.model.latent_shape(dataclasses.replace(sampling, height=40))
    with pytest.raises(RecipeError, match=r"model\.source_area: got 100"):
        editor.built(source_area=100)


def test_a_long_text_is_cut_behind_the_images_and_what_stays_does_not_change(
    editor: Editor, sampling: LatentSamplingConfig, tmp_path: Path
) -> None:
    inputs = inputs_of(editor.sources(tmp_path, number=0), text="a ring, " * 20)
    whole, cut = (
        editor.model.encode(inputs, sampling=dataclasses.replace(sampling, max_sequence_length=length))
        for length in (400, 10)
    )
    (long,), (short,) = whole["prompt_embeds"], cut["prompt_embeds"]
    empty = editor.model.encode(inputs_of(inputs.media[0], text=""), sampling=sampling)["prompt_embeds"][0]
    # The template ends with five tokens behind the text.
    assert len(short) - 10 == len(empty) - 5 < len(long)
    # A causal encoder's sums over fewer tokens, states of order 1.
    torch.testing.assert_close(short, long[: len(short)], rtol=0, atol=1e-5)


def test_every_parameter_of_the_transformer_trains_and_nothing_else(
    editor: Editor, sampling: LatentSamplingConfig, tmp_path: Path
) -> None:
    fresh = editor.built()
    inputs = inputs_of(*(editor.sources(tmp_path, number=number) for number in range(2)))
    conditions = fresh.encode(inputs, sampling=sampling)
    x = torch.randn(2, *fresh.latent_shape(sampling), generator=torch.Generator().manual_seed(1))
    fresh.velocity(x, torch.tensor([0.7, 0.2]), conditions).square().mean().backward()
    idle = [name for name, p in fresh.trainable.named_parameters() if p.grad is None or not p.grad.any()]
    # The last block's text goes nowhere: neither what its tokens attend to nor its feed-forward layers.
    text = ("attn.add_q_proj", "attn.to_add_out", "attn.norm_added_q", "txt_mlp.net.0.proj", "txt_mlp.net.2")
    assert {name.rpartition(".")[0] for name in idle} == {f"transformer_blocks.1.{layer}" for layer in text}
    assert not any(p.requires_grad for part in (fresh.pipeline.text_encoder, fresh.vae) for p in part.parameters())


def test_ranks_that_share_a_sharded_model_edit_row_by_row(
    editor: Editor, sampling: LatentSamplingConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks with other numbers of groups would wait for each other forever; one row is one forward everywhere."""
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    monkeypatch.setattr("unirl.model_host.diffusion.equal_forwards.FSDPModule", type(editor.model.transformer))
    sources = editor.sources(tmp_path, number=0)
    x, sigma = torch.zeros(2, *editor.model.latent_shape(sampling)), torch.tensor([0.5, 0.5])
    conditions = editor.model.encode(inputs_of(sources, sources), sampling=sampling)
    with torch.no_grad():
        one = {name: value[:1] for name, value in conditions.items()}
        assert bool(editor.model.velocity(x[:1], sigma[:1], one).isfinite().all())
        with pytest.raises(RunFailed, match=r"source images.*separate forwards.*train\.micro_batch_size=1"):
            editor.model.velocity(x, sigma, conditions)


@pytest.mark.parametrize("engine", ["vllm-omni", "sglang"])
@pytest.mark.parametrize("name", ["qwen-image-edit", "qwen-image-edit-plus"])
def test_external_engines_are_accepted_when_a_recipe_is_composed(name: str, engine: str) -> None:
    catalog = Catalog.discover()
    plan = compose(f"{name}/flow-grpo", ["data.train=edits.jsonl", f"engine={engine}"], catalog=catalog)
    assert not match(plan, catalog=catalog).reasons


def trained(editor: Editor, folder: Path, *words: str) -> list[dict[str, float]]:
    """Metrics of the steps of a run over prompts of one instruction, each with other sources."""
    rows = [
        {
            "prompt": "make it red",
            "media": [{"modality": "image", "role": "source", "uri": Path(ref.uri).name} for ref in refs],
        }
        for refs in (editor.sources(folder, number=number) for number in range(4))
    ]
    (folder / "edits.jsonl").write_text("\n".join(map(json.dumps, rows)))
    settings = [
        f"model.path={editor.folder}", f"data.train={folder / 'edits.jsonl'}", f"run.dir={folder / 'out'}",
        "model.dtype=float32", "model.text_dtype=float32", "model.vae_dtype=float32",
        f"model.source_area={AREAS['source_area']}", "data.prompts_per_step=4", "data.samples_per_prompt=4",
        "sampling.height=32", "sampling.width=48", "sampling.max_sequence_length=32", "sampling.num_inference_steps=4",
        "sampling.sde.count=2", "run.max_steps=2", "backend.mixed_precision=none", "eval.every=0",
        "backend.activation_checkpointing=false", *words,
    ]  # fmt: skip
    catalog = Catalog.discover()
    train(compose(f"qwen-image-{editor.name}/flow-grpo", settings, catalog=catalog), catalog=catalog)
    events = [json.loads(line) for line in (folder / "out" / "events.jsonl").read_text().splitlines()]
    steps = [event["metrics"] for event in events if event["kind"] == "step"]
    assert len(steps) == 2 and all(step["grad_norm"] > 0 for step in steps)
    assert steps[0]["reward_std"] > 0
    return steps


@pytest.mark.parametrize("trains", ["lora", "full"])
def test_a_run_edits_images_of_different_sizes_with_ratio_1(editor: Editor, tmp_path: Path, trains: str) -> None:
    """In micro-batches that mix them, with guidance."""
    steps = trained(
        editor, tmp_path, "sampling.guidance_scale=4", f"backend.trains={trains}", "engine.forward_batch=16",
        "train.micro_batch_size=2",
    )  # fmt: skip
    # Replay in other batches: fp32 rounding of a forward, in log-probs that are means over the elements of a latent.
    assert all(step["logp_mismatch_max"] <= 1e-5 for step in steps)


def test_two_ranks_that_share_the_model_give_the_numbers_of_one_process(plus: Editor, tmp_path: Path) -> None:
    """Row by row, as the recipe has it: then replay computes what the rollout computed, bit for bit."""
    ray = ("launcher=ray", "launcher.train_ranks=2", "launcher.cpus=0.1", "launcher.reward_cpus=0.1")
    steps: list[dict[str, float]] = []
    for name, words in (("one", ()), ("two", ray)):
        (tmp_path / name).mkdir()
        with ray_clusters.joined() if words else nullcontext():
            steps.append(trained(plus, tmp_path / name, *words)[0])
    one, two = steps
    assert one["logp_mismatch_max"] == two["logp_mismatch_max"] == 0
    for key in ("reward_mean", "grad_norm"):
        # Each rank has half of the rows: fp32 sums in another order, relative to the size of the number.
        assert two[key] == pytest.approx(one[key], rel=1e-4), key
