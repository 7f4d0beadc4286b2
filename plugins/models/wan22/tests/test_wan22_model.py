from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from unirl.core.errors import RecipeError
from unirl.core.match.match import match
from unirl.core.plugins.catalog import Catalog
from unirl.core.recipe.compose import compose
from unirl.core.types.inputs import Inputs
from unirl.core.types.sampling import LatentSamplingConfig
from unirl.models.wan22 import tiny
from unirl.models.wan22.config import Wan22Config
from unirl.models.wan22.model import Wan22Model, build


def gradients(model: Wan22Model, sampling: LatentSamplingConfig, sigmas: list[float]) -> dict[str, list[str]]:
    """Names of the weights of each expert that have a gradient from rows of this noise."""
    conditions = model.encode(Inputs.of_texts(["a ring"] * len(sigmas)), sampling=sampling)
    x = torch.ones(len(sigmas), *model.latent_shape(sampling))
    model.trainable.zero_grad()
    model.velocity(x, torch.tensor(sigmas), conditions).square().sum().backward()
    return {
        expert: [n for n, p in model.trainable.get_submodule(expert).named_parameters() if p.grad is not None]
        for expert in model.experts
    }


def test_an_expert_takes_gradients_from_rows_of_its_noise_alone(
    model: Wan22Model, sampling: LatentSamplingConfig
) -> None:
    high, low, both = (gradients(model, sampling, sigmas) for sigmas in ([0.9], [0.5], [0.9, 0.5]))
    assert high["transformer"] and not high["transformer_2"]
    assert low["transformer_2"] and not low["transformer"]
    assert both == {"transformer": high["transformer"], "transformer_2": low["transformer_2"]}


@pytest.mark.parametrize(("experts", "trained", "frozen"), [("high", 0, 1), ("low", 1, 0)])
def test_a_frozen_expert_takes_no_gradient_and_rows_of_its_noise_alone_still_have_a_backward_pass(
    tiny_folder: Path, sampling: LatentSamplingConfig, experts: str, trained: int, frozen: int
) -> None:
    model = build(Wan22Config(path=str(tiny_folder), experts=experts), device="cpu")
    own, other = (0.9, 0.5)[trained], (0.9, 0.5)[frozen]
    assert gradients(model, sampling, [own])[model.experts[trained]]
    result = gradients(model, sampling, [other])
    assert not result[model.experts[frozen]]
    weights = model.trainable.get_submodule(model.experts[trained]).parameters()
    assert all(bool((p.grad == 0).all()) for p in weights if p.grad is not None)


def test_a_lone_expert_that_no_step_calls_is_refused(tiny_folder: Path, sampling: LatentSamplingConfig) -> None:
    model = build(Wan22Config(path=str(tiny_folder), experts="low"), device="cpu")
    with pytest.raises(
        RecipeError, match=r"model\.experts: got 'low', but none of the 1 steps has less than sigma 0\.875"
    ):
        model.schedule(dataclasses.replace(sampling, num_inference_steps=1))


@pytest.mark.parametrize("of", ["model", "i2v_model"])
@pytest.mark.parametrize(("frames", "nearest"), [(8, "5 or 9"), (0, "1")])
def test_a_frame_count_off_the_grid_is_refused_with_the_nearest(
    of: str, frames: int, nearest: str, sampling: LatentSamplingConfig, request: pytest.FixtureRequest
) -> None:
    message = rf"^sampling\.frames: got {frames}, expected a multiple of 4 plus 1 .*Nearest: {nearest}\."
    with pytest.raises(RecipeError, match=message):
        request.getfixturevalue(of).latent_shape(dataclasses.replace(sampling, frames=frames))


def write_index(folder: Path, **changes: object) -> None:
    place = folder / "model_index.json"
    place.write_text(json.dumps({**json.loads(place.read_text()), **changes}))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"boundary_ratio": None}, r"boundary_ratio None in its model_index\.json"),
        ({"boundary_ratio": 875}, r"boundary_ratio 875 in its model_index\.json, .* between 0 and 1"),
        ({"expand_timesteps": True}, r"a Wan 2\.2 of one expert, by its expand_timesteps"),
    ],
)
def test_another_wan_is_refused(tmp_path: Path, changes: dict[str, object], message: str) -> None:
    tiny.write(tmp_path, seed=0)
    write_index(tmp_path, **changes)
    with pytest.raises(RecipeError, match=rf"^model\.path: .*{message}"):
        build(Wan22Config(path=str(tmp_path)), device="cpu")


def test_a_checkpoint_without_its_second_expert_is_refused(tmp_path: Path) -> None:
    tiny.write(tmp_path, seed=0)
    write_index(tmp_path, transformer_2=[None, None])
    with pytest.raises(RecipeError, match=r"^model\.path: .*transformer_2"):
        build(Wan22Config(path=str(tmp_path)), device="cpu")


def test_a_scale_that_changes_apart_from_the_experts_is_refused_before_anything_is_built(tiny_folder: Path) -> None:
    catalog = Catalog.discover()
    words = ["data.train=prompts.txt", f"model.path={tiny_folder}"]
    assert match(compose("wan22/flow-grpo", words, catalog=catalog), catalog=catalog).accepted
    other = compose("wan22/flow-grpo", [*words, "sampling.guidance_options.boundary=0.9"], catalog=catalog)
    (reason,) = match(other, catalog=catalog).reasons
    assert "sampling.guidance_options.boundary: got 0.9" in str(reason) and "change at sigma 0.875" in str(reason)


def test_a_lazy_build_has_the_values_of_both_experts(tiny_folder: Path, model: Wan22Model) -> None:
    lazy = build(Wan22Config(path=str(tiny_folder)), device="cpu", lazy=True)
    module = lazy.trainable.to_empty(device="cpu")
    lazy.fill(module.state_dict())
    expected = model.trainable.state_dict()
    assert module.state_dict().keys() == expected.keys()
    assert all(torch.equal(value, expected[name]) for name, value in module.state_dict().items())
