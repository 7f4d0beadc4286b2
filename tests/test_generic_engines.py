"""External engines and `model=diffusers`: refused in favour of the dedicated model of the folder, whose bridge samples
the same."""

from __future__ import annotations

import dataclasses
import json
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from external_engines.image_models import started
from external_engines.latents import ROUNDING, adapter, asking, assert_same, trainside
from unirl.conformance.doubles.weight_updates import full_update, perturb, with_adapter
from unirl.core.match.match import match
from unirl.core.plugins.catalog import Catalog
from unirl.core.plugins.registry import known_parts
from unirl.core.recipe.compose import compose
from unirl.core.roles import DiffusionModel
from unirl.core.specs.facts import names_in
from unirl.core.specs.spec import EngineSpec, ModelSpec
from unirl.core.types.request import Request
from unirl.engine_host.latent_engine import ExternalLatentEngine
from unirl.models.diffusers.config import DiffusersConfig
from unirl.models.diffusers.model import build

CATALOG = Catalog.discover()
ENGINES = sorted(spec.name for spec in CATALOG.specs("engine") if isinstance(spec, EngineSpec) and spec.needs_bridge)
DEDICATED = [spec for spec in CATALOG.specs("model") if isinstance(spec, ModelSpec) and spec.bridges and spec.reference]
"""Of pipelines of diffusers; other checkpoints are none of model=diffusers."""
PROMPTS = ("a red ring", "a blue square on the left of two green discs")
"""Prompts of different lengths."""
GUIDED: dict[str, Any] = {"guidance_mode": "two-pass", "guidance_scale": 3.5, "negative_prompt": "blurred, in grey"}


def refusals(engine_name: str, path: Path | str) -> list[str]:
    """Reasons against an engine for model=diffusers."""
    words = ["data.train=prompts.txt", f"engine={engine_name}", f"model.path={path}"]
    plan = compose("diffusers/flow-grpo", words, catalog=CATALOG)
    return [reason.text for reason in match(plan, catalog=CATALOG).reasons if reason.key == "engine"]


def change_index(folder: Path, **values: object) -> None:
    file = folder / "model_index.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


@pytest.mark.parametrize("spec", DEDICATED, ids=lambda spec: spec.name)
def test_an_engine_is_refused_in_one_sentence_that_names_the_dedicated_model_of_the_folder(
    spec: ModelSpec, tmp_path: Path
) -> None:
    """Found by `model_index.json`, as in the model's own miniature: for every model with a bridge to any engine."""
    assert spec.tiny is not None
    CATALOG.resolve(spec.tiny.write)(tmp_path, seed=0)
    part = known_parts().part("model", spec.name)
    assert part is not None
    for engine_name in ENGINES:
        (reason,) = refusals(engine_name, tmp_path)
        assert f"is a checkpoint of '{spec.reference.removeprefix('diffusers.')}" in reason
        has_bridge = engine_name in spec.bridges
        assert (f"Choose model={spec.name} (`pip install {part.dist}`)" in reason) is has_bridge
        assert has_bridge or reason.endswith("for which no model of UniRL has a bridge. Choose engine=trainside.")
    assert refusals("trainside", tmp_path) == []


@pytest.mark.parametrize("spec", DEDICATED, ids=lambda spec: spec.name)
def test_the_readme_names_every_dedicated_model_with_its_engines(spec: ModelSpec) -> None:
    readme = Path(__file__).parents[1] / "plugins" / "models" / "diffusers" / "README.md"
    start = f"| {spec.reference.removeprefix('diffusers.')} | `"
    (row,) = [line for line in readme.read_text().splitlines() if line.startswith(start)]
    _, _, models, *cells = (cell.strip() for cell in row.split("|"))
    assert f"`{spec.name}`" in models
    assert cells[:2] == ["yes" if name in spec.bridges else "" for name in ("vllm-omni", "sglang")]


@pytest.mark.parametrize("engine_name", ENGINES)
def test_where_no_dedicated_model_has_a_bridge_trainside_is_named(engine_name: str, tmp_path: Path) -> None:
    (tmp_path / "model_index.json").write_text("{}")
    for index in (
        {"_class_name": "SanaPipeline"},
        # Wan 2.2 of one transformer, which model=wan21 refuses.
        {"_class_name": "WanPipeline", "expand_timesteps": True, "transformer_2": [None, None]},
    ):
        change_index(tmp_path, **index)
        (reason,) = refusals(engine_name, tmp_path)
        assert f"is a checkpoint of '{index['_class_name']}" in reason and reason.endswith(
            "for which no model of UniRL has a bridge. Choose engine=trainside."
        )


@pytest.mark.parametrize("engine_name", ENGINES)
def test_for_a_hub_id_every_pipeline_with_a_bridge_is_named(engine_name: str) -> None:
    (reason,) = refusals(engine_name, "acme/some-checkpoint")
    for spec in DEDICATED:
        assert (f"model={spec.name} for {spec.reference.removeprefix('diffusers.')}" in reason) is (
            engine_name in spec.bridges
        )
    assert reason.endswith("for all others engine=trainside.")


def check(engine: ExternalLatentEngine, generic: DiffusionModel, request: Request) -> None:
    """The same latents, log-probs and images, each to the bound by which engines equal the dedicated model. Conditions
    have other names and layouts in each model."""
    tracks = [engine.generate(request), trainside(generic, request)]
    assert_same(*(dataclasses.replace(track, conditions={}) for track in tracks))
    one, other = (track.latent.log_probs for track in tracks)
    assert one is not None and other is not None
    assert float((one - other).abs().max()) < ROUNDING


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize(("name", "engine_name"), [("z-image", "vllm-omni"), ("flux2-klein", "sglang")])
def test_an_engine_with_a_dedicated_models_bridge_samples_as_the_generic_model_does(
    name: str, engine_name: str, tmp_path: Path
) -> None:
    """From text, or from source images and text; with all weights, and with an adapter, of the generic model."""
    package = f"unirl.models.{name.replace('-', '_')}"
    folder = tmp_path / "tiny"
    tiny = import_module(f"{package}.tiny")
    tiny.write(folder, seed=0)
    spec = import_module(f"{package}.plugin").SPEC
    module, _, cls = spec.config.partition(":")
    config = getattr(import_module(module), cls)(path=str(folder))
    dedicated: Any = import_module(f"{package}.model").build(config, device="cpu")
    generic = build(DiffusersConfig(path=str(folder)), device="cpu")
    media = [tiny.media(tmp_path, number=number) if spec.tiny.media else () for number in range(len(PROMPTS))]
    ask = asking(generic, prompts=PROMPTS, media=lambda n: media[n], height=32, width=48, max_sequence_length=64)
    with started(engine_name, dedicated) as engine:
        perturb(generic, seed=1)
        engine.load_weights(full_update(generic, version=1))
        request = ask(engine)
        check(engine, generic, request)
        check(engine, generic, ask(engine, **GUIDED))
        before = trainside(generic, request).latent.final
        update, added = adapter(generic, targets=names_in(generic.spec.lora_targets, generic.trainable), version=2)
        engine.load_weights(update)
        with_adapter(generic, added)
        check(engine, generic, ask(engine))
        after = trainside(generic, request).latent.final
        assert float((after - before).abs().max()) > 100 * ROUNDING, "the check does not see an adapter"
