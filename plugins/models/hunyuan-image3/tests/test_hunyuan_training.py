"""Text and images of one model in one optimizer step."""

from __future__ import annotations

from pathlib import Path

import pytest
from hunyuan_runs import IMAGE_ALONE, SMALL, THINKS, run
from unified_models import Steps, check_equal_steps, check_joint_steps
from unirl.core.errors import PlanRejected
from unirl.core.plugins.catalog import Catalog
from unirl.core.recipe.compose import compose
from unirl.loop.run import train

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def plain(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Steps:
    folder = tmp_path_factory.mktemp("plain")
    return run(folder, tiny_folder, *SMALL, "backend.trains=full")


def test_a_thought_and_its_image_train_in_one_step_at_ratio_1(plain: Steps) -> None:
    """From source images of different sizes."""
    check_joint_steps(plain, "think", "image", mismatch=1e-5)
    assert all(step[f"{track}/ratio_max_dev"] > 0 for step in plain for track in ("think", "image"))


def test_a_sharded_model_trains_as_a_plain_one(plain: Steps, tiny_folder: Path, tmp_path: Path) -> None:
    """FSDP gathers the weights of the root in its forward alone: whatever went past it would fail here."""
    check_equal_steps(run(tmp_path, tiny_folder, *SMALL, "backend.trains=full", "backend.shard=always"), plain)


def test_edited_images_alone_train_with_adapters_and_guidance(tiny_folder: Path, tmp_path: Path) -> None:
    words = ["sampling.guidance_scale=5", "sampling.guidance_mode=two-pass", "data.samples_per_prompt=3"]
    for step in run(tmp_path, tiny_folder, *IMAGE_ALONE, *words, recipe="hunyuan-image3/edit"):
        assert step["logp_mismatch_max"] <= 1e-5 and step["grad_norm"] > 0


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("sampling.think.system_prompt=other", r"sampling\.image\.options\.system_prompt: got '', expected 'other'"),
        ("sampling.think.options.begin=recaption", r"sampling\.image\.options\.begin: got 'think', expected 'recapt"),
        ("sampling.image.width=80", r"sampling\.image\.width: got 64 x 80 \(height x width\), which the checkpoint"),
    ],
)
def test_stages_that_do_not_fit_are_refused(tiny_folder: Path, word: str, message: str) -> None:
    catalog = Catalog.discover()
    with pytest.raises(PlanRejected, match=message):
        words = [f"model.path={tiny_folder}", "data.train=p.jsonl", *SMALL, word]
        train(compose(THINKS, words, catalog=catalog), catalog=catalog)
