"""Text and images of one model in one optimizer step."""

from __future__ import annotations

from pathlib import Path

import pytest
from bagel_runs import SMALL, run
from unified_models import Steps, check_equal_steps, check_joint_steps, image_alone
from unirl.core.errors import PlanRejected
from unirl.core.plugins.catalog import Catalog
from unirl.core.recipe.compose import compose
from unirl.loop.run import train

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def plain(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Steps:
    folder = tmp_path_factory.mktemp("plain")
    return run(folder, tiny_folder, *SMALL, "backend.trains=full")


def test_a_plan_and_its_image_train_in_one_step_at_ratio_1(plain: Steps) -> None:
    """From source images of different sizes."""
    check_joint_steps(plain, "plan", "image", mismatch=1e-5)
    assert all(step[f"{track}/ratio_max_dev"] > 0 for step in plain for track in ("plan", "image"))


def test_a_sharded_model_trains_as_a_plain_one(plain: Steps, tiny_folder: Path, tmp_path: Path) -> None:
    """FSDP gathers the weights of the root in its forward alone: whatever went past it would fail here."""
    check_equal_steps(run(tmp_path, tiny_folder, *SMALL, "backend.trains=full", "backend.shard=always"), plain)


def test_images_alone_train_with_adapters_and_are_guided_by_text_and_sources(tiny_folder: Path, tmp_path: Path) -> None:
    words = [*image_alone(SMALL), "data.samples_per_prompt=3"]
    guided = [
        "guidance_scale=4",
        "guidance_mode=text-image",
        "guidance_options.image_scale=1.5",
        "guidance_options.low=0.4",
    ]
    words += [f"++sampling.{word}" for word in guided]
    for step in run(tmp_path, tiny_folder, *words, recipe="bagel/flow-grpo"):
        assert step["logp_mismatch_max"] <= 1e-5 and step["grad_norm"] > 0


def test_stages_whose_sequences_begin_differently_are_refused(tiny_folder: Path) -> None:
    words = [f"model.path={tiny_folder}", "data.train=p.jsonl", *SMALL, "sampling.plan.system_prompt=other"]
    catalog = Catalog.discover()
    with pytest.raises(PlanRejected, match=r"sampling\.image\.options\.system_prompt: got 'Plan .*, expected 'other'"):
        train(compose("bagel/unigrpo", words, catalog=catalog), catalog=catalog)


def test_a_critic_of_denoise_steps_is_refused(tiny_folder: Path) -> None:
    """Backends choose the kind of a critic by the model, which has tracks of both."""
    words = [f"model.path={tiny_folder}", "data.train=prompts.jsonl", "algorithm=flow-ppo", "backend.critic.lr=1e-4"]
    catalog = Catalog.discover()
    with pytest.raises(PlanRejected, match=r"algorithm: got 'flow-ppo', which trains a critic of denoise steps"):
        train(compose("bagel/flow-grpo", words, catalog=catalog), catalog=catalog)
