"""The transformer and the VAE against vLLM-Omni's, in that engine's environment, in fp32 and on the CPU.

Weights go in through vLLM-Omni's own loader, from a checkpoint that this package exported. What is changed in
vLLM-Omni's modules:

- `HunYuanRotary2DEmbedder` casts queries and keys to bf16 whatever the dtype of the weights; here to fp32.
- The groups of pipeline and sequence parallelism, which its engine makes, are groups of one.
- Its pipeline is left out, with its autocast to bf16, its cache of the prompt's keys and its random latents of source
  images: the test gives embedded places, masks and spans, and the whole sequence goes through in one forward.
- Logits are those of that forward, by its final norm and the checkpoint's `lm_head`: its own text mode needs the
  paged cache of vLLM's runner.
"""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from unified_models import given
from unirl.core.plugins.catalog import Catalog
from unirl.core.types.data import MediaRef
from unirl.core.types.sampling import LatentSamplingConfig, TextSamplingConfig
from unirl.models.hunyuan_image3.model import HunyuanImageModel
from unirl.numerics.diffusion.guidance import Cfg

pytestmark = [pytest.mark.slow, pytest.mark.nightly]

CLOSE = 1e-5
"""Of the largest value: fp32 sums in another order."""
IMAGE = LatentSamplingConfig(num_inference_steps=4, height=64, width=48)
TEXT = TextSamplingConfig(max_new_tokens=4)
SCALE, SIGMA = 5.0, 0.7
BEFORE_IMAGE = 4
"""Tokens between the prompt and the image: `<answer>`, `<boi>`, its size and its ratio."""


@pytest.fixture(scope="module")
def python() -> Path:
    """Of the environment; it is used where it is there, and not made for this."""
    catalog = Catalog.discover()
    environment = catalog.resolve(catalog.get("engine", "vllm-omni").spec.environment)
    if not environment.is_present("cpu"):
        pytest.skip(f"not run: {environment.folder('cpu')} does not exist; `unirl engine-env vllm-omni` creates it")
    return environment.interpreter("cpu")


@pytest.fixture(scope="module")
def conditions(model: HunyuanImageModel, media: list[tuple[MediaRef, ...]]) -> dict[str, dict[str, Any]]:
    """Of a prompt with two sources of different sizes, of its negative branch, and of one without sources."""
    inputs = given(("both",), (media[2],))
    each = {"positive": inputs, "negative": inputs.negative(""), "text alone": given(("a red ring",))}
    return {name: dict(model.encode(own, sampling=IMAGE)) for name, own in each.items()}


