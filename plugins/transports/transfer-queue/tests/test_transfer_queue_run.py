"""A run whose tensors go through the queue gives the numbers of one whose workers hand them on themselves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from unirl.core.plugins.catalog import Catalog
from unirl.core.recipe.compose import compose
from unirl.loop.run import train

pytestmark = [
    pytest.mark.slow,
    pytest.mark.nightly,
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("ignore:The given NumPy array is not writable:UserWarning"),
]

SMALL = (
    *("run.max_steps=2", "run.threads=1", "run.media_every=1", "~tracker.report"),
    *(
        "data.prompts_per_step=4",
        "data.samples_per_prompt=4",
        "sampling.num_inference_steps=4",
        "eval.every=0",
        "eval.num_prompts=2",
    ),
    # A second reward that no two images share: the shapes of a dozen images may all score the same.
    *("+reward@reward.light=brightness", "reward.light.weight=0.1"),
    *("launcher=ray", "launcher.placement=separate", "launcher.cpus=0.5", "launcher.reward_cpus=0.5"),
)

NUMBERS = ("loss", "reward_mean", "reward_std", "grad_norm", "ratio_max_dev_first", "logp_mismatch_max", "approx_kl")


def run(folder: Path, *words: str) -> Path:
    catalog = Catalog.discover()
    words = (*SMALL, f"run.dir={folder}", *words)
    assert train(compose("quickstart", words, catalog=catalog), catalog=catalog, overrides=words).status == "done"
    return folder


def metrics(folder: Path) -> list[dict[str, float]]:
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    return [event["metrics"] for event in events if event["kind"] == "step"]


def saved(folder: Path) -> dict[str, Any]:
    """Everything that the last checkpoint holds, by name."""
    (metadata,) = (folder / "checkpoints" / "step-000002").rglob(".metadata")
    dcp_to_torch_save(metadata.parent, folder / "whole.pt")

    def flat(value: Any, prefix: str) -> dict[str, Any]:
        if not isinstance(value, dict):
            return {prefix: value}
        return {name: item for key, inner in value.items() for name, item in flat(inner, f"{prefix}/{key}").items()}

    return flat(torch.load(folder / "whole.pt", weights_only=True), "")


def test_two_steps_equal_those_of_the_workers_own_store_bit_for_bit(tmp_path: Path, ray_here: None) -> None:
    """2 CPUs are there and the workers count for 1.5: the queue's processes must not count."""
    ours, theirs = run(tmp_path / "store"), run(tmp_path / "queue", "transport=transfer-queue")
    ours_steps, theirs_steps = metrics(ours), metrics(theirs)
    assert len(ours_steps) == len(theirs_steps) == 2
    for one, other in zip(ours_steps, theirs_steps, strict=True):
        assert one.keys() == other.keys()
        for key in NUMBERS:
            assert one[key] == other[key], key
        # The bar of the design. What the driver carries are names and a few numbers of each sample.
        assert 0 < other["driver/bytes_per_sample"] < 4096
        assert one["loss"] != 0
    weights, result = saved(ours), saved(theirs)
    assert weights.keys() == result.keys()
    tensors = {name: value for name, value in weights.items() if isinstance(value, torch.Tensor)}
    moments = {name: value for name, value in tensors.items() if name.endswith("/exp_avg")}
    # The last block's queries of the text feed an output that SD3 drops.
    assert all(value.abs().sum() > 0 or "2.attn.add_q" in n or "norm_added_q" in n for n, value in moments.items())
    assert len(moments) > 100
    for name, value in tensors.items():
        assert torch.equal(result[name], value), name
