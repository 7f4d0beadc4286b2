"""Finding recipes: packages, ./recipes, links, names that occur twice; and package folders without importing."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from unirl.core.errors import RecipeError
from unirl.core.recipe.assets import asset, by_name_only, package_folder
from unirl.core.recipe.files import RecipeRoot, find_recipe, list_recipes, recipe_roots


def _write(folder: Path, name: str, text: str = "# unirl train it\n") -> Path:
    file = folder / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text, encoding="utf-8")
    return file


def test_a_recipe_is_named_by_its_place_and_summed_up_by_its_first_sentence(tmp_path: Path) -> None:
    comment = "\n# unirl train sd9/fast\n#\n# Fast training (arXiv 2505.05470) on SD9.5: few\n# steps. For one GPU.\n"
    _write(tmp_path, "sd9/fast.yaml", f"{comment}defaults: []\n# more\n")
    _write(tmp_path, "bare.yaml", "run: {}\n")
    _write(tmp_path, "model/preset.yaml")
    _write(tmp_path, "notes.txt")

    result = list_recipes([RecipeRoot(folder=tmp_path, owner="acme")])

    assert [(recipe.name, recipe.summary, recipe.root.owner) for recipe in result] == [
        ("bare", "", "acme"),
        ("sd9/fast", "Fast training (arXiv 2505.05470) on SD9.5: few steps", "acme"),
    ]


def test_the_users_own_recipe_hides_an_installed_one_and_says_so(tmp_path: Path) -> None:
    own, installed = _write(tmp_path / "recipes", "a.yaml"), _write(tmp_path / "pkg", "a.yaml")
    roots = [RecipeRoot(folder=tmp_path / "recipes", owner=""), RecipeRoot(folder=tmp_path / "pkg", owner="acme")]

    result = find_recipe("a", roots)

    assert (result.file, result.hides) == (own, (installed,))


def test_a_link_to_the_same_file_hides_nothing_and_keeps_its_owner(tmp_path: Path) -> None:
    installed = _write(tmp_path / "pkg", "sd9/a.yaml")
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "sd9").symlink_to(installed.parent)
    roots = [RecipeRoot(folder=tmp_path / "recipes", owner=""), RecipeRoot(folder=tmp_path / "pkg", owner="acme")]

    result = find_recipe("sd9/a", roots)

    assert (result.hides, result.root.owner) == ((), "acme")


def test_two_packages_with_one_recipe_name_are_refused(tmp_path: Path) -> None:
    roots = [RecipeRoot(folder=tmp_path / owner, owner=owner) for owner in ("one", "two")]
    for root in roots:
        _write(root.folder, "a.yaml")
    with pytest.raises(RecipeError, match=r"two packages ship it .*one/a\.yaml.*two/a\.yaml"):
        find_recipe("a", roots)


def test_a_recipe_of_a_known_package_that_is_not_installed_gets_its_install_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("unirl.core.recipe.files.package_folder", lambda package: None)
    with pytest.raises(RecipeError, match=r"'quickstart' was not found\. Install it: `pip install unirl-quickstart`"):
        find_recipe("quickstart", [])
    with pytest.raises(RecipeError, match=r"'sd3/flow-grpo' was not found\. Install it: `pip install unirl-model-sd3`"):
        find_recipe("sd3/flow-grpo", [])


def test_recipes_of_the_current_directory_come_first(tmp_path: Path) -> None:
    (tmp_path / "recipes").mkdir()
    roots = recipe_roots(tmp_path)
    assert roots[0] == RecipeRoot(folder=tmp_path / "recipes", owner="")
    assert all(root.owner for root in roots[1:])


def test_a_package_folder_is_found_without_importing_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _write(tmp_path, "acme_rl/__init__.py", "raise RuntimeError('imported')\n")
    _write(tmp_path, "acme_rl/inner/recipes/a.yaml")
    monkeypatch.syspath_prepend(str(tmp_path))

    assert package_folder("acme_rl.inner.recipes") == tmp_path / "acme_rl" / "inner" / "recipes"
    assert "acme_rl" not in sys.modules
    assert package_folder("no_such_package.recipes") is None


def test_an_asset_is_a_file_of_its_package_and_stands_for_itself_in_hashes() -> None:
    assert Path(asset("quickstart", "__init__.py")).is_file()
    with by_name_only():
        assert asset("quickstart", "__init__.py") == "${asset:quickstart,__init__.py}"
        assert asset("nowhere", "x") == "${asset:nowhere,x}"


def test_links_in_a_circle_and_files_that_are_no_text_do_not_hide_the_others(tmp_path: Path) -> None:
    _write(tmp_path, "sd9/fast.yaml", "# unirl train sd9/fast\n")
    (tmp_path / "sd9" / "again").symlink_to(tmp_path)
    (tmp_path / "gone.yaml").symlink_to(tmp_path / "nowhere.yaml")
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    result = list_recipes([RecipeRoot(folder=tmp_path, owner="acme")])
    assert [recipe.name for recipe in result] == ["binary", "sd9/fast"]


def test_a_working_folder_that_was_deleted_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    with pytest.raises(RecipeError, match="the current folder no longer exists"):
        recipe_roots()
