"""Refusals of FLUX.2 [klein], its trainable parameters, and a run that edits images."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from unirl.core.errors import DataError, RecipeError
from unirl.core.plugins.catalog import Catalog
from unirl.core.recipe.compose import compose
from unirl.core.types.data import MediaRef
from unirl.core.types.inputs import Inputs
from unirl.core.types.sampling import LatentSamplingConfig
from unirl.loop.run import train
from unirl.models.flux2_klein import tiny
from unirl.models.flux2_klein.config import Flux2KleinConfig
from unirl.models.flux2_klein.model import Flux2KleinModel, build


def edit(file: Path, **settings: Any) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **settings}))


@pytest.mark.parametrize(
    ("breaks", "message"),
    [
        (lambda folder: shutil.rmtree(folder / "vae"), "lacks vae"),
        (lambda folder: edit(folder / "model_index.json", _class_name="Flux2Pipeline"), "Flux2Pipeline"),
        (lambda folder: edit(folder / "transformer" / "config.json", guidance_embeds=True), "guidance_embeds"),
        (lambda folder: edit(folder / "text_encoder" / "config.json", num_hidden_layers=20), "has 20 layers"),
    ],
    ids=["no-vae", "another-pipeline", "guidance-as-an-input", "short-encoder"],
)
def test_a_checkpoint_that_does_not_fit_is_refused_by_its_path(
    tiny_folder: Path, tmp_path: Path, breaks: Callable[[Path], None], message: str
) -> None:
    folder = tmp_path / "broken"
    shutil.copytree(tiny_folder, folder)
    breaks(folder)
    with pytest.raises(RecipeError, match=rf"^model\.path: .*{message}"):
        build(Flux2KleinConfig(path=str(folder)), device="cpu")


def test_a_size_off_the_grid_is_refused_with_the_nearest(
    model: Flux2KleinModel, sampling: LatentSamplingConfig
) -> None:
    with pytest.raises(RecipeError, match=r"^sampling\.height: got 40, expected a multiple of 16.*Nearest: 32 or 48"):
        model.latent_shape(dataclasses.replace(sampling, height=40))


def test_a_distilled_checkpoint_refuses_guidance(tmp_path: Path, sampling: LatentSamplingConfig) -> None:
    tiny.write(tmp_path, seed=0, is_distilled=True)
    model = build(Flux2KleinConfig(path=str(tmp_path)), device="cpu")
    assert model.latent_shape(sampling) == (16, 2, 3)
    with pytest.raises(RecipeError, match=r"^sampling\.guidance_scale: got 4 for a distilled checkpoint.*expected 1"):
        model.latent_shape(dataclasses.replace(sampling, guidance_scale=4.0))


def test_a_source_that_the_pipeline_does_not_take_is_an_error_that_names_it(
    model: Flux2KleinModel, sampling: LatentSamplingConfig, tmp_path: Path
) -> None:
    Image.fromarray(np.zeros((32, 80, 3), dtype=np.uint8)).save(tmp_path / "small.png")
    for name, message in (("small.png", r"small\.png': Image too small: 80×32"), ("gone.png", r"gone\.png")):
        media = ((MediaRef(modality="image", role="source", uri=str(tmp_path / name)),),)
        with pytest.raises(DataError, match=message):
            model.encode(Inputs(ids=("a",), prompts=("a",), texts=("a",), media=media), sampling=sampling)


def test_every_parameter_of_the_transformer_trains_and_nothing_else(
    model: Flux2KleinModel, sampling: LatentSamplingConfig, tmp_path: Path
) -> None:
    texts = ("a ring", "a disc")
    media = (tiny.media(tmp_path, number=0), ())
    conditions = model.encode(Inputs(ids=texts, prompts=texts, texts=texts, media=media), sampling=sampling)
    x = torch.randn(2, *model.latent_shape(sampling), generator=torch.Generator().manual_seed(1))
    model.trainable.zero_grad()
    model.velocity(x, torch.tensor([0.7, 0.2]), conditions).square().mean().backward()
    assert [name for name, p in model.trainable.named_parameters() if p.grad is None or not p.grad.any()] == []
    assert not any(p.requires_grad for part in (model.pipeline.text_encoder, model.vae) for p in part.parameters())
    model.trainable.zero_grad()


def test_ranks_that_share_a_sharded_model_run_the_same_number_of_forwards(
    model: Flux2KleinModel, sampling: LatentSamplingConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One rank has sources of two sizes, another one of three: the first runs its last rows again, for nothing."""
    texts = ("a ring", "a disc", "a box")
    media = tuple(tiny.media(tmp_path, number=number) for number in (0, 1, 0))
    edits = model.encode(Inputs(ids=texts, prompts=texts, texts=texts, media=media), sampling=sampling)
    plain = model.encode(Inputs.of_texts(list(texts)), sampling=sampling)
    x = torch.randn(3, *model.latent_shape(sampling), generator=torch.Generator().manual_seed(1))
    calls: list[int] = []
    counted = model.transformer.register_forward_pre_hook(
        lambda _, args, kwargs: calls.append(len(kwargs["hidden_states"])), with_kwargs=True
    )

    def run(conditions: Any) -> tuple[list[int], torch.Tensor, list[torch.Tensor]]:
        """Rows of each forward, velocities and gradients."""
        calls.clear()
        model.trainable.zero_grad()
        velocity = model.velocity(x, torch.tensor([0.7, 0.2, 0.4]), conditions)
        velocity.square().mean().backward()
        return [*calls], velocity.detach(), [p.grad for p in model.trainable.parameters() if p.grad is not None]

    alone = run(edits)
    assert alone[0] == [2, 1]
    counts: list[int] = []

    def largest(count: torch.Tensor, **_: Any) -> None:
        counts.append(int(count))
        count.fill_(3)

    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    monkeypatch.setattr(torch.distributed, "all_reduce", largest)
    monkeypatch.setattr("unirl.model_host.diffusion.equal_forwards.FSDPModule", type(model.transformer))
    forwards, velocity, grads = run(edits)
    assert (counts, forwards) == ([2], [2, 1, 1])
    assert torch.equal(velocity, alone[1])
    assert len(grads) == len(alone[2]) and all(map(torch.equal, grads, alone[2]))
    # Texts alone have one forward everywhere.
    assert run(plain)[0] == [3] and counts == [2]
    counted.remove()
    model.trainable.zero_grad()


