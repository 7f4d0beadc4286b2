"""Plans and image tokens of one model in one optimizer step."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import small_runs
from unirl.core.errors import PlanRejected
from unirl.core.match.match import match
from unirl.core.plugins.catalog import Catalog
from unirl.core.recipe.compose import compose
from unirl.loop.run import train

pytestmark = pytest.mark.slow

SMALL = [
    "data.train=prompts.txt", "run.max_steps=2", "run.media_every=0", "run.threads=1", "model.dtype=float32",
    "data.prompts_per_step=2", "stages.plan.samples=2", "stages.image.samples=2", "sampling.plan.max_new_tokens=4",
    "sampling.image.max_new_tokens=16", "backend.mixed_precision=none", "backend.activation_checkpointing=false",
    "eval.every=0",
]  # fmt: skip
"""The recipe on a miniature, in fp32."""


def run(folder: Path, checkpoint: Path, *words: str, recipe: str) -> list[Mapping[str, Any]]:
    """Metrics of each step."""
    (folder / "prompts.txt").write_text("a red ring on the left\ntwo blue squares\n")
    result = small_runs.run(folder / "out", f"model.path={checkpoint}", *words, recipe=recipe, small=())
    return list(small_runs.steps(result.folder).values())


@pytest.fixture(scope="module")
def whole(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Mapping[str, Any]]:
    folder = tmp_path_factory.mktemp("whole")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        return run(folder, tiny_folder, *SMALL, "backend.trains=full", recipe="janus-pro/plan-and-image")


def test_a_plan_and_its_image_train_in_one_step_at_ratio_1(whole: list[Mapping[str, Any]]) -> None:
    """The first ratio is that of two forwards of the same batch: exactly 1. The rollout had other batches, and a cache:
    rounding of a forward, times the scale of the guidance."""
    assert len(whole) == 2
    for step in whole:
        for track in ("plan", "image"):
            assert step[f"{track}/ratio_max_dev_first"] == 0
            assert step[f"{track}/logp_mismatch_max"] <= 5e-5
            assert step[f"{track}/grad_norm"] > 0


def test_a_sharded_model_trains_as_a_whole_one(
    whole: list[Mapping[str, Any]], tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FSDP gathers the weights of the root in its forward alone: whatever went past it would fail here."""
    monkeypatch.chdir(tmp_path)
    words = [*SMALL, "backend.trains=full", "backend.shard=always"]
    sharded = run(tmp_path, tiny_folder, *words, recipe="janus-pro/plan-and-image")
    for mine, its in zip(sharded, whole, strict=True):
        # The same operations on the same numbers.
        assert {name: value for name, value in mine.items() if not name.startswith("perf/")} == {
            name: value for name, value in its.items() if not name.startswith("perf/")
        }


def test_image_tokens_alone_train_with_adapters(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = [word for word in SMALL if "plan" not in word and not word.startswith("stages.")]
    words = [word.replace("sampling.image.", "sampling.") for word in words] + ["data.samples_per_prompt=3"]
    for step in run(tmp_path, tiny_folder, *words, recipe="janus-pro/grpo"):
        assert step["ratio_max_dev_first"] == 0 and step["logp_mismatch_max"] <= 5e-5 and step["grad_norm"] > 0


@pytest.mark.parametrize(
    ("word", "says"),
    [
        ("sampling.plan.system_prompt=other", r"sampling\.plan\.|sampling\.image\.system_prompt: got"),
        ("sampling.image.max_new_tokens=15", r"sampling\.image\.max_new_tokens: got 15, expected 16 or more"),
        ("sampling.image.options.guidance_scale=0.5", r"guidance_scale: got 0\.5, expected 1 or more"),
    ],
)
def test_settings_that_cannot_be_are_refused(tiny_folder: Path, word: str, says: str) -> None:
    extra = ["sampling.image.system_prompt=this"] if "system_prompt" in word else []
    catalog = Catalog.discover()
    with pytest.raises(PlanRejected, match=says):
        words = [f"model.path={tiny_folder}", *SMALL, word, *extra]
        train(compose("janus-pro/plan-and-image", words, catalog=catalog), catalog=catalog)


def test_an_image_anywhere_above_an_image_is_refused(tiny_folder: Path) -> None:
    """Also above the text between them: its tokens would continue what the image's sequence does not have."""
    draft = ("+stages.draft={track: image}", "+sampling@sampling.draft=text", "+engine@engine.draft=trainside")
    words = [
        f"model.path={tiny_folder}",
        *SMALL,
        *draft,
        "sampling.draft.max_new_tokens=16",
        "stages.plan.parent=draft",
    ]
    catalog = Catalog.discover()
    reasons = match(compose("janus-pro/plan-and-image", words, catalog=catalog), catalog=catalog).reasons
    (reason,) = (one for one in reasons if one.key == "stages.image.parent")
    assert reason.text.startswith("got 'plan'; expected stages of text alone above it, or none: 'draft' makes images")
