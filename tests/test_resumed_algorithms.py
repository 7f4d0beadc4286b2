"""Algorithms with a state, a copy of the weights, a critic or a fake score: a resumed run equals an uninterrupted one.

That of DDPO's running statistics is in its plugin, on prompts that come again; those of Flow-GRPO are in `test_runs.py`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from small_runs import catalog, copy_up_to, flat
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from unirl.core.recipe.compose import compose
from unirl.loop.run import RunResult, train

pytestmark = [pytest.mark.slow, pytest.mark.nightly]

SMALL = ("data.prompts_per_step=2", "data.samples_per_prompt=4", "data.eval=''", "run.media_every=0", "~tracker.report")
IMAGES = (*SMALL, "sampling.num_inference_steps=3", "+reward@reward.light=brightness", "reward.light.weight=0.1")
TEXTS = (
    *SMALL,
    "sampling.max_new_tokens=12",
    "+reward@reward.size=length",
    "reward.size.least=12",
    "reward.size.falloff=12",
)
ADAPTIVE = ("algorithm.kl_coef=0.1", "algorithm.kl_target=1e-3", "algorithm.kl_horizon=60")
COPY = "backend.reference_copy=true"
CRITIC = "backend.critic.lr=1e-3"
CASES: dict[str, tuple[str, tuple[str, ...]]] = {
    "diffusion-nft, lagged policy": ("quickstart-nft", ("backend.lagged.kind=linear", "algorithm.kl_coef=0.1", COPY)),
    "awm, lagged policy": ("quickstart-awm", ("algorithm.lagged_coef=0.1", "backend.lagged.kind=linear")),
    "diffusion-dpo, reference copy": ("quickstart-dpo", ()),
    "dgpo, lagged policy": ("quickstart-dgpo", ("algorithm.moving_reference=true", "backend.lagged.kind=linear")),
    "crd, lagged policy": ("quickstart-crd", ("algorithm.moving_reference=true", "backend.lagged.kind=linear")),
    "epg, reference copy": ("quickstart-epg", ("algorithm.kl_coef=0.1", COPY)),
    "dpok, critic and adaptive kl": ("quickstart-dpok", ("algorithm.critic=true", CRITIC, *ADAPTIVE)),
    "flow-ppo, critic and adaptive kl": (
        "quickstart-flow-ppo",
        (CRITIC, "backend.critic.warmup_steps=0", COPY, *ADAPTIVE),
    ),
    "flow-grpo, rewards of steps": ("quickstart", ("algorithm.step_rewards=true",)),
    "flow-grpo, scouts": (
        "quickstart",
        ("data.scouts.samples_per_prompt=6", "data.scouts.num_inference_steps=2"),
    ),
    "flow-grpo, moving reference": (
        "quickstart",
        # It moves after the third rollout, the first one after the resume.
        ("algorithm.kl_coef=0.1", *(f"backend.moving_reference.{word}" for word in ("kind=constant", "period=3"))),
    ),
    "flow-dppo, adaptive kl": ("quickstart-dppo", (COPY, *ADAPTIVE)),
    "tempflow-grpo, adaptive kl": ("quickstart-tempflow", (COPY, *ADAPTIVE)),
    "velocity-distillation, its own guidance": (
        "quickstart",
        (
            "algorithm=velocity-distillation",
            "sampling.guidance_mode='unirl.algorithms.distillation.guidance:WithNegatives'",
            "+stages.image.reference_guidance=3.5",
            COPY,
        ),
    ),
    "dmd2, fake score": ("quickstart-few-steps", ("backend.fake_score.steps_per_update=2", "train.updates_per_step=2")),
    "grpo, adaptive kl": ("quickstart-text", (COPY, *ADAPTIVE)),
    "drpo, adaptive kl": ("quickstart-text", ("algorithm=drpo", COPY, *ADAPTIVE)),
    "ppo, critic and adaptive kl": ("quickstart-text", ("algorithm=ppo", CRITIC, COPY, *ADAPTIVE)),
    "dpo, reference copy": ("quickstart-text-dpo", ()),
    "distillation, teacher": ("quickstart-distillation", ("data.samples_per_prompt=1",)),
}


def metrics(folder: Path) -> list[dict[str, float]]:
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    return [event["metrics"] for event in events if event["kind"] == "step"]


def saved(folder: Path, into: Path) -> dict[str, Any]:
    """Everything that the backend saved in the fourth step, by folder and name."""
    last = folder / "checkpoints" / "step-000004"
    result: dict[str, Any] = {}
    for path in sorted(last.rglob(".metadata")):
        dcp_to_torch_save(path.parent, into)
        result |= flat(torch.load(into, weights_only=True), str(path.parent.relative_to(last)))
    assert result, "the run left no checkpoint"
    return result


@pytest.mark.parametrize("case", CASES)
def test_two_steps_and_two_after_a_resume_equal_four(case: str, tmp_path: Path) -> None:
    recipe, words = CASES[case]
    common = TEXTS if "text" in recipe or recipe == "quickstart-distillation" else IMAGES

    def run(name: str, *more: str, resume: Path | None = None) -> RunResult:
        overrides = [*common, *words, "run.max_steps=4", *more, *([] if resume else [f"run.dir={tmp_path / name}"])]
        plan = compose(recipe, overrides, catalog=catalog())
        return train(plan, catalog=catalog(), resume=resume, overrides=overrides)

    whole = run("whole", "run.save_every=2", "run.keep=0")
    second = run("parts", resume=copy_up_to(whole.folder, 2, tmp_path / "parts"))
    assert (second.status, second.step) == ("done", 4)
    numbers = [metrics(folder) for folder in (whole.folder, second.folder)]
    assert len(numbers[0]) == 4 and numbers[0] == numbers[1]
    assert numbers[0][3]["grad_norm"] > 0
    if "adaptive kl" in case:
        assert len({step["kl_coef"] for step in numbers[0]}) == 4, "the state moves with every step"
    expected, result = (saved(folder, tmp_path / "whole.pt") for folder in (whole.folder, second.folder))
    assert expected.keys() == result.keys()
    different = [
        name
        for name, value in expected.items()
        if not (torch.equal(value, result[name]) if isinstance(value, torch.Tensor) else value == result[name])
    ]
    assert different == []
