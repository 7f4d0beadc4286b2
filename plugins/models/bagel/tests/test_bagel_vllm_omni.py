"""The transformer against vLLM-Omni's, in that engine's environment, in fp32 and on the CPU.

Weights go in through vLLM-Omni's own loader, from a checkpoint that this package exported. What is changed in
vLLM-Omni's modules:

- `torch.bfloat16`, to which its attention and its layers cast whatever the dtype of the weights, is `torch.float32`.
- Its VAE draws a sample of a source's posterior and has the published size alone, its ViT leaves out the last norm and
  takes the numbers of a patch in another order than the checkpoint has: both give what this package's give. They are
  tested against diffusers and transformers.
- Its pipeline is left out, with its tokenizer, its autocast and its sizes of source images: it is given the tokens.

On a CPU its projections of both experts run one after the other, not in its Triton kernel.
"""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from unified_models import given
from unirl.core.plugins.catalog import Catalog
from unirl.core.types.data import MediaRef
from unirl.core.types.sampling import LatentSamplingConfig, TextSamplingConfig
from unirl.models.bagel.model import BagelModel
from unirl.numerics.diffusion.guidance import TextImageCfg

pytestmark = [pytest.mark.slow, pytest.mark.nightly]

CLOSE = 1e-5
"""Of the largest value: fp32 sums of two layers in another order differ by about 1e-6."""
IMAGE = LatentSamplingConfig(num_inference_steps=4, height=32, width=48)
TEXT = TextSamplingConfig(max_new_tokens=4)
GRIDS = ((4, 4), (4, 4), (4, 6), (3, 4))
"""Latents and patches of the sources of `tiny.media`, 64 x 64 and 40 x 60, which is 64 x 96 once its short side is
64."""
SCALES, LEAST, SIGMA = (4.0, 1.5), 0.4, 0.7
"""The published scales; the least factor of the renormalisation applies to some latents, whose factors are 0.31 to 0.52."""
BRANCHES = ("positive", "negative", "no-image")


@pytest.fixture(scope="module")
def python() -> Path:
    """Of the environment; it is used where it is there, and not made for this."""
    catalog = Catalog.discover()
    environment = catalog.resolve(catalog.get("engine", "vllm-omni").spec.environment)
    if not environment.is_present("cpu"):
        pytest.skip(f"not run: {environment.folder('cpu')} does not exist; `unirl engine-env vllm-omni` creates it")
    return environment.interpreter("cpu")


@pytest.fixture(scope="module")
def guidance() -> TextImageCfg:
    text, image = SCALES
    return TextImageCfg(scale=text, image_scale=image, renorm_least=LEAST)


@pytest.fixture(scope="module")
def conditions(
    model: BagelModel, media: list[tuple[MediaRef, ...]], guidance: TextImageCfg
) -> dict[str, dict[str, Any]]:
    """Of each branch of a prompt with two sources of different sizes."""
    inputs = given(("both",), (media[2],))
    return {
        branch: dict(model.encode(guidance.inputs(branch, inputs, negative_prompt=""), sampling=IMAGE))
        for branch in BRANCHES
    }


@pytest.fixture(scope="module")
def texts(model: BagelModel, media: list[tuple[MediaRef, ...]]) -> dict[str, tuple[Tensor, dict[str, Any]]]:
    """Tokens and conditions of a question about both, and of one without images."""
    each = {"question": given(("what is it",), (media[2],)), "text alone": given(("a b",))}
    return {
        name: (model.prompt_tokens(own, sampling=TEXT)[0], dict(model.conditions(own, sampling=TEXT)))
        for name, own in each.items()
    }


