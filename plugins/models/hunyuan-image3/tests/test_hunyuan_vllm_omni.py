"""The transformer and the VAE against vLLM-Omni's, in that engine's environment."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import torch
from hunyuan_inputs import given
from torch import Tensor
from unirl.core.plugins.catalog import Catalog
from unirl.core.types.data import MediaRef
from unirl.core.types.sampling import LatentSamplingConfig
from unirl.models.hunyuan_image3.model import HunyuanImageModel

pytestmark = [pytest.mark.slow, pytest.mark.nightly]

CLOSE = 1e-5
"""Of the largest value: fp32 sums in another order."""
IMAGE = LatentSamplingConfig(num_inference_steps=4, height=64, width=48)


@pytest.fixture(scope="module")
def python() -> Path:
    """Of the environment; it is used where it is there, and not made for this."""
    catalog = Catalog.discover()
    environment = catalog.resolve(catalog.get("engine", "vllm-omni").spec.environment)
    if not environment.is_present("cpu"):
        pytest.skip(f"not run: {environment.folder('cpu')} does not exist; `unirl engine-env vllm-omni` creates it")
    return environment.interpreter("cpu")


def test_velocities_and_the_vae_are_those_of_vllm_omni(
    python: Path, model: HunyuanImageModel, tiny_folder: Path, media: list[tuple[MediaRef, ...]], tmp_path: Path
) -> None:
    """A prompt with two sources of different sizes."""
    conditions = dict(model.encode(given(("both",), (media[2],)), sampling=IMAGE))
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(1, *model.latent_shape(IMAGE), generator=generator)
    image = torch.rand(3, 64, 48, generator=generator)
    stand, marks, count = model.stand, model.marks, x[0, 0].numel()
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
    values = {
        "tokens": torch.tensor([numbers.get(token, token) for token in tokens.tolist()]),
        "x": x[0],
        "t": torch.tensor([700.0]),
        "latents": latents,
        "features": conditions["features"][0],
        "spans": torch.tensor([*spans, (at, at + count)]),
        "grids": torch.tensor([*sides, (4, 3)]),
        "mask": mask,
        "image": 2 * image - 1,
    }
    torch.save(values, tmp_path / "inputs.pt")
    script = Path(__file__).with_name("vllm_omni_reference.py")
    done = subprocess.run(
        [python, script, tiny_folder, tmp_path / "inputs.pt", tmp_path / "outputs.pt"],
        capture_output=True, text=True, check=False, timeout=1800,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    expected: dict[str, Tensor] = torch.load(tmp_path / "outputs.pt", weights_only=True)
    with torch.no_grad():
        velocity = model.velocity(x, torch.tensor([0.7]), conditions)[0]
        own = model.latents_of(image[None])
        decoded = model.images.vae.decode(own)[0]
    for name, result in (("velocity", velocity), ("latents", own[0]), ("decoded", decoded)):
        assert result.shape == expected[name].shape
        assert float((result - expected[name]).abs().max()) <= CLOSE * float(expected[name].abs().max()), name
