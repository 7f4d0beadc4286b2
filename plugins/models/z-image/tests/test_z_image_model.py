"""Checkpoints and requests that Z-Image refuses, and what trains."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from unirl.core.errors import RecipeError
from unirl.core.types.inputs import Inputs
from unirl.core.types.sampling import LatentSamplingConfig
from unirl.models.z_image.config import ZImageConfig
from unirl.models.z_image.model import ZImageModel, build


def edit(file: Path, **settings: Any) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **settings}))


def without_template(folder: Path) -> None:
    (folder / "tokenizer" / "chat_template.jinja").unlink(missing_ok=True)
    settings = json.loads((folder / "tokenizer" / "tokenizer_config.json").read_text())
    settings.pop("chat_template", None)
    (folder / "tokenizer" / "tokenizer_config.json").write_text(json.dumps(settings))


@pytest.mark.parametrize(
    ("breaks", "message"),
    [
        (lambda folder: shutil.rmtree(folder / "vae"), "lacks vae"),
        (lambda folder: edit(folder / "model_index.json", _class_name="FluxPipeline"), "FluxPipeline"),
        (lambda folder: edit(folder / "transformer" / "config.json", siglip_feat_dim=16), "siglip_feat_dim"),
        (without_template, "has no chat template"),
    ],
    ids=["no-vae", "another-pipeline", "images-besides-the-prompt", "no-chat-template"],
)
def test_a_checkpoint_that_does_not_fit_is_refused_by_its_path(
    tiny_folder: Path, tmp_path: Path, breaks: Callable[[Path], None], message: str
) -> None:
    folder = tmp_path / "broken"
    shutil.copytree(tiny_folder, folder)
    breaks(folder)
    with pytest.raises(RecipeError, match=rf"^model\.path: .*{message}"):
        build(ZImageConfig(path=str(folder)), device="cpu")


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"height": 40}, r"^sampling\.height: got 40, expected a multiple of 16 .*Nearest: 32 or 48"),
        ({"width": 1024}, r"^sampling\.width: got 1024, .* to 512"),
        ({"frames": 5}, r"^sampling\.frames: got 5"),
    ],
)
def test_a_size_that_does_not_fit_is_refused_with_the_nearest(
    model: ZImageModel, sampling: LatentSamplingConfig, changed: dict[str, int], message: str
) -> None:
    with pytest.raises(RecipeError, match=message):
        model.latent_shape(dataclasses.replace(sampling, **changed))


def test_prompts_are_as_long_as_positions_go(model: ZImageModel, sampling: LatentSamplingConfig) -> None:
    """160 positions: padding has one, an image one, and prompts are padded to multiples of 32."""
    assert model.max_sequence_length == 128
    longest = dataclasses.replace(sampling, max_sequence_length=128)
    conditions = model.encode(Inputs.of_texts(["a ring, " * 30]), sampling=longest)
    with torch.no_grad():
        velocity = model.velocity(torch.ones(1, *model.latent_shape(longest)), torch.tensor([0.5]), conditions)
    assert torch.isfinite(velocity).all()
    with pytest.raises(RecipeError, match=r"^sampling\.max_sequence_length: got 129; z-image takes 1 to 128"):
        model.encode(Inputs.of_texts(["a"]), sampling=dataclasses.replace(sampling, max_sequence_length=129))


def test_every_parameter_of_the_transformer_trains_and_nothing_else(
    model: ZImageModel, sampling: LatentSamplingConfig
) -> None:
    conditions = model.encode(Inputs.of_texts(["a ring", "a disc on the left"]), sampling=sampling)
    x = torch.randn(2, *model.latent_shape(sampling), generator=torch.Generator().manual_seed(1))
    model.trainable.zero_grad()
    model.velocity(x, torch.tensor([0.7, 0.2]), conditions).square().mean().backward()
    assert [name for name, p in model.trainable.named_parameters() if p.grad is None or not p.grad.any()] == []
    others = [part for part in (model.pipeline.text_encoder, model.vae)]
    assert not any(p.requires_grad for part in others for p in part.parameters())
    model.trainable.zero_grad()
