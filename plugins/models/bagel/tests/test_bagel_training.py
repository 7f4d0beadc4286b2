"""Text and images of one model in one optimizer step."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from bagel_runs import SMALL, run
from unirl.core.errors import PlanRejected
from unirl.core.plugins.catalog import Catalog
from unirl.core.recipe.compose import compose
from unirl.loop.run import train

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def plain(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Mapping[str, Any]]:
    folder = tmp_path_factory.mktemp("plain")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        return run(folder, tiny_folder, *SMALL, "backend.trains=full")


def test_a_plan_and_its_image_train_in_one_step_at_ratio_1(plain: list[Mapping[str, Any]]) -> None:
    """From source images of different sizes. The first ratio is that of two forwards of the same batch: exactly 1. The
    rollout had other batches, and a cache: rounding of a forward, in log-probs of some nats."""
    assert len(plain) == 2
    for step in plain:
        for track in ("plan", "image"):
            assert step[f"{track}/ratio_max_dev_first"] == 0
            assert step[f"{track}/logp_mismatch_max"] <= 1e-5
            assert step[f"{track}/grad_norm"] > 0 and step[f"{track}/ratio_max_dev"] > 0


def test_a_sharded_model_trains_as_a_plain_one(
    plain: list[Mapping[str, Any]], tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FSDP gathers the weights of the root in its forward alone: whatever went past it would fail here."""
    monkeypatch.chdir(tmp_path)
    sharded = run(tmp_path, tiny_folder, *SMALL, "backend.trains=full", "backend.shard=always")
    for mine, its in zip(sharded, plain, strict=True):
        # The same operations on the same numbers.
        assert {name: value for name, value in mine.items() if not name.startswith("perf/")} == {
            name: value for name, value in its.items() if not name.startswith("perf/")
        }


def test_images_alone_train_with_adapters_and_are_guided_by_text_and_sources(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = [word for word in SMALL if "plan" not in word and not word.startswith("stages.")]
    words = [word.replace("sampling.image.", "sampling.") for word in words]
    guided = [
        "guidance_scale=4",
        "guidance_mode=text-image",
        "guidance_options.image_scale=1.5",
        "guidance_options.low=0.4",
    ]
    words += [f"++sampling.{word}" for word in guided] + ["data.samples_per_prompt=3"]
    for step in run(tmp_path, tiny_folder, *words, recipe="bagel/flow-grpo"):
        assert step["logp_mismatch_max"] <= 1e-5 and step["grad_norm"] > 0


def test_stages_whose_sequences_begin_differently_are_refused(tiny_folder: Path) -> None:
    words = [f"model.path={tiny_folder}", *SMALL, "sampling.plan.system_prompt=other"]
    catalog = Catalog.discover()
    with pytest.raises(PlanRejected, match=r"sampling\.image\.options\.system_prompt: got 'Plan .*, expected 'other'"):
        train(compose("bagel/unigrpo", words, catalog=catalog), catalog=catalog)


def test_a_critic_of_denoise_steps_is_refused(tiny_folder: Path) -> None:
    """Backends choose the kind of a critic by the model, which has tracks of both."""
    words = [f"model.path={tiny_folder}", "data.train=prompts.jsonl", "algorithm=flow-ppo", "backend.critic.lr=1e-4"]
    catalog = Catalog.discover()
    with pytest.raises(PlanRejected, match=r"algorithm: got 'flow-ppo', which trains a critic of denoise steps"):
        train(compose("bagel/flow-grpo", words, catalog=catalog), catalog=catalog)