@pytest.fixture(scope="module")
def x(model: HunyuanImageModel) -> Tensor:
    return torch.randn(1, *model.latent_shape(IMAGE), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def image() -> Tensor:
    return torch.rand(3, 64, 48, generator=torch.Generator().manual_seed(2))


@pytest.fixture(scope="module")
def theirs(
    python: Path,
    model: HunyuanImageModel,
    conditions: dict[str, dict[str, Any]],
    x: Tensor,
    image: Tensor,
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, Tensor]:
    """What vLLM-Omni makes of the same inputs."""
    folder = tmp_path_factory.mktemp("vllm-omni")
    model.transformer.save_pretrained(folder)
    (folder / "config.json").write_bytes((model.folder / "config.json").read_bytes())
    values = {
        "branches": {name: branch(model, own, count=x[0, 0].numel()) for name, own in conditions.items()},
        "x": x[0],
        "t": torch.tensor([1000 * SIGMA]),
        "scale": SCALE,
        "image": 2 * image - 1,
    }
    inputs, outputs = folder / "inputs.pt", folder / "outputs.pt"
    torch.save(values, inputs)
    script = Path(__file__).with_name("vllm_omni_reference.py")
    done = subprocess.run(
        [python, script, folder, inputs, outputs], capture_output=True, text=True, check=False, timeout=1800
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return torch.load(outputs, weights_only=True)


def branch(model: HunyuanImageModel, conditions: Mapping[str, Any], *, count: int) -> dict[str, Any]:
    """The sequence of a sample as vLLM-Omni's modules take it, count latents of 4 x 3 at its end."""
    stand, marks = model.stand, model.marks
    grids = conditions["latent_sizes"][0].tolist(), conditions["feature_sizes"][0].tolist()
    tokens = torch.tensor([*conditions["tokens"][0].tolist(), stand.time, *[stand.noisy] * count, marks.image_end])
    spans, sides, mask = [], [], torch.ones(len(tokens), len(tokens), dtype=torch.bool).tril()
    latents: list[Tensor] = []
    parts = iter(conditions["latents"][0].split([height * width for height, width in grids[0]]))
    for (height, width), seen in zip(*grids, strict=True):
        start = int((tokens == stand.clean_time).nonzero()[len(latents), 0]) + 1
        first, last = start + height * width, start + height * width + 1 + 12
        spans += [(start, first), (first + 1, last)]
        sides += [(height, width), tuple(seen)]
        mask[start:last, start:last] = True
        latents.append(next(parts).T.reshape(-1, height, width).contiguous())
    at = len(tokens) - 1 - count
    mask[at:-1, at:-1] = True
    numbers = {stand.latent: -1, stand.feature: -2, stand.noisy: -3, stand.clean_time: -4, stand.time: -5}
    return {
        "tokens": torch.tensor([numbers.get(token, token) for token in tokens.tolist()]),
        "latents": latents,
        "features": conditions["features"][0],
        "spans": torch.tensor([*spans, (at, at + count)]),
        "grids": torch.tensor([*sides, (4, 3)]),
        "mask": mask,
    }


def close(result: Tensor, expected: Tensor) -> None:
    assert result.shape == expected.shape
    assert float((result - expected).abs().max()) <= CLOSE * float(expected.abs().max())


def test_velocities_of_each_branch_and_their_combination_are_those_of_vllm_omni(
    model: HunyuanImageModel, conditions: dict[str, dict[str, Any]], x: Tensor, theirs: dict[str, Tensor]
) -> None:
    sigma = torch.tensor([SIGMA])
    with torch.no_grad():
        velocities = {name: model.velocity(x, sigma, own) for name, own in conditions.items()}
    for name, velocity in velocities.items():
        close(velocity[0], theirs[f"{name}.velocity"])
    close(Cfg(scale=SCALE).combine(velocities, sigma)[0], theirs["guided"])
    assert float((velocities["negative"] - velocities["positive"]).abs().max()) > 100 * CLOSE


def test_logits_of_the_next_token_are_those_of_vllm_omni(
    model: HunyuanImageModel, media: list[tuple[MediaRef, ...]], conditions: dict[str, dict[str, Any]], theirs: Any
) -> None:
    """Behind two sources and a prompt, and behind a prompt alone."""
    for name, inputs in (("positive", given(("both",), (media[2],))), ("text alone", given(("a red ring",)))):
        tokens = model.prompt_tokens(inputs, sampling=TEXT)[0][None]
        count = tokens.shape[1]
        assert tokens[0].tolist() == conditions[name]["tokens"][0].tolist()[:count]
        assert len(conditions[name]["tokens"][0]) == count + BEFORE_IMAGE
        logits, _ = model.next_logits(
            tokens,
            positions=torch.arange(count)[None],
            attention_mask=torch.ones(1, count, dtype=torch.bool),
            cache=None,
            conditions=dict(model.conditions(inputs, sampling=TEXT)),
        )
        close(logits[0], theirs[f"{name}.logits"][count - 1])


def test_the_vae_is_that_of_vllm_omni(model: HunyuanImageModel, image: Tensor, theirs: dict[str, Tensor]) -> None:
    with torch.no_grad():
        latents = model.latents_of(image[None])
        close(latents[0], theirs["latents"])
        close(model.encoder.images.vae.decode(latents)[0], theirs["decoded"])
