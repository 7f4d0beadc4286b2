"""One step of the Wan 2.1 recipe on its miniature checkpoint, trained on rewards of this plugin."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from unirl.core.plugins.catalog import Catalog
from unirl.core.recipe.compose import compose
from unirl.loop.run import train
from unirl.models.wan.tiny import write_wan21


def test_wan_trains_on_motion_and_smoothness(tmp_path: Path) -> None:
    write_wan21(tmp_path / "wan", seed=0)
    lines = [
        {"prompt": "a red ring rolls to the right", "metadata": {"motion": "right"}},
        {"prompt": "a blue disc", "metadata": {"motion": [0.0, 0.5]}},
    ]
    (prompts := tmp_path / "prompts.jsonl").write_text("\n".join(map(json.dumps, lines)))
    words = [
        "~reward.motion",
        "+reward@reward.direction=motion",
        "+reward@reward.steady=temporal",
        f"data.train={prompts}",
        f"model.path={tmp_path / 'wan'}",
        f"run.dir={tmp_path / 'run'}",
        "run.max_steps=1",
        "run.threads=1",
        "data.prompts_per_step=2",
        "data.samples_per_prompt=2",
        "sampling.num_inference_steps=4",
        "sampling.height=32",
        "sampling.width=48",
        "sampling.frames=5",
        "sampling.max_sequence_length=16",
        "sampling.sde.last=0.75",
        "train.micro_batch_size=2",
        "eval=null",
    ]
    catalog = Catalog.discover()
    result = train(compose("wan21/flow-grpo", words, catalog=catalog), catalog=catalog, overrides=words)
    events = [json.loads(line) for line in (result.folder / "events.jsonl").read_text().splitlines()]
    (step,) = [event["metrics"] for event in events if event["kind"] == "step"]
    assert step["grad_norm"] > 0
    assert -1 <= step["reward/direction"] <= 1
    assert (
        0
        < step["reward/steady"]
        == pytest.approx((step["reward/steady/smoothness"] + step["reward/steady/steadiness"]) / 2, abs=1e-6)
    )
