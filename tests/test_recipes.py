"""Every recipe that is installed composes, and its parts fit."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
from unirl.core.errors import RecipeError
from unirl.core.match.match import match
from unirl.core.plugins.catalog import Catalog
from unirl.core.recipe.compose import compose, compose_config, plan_of
from unirl.core.recipe.files import find_recipe, list_recipes, recipe_roots
from unirl.core.specs.capability import Cap
from unirl.core.specs.leaves import leaves
from unirl.core.specs.plan import Plan, Stage

ROOT = Path(__file__).resolve().parents[1]
RECIPES = [recipe.name for recipe in list_recipes(recipe_roots(ROOT))]


@pytest.fixture(scope="module")
def catalog() -> Catalog:
    return Catalog.discover()


def test_there_are_recipes() -> None:
    assert {
        "quickstart",
        "quickstart-text",
        "quickstart-tools",
        "quickstart-vl",
        "quickstart-edit",
        "quickstart-video",
        "quickstart-i2v",
        "quickstart-enhancer",
        "quickstart-enhancer-joint",
        "quickstart-unified",
        "quickstart-unified-think",
        "quickstart-image-tokens",
        "quickstart-revise",
        "sd3/flow-grpo",
        "sd3/dance-grpo",
        "sd3/mix-grpo",
        "sd3/grpo-guard",
        "qwen-image/flow-grpo",
        "qwen3/grpo-gsm8k",
        "wan21/flow-grpo",
        "diffusers/flow-grpo",
    } <= set(RECIPES)


@pytest.fixture(scope="module")
def plans(catalog: Catalog) -> Mapping[str, Plan]:
    """Every recipe as it is; prompts are the user's own where it brings none, and nothing else is."""

    def planned(name: str) -> Plan:
        composed = compose_config(name, catalog=catalog, directory=ROOT)
        try:
            return plan_of(composed, catalog=catalog)
        except RecipeError as error:
            assert str(error).startswith("data.train: the recipe has no default for this value")
            composed.config.data.train = "prompts.txt"
            return plan_of(composed, catalog=catalog)

    return {name: planned(name) for name in RECIPES}


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_composes_and_its_parts_fit(name: str, plans: Mapping[str, Plan], catalog: Catalog) -> None:
    plan = plans[name]
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


@pytest.mark.slow
@pytest.mark.parametrize("engine", GENERATES)
def test_a_recipe_takes_every_engine_that_generates_its_tracks(
    plans: Mapping[str, Plan], engine: str, catalog: Catalog
) -> None:
    """In any of its stages. What it gives its own engine and the other has no key for is left out, and nothing else.

    One recipe speaks for all that have its models and settings of engines.
    """
    distinct = {tuple(map(_of_engine, plan.stages)): plan for plan in plans.values()}
    for plan in distinct.values():
        name, stages = plan.recipe, plan.stages
        for number, stage in enumerate(stages):
            if stage.engine.spec.name == engine:
                # The recipe itself, which is accepted.
                continue
            # One section for the engine of all stages, or one for each.
            is_shared = stage.name not in compose_config(name, catalog=catalog, directory=ROOT).config.engine
            section = "engine" if is_shared else f"engine@engine.{stage.name}"
            words = [f"{section}={engine}", "data.train=prompts.txt"]
            if plan.launcher is not None and plan.launcher.spec.name == "ray":
                # Workers for an engine that does not sample with the module that trains.
                words.append("launcher.placement=separate")
            backend = stage.learner.backend
            if engine in stage.learner.model.spec.bridges and GENERATES[engine] == {"text"}:
                # It has room for adapters on request.
                is_adapted = backend is not None and backend.config.trains == "lora"
                words += [f"{section.rpartition('@')[2]}.lora_rank=64"] if is_adapted else []
            changed = compose(name, words, catalog=catalog, directory=ROOT)
            verdict = match(changed, catalog=catalog)
            changes = stages if is_shared else [stage]
            fits = all(
                each.kind in GENERATES[engine]
                or (each.kind == "text" and engine in each.learner.model.spec.bridged_texts)
                for each in changes
            )
            if stage.learner.model.spec.needs_media:
                fits = fits and Cap.MEDIA_REFS in changed.stages[number].engine.spec.capabilities
            if changed.stages[number].engine.spec.needs_bridge:
                fits = fits and engine in stage.learner.model.spec.bridges
            if engine in ("vllm", "sglang-llm") and engine not in stage.learner.model.spec.bridges:
                # They load no such layout.
                fits = fits and stage.learner.model.spec.name not in ("bagel", "hunyuan-image3", "janus")
            assert verdict.accepted == fits, (name, [str(reason) for reason in verdict.reasons])
            left_out = [value for value in changed.left_out if value not in plan.left_out]
            assert {value.path.split(".")[0] for value in left_out} <= {"engine"}, name


def _of_engine(stage: Stage) -> tuple[str, ...]:
    return stage.track, stage.learner.model.spec.name, repr(stage.engine.config)


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


GRADIENT = {"algorithm.", "data.", "reward.", "eval.threshold"}
"""Settings by which a recipe of a gradient algorithm differs: few samples, of a reward with a gradient."""


@pytest.mark.parametrize(
    ("algorithm", "recipe", "differs"),
    [
        ("diffusion-nft", "quickstart-nft", set[str]()),
        ("awm", "quickstart-awm", set[str]()),
        *((name, f"quickstart-{name}", set[str]()) for name in ("epg", "dgpo", "crd")),
        ("diffusion-dpo", "quickstart-dpo", {"algorithm."}),
        *((name, f"quickstart-{name}", GRADIENT) for name in ("draft", "refl", "alignprop", "drtune", "srpo")),
    ],
)
def test_an_algorithm_proposes_what_its_quickstart_sets(
    algorithm: str, recipe: str, differs: set[str], plans: Mapping[str, Plan], catalog: Catalog
) -> None:
    expected = plans[recipe]
    plan = compose("quickstart", [f"algorithm={algorithm}"], catalog=catalog, directory=ROOT)

    result, own = leaves(plan.resolved), leaves(expected.resolved)
    unequal = {path for path in result.keys() | own.keys() if result.get(path) != own.get(path)}
    assert {path for path in unequal if not path.startswith(tuple(differs))} == set()
    reasons = match(plan, catalog=catalog).reasons
    if differs is GRADIENT:
        # One more word is enough.
        assert "`reward@reward.shapes=soft-shapes`" in str(*reasons)
        override = ["reward@reward.shapes=soft-shapes", f"algorithm={algorithm}"]
        reasons = match(compose("quickstart", override, catalog=catalog, directory=ROOT), catalog=catalog).reasons
    assert reasons == ()
