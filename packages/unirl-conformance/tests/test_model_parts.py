"""Diffusion models without their encoders or VAE compute the same, and say what they were built without."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from unirl.core.errors import RunFailed
from unirl.core.plugins.catalog import Catalog
from unirl.core.specs.spec import ModelSpec
from unirl.core.types.inputs import Inputs
from unirl.core.types.sampling import LatentSamplingConfig
from unirl.models.qwen_image.plugin import SPEC as QWEN_IMAGE
from unirl.models.sd3.plugin import SPEC as SD3
from unirl.models.wan.plugin import WAN21

INPUTS = Inputs.of_texts(["a red ring", "a disc"])
SIZES = {"height": 32, "width": 32, "max_sequence_length": 16, "num_inference_steps": 4}
SAMPLINGS = {
    "sd3": LatentSamplingConfig(**SIZES),
    "qwen-image": LatentSamplingConfig(**SIZES),
    "wan21": LatentSamplingConfig(**SIZES, frames=5),
}


@pytest.fixture(scope="module", params=[SD3, QWEN_IMAGE, WAN21], ids=lambda spec: spec.name)
def built(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    """Builds one model on its miniature."""
    spec: ModelSpec = request.param
    catalog = Catalog.of({})
    folder: Path = tmp_path_factory.mktemp("parts") / spec.name
    assert spec.tiny is not None
    catalog.resolve(spec.tiny.write)(folder, seed=0)
    config = catalog.resolve(spec.config)(path=str(folder), dtype="float32", text_dtype="float32")
    return lambda **context: catalog.resolve(spec.build)(config, device="cpu", **context)


def loaded(model: Any) -> set[str]:
    """Components whose weights are in memory; asserts that each has all of them or none."""
    modules = {name: part for name, part in model.pipeline.components.items() if isinstance(part, torch.nn.Module)}
    real = {name: [not weight.is_meta for weight in module.parameters()] for name, module in modules.items()}
    assert all(all(flags) or not any(flags) for flags in real.values())
    return {name for name, flags in real.items() if any(flags)}


@pytest.mark.parametrize(
    "serves", [set(), {"encode"}, {"decode"}, {"encode", "decode"}], ids=lambda parts: "+".join(sorted(parts)) or "none"
)
def test_a_model_loads_what_it_serves_and_refuses_the_rest(built: Callable[..., Any], serves: set[str]) -> None:
    whole, model = built(), built(serves=frozenset(serves))
    sampling = SAMPLINGS[model.spec.name]
    encoders = {name for name in loaded(whole) if name.startswith("text_encoder")}
    assert encoders
    expected = (
        {"transformer"} | (encoders if "encode" in serves else set()) | ({"vae"} if "decode" in serves else set())
    )
    assert loaded(model) == expected
    shape = whole.latent_shape(sampling)
    assert model.latent_shape(sampling) == shape
    assert torch.equal(model.schedule(sampling), whole.schedule(sampling))
    conditions = whole.encode(INPUTS, sampling=sampling)
    x, sigma = torch.randn((2, *shape), generator=torch.Generator().manual_seed(0)), torch.tensor([0.9, 0.3])
    # The same weights and arithmetic: bit for bit.
    assert torch.equal(model.velocity(x, sigma, conditions), whole.velocity(x, sigma, conditions))
    if "encode" in serves:
        result = model.encode(INPUTS, sampling=sampling)
        assert all(torch.equal(result[name], value) for name, value in conditions.items())
    else:
        with pytest.raises(
            RunFailed, match=r"got a call of `encode`, but .* built without the text encoders.*'encode'"
        ):
            model.encode(INPUTS, sampling=sampling)
    if "decode" in serves:
        assert torch.equal(model.decode(x), whole.decode(x))
    else:
        with pytest.raises(RunFailed, match=r"got a call of `decode`, but .* built without the VAE\. .*`Needs.reward`"):
            model.decode(x)


def test_a_lazy_model_loads_no_weights_of_what_it_does_not_serve(built: Callable[..., Any]) -> None:
    assert loaded(built(lazy=True, serves=frozenset())) == set()
    assert loaded(built(lazy=True, serves=frozenset({"decode"}))) == {"vae"}
