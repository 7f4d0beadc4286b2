"""What a user reads when a recipe or an override is wrong: one message, the key first, what to do last."""

from __future__ import annotations

from pathlib import Path

import pytest
from unirl.core.catalog import Catalog
from unirl.core.errors import PluginBroken, PluginNotFound, RecipeError
from unirl.core.recipe import compose

DATA = "data.train=prompts.txt"


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        (["algorithm.clip_rnage=1"], ["algorithm.clip_rnage: ", "did you mean algorithm.clip_range?", "command line"]),
        (["+algorithm.clip_rnage=1"], ["algorithm.clip_rnage: ", "did you mean 'clip_range'?"]),
        (["clip_range=1"], ["clip_range: ", "did you mean 'algorithm.clip_range'?"]),
        (["enginee=far"], ["enginee: ", "did you mean 'engine'?"]),
        (["algorithm.clip_range=much"], ["algorithm.clip_range: ", "'much'", "Float", "algorithm.clip_range=much"]),
        (["backend.optimizer.betas=3"], ["backend.optimizer.betas: ", "list"]),
        (["run=3"], ["run: ", "RunConfig"]),
        (["model.path=null"], ["model.path: "]),
        (["model={pth: 3}"], ["model.pth: ", "did you mean model.path?"]),
        (["eval.sampling.steps=3"], ["eval.sampling.steps: ", "`+eval.sampling.steps=...`"]),
        (
            ["+eval.sampling.stepz=3"],
            ["eval.sampling.stepz: ", "did you mean eval.sampling.steps?", "(command line: +eval.sampling.stepz=3)"],
        ),
        (
            ["+eval.sampling.steps=few"],
            ["eval.sampling.steps: ", "'few'", "Integer", "(command line: +eval.sampling.steps=few)"],
        ),
        (["+eval.sampling.schedule=3"], ["eval.sampling", "ScheduleConfig", "+eval.sampling.schedule=3)"]),
        (["model.use=pair"], ["model.use: ", "by hand", "`model=pair`"]),
        (["reward.size.use=tone"], ["reward.size.use: ", "`reward@reward.size=tone`"]),
        (["reward.sise.weight=2"], ["reward.sise: ", "did you mean 'size'?", "`+reward@reward.sise=NAME`"]),
        (["+reward.third.weight=2"], ["reward.third: ", "`+reward@reward.third=NAME`"]),
        (["+reward=tone"], ["reward: ", "`/reward@reward.tone: tone`"]),
        (["tracker=notes"], ["tracker: ", "chooses none"]),
        (["~engine"], ["no engine is chosen", "`- /engine: NAME`"]),
        (["sampling=latnet"], ["sampling: ", "'latnet'", "did you mean 'latent'?"]),
        (["run.seed=1,2"], ["run.seed: ", "--multirun", "run.seed=[1,2]"]),
        (["run.seed=range(1,3)"], ["run.seed: ", "--multirun"]),
        (["run.seed=[1"], ["run.seed=[1: not an override"]),
        (["justtext"], ["justtext: not an override"]),
        (["hydra.run.dir=x"], ["hydra.run.dir: ", "`run.dir`"]),
        (["hydra/launcher=joblib"], ["hydra/launcher: ", "no effect"]),
        (["run.name=${asset:quickstrat,x}"], ["run.name: ", "'quickstrat'", "did you mean 'quickstart'?"]),
        (["run.name=${asset:nowhere,x}"], ["run.name: ", "no installed package provides the asset 'nowhere'"]),
        (["run.name=${asset:quickstart,missing.txt}"], ["run.name: ", "unirl-quickstart", "has no 'missing.txt'"]),
        (["run.name=${runn.seed}"], ["run.name: ", "'runn.seed' not found"]),
    ],
)
def test_a_wrong_override_says_which_and_what_to_do(
    overrides: list[str], parts: list[str], toy_catalog: Catalog, toy_folder: Path
) -> None:
    with pytest.raises(RecipeError) as caught:
        compose("toy/base", [DATA, *overrides], catalog=toy_catalog)
    text = str(caught.value)
    assert all(part in text for part in parts), text
    assert "\n" not in text
    assert caught.value.exit_code == 2


