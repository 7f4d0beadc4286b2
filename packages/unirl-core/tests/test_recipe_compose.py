"""Composing: values, origins, hashes, Hydra's override grammar."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest
from unirl.core.errors import RecipeError
from unirl.core.plugins.catalog import Catalog
from unirl.core.recipe.compose import compose, split_sweep
from unirl.core.specs.leaves import leaves
from unirl.core.specs.plan import Origin
from unirl.core.types.sampling import LatentSamplingConfig, ScheduleConfig

DATA = "data.train=prompts.txt"


def origin(source: str, detail: str) -> Origin:
    return Origin(source=source, detail=detail)


def test_a_recipe_becomes_a_plan_with_typed_configs(toy_catalog: Catalog, toy_folder: Path) -> None:
    plan = compose("toy/base", [DATA], catalog=toy_catalog)

    assert (plan.only.model.name, plan.only.engine.name, plan.only.backend.name, plan.only.algorithm.name) == (
        "toy",
        "near",
        "plain",
        "grpo-like",
    )
    assert type(plan.only.model.config).__name__ == "ToyModelConfig"
    assert vars(plan.only.model.config) == {"use": "toy", "path": "some/folder", "dtype": "float32"}
    assert list(plan.rewards) == ["size"] and plan.rewards["size"].key == "reward.size"
    assert plan.only.name == "image" and plan.only.sampling.num_inference_steps == 8
    assert plan.only.sampling.sde.last == 0.5
    assert (plan.only.model.dist, plan.only.model.version) == ("unirl-toy", "1.2")
    assert plan.run.max_steps == 100 and plan.data.train == "prompts.txt"


def test_resolved_is_what_the_configs_hold(toy_catalog: Catalog, toy_folder: Path) -> None:
    plan = compose("toy/child", [DATA], catalog=toy_catalog)

    assert plan.resolved["run"] == vars(plan.run)
    assert plan.resolved["reward"]["second"] == dataclasses.asdict(plan.rewards["second"].config)
    assert plan.run.max_steps == plan.data.samples_per_prompt == 8


def test_what_evaluation_samples_with_is_typed_and_laid_over_what_training_does(
    toy_catalog: Catalog, toy_folder: Path
) -> None:
    changes = ["sampling.schedule.variant=diffusers-default", "+eval.sampling.schedule.shift=2"]
    plan = compose("toy/child", [DATA, *changes, "+eval.sampling.guidance_scale=4"], catalog=toy_catalog)
    evaluated = plan.only.evaluation

    assert isinstance(evaluated, LatentSamplingConfig)
    assert evaluated.schedule == ScheduleConfig(shift=2.0, variant="diffusers-default")
    assert (evaluated.guidance_scale, evaluated.kernel, evaluated.sde.mode) == (4.0, "euler", "none")
    assert plan.resolved["eval"]["sampling"] == {"schedule": {"shift": 2}, "guidance_scale": 4}


def test_every_leaf_has_an_origin(toy_catalog: Catalog, toy_folder: Path) -> None:
    plan = compose("toy/child", [DATA, "engine.url=x", "+eval.sampling.num_inference_steps=3"], catalog=toy_catalog)

    assert set(plan.origins) == set(leaves(plan.resolved))


def test_the_origin_is_whoever_set_the_value_last_in_a_chain(toy_catalog: Catalog, toy_folder: Path) -> None:
    expected = {
        "run.seed": origin("default", "RunConfig"),
        "backend.optimizer.betas": origin("default", "OptimizerConfig"),
        "sampling.schedule.shift": origin("default", "ScheduleConfig"),
        "reward.size.weight": origin("default", "ToyRewardConfig"),
        "model.path": origin("recipe", "toy/base.yaml"),
        "backend.optimizer.lr": origin("recipe", "toy/base.yaml"),
        "sampling.sde.mode": origin("recipe", "toy/base.yaml"),
        "model.use": origin("recipe", "toy/base.yaml"),
        "reward.size.use": origin("recipe", "toy/base.yaml"),
        # The child sets these again, or chooses the part.
        "sampling.num_inference_steps": origin("recipe", "toy/child.yaml"),
        "engine.use": origin("recipe", "toy/child.yaml"),
        "reward.second.use": origin("recipe", "toy/child.yaml"),
        "reward.second.weight": origin("recipe", "toy/child.yaml"),
        "run.max_steps": origin("recipe", "toy/child.yaml"),
        "engine.url": origin("default", "FarEngineConfig"),
        "data.train": origin("command line", DATA),
    }
    origins = compose("toy/child", [DATA], catalog=toy_catalog).origins
    assert {key: origins[key] for key in expected} == expected


def test_origins_name_the_override_that_set_or_chose(toy_catalog: Catalog, toy_folder: Path) -> None:
    overrides = [
        DATA,
        "engine=far",
        "engine.url=elsewhere",
        "backend.optimizer={lr: 1}",
        "+reward@reward.other=tone",
        "+eval.sampling.num_inference_steps=4",
        "++algorithm.clip_range=0.5",
    ]
    origins = compose("toy/base", overrides, catalog=toy_catalog).origins

    result = {key: o.detail for key, o in origins.items() if o.source == "command line"}
    assert result == {
        "data.train": DATA,
        "engine.use": "engine=far",
        "engine.url": "engine.url=elsewhere",
        "backend.optimizer.lr": "backend.optimizer={lr: 1}",
        "reward.other.use": "+reward@reward.other=tone",
        "eval.sampling.num_inference_steps": "+eval.sampling.num_inference_steps=4",
        "algorithm.clip_range": "++algorithm.clip_range=0.5",
    }


def test_a_section_that_is_an_interpolation_passes_its_origin_on(toy_catalog: Catalog, toy_folder: Path) -> None:
    plan = compose("toy/base", [DATA, "+sampling.kernel_options.copied=${run}"], catalog=toy_catalog)

    assert plan.resolved["sampling"]["kernel_options"]["copied"]["seed"] == 0
    assert plan.origins["sampling.kernel_options.copied.seed"].source == "command line"


def test_a_preset_of_a_part_is_a_file_in_a_folder_of_its_kind(toy_catalog: Catalog, toy_folder: Path) -> None:
    presets = toy_folder / "recipes" / "model"
    presets.mkdir()
    (presets / "toy-half.yaml").write_text("defaults: [toy, _self_]\ndtype: float16\n", encoding="utf-8")

    plan = compose("toy/base", [DATA, "model=toy-half"], catalog=toy_catalog)

    assert plan.only.model.name == "toy" and plan.resolved["model"]["dtype"] == "float16"
    assert plan.origins["model.dtype"] == origin("recipe", "model/toy-half.yaml")
    assert plan.origins["model.path"] == origin("recipe", "toy/base.yaml")


def test_a_recipe_file_can_be_given_by_its_path(toy_catalog: Catalog, toy_folder: Path) -> None:
    file = toy_folder / "mine.yaml"
    file.write_text("# mine\ndefaults:\n  - /toy/child\n  - _self_\nmodel: {dtype: bf16}\n", encoding="utf-8")

    plan = compose("./mine.yaml", [DATA], catalog=toy_catalog)

    assert plan.recipe == str(file)
    assert plan.run.name == "mine" and plan.origins["run.name"] == origin("recipe", "mine.yaml")
    assert plan.origins["model.dtype"] == origin("recipe", "mine.yaml")
    assert plan.origins["sampling.num_inference_steps"] == origin("recipe", "toy/child.yaml")
    assert compose("./mine.yaml", [DATA, "run.name=x"], catalog=toy_catalog).run.name == "x"


def test_several_tracks_have_a_sampling_section_each(toy_catalog: Catalog, toy_folder: Path) -> None:
    overrides = [
        DATA,
        "model=pair",
        "~sampling",
        "+sampling@sampling.draft=latent",
        "+sampling@sampling.final=latent",
    ]
    recipe = toy_folder / "recipes" / "two.yaml"
    text = (toy_folder / "recipes" / "toy" / "base.yaml").read_text(encoding="utf-8")
    sections = "  - /sampling@sampling.draft: latent\n  - /sampling@sampling.final: latent\n"
    text = text.replace("  - /sampling: latent\n", sections).replace("/model: toy", "/model: pair")
    text = text.replace(
        "sampling: {num_inference_steps: 8, sde: {mode: fraction, last: 0.5}}",
        "sampling: {draft: {num_inference_steps: 3}}",
    )
    recipe.write_text(text, encoding="utf-8")

    plan = compose("two", [DATA, "sampling.final.num_inference_steps=5"], catalog=toy_catalog)

    assert {stage.name: stage.sampling.num_inference_steps for stage in plan.stages} == {
        "draft": 3,
        "final": 5,
    }
    with pytest.raises(RecipeError, match=r"sampling: got one section, expected one for each of 'draft', 'final'"):
        compose("toy/base", overrides[:2], catalog=toy_catalog)


def test_the_hash_does_not_change_with_what_leaves_the_numbers_alone(toy_catalog: Catalog, toy_folder: Path) -> None:
    idle = ["run.name=other", "run.dir=elsewhere", "run.max_steps=7", "run.save_every=3", "run.media_every=0"]
    idle += ["run.save_async=true"]
    idle += ["train.micro_batch_size=2", "train.replay=serial", "engine.batch=3"]
    # They only say what ends a run.
    idle += ["advantage.constant_reward=fail", "train.logp_mismatch_max=0.5", "train.logp_mismatch_mean=0.5"]
    base = compose("toy/base", [DATA], catalog=toy_catalog)
    assert compose("toy/base", [DATA, *idle, "+tracker@tracker.notes=notes"], catalog=toy_catalog).hash == base.hash


def test_the_hash_changes_with_what_changes_the_numbers(toy_catalog: Catalog, toy_folder: Path) -> None:
    overrides = ["run.seed=0", "algorithm.clip_range=1e-4", "run.seed=1", "engine=far", "reward.size.weight=2"]
    hashes = [compose("toy/base", [DATA, override], catalog=toy_catalog).hash for override in overrides]
    assert len(set(hashes)) == len(overrides)


def test_the_hash_does_not_depend_on_where_assets_are_installed(
    toy_catalog: Catalog, toy_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    overrides = ["data.train=${asset:quickstart,__init__.py}"]
    here = compose("toy/base", overrides, catalog=toy_catalog)
    (toy_folder / "__init__.py").touch()
    monkeypatch.setattr("unirl.core.recipe.assets.package_folder", lambda package: toy_folder)
    there = compose("toy/base", overrides, catalog=toy_catalog)

    assert here.data.train != there.data.train == str(toy_folder / "__init__.py")
    assert here.hash == there.hash == compose("toy/base", overrides, catalog=toy_catalog).hash


def test_composing_leaves_hydra_as_it_was(toy_catalog: Catalog, toy_folder: Path) -> None:
    from hydra.core.global_hydra import GlobalHydra

    compose("toy/base", [DATA], catalog=toy_catalog)
    assert not GlobalHydra.instance().is_initialized()


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["run.seed=1,2"], [["run.seed=1"], ["run.seed=2"]]),
        (["run.seed=range(0,2)", "x=3"], [["run.seed=0", "x=3"], ["run.seed=1", "x=3"]]),
        (["algorithm.clip_range=choice(1e-3,1e-4)"], [["algorithm.clip_range=0.001"], ["algorithm.clip_range=0.0001"]]),
        (["engine=glob(*)"], [["engine=far"], ["engine=near"]]),
        (
            ["run.seed=1,2", "engine=near,far"],
            [[f"run.seed={s}", f"engine={e}"] for s in (1, 2) for e in ("near", "far")],
        ),
    ],
)
def test_a_sweep_expands_as_hydra_expands_it(
    overrides: list[str], expected: list[list[str]], toy_catalog: Catalog, toy_folder: Path
) -> None:
    assert split_sweep("toy/base", overrides, catalog=toy_catalog) == expected


def test_composing_real_parts_imports_nothing_heavy() -> None:
    code = (
        "import sys\n"
        "from unirl.core.plugins.catalog import Catalog\n"
        "from unirl.core.recipe.compose import compose\n"
        "plan = compose('sd3/flow-grpo', ['data.train=x'], catalog=Catalog.discover())\n"
        "heavy = {'torch', 'ray', 'diffusers', 'transformers', 'peft', 'numpy'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("batch", ["3", "{size: 3}"])
def test_values_for_a_part_that_another_one_replaces_are_left_out_and_said(
    toy_catalog: Catalog, toy_folder: Path, batch: str
) -> None:
    """Values of the recipe that chose the part; the command line or a derived recipe replaces it."""
    base = toy_folder / "recipes" / "toy" / "base.yaml"
    base.write_text(base.read_text(encoding="utf-8") + f"engine: {{batch: {batch}, url: x}}\n", encoding="utf-8")
    for name, overrides in (("toy/base", [DATA, "engine=far"]), ("toy/child", [DATA])):
        plan = compose(name, overrides, catalog=toy_catalog)
        assert plan.resolved["engine"] == {"use": "far", "url": "x"}
        assert [(one.path, one.file, one.part) for one in plan.left_out] == [
            ("engine.batch", "toy/base", "engine 'far'")
        ]
        assert plan.origins["engine.url"] == origin("recipe", "toy/base.yaml")
        assert set(plan.origins) == set(leaves(plan.resolved))
        assert str(plan.left_out[0]).endswith(" of toy/base.yaml is left out: engine 'far' has no such key.")


def test_nothing_is_left_out_of_the_recipe_that_chose_the_part_or_of_the_command_line(
    toy_catalog: Catalog, toy_folder: Path
) -> None:
    with pytest.raises(RecipeError, match=r"engine\.batch: FarEngineConfig has no such key"):
        compose("toy/base", [DATA, "engine=far", "engine.batch=3"], catalog=toy_catalog)
    child = toy_folder / "recipes" / "toy" / "child.yaml"
    before = child.read_text(encoding="utf-8")
    child.write_text(before + "engine: {batch: 3}\n", encoding="utf-8")
    with pytest.raises(RecipeError, match=r"engine\.batch: FarEngineConfig has no such key"):
        compose("toy/child", [DATA], catalog=toy_catalog)
    base = toy_folder / "recipes" / "toy" / "base.yaml"
    base.write_text(base.read_text(encoding="utf-8") + "engine: {bach: 3}\n", encoding="utf-8")
    with pytest.raises(RecipeError, match=r"engine\.bach: NearEngineConfig has no such key"):
        compose("toy/base", [DATA], catalog=toy_catalog)
