"""A worker loads the parts of a model that it uses, and no number of the run changes."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from safetensors import safe_open
from small_runs import SMALL, SMALL_DRAFT, steps, tensors
from unirl.core.plugins.catalog import Catalog
from unirl.core.plugins.files import plugin_files
from unirl.core.recipe.compose import compose
from unirl.loop.run import train
from unirl.quickstart import checkpoint_path

pytestmark = [pytest.mark.slow, pytest.mark.nightly]

PLUGIN = """
import dataclasses, json
from pathlib import Path

import ray
from unirl.core.plugins.hookspec import hookimpl
from unirl.models.sd3.plugin import SPEC

def build(config, **context):
    from unirl.models.sd3.model import build

    model = build(config, **context)
    modules = {name: part for name, part in model.pipeline.components.items() if hasattr(part, "parameters")}
    loaded = {}
    for name, module in modules.items():
        # Tied weights once; position tables are buffers that a checkpoint has.
        tensors = {id(tensor): tensor for tensor in module.state_dict(keep_vars=True).values()}
        loaded[name] = sum(tensor.numel() for tensor in tensors.values() if not tensor.is_meta)
    *_, worker = ray.get_runtime_context().get_actor_name().split("/")
    Path(FOLDER, worker + ".json").write_text(json.dumps(loaded))
    return model

@hookimpl
def unirl_models():
    return [dataclasses.replace(SPEC, name="counted", build=f"{__name__}:build", optional_parts=PARTS)]
"""
"""sd3, writing down how many numbers each component of each process loaded."""
SEPARATE = ("launcher=ray", "launcher.placement=separate", "launcher.rollout_workers=1", "launcher.reward_workers=1")


def counted_run(folder: Path, *words: str, parts: tuple[str, ...], recipe: str = "quickstart") -> Path:
    """The folder of a run whose model leaves out these parts. Each worker's counts are in `counts` beside it."""
    (counts := folder / "counts").mkdir(parents=True)
    (plugins := folder / "plugins").mkdir()
    name = f"counted_{folder.name}"
    (plugins / f"{name}.py").write_text(PLUGIN.replace("FOLDER", repr(str(counts))).replace("PARTS", repr(parts)))
    catalog = Catalog.discover(files=plugin_files(plugins))
    words = (
        *words,
        "model=counted",
        "run.max_steps=2",
        "run.save_every=2",
        "run.keep=1",
        *SEPARATE,
        f"run.dir={folder / 'run'}",
    )
    result = train(compose(recipe, words, catalog=catalog), catalog=catalog, overrides=words)
    assert result.status == "done"
    return result.folder


def counts(run: Path, worker: str) -> dict[str, int]:
    return json.loads((run.parent / "counts" / f"{worker}.json").read_text())


def stored() -> dict[str, int]:
    """Numbers in each component of the quickstart's checkpoint, as its files have them."""
    result: dict[str, int] = {}
    for path in Path(checkpoint_path()).glob("*/*.safetensors"):
        with safe_open(path, "pt") as file:
            sizes = [math.prod(file.get_slice(name).get_shape()) for name in file.keys()]  # noqa: SIM118
        result[path.parent.name] = result.get(path.parent.name, 0) + sum(sizes)
    return result


def test_a_train_rank_loads_the_transformer_alone_and_trains_the_same(tmp_path: Path, ray_here: None) -> None:
    before = counted_run(tmp_path / "whole", *SMALL, parts=())
    after = counted_run(tmp_path / "parts", *SMALL, parts=("encode", "decode"))
    whole = stored()
    assert {"transformer", "vae", "text_encoder"} <= whole.keys()
    assert counts(before, "train-0") == whole
    assert counts(after, "train-0") == dict.fromkeys(whole, 0) | {"transformer": whole["transformer"]}
    # The model's own engine encodes and decodes.
    assert counts(after, "rollout-0") == whole
    first, second = steps(before), steps(after)
    for step in (1, 2):
        for key in ("loss", "reward_mean", "ratio_max_dev_first", "logp_mismatch_max"):
            assert first[step][key] == second[step][key], (step, key)
    expected, result = tensors(before, 2), tensors(after, 2)
    assert expected.keys() == result.keys()
    for name, value in expected.items():
        assert bool((result[name] == value).all() if hasattr(value, "shape") else result[name] == value), name


def test_a_loss_of_media_has_the_vae(tmp_path: Path, ray_here: None) -> None:
    run = counted_run(tmp_path / "draft", *SMALL_DRAFT, parts=("encode", "decode"), recipe="quickstart-draft")
    whole = stored()
    expected = {name: size if name in ("transformer", "vae") else 0 for name, size in whole.items()}
    assert counts(run, "train-0") == expected