def test_an_unknown_part_gets_the_catalogs_own_message(toy_catalog: Catalog, toy_folder: Path) -> None:
    with pytest.raises(PluginNotFound) as expected:
        toy_catalog.get("engine", "sglang")
    with pytest.raises(PluginNotFound) as caught:
        compose("toy/base", [DATA, "engine=sglang"], catalog=toy_catalog)
    assert str(caught.value) == str(expected.value)


def test_all_missing_values_are_named_at_once(toy_catalog: Catalog, toy_folder: Path) -> None:
    recipe = toy_folder / "recipes" / "toy" / "base.yaml"
    recipe.write_text(recipe.read_text(encoding="utf-8").replace("model: {path: some/folder}\n", ""), encoding="utf-8")
    with pytest.raises(RecipeError, match=r"^data\.train, model\.path: .* add data\.train=\.\.\. model\.path=\.\.\.$"):
        compose("toy/base", catalog=toy_catalog)


def test_an_unknown_recipe_lists_those_there_are(toy_catalog: Catalog, toy_folder: Path) -> None:
    with pytest.raises(RecipeError, match=r"'toy/bsae' was not found; did you mean 'toy/base'\?.*toy/child"):
        compose("toy/bsae", catalog=toy_catalog)
    with pytest.raises(RecipeError, match=r"\./none\.yaml: no such recipe file"):
        compose("./none.yaml", catalog=toy_catalog)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        (
            "algorithm: {clip_rnage: 1}",
            ["algorithm.clip_rnage: ", "did you mean algorithm.clip_range?", "toy/mine.yaml"],
        ),
        ("algorithn: {clip_range: 1}", ["algorithn: ", "did you mean 'algorithm'?", "toy/mine.yaml"]),
        ("run: {steps: many}", ["run.steps: ", "'many'", "Integer", "toy/mine.yaml"]),
        ("model: {use: pair}", ["model.use: ", "by hand"]),
        ("reward: {third: {weight: 2}}", ["reward.third: ", "no reward was chosen"]),
        ("run: {steps: 1", ["mine.yaml:", "not valid YAML"]),
    ],
)
def test_a_mistake_in_a_file_names_the_file_or_the_key(
    text: str, parts: list[str], toy_catalog: Catalog, toy_folder: Path
) -> None:
    file = toy_folder / "recipes" / "toy" / "mine.yaml"
    file.write_text(f"defaults: [base, _self_]\n{text}\n", encoding="utf-8")
    with pytest.raises(RecipeError) as caught:
        compose("toy/mine", [DATA], catalog=toy_catalog)
    assert all(part in str(caught.value) for part in parts), str(caught.value)


@pytest.mark.parametrize(
    ("defaults", "message"),
    [
        ("[/model: toy, _self_]", r"`- /unirl`, the schema of a recipe, is not there"),
        ("[base, /unirl, _self_]", r"comes once, as the first entry"),
        (
            "[bsae, _self_]",
            r"toy/mine\.yaml: its defaults name 'toy/bsae', which was not found; did you mean 'toy/base'",
        ),
        ("[mine, _self_]", r"includes itself"),
        ("[/unirl, model: toy, _self_]", r"parts need a slash: `- /model: toy`"),
        ("[base, /tracker: notes, _self_]", r"tracker 'notes' .* choose it as `/tracker@tracker\.notes: notes`"),
    ],
)
def test_a_wrong_defaults_list_says_how_it_should_read(
    defaults: str, message: str, toy_catalog: Catalog, toy_folder: Path
) -> None:
    file = toy_folder / "recipes" / "toy" / "mine.yaml"
    items = "\n".join(f"  - {item.strip()}" for item in defaults.strip("[]").split(","))
    file.write_text(f"defaults:\n{items}\n", encoding="utf-8")
    with pytest.raises(RecipeError, match=message):
        compose("toy/mine", [DATA], catalog=toy_catalog)


def test_a_spec_whose_config_is_no_part_config_is_broken(
    toy_catalog: Catalog, toy_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Catalog, "resolve", lambda self, target: int)
    with pytest.raises(PluginBroken, match=r"unirl-toy 1\.2.*inherits unirl\.core\.config\.PartConfig"):
        compose("toy/base", [DATA], catalog=toy_catalog)
