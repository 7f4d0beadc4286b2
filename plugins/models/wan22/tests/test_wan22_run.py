"""Two steps of the recipe on the miniature checkpoint, with a reward that reads videos: in process, in vLLM-Omni and in SGLang."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from external_engines import environments
from unirl.core.plugins.catalog import Catalog
from unirl.core.recipe.compose import compose
from unirl.loop.run import train

SMALL = [
    "run.max_steps=2",
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
    "model.dtype=float32",
    "model.text_dtype=float32",
    "backend.mixed_precision=none",
]


@pytest.mark.parametrize(
    ("overrides", "lora_layers"),
    [
        ([], 32),
        (["engine=vllm-omni"], 32),
        (["engine=sglang", "model.experts=low"], 16),
        (["model.experts=high"], 16),
        (["train.replay=stacked"], 32),
        (["backend.trains=full", "backend.reference_copy=true"], 0),
    ],
    ids=["lora", "vllm-omni", "sglang-low", "high", "stacked", "full"],
)
def test_the_recipe_trains_both_experts_or_one_from_ratio_one(
    overrides: list[str], lora_layers: int, tiny_folder: Path, tmp_path: Path
) -> None:
    engine = next((word.removeprefix("engine=") for word in overrides if word.startswith("engine=")), "")
    if engine:
        environments.make(engine)
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("a red ring rolls\na blue disc\ntwo green squares\n")
    catalog = Catalog.discover()
    words = [*SMALL, *overrides, f"data.train={prompts}", f"model.path={tiny_folder}", f"run.dir={tmp_path / 'run'}"]
    result = train(compose("wan22/flow-grpo", words, catalog=catalog), catalog=catalog, overrides=words)
    events = [json.loads(line) for line in (result.folder / "events.jsonl").read_text().splitlines()]
    steps = [event["metrics"] for event in events if event["kind"] == "step"]
    assert len(steps) == 2
    for step in steps:
        # The forwards of an engine, or of stacked rows, are other ones: spacings of fp32 log-probs of order 1, times ten.
        is_exact = not engine and "train.replay=stacked" not in overrides
        assert step["ratio_max_dev_first"] <= (0.0 if is_exact else 2e-6)
        assert step["grad_norm"] > 0
    facts = json.dumps(events)
    assert not lora_layers or f'"lora_layers": {float(lora_layers)}' in facts
