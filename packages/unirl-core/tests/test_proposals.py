"""Settings that algorithms propose: their place among defaults, recipes and overrides."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from unirl.core.errors import PluginBroken
from unirl.core.plugins.catalog import Catalog
from unirl.core.plugins.hookspec import hookimpl
from unirl.core.recipe.compose import compose
from unirl.core.specs.leaves import leaves
from unirl.core.specs.overrides import ValueIf
from unirl.core.specs.plan import Origin, Plan
from unirl.core.specs.spec import Kind

DATA = "data.train=prompts.txt"
OTHER = "algorithm=other"
PROPOSED = {
    "sampling.kernel": "euler",
    "sampling.eta": 0.0,
    "sampling.sde": {"mode": "none"},
    "train.updates_per_step": 3,
    "advantage.scope": "global",
    "backend.optimizer.lr": 0.25,
}


Composing = Callable[..., Plan]


def catalog_with(toy: Catalog, **proposes: Any) -> Catalog:
    """The toy parts, and a second algorithm, in a separate plugin, with these proposals."""
    spec = dataclasses.replace(toy.get("algorithm", "grpo-like").spec, name="other", proposes=proposes)

    def gives(kind: Kind) -> Any:
        return hookimpl(lambda: toy.specs(kind))

    kinds: tuple[Kind, ...] = ("model", "engine", "backend", "algorithm", "reward", "tracker")
    hooks = SimpleNamespace(**{f"unirl_{kind}s": gives(kind) for kind in kinds})
    return Catalog.of({"unirl-toy": hooks, "other": SimpleNamespace(unirl_algorithms=hookimpl(lambda: [spec]))})


@pytest.fixture
def composed(toy_catalog: Catalog, toy_folder: Path) -> Composing:
    def result(name: str, *overrides: str, proposes: Mapping[str, Any] = PROPOSED) -> Plan:
        return compose(name, [DATA, *overrides], catalog=catalog_with(toy_catalog, **proposes))

    return result


@pytest.fixture
def base(toy_folder: Path) -> str:
    return (toy_folder / "recipes" / "toy" / "base.yaml").read_text(encoding="utf-8")


def write(folder: Path, name: str, text: str) -> None:
    (folder / "recipes" / "toy" / f"{name}.yaml").write_text(text, encoding="utf-8")


def test_an_algorithm_chosen_on_the_command_line_replaces_values_written_for_another_one(composed: Composing) -> None:
    plan = composed("toy/base", OTHER)

    assert (plan.only.sampling.kernel, plan.only.sampling.eta) == ("euler", 0.0)
    assert vars(plan.only.sampling.sde) == vars(type(plan.only.sampling.sde)(mode="none"))
    assert (plan.only.train.updates_per_step, plan.only.advantage.scope) == (3, "global")
    assert plan.resolved["backend"]["optimizer"] == {"lr": 0.25, "betas": [0.9, 0.999]}
    assert plan.only.sampling.num_inference_steps == 8


def test_origins_name_the_algorithm_and_the_plan_says_what_gave_way(composed: Composing) -> None:
    plan = composed("toy/base", OTHER)

    named = {path for path, origin in plan.origins.items() if origin == Origin(source="proposal", detail="other")}
    # The whole section `sde` is proposed; of its other keys only `last` was set by the recipe.
    assert named == {
        "sampling.kernel",
        "sampling.eta",
        "sampling.sde.mode",
        "sampling.sde.last",
        "train.updates_per_step",
        "advantage.scope",
        "backend.optimizer.lr",
    }
    assert str(plan.origins["sampling.kernel"]) == "proposed by other"
    assert set(plan.origins) == set(leaves(plan.resolved))
    assert [str(one) for one in plan.left_out] == [
        "sampling.sde.mode=fraction of toy/base.yaml is left out: algorithm 'other' proposes \"none\".",
        "sampling.sde.last=0.5 of toy/base.yaml is left out: algorithm 'other' proposes 1.0.",
        "backend.optimizer.lr=5e-05 of toy/base.yaml is left out: algorithm 'other' proposes 0.25.",
    ]


def test_the_command_line_wins_over_proposals(composed: Composing) -> None:
    plan = composed("toy/base", OTHER, "sampling.eta=0.5", "sampling.sde.last=0.8", "backend.optimizer={lr: 1}")

    assert (plan.only.sampling.kernel, plan.only.sampling.eta) == ("euler", 0.5)
    assert (plan.only.sampling.sde.mode, plan.only.sampling.sde.last) == ("none", 0.8)
    assert plan.resolved["backend"]["optimizer"]["lr"] == 1
    assert plan.origins["sampling.eta"].source == "command line"


def test_a_recipe_that_names_the_algorithm_wins_over_proposals_and_they_over_defaults(
    composed: Composing, toy_folder: Path, base: str
) -> None:
    write(toy_folder, "own", base.replace("grpo-like", "other"))
    for overrides in ((), (OTHER,)):
        plan = composed("toy/own", *overrides)
        assert (plan.only.sampling.sde.mode, plan.only.sampling.sde.last) == ("fraction", 0.5)
        assert plan.resolved["backend"]["optimizer"]["lr"] == 5e-5
        assert (plan.only.sampling.kernel, plan.only.train.updates_per_step) == ("euler", 3)
        assert plan.left_out == ()


def test_a_recipe_that_builds_on_another_and_exchanges_the_algorithm_keeps_its_own_values(
    composed: Composing, toy_folder: Path
) -> None:
    child = "defaults:\n  - base\n  - override /algorithm: other\n  - _self_\nsampling: {eta: 0.9}\n"
    write(toy_folder, "heir", child)
    for overrides in ((), (OTHER,)):
        plan = composed("toy/heir", *overrides)
        assert (plan.only.sampling.eta, plan.only.sampling.sde.mode) == (0.9, "none")
        assert plan.origins["sampling.eta"] == Origin(source="recipe", detail="toy/heir.yaml")
        assert [one.path for one in plan.left_out][:1] == ["sampling.sde.mode"]


def test_a_recipe_whose_own_algorithm_is_not_installed_takes_the_proposals_of_another(
    composed: Composing, toy_folder: Path, base: str
) -> None:
    write(toy_folder, "absent", base.replace("grpo-like", "gone"))
    assert composed("toy/absent", OTHER).only.sampling.sde.mode == "none"


def test_an_equal_value_of_the_recipe_stays_the_recipes(composed: Composing) -> None:
    plan = composed("toy/base", OTHER, proposes={"sampling.sde.mode": "fraction"})
    assert plan.origins["sampling.sde.mode"] == Origin(source="recipe", detail="toy/base.yaml")
    assert plan.left_out == ()


def test_a_proposal_may_depend_on_settings_of_its_section(composed: Composing) -> None:
    depends = {"backend.lr": ValueIf(value=0.5, when={"backend.trains": "full"})}
    assert composed("toy/base", OTHER, proposes=depends).resolved["backend"]["lr"] == 0.5
    assert composed("toy/base", OTHER, "backend.trains=lora", proposes=depends).resolved["backend"]["lr"] == 1e-4


def test_stages_take_the_proposals_of_their_own_algorithm(composed: Composing, toy_folder: Path) -> None:
    text = """\