def test_a_run_edits_images_of_different_sizes_with_ratio_1(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three prompts of one instruction over different sources, one of them with two: trained in micro-batches that mix
    them, and the rewards are those of each one's own images."""
    monkeypatch.chdir(tmp_path)
    rows = [
        {
            "prompt": "make it red",
            "media": [{"modality": "image", "role": "source", "uri": Path(ref.uri).name} for ref in refs],
        }
        for refs in (tiny.media(tmp_path, number=number) for number in range(3))
    ]
    (tmp_path / "prompts.jsonl").write_text("\n".join(map(json.dumps, rows)))
    words = [
        f"model.path={tiny_folder}", "model.text_dtype=float32", "data.train=prompts.jsonl", "run.dir=out", "run.max_steps=2",
        "data.prompts_per_step=3", "data.samples_per_prompt=4", "sampling.height=32", "sampling.width=48",
        "sampling.max_sequence_length=32", "sampling.num_inference_steps=4", "backend.mixed_precision=none",
        "backend.activation_checkpointing=false", "sampling.sde.count=2", "train.micro_batch_size=2", "eval.every=0",
    ]  # fmt: skip
    catalog = Catalog.discover()
    train(compose("flux2-klein/flow-grpo", words, catalog=catalog), catalog=catalog)
    events = [json.loads(line) for line in (tmp_path / "out" / "events.jsonl").read_text().splitlines()]
    steps = [event["metrics"] for event in events if event["kind"] == "step"]
    assert len(steps) == 2 and all(step["grad_norm"] > 0 for step in steps)
    # Replay in other batches: fp32 rounding of a forward, in log-probs that are means over the elements of a latent.
    assert all(step["logp_mismatch_max"] <= 1e-5 for step in steps)
    assert steps[0]["reward_std"] > 0
