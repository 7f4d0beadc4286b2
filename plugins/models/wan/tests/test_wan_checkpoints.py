"""Which checkpoints each model takes, and what is said of the others."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import as_hub_id, cut
from unirl.core.errors import RecipeError
from unirl.core.types.sampling import LatentSamplingConfig
from wan_models import SPECS, built, refusals

Tiny = Callable[[str], Path]
INDEX, TRANSFORMER = "model_index.json", "transformer/config.json"


def change(folder: Path, file: str, **values: object) -> None:
    """Set keys of a JSON file of the checkpoint."""
    path = folder / file
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def test_a_hub_id_has_the_schedule_and_the_weights_of_the_local_path(
    tiny: Tiny,
    model_of: Callable[[str], Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    sampling: LatentSamplingConfig,
) -> None:
    model = model_of("wan21")
    fetched = built("wan21", Path(as_hub_id(tiny("wan21"), tmp_path, monkeypatch)))
    assert torch.equal(fetched.schedule(sampling), model.schedule(sampling))
    state = fetched.trainable.state_dict()
    assert all(torch.equal(weight, state[name]) for name, weight in model.trainable.state_dict().items())


@pytest.mark.parametrize("name", SPECS)
def test_each_model_takes_its_own_checkpoints_and_names_the_model_for_those_of_the_other_task(
    tiny: Tiny, name: str
) -> None:
    other = name.removesuffix("-i2v") if name.endswith("-i2v") else f"{name}-i2v"
    kind = SPECS[other].reference.removeprefix("diffusers.")
    assert refusals(name, tiny(name)) == []
    (reason,) = refusals(name, tiny(other))
    assert reason.startswith(f"model.path: got a checkpoint of {kind!r}") and f"Choose model={other}, or" in reason
    with pytest.raises(RecipeError, match=rf"'{kind}'; {name} .* Choose model={other}\b"):
        built(name, tiny(other))


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("engine", ["sglang", "vllm-omni"])
def test_a_recipe_is_composed_for_engines_with_a_bridge(engine: str, name: str, tiny: Tiny) -> None:
    assert not refusals(name, tiny(name), f"engine={engine}")


OTHERS: list[tuple[str, str, dict[str, Any], str]] = [
    ("wan21", INDEX, {"boundary_ratio": 0.875}, r"for Wan 2\.2, by its boundary_ratio; expected Wan 2\.1 for text"),
    ("wan21", INDEX, {"expand_timesteps": True}, r"a Wan 2\.2 of one expert, by its expand_timesteps; expected"),
    ("wan21", TRANSFORMER, {"image_dim": 1280}, r"for image to video, by its image_dim"),
    ("wan21", TRANSFORMER, {"in_channels": 36}, r"for image to video, by its in_channels = 36"),
    ("wan21-i2v", INDEX, {"boundary_ratio": 0.9}, r"for Wan 2\.2, by its boundary_ratio; expected Wan 2\.1 for image"),
    (
        "wan21-i2v",
        INDEX,
        {"expand_timesteps": True},
        r"one expert, by its expand_timesteps, whose first frame is a part of the latents at timestep 0; expected",
    ),
    ("wan21-i2v", TRANSFORMER, {"in_channels": 4}, r"for text to video, by its in_channels = 4; expected"),
    ("wan21-i2v", TRANSFORMER, {"in_channels": 8}, r"another condition .* in_channels = 8 of 4 out_channels"),
    # A mask of two channels where the VAE makes one latent frame of two.
    (
        "wan21-i2v",
        "vae/config.json",
        {"scale_factor_temporal": 2},
        r"another condition .* in_channels = 12 of 4 out_channels",
    ),
    ("wan21-i2v", TRANSFORMER, {"pos_embed_seq_len": 10}, r"a first and a last frame, by its pos_embed_seq_len"),
    ("wan22", INDEX, {"boundary_ratio": None}, r"boundary_ratio None in its model_index\.json"),
    ("wan22", INDEX, {"boundary_ratio": 875}, r"boundary_ratio 875 in its model_index\.json, .* between 0 and 1"),
    ("wan22", INDEX, {"expand_timesteps": True}, r"a Wan 2\.2 of one expert, by its expand_timesteps; expected"),
    ("wan22-i2v", INDEX, {"boundary_ratio": None}, r"boundary_ratio None in its model_index\.json"),
    (
        "wan22-i2v",
        INDEX,
        {"expand_timesteps": True},
        r"a Wan 2\.2 of one expert, by its expand_timesteps, whose first frame is a part of the latents",
    ),
    ("wan22-i2v", INDEX, {"transformer_2": [None, None]}, r"no transformer_2 by its model_index\.json"),
    ("wan22-i2v", "transformer_2/config.json", {"in_channels": 4}, r"for text to video, by its in_channels = 4"),
    ("wan22-i2v", TRANSFORMER, {"image_dim": 1280}, r"for Wan 2\.1, by its image_dim"),
]


@pytest.mark.parametrize(("name", "file", "values", "message"), OTHERS)
def test_another_checkpoint_is_refused_when_a_recipe_is_composed_and_when_it_is_loaded(
    tmp_path: Path, tiny: Tiny, name: str, file: str, values: dict[str, Any], message: str
) -> None:
    folder = tmp_path / "other"
    shutil.copytree(tiny(name), folder)
    change(folder, file, **values)
    with pytest.raises(RecipeError, match=rf"^model\.path: .*{message}"):
        built(name, folder)
    # The scales of guidance in the recipe of `wan22` may not fit either.
    (reason,) = [reason for reason in refusals(name, folder) if reason.startswith("model.path")]
    assert re.search(rf"^model\.path: .*{message}", reason)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (shutil.rmtree, r"there is no folder .* and it is not a hub id either"),
        (lambda folder: (folder / INDEX).unlink(), r"has no model_index\.json"),
        (lambda folder: shutil.rmtree(folder / "vae"), r"lacks vae/"),
        (lambda folder: (folder / "scheduler" / "scheduler_config.json").write_text("{"), r"cannot be read as JSON"),
        (lambda folder: (folder / "tokenizer" / "tokenizer.json").unlink(), r"has no vocabulary in tokenizer/"),
        (lambda folder: cut(folder / "transformer"), r"a component does not load"),
    ],
    ids=["absent", "no-index", "no-vae", "bad-scheduler", "no-tokens", "cut"],
)
def test_a_damaged_checkpoint_is_one_clear_error(
    tmp_path: Path, tiny: Tiny, damage: Callable[[Path], None], message: str
) -> None:
    folder = tmp_path / "damaged"
    shutil.copytree(tiny("wan21"), folder)
    damage(folder)
    with pytest.raises(RecipeError, match=rf"^model\.path: .*{message}"):
        built("wan21", folder)


def test_a_checkpoint_without_its_second_expert_is_refused(tmp_path: Path, tiny: Tiny) -> None:
    folder = tmp_path / "other"
    shutil.copytree(tiny("wan22"), folder)
    change(folder, INDEX, transformer_2=[None, None])
    with pytest.raises(RecipeError, match=r"^model\.path: .*transformer_2"):
        built("wan22", folder)


@pytest.mark.parametrize("part", ["image_encoder", "image_processor"])
def test_a_checkpoint_without_the_encoder_that_it_needs_is_refused(tmp_path: Path, tiny: Tiny, part: str) -> None:
    folder = tmp_path / "other"
    shutil.copytree(tiny("wan21-i2v"), folder)
    shutil.rmtree(folder / part)
    change(folder, INDEX, **{part: [None, None]})
    with pytest.raises(RecipeError, match=rf"^model\.path: .*lacks {part}/"):
        built("wan21-i2v", folder)


def test_a_checkpoint_whose_image_processor_is_incomplete_is_refused(tmp_path: Path, tiny: Tiny) -> None:
    folder = tmp_path / "other"
    shutil.copytree(tiny("wan21-i2v"), folder)
    (folder / "image_processor" / "preprocessor_config.json").unlink()
    with pytest.raises(RecipeError, match=r"^model\.path: .*(a component|the image_processor in .*) does not load"):
        built("wan21-i2v", folder)


def test_a_scale_that_changes_apart_from_the_experts_is_refused_before_anything_is_built(tiny: Tiny) -> None:
    (reason,) = refusals("wan22", tiny("wan22"), "sampling.guidance_options.boundary=0.9")
    assert "sampling.guidance_options.boundary: got 0.9" in reason and "change at sigma 0.875" in reason
