"""Every recipe that is installed composes, and its parts fit."""

from __future__ import annotations

from pathlib import Path

import pytest
from unirl.core.errors import RecipeError
from unirl.core.match.match import match
from unirl.core.plugins.catalog import Catalog
from unirl.core.recipe.compose import compose
from unirl.core.recipe.files import find_recipe, list_recipes, recipe_roots
from unirl.core.specs.capability import Cap, Support
from unirl.core.specs.plan import Plan, leaves

ROOT = Path(__file__).resolve().parents[1]
RECIPES = [recipe.name for recipe in list_recipes(recipe_roots(ROOT))]


@pytest.fixture(scope="module")
def catalog() -> Catalog:
    return Catalog.discover()


def test_there_are_recipes() -> None:
    assert {
        "quickstart",
        "quickstart-text",
        "quickstart-vl",
        "quickstart-enhancer",
        "quickstart-enhancer-joint",
        "sd3/flow-grpo",
        "sd3/dance-grpo",
        "sd3/mix-grpo",
        "sd3/grpo-guard",
        "qwen-image/flow-grpo",
        "qwen3/grpo-gsm8k",
        "wan21/flow-grpo",
    } <= set(RECIPES)


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_composes_and_its_parts_fit(name: str, catalog: Catalog) -> None:
    try:
        plan = compose(name, catalog=catalog, directory=ROOT)
    except RecipeError as error:
        # Prompts are the user's own where the recipe brings none.
        assert str(error).startswith("data.train: the recipe has no default for this value")
        plan = compose(name, ["data.train=prompts.txt"], catalog=catalog, directory=ROOT)
    verdict = match(plan, catalog=catalog)
    assert verdict.accepted, [str(reason) for reason in verdict.reasons]
    assert set(plan.origins) == set(leaves(plan.resolved))


GENERATES = {
    "trainside": {"latent", "text"},
    "vllm-omni": {"latent"},
    "sglang": {"latent"},
    "vllm": {"text"},
    "sglang-llm": {"text"},
}


@pytest.fixture(scope="module", params=RECIPES)
def plan(request: pytest.FixtureRequest, catalog: Catalog) -> Plan:
    return compose(request.param, ["data.train=prompts.txt"], catalog=catalog, directory=ROOT)


@pytest.mark.parametrize("engine", GENERATES)
def test_a_recipe_takes_every_engine_that_generates_its_tracks(plan: Plan, engine: str, catalog: Catalog) -> None:
    """In any of its stages. What it gives its own engine and the other has no key for is left out, and nothing else."""
    name, stages = plan.recipe, plan.stages
    for number, stage in enumerate(stages):
        section = "engine" if len(stages) == 1 else f"engine@engine.{stage.name}"
        changed = compose(name, [f"{section}={engine}", "data.train=prompts.txt"], catalog=catalog, directory=ROOT)
        verdict = match(changed, catalog=catalog)
        fits = stage.kind in GENERATES[engine]
        if "needs" in stage.learner.model.spec.inputs.get(stage.track, {}).values():
            fits = fits and changed.stages[number].engine.spec.support(Cap.MEDIA_REFS) is Support.NATIVE
        if changed.stages[number].engine.spec.needs_bridge:
            fits = fits and engine in stage.learner.model.spec.bridges
        assert verdict.accepted == fits, [str(reason) for reason in verdict.reasons]
        assert {value.path.split(".")[0] for value in changed.left_out} <= {"engine"}


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_begins_with_the_command_that_runs_it_and_is_short(name: str) -> None:
    recipe = find_recipe(name, recipe_roots(ROOT))
    text = recipe.file.read_text(encoding="utf-8")
    assert text.splitlines()[0].split()[:4] == ["#", "unirl", "train", name]
    assert len(text.splitlines()) <= 40


def test_the_recipes_folder_links_to_the_files_of_the_packages() -> None:
    for recipe in list_recipes(recipe_roots(ROOT)):
        assert recipe.root.owner.startswith("unirl-"), recipe.file
        assert recipe.file.is_relative_to(ROOT / "recipes") and not recipe.hides