@pytest.fixture(scope="module")
def x(model: BagelModel) -> Tensor:
    return torch.randn(1, *model.latent_shape(IMAGE), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def theirs(
    python: Path,
    model: BagelModel,
    conditions: dict[str, dict[str, Any]],
    texts: dict[str, tuple[Tensor, dict[str, Any]]],
    x: Tensor,
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, Tensor]:
    """What vLLM-Omni makes of the same inputs."""
    folder = tmp_path_factory.mktemp("vllm-omni")
    model.transformer.save_pretrained(folder)
    for file in model.folder.glob("*config.json"):
        (folder / file.name).write_bytes(file.read_bytes())
    marks = model.marks
    values = {
        "marks": {
            "bos_token_id": marks.start,
            "eos_token_id": marks.end,
            "start_of_image": marks.image_start,
            "end_of_image": marks.image_end,
        },
        "branches": {name: pieces(model, own["tokens"][0], own) for name, own in conditions.items()},
        "texts": {name: pieces(model, tokens, own) for name, (tokens, own) in texts.items()},
        "x": x[0].flatten(1).T.contiguous(),
        "grid": torch.tensor(x.shape[2:]),
        "t": torch.tensor(SIGMA),
        "scales": SCALES,
        "least": LEAST,
    }
    inputs, outputs = folder / "inputs.pt", folder / "outputs.pt"
    torch.save(values, inputs)
    script = Path(__file__).with_name("bagel_in_vllm_omni.py")
    done = subprocess.run(
        [python, script, folder, inputs, outputs], capture_output=True, text=True, check=False, timeout=1800
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return torch.load(outputs, weights_only=True)


def pieces(model: BagelModel, tokens: Tensor, conditions: Mapping[str, Any]) -> list[Any]:
    """A sequence as pieces, one for each image."""
    marks, result = model.marks, list[Any]()
    grids = iter(GRIDS)
    rest: dict[str, Tensor] = {"latent": conditions["latents"][0], "feature": conditions["features"][0]}
    text: list[int] = []
    ids: Sequence[int] = tokens.tolist()
    at = 0
    while at < len(ids):
        if ids[at] != marks.image_start:
            text.append(ids[at])
            at += 1
            continue
        assert not text, "sources come before texts"
        kind = "latent" if ids[at + 1] == marks.latent else "feature"
        height, width = next(grids)
        count = height * width
        assert ids[at + 1 + count] == marks.image_end
        result.append((kind, rest[kind][:count], torch.tensor([height, width])))
        rest[kind] = rest[kind][count:]
        at += count + 2
    assert not any(map(len, rest.values()))
    return [*result, *([("text", torch.tensor(text))] if text else [])]


def close(result: Tensor, expected: Tensor) -> None:
    assert result.shape == expected.shape
    assert float((result - expected).abs().max()) <= CLOSE * float(expected.abs().max())


def test_velocities_of_each_branch_and_their_combination_are_those_of_vllm_omni(
    model: BagelModel,
    conditions: dict[str, dict[str, Any]],
    x: Tensor,
    guidance: TextImageCfg,
    theirs: dict[str, Tensor],
) -> None:
    sigma = torch.tensor([SIGMA])
    with torch.no_grad():
        velocities = {name: model.velocity(x, sigma, own) for name, own in conditions.items()}
    for name, velocity in velocities.items():
        close(velocity[0].flatten(1).T, theirs[name])
    text, image = SCALES
    plain = guidance.combine(velocities, sigma)
    for kind in ("global", "channel", "text-channel"):
        own = TextImageCfg(scale=text, image_scale=image, renorm=kind, renorm_least=LEAST).combine(velocities, sigma)
        close(own[0].flatten(1).T, theirs[f"guided.{kind.replace('-', '_')}"])
        assert kind == "global" or float((own - plain).abs().max()) > 100 * CLOSE


def test_logits_of_the_next_token_are_those_of_vllm_omni(
    model: BagelModel, texts: dict[str, tuple[Tensor, dict[str, Any]]], theirs: dict[str, Tensor]
) -> None:
    """After the whole prompt, and after two more tokens behind a cache of the rest."""
    for name, (tokens, conditions) in texts.items():
        for cached in (0, 2):
            count = len(tokens) - cached
            positions, keep = torch.arange(len(tokens))[None], torch.ones(1, len(tokens), dtype=torch.bool)
            logits, cache = model.next_logits(
                tokens[None, :count],
                positions=positions[:, :count],
                attention_mask=keep[:, :count],
                cache=None,
                conditions=conditions,
            )
            close(logits[0], theirs[name][-1 - cached])
            for at in range(count, len(tokens)):
                logits, cache = model.next_logits(
                    tokens[None, at : at + 1],
                    positions=positions[:, at : at + 1],
                    attention_mask=keep[:, : at + 1],
                    cache=cache,
                )
            close(logits[0], theirs[name][-1])
