"""Groups in whole runs: samples that are left out of training, ranks in place of scores, and groups that are replaced."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from unirl.backends.fsdp2.backend import Fsdp2Backend
from unirl.core.plugins.catalog import Catalog
from unirl.core.recipe.compose import compose
from unirl.core.roles import Job
from unirl.loop.run import train
from unirl.models.sd3.model import Sd3Model

SMALL = {
    "quickstart": ["sampling.num_inference_steps=4", "sampling.sde.last=1", "data.samples_per_prompt=4"],
    "quickstart-text": ["data.samples_per_prompt=8"],
}
COMMON = ["data.prompts_per_step=3", "eval=null", "run.media_every=0", "run.max_steps=1", "~tracker.report"]


def steps(recipe: str, folder: Path, *overrides: str) -> list[dict[str, Any]]:
    """The metrics of each step."""
    words = [*COMMON, *SMALL[recipe], *overrides, f"run.dir={folder}"]
    catalog = Catalog.discover()
    result = train(compose(recipe, words, catalog=catalog), catalog=catalog, overrides=words)
    lines = (result.folder / "events.jsonl").read_text().splitlines()
    return [event["metrics"] for event in map(json.loads, lines) if event["kind"] == "step"]


@pytest.mark.parametrize("recipe", SMALL)
@pytest.mark.parametrize("values", ["scores", "win-rate"])
def test_samples_that_are_not_kept_reach_no_backend(
    recipe: str, values: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Latents and tokens alike: the best and the worst of each prompt by their scores, whichever values rank them."""
    jobs, trains = list[Job](), Fsdp2Backend.train
    monkeypatch.setattr(
        Fsdp2Backend, "train", lambda self, given, **more: (jobs.extend(given), trains(self, given, **more))[1]
    )
    extra = ["+reward@reward.light=brightness"] if recipe == "quickstart" else []
    keep = ["advantage.keep_best=1", "advantage.keep_worst=1", f"advantage.values={values}"]
    (metrics,) = steps(recipe, tmp_path / "run", *keep, *extra, "train.updates_per_step=2", "train.micro_batch_size=1")
    (job,) = jobs
    assert metrics["samples_kept"] == job.track.num_rows == 6
    assert {group: len(rows) for group, rows in job.track.groups().items()} == dict.fromkeys(job.track.group_ids, 2)
    assert metrics["ratio_max_dev_first"] == 0.0
    assert metrics["updates"] + metrics.get("updates_empty", 0) == 2
    for rows in job.track.groups().values():
        assert job.track.advantages is not None
        low, high = sorted(job.track.advantages[rows].tolist())
        assert low < 0 < high or low == high == 0


def test_samples_that_are_not_kept_cost_no_forward(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of the denoiser's forwards with gradient: as many as samples are kept, times the SDE steps."""
    rows, velocity = list[int](), Sd3Model.velocity

    def counted(self: Sd3Model, x: Tensor, *given: Any, **more: Any) -> Tensor:
        rows.append(len(x) if torch.is_grad_enabled() else 0)
        return velocity(self, x, *given, **more)

    monkeypatch.setattr(Sd3Model, "velocity", counted)
    light = ["+reward@reward.light=brightness", "train.updates_per_step=1"]
    steps("quickstart", tmp_path / "all", *light)
    every, rows[:] = sum(rows), []
    steps("quickstart", tmp_path / "kept", *light, "advantage.keep_best=1")
    assert every == 3 * 4 * 4 and sum(rows) == 3 * 1 * 4


def test_groups_of_equal_images_are_replaced(tmp_path: Path) -> None:
    """DAPO's dynamic sampling for latents: the shapes reward has few values, so prompts with equal samples are frequent."""
    metrics = steps("quickstart", tmp_path / "run", "data.dynamic_sampling_rounds=4", "run.max_steps=2")
    assert any(step["groups_without_spread"] for step in metrics)
    for step in metrics:
        assert step["groups"] == 3 and step["zero_spread_groups"] == 0
        assert step["groups_drawn"] - step["groups_without_spread"] >= 3
