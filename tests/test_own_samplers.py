"""Kernels and guidances of plugins: the file of the how-to in a whole run, and names that are refused at compose."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from unirl.core.match.match import match
from unirl.core.plugins.catalog import Catalog
from unirl.core.plugins.files import plugin_files
from unirl.core.recipe.compose import compose
from unirl.loop.run import train
from unirl.numerics.diffusion.guidance import make_guidance
from unirl.numerics.diffusion.kernels import make_kernel

PAGE = Path(__file__).parents[1] / "docs/how-to/own-sampler.md"
STRANGE = """
from dataclasses import dataclass
from unirl.core.plugins.hookspec import hookimpl
from unirl.numerics.diffusion.kernels import EulerOde, KERNELS

@dataclass(frozen=True)
class Still(EulerOde):
    pass

@hookimpl
def unirl_kernels():
    return ["strange_samplers:KERNELS", "strange_samplers:Still", "strange_samplers:Gone"]
"""
KERNEL, GUIDANCE = "own_samplers:PowerSde", "own_samplers:ComposedCfg"


@pytest.fixture
def catalog(tmp_path: Path) -> Iterator[Catalog]:
    (folder := tmp_path / "plugins").mkdir()
    (code,) = re.findall(r"```python\n# plugins/own_samplers.py\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
    (folder / "own_samplers.py").write_text(code)
    (folder / "strange_samplers.py").write_text(STRANGE)
    yield Catalog.discover(files=plugin_files(folder))
    for name in ("own_samplers", "strange_samplers"):
        sys.modules.pop(name, None)


def test_a_run_samples_and_trains_with_the_kernel_and_the_guidance_of_a_file(catalog: Catalog, tmp_path: Path) -> None:
    words = [
        f"sampling.kernel={KERNEL}",
        "+sampling.kernel_options.power=1",
        f"sampling.guidance_mode={GUIDANCE}",
        "sampling.guidance_scale=2",
        "+sampling.guidance_options.away=0.5",
        "sampling.negative_prompt=a red ring",
        "data.prompts_per_step=3",
        "data.samples_per_prompt=4",
        "sampling.num_inference_steps=4",
        "run.max_steps=1",
        "run.media_every=0",
        "run.threads=1",
        "train.updates_per_step=2",
        "eval.num_prompts=1",
        "+reward@reward.light=brightness",
        "~tracker.report",
        f"run.dir={tmp_path / 'run'}",
    ]
    plan = compose("quickstart", words, catalog=catalog)
    assert match(plan, catalog=catalog).reasons == ()
    assert [file.name for file in plan.plugin_files] == ["own_samplers.py"]
    result = train(plan, catalog=catalog)
    events = [json.loads(line) for line in (result.folder / "events.jsonl").read_text().splitlines()]
    (step,) = (event for event in events if event["kind"] == "step")
    assert step["metrics"]["ratio_max_dev_first"] == 0.0
    # Batch shapes of rollout and replay differ; fp32 rounding of log-probs of order 1 is 1e-7, more under guidance.
    assert step["metrics"]["logp_mismatch_max"] < 5e-6


@pytest.mark.usefixtures("catalog")
def test_the_classes_of_the_how_to_compute_their_formulas() -> None:
    kernel = make_kernel(KERNEL, eta=0.5, power=2)
    sigma, after = torch.tensor([0.8, 0.4]), torch.tensor([0.6, 0.1])
    x, v = torch.tensor([[1.0, -2.0], [0.5, 3.0]]), torch.tensor([[0.25, 1.0], [-1.0, 2.0]])
    step = kernel.transition(x, velocity=v, sigma=sigma, sigma_next=after, sigma_max=0.9)
    s, n, y, w = (value.double() for value in (sigma[:, None], after[:, None], x, v))
    g = 0.5 * s**2
    # Numbers of order 1 after about ten roundings of fp32, 2^-24 each.
    torch.testing.assert_close(step.std.double(), g * (s - n).sqrt(), rtol=1e-6, atol=0)
    mean = y + (n - s) * (w + g**2 / 2 * (y + (1 - s) * w) / s)
    torch.testing.assert_close(step.mean.double(), mean, rtol=0, atol=2e-6)
    guidance = make_guidance(GUIDANCE, scale=3.0, away=0.5)
    given = {"positive": 1.0, "negative": -2.0, "empty": 0.25}
    velocities = {branch: torch.full((1, 2), value) for branch, value in given.items()}
    # 0.25 + 3 (1 - 0.25) - 0.5 (-2 - 0.25), exact in binary.
    assert guidance.combine(velocities, torch.tensor([0.5])).tolist() == [[3.625, 3.625]]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["sampling.kernel=flow-sd"], r"sampling\.kernel: got 'flow-sd'; engine 'trainside' supports .*; did you mean"),
        (
            ["sampling.kernel=nowhere:Kernel"],
            r"sampling\.kernel: got 'nowhere:Kernel', which no loaded plugin offers\. Available: .*own_samplers:PowerSde",
        ),
        (
            ["sampling.kernel=own_samplers:ComposedCfg"],
            r"sampling\.kernel: got 'own_samplers:ComposedCfg', which no loaded plugin offers",
        ),
        (["sampling.kernel=strange_samplers:KERNELS"], "expected a frozen dataclass that inherits .*kernels.Kernel"),
        (["sampling.kernel=strange_samplers:Gone"], r"sampling\.kernel: .* it cannot be imported: .* 'Gone'"),
        (
            ["sampling.kernel=strange_samplers:Still", "sampling.eta=0"],
            r"sampling\.kernel: algorithm 'flow-grpo' takes ratios .* is deterministic",
        ),
        (
            [f"sampling.kernel={KERNEL}", "+sampling.kernel_options.power=wide"],
            r"sampling\.kernel_options\.power: got 'wide', expected a value of type float",
        ),
        (
            [f"sampling.kernel={KERNEL}", "+sampling.kernel_options.power=5"],
            r"sampling\.kernel_options: kernel 'own_samplers:PowerSde': power: got 5.*, expected 0 to 4",
        ),
        (
            [f"sampling.kernel={KERNEL}", "+sampling.kernel_options.powr=1"],
            r"sampling\.kernel_options\.powr: PowerSde has no such option; did you mean 'power'\? It has power\.",
        ),
        (
            ["sampling.guidance_mode=two-scale", "+sampling.guidance_options.scale_high=1"],
            r"guidance_options\.scale_high: TwoScaleCfg has no such option.* It has boundary, scale_low",
        ),
        (
            ["+eval.sampling.guidance_mode=interval", "+eval.sampling.guidance_options.low=1.5"],
            r"eval\.sampling\.guidance_options: guidance 'interval': low: got 1.5, expected .* less than 1",
        ),
        (
            ["engine=vllm-omni", f"sampling.guidance_mode={GUIDANCE}", f"sampling.kernel={KERNEL}"],
            r"sampling\.kernel: got .*; engine 'vllm-omni' computes none of plugins\. It supports cps",
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_leads_to_no_kernel_or_guidance_is_refused_at_compose(
    catalog: Catalog, words: list[str], says: str
) -> None:
    reasons = match(compose("quickstart", words, catalog=catalog), catalog=catalog).reasons
    assert any(re.search(says, str(reason)) for reason in reasons), list(map(str, reasons))


def test_evaluation_with_another_guidance_starts_without_the_options_of_training(catalog: Catalog) -> None:
    training = ["sampling.guidance_mode=two-scale", "+sampling.guidance_options.scale_low=2"]
    for words in (training, [*training, "+eval.sampling.guidance_mode=batched"]):
        assert match(compose("quickstart", words, catalog=catalog), catalog=catalog).reasons == ()