defaults:
  - /unirl
  - /model: toy
  - /backend: plain
  - /engine: near
  - /algorithm@algorithm.first: grpo-like
  - /algorithm@algorithm.second: other
  - /sampling@sampling.first: latent
  - /sampling@sampling.second: latent
  - /reward@reward.size: size
  - _self_
model: {path: some/folder}
stages: {first: {track: image}, second: {track: image}}
"""
    write(toy_folder, "two", text)
    plan = composed("toy/two")
    assert (plan.stage("first").sampling.kernel, plan.stage("second").sampling.kernel) == ("flow-sde", "euler")
    assert (plan.stage("first").train.updates_per_step, plan.stage("second").train.updates_per_step) == (1, 3)
    assert plan.resolved["advantage"]["scope"] == "group" and plan.stage("second").advantage.scope == "global"
    assert plan.resolved["backend"]["optimizer"]["lr"] == 0.25
    write(toy_folder, "two", text + "train: {updates_per_step: 7}\n")
    assert composed("toy/two").stage("second").train.updates_per_step == 7


@pytest.mark.parametrize(
    ("proposes", "expected"),
    [
        (
            {"sampling.kernl": "euler"},
            "got sampling.kernl; LatentSamplingConfig has no such key; did you mean 'kernel'?",
        ),
        ({"sampling.max_new_tokens": 8}, "LatentSamplingConfig has no such key"),
        ({"sampling.sde": {"mod": "none"}}, "got sampling.sde.mod; LatentSamplingConfig has no such key"),
        ({"train.updates": 2}, "TrainConfig has no such key"),
        ({"reward.weight": 2}, "got 'reward.weight', expected a key of sampling, train, backend, advantage"),
        ({"sampling": {"eta": 0}}, "got 'sampling', expected a key of"),
        ({"train.replay": ValueIf(value="serial", when={"backend.trains": "full"})}, "expected settings of 'train'"),
    ],
)
def test_a_proposal_that_no_section_has_breaks_the_plugin_when_it_loads(
    proposes: dict[str, Any], expected: str, toy_catalog: Catalog
) -> None:
    (record,) = [one for one in catalog_with(toy_catalog, **proposes).records if one.name == "other"]
    assert record.status == "broken" and record.error is not None
    assert "algorithm 'other': " in record.error and expected in record.error


def test_a_value_of_the_wrong_type_breaks_the_plugin_when_it_is_composed(composed: Composing) -> None:
    with pytest.raises(PluginBroken, match=r"algorithm 'other' proposes train\.updates_per_step='many': "):
        composed("toy/base", OTHER, proposes={"train.updates_per_step": "many"})


def test_a_key_that_the_backend_lacks_is_left_out_and_said(composed: Composing) -> None:
    plan = composed("toy/base", OTHER, proposes={"backend.lagged": {"kind": "linear"}})
    assert [str(one) for one in plan.left_out] == [
        "backend.lagged={'kind': 'linear'} of the algorithm's proposals is left out: backend 'plain' has no such key."
    ]
