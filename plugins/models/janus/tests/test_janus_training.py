"""Plans and image tokens of one model in one optimizer step."""

from __future__ import annotations

from pathlib import Path

import pytest
from unified_models import Steps, check_equal_steps, check_joint_steps, image_alone, run, short
from unirl.core.errors import PlanRejected
from unirl.core.match.match import match
from unirl.core.plugins.catalog import Catalog
from unirl.core.recipe.compose import compose
from unirl.loop.run import train

pytestmark = pytest.mark.slow

SMALL = short("plan", "sampling.image.max_new_tokens=16")
"""The recipe on a miniature."""
PLANS = "janus-pro/plan-and-image"
# The scale of the guidance multiplies what rounding leaves.
MISMATCH = 5e-5


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> str:
    file = tmp_path_factory.mktemp("prompts") / "prompts.txt"
    file.write_text("a red ring on the left\ntwo blue squares\n")
    return f"data.train={file}"


@pytest.fixture(scope="module")
def whole(tiny_folder: Path, prompts: str, tmp_path_factory: pytest.TempPathFactory) -> Steps:
    folder = tmp_path_factory.mktemp("whole")
    return run(folder, tiny_folder, *SMALL, prompts, "backend.trains=full", recipe=PLANS)


def test_a_plan_and_its_image_train_in_one_step_at_ratio_1(whole: Steps) -> None:
    check_joint_steps(whole, "plan", "image", mismatch=MISMATCH)


def test_a_sharded_model_trains_as_a_whole_one(whole: Steps, tiny_folder: Path, prompts: str, tmp_path: Path) -> None:
    """FSDP gathers the weights of the root in its forward alone: whatever went past it would fail here."""
    words = [*SMALL, prompts, "backend.trains=full", "backend.shard=always"]
    check_equal_steps(run(tmp_path, tiny_folder, *words, recipe=PLANS), whole)


def test_image_tokens_alone_train_with_adapters(tiny_folder: Path, prompts: str, tmp_path: Path) -> None:
    words = [*image_alone(SMALL), prompts, "data.samples_per_prompt=3"]
    for step in run(tmp_path, tiny_folder, *words, recipe="janus-pro/grpo"):
        assert step["ratio_max_dev_first"] == 0 and step["logp_mismatch_max"] <= MISMATCH and step["grad_norm"] > 0


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
        words = [f"model.path={tiny_folder}", "data.train=p.txt", *SMALL, word, *extra]
        train(compose(PLANS, words, catalog=catalog), catalog=catalog)


def test_an_image_anywhere_above_an_image_is_refused(tiny_folder: Path) -> None:
    """Also above the text between them: its tokens would continue what the image's sequence does not have."""
    draft = (
        "+stages.draft={track: image}",
        "+sampling@sampling.draft=text",
        "+engine@engine.draft=trainside",
        "sampling.draft.max_new_tokens=16",
    )
    words = [f"model.path={tiny_folder}", "data.train=p.txt", *SMALL, *draft, "stages.plan.parent=draft"]
    catalog = Catalog.discover()
    reasons = match(compose(PLANS, words, catalog=catalog), catalog=catalog).reasons
    (reason,) = (one for one in reasons if one.key == "stages.image.parent")
    assert reason.text.startswith("got 'plan'; expected stages of text alone above it, or none: 'draft' makes images")
