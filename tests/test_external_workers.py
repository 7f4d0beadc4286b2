"""A worker that generates on an external engine holds no weights that train: the engine has its own."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import ray_clusters
import torch
from external_engines.environments import make
from external_engines.texts import ROUNDING
from unirl.core.plugins.catalog import Catalog
from unirl.core.plugins.files import plugin_files
from unirl.core.recipe.compose import compose
from unirl.core.roles import Model, WeightReceipt, WeightUpdate
from unirl.core.specs.plan import Plan, Stage
from unirl.core.types.event import Event
from unirl.core.types.weights import MadeTensors, checksum
from unirl.engines.trainside.plugin import SPEC as TRAINSIDE
from unirl.loop.build import build_parts
from unirl.loop.parts import NoEngine
from unirl.loop.run import train
from writer_and_painter import RECIPE, composed, saved_weights


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    file = tmp_path / "writer.yaml"
    file.write_text(RECIPE, encoding="utf-8")
    return file


class Elsewhere(NoEngine):
    """Takes weights as an external engine does, one by one, and reads none of its model."""

    def __init__(self, model: Model) -> None:
        self.dtypes = {name: param.dtype for name, param in model.trainable.named_parameters()}
        self.taken: list[WeightUpdate] = []

    def load_weights(self, update: WeightUpdate) -> WeightReceipt:
        self.taken.append(update)
        held = {name: update.tensors[name] for name in sorted(update.tensors)}
        size = sum(tensor.nbytes for tensor in held.values())
        return WeightReceipt(version=update.version, checksum=checksum(held), num_tensors=len(held), size_bytes=size)


def build_elsewhere(config: Any, *, model: Model, device: Any) -> Elsewhere:
    return Elsewhere(model)


def elsewhere(plan: Plan) -> Plan:
    """The plan with every stage on such an engine."""
    from unirl.core.specs.capability import Cap

    capabilities = (TRAINSIDE.capabilities - {Cap.WEIGHTS_SHARED}) | {Cap.WEIGHTS_FULL}
    spec = dataclasses.replace(
        TRAINSIDE, name="elsewhere", build=f"{__name__}:build_elsewhere", capabilities=capabilities, reads_weights=False
    )

    def moved(stage: Stage) -> Stage:
        return dataclasses.replace(stage, engine=dataclasses.replace(stage.engine, spec=spec))

    return plan.with_stages(moved)


def held(model: Model) -> int:
    """Bytes of `trainable` that are in memory."""
    return sum(param.nbytes for param in model.trainable.parameters() if not param.is_meta)


@pytest.mark.parametrize(
    ("words", "dtype"),
    [
        # A backend keeps what it trains in fp32, and an adapted model in the dtype it was loaded in.
        (["backend.writer.trains=full", "backend.writer.mixed_precision=bf16"], torch.float32),
        (["backend.writer.trains=lora"], torch.bfloat16),
    ],
    ids=["full", "lora"],
)
def test_a_worker_of_external_engines_holds_names_and_dtypes_alone(
    recipe: Path, words: list[str], dtype: torch.dtype
) -> None:
    plan = elsewhere(composed(recipe, "model.writer.dtype=bfloat16", *words))
    # The launcher's way to build a worker that generates, with neither losses nor rewards.
    parts = build_parts(plan, catalog=Catalog.discover(), rewards="none")
    assert parts.backends == {}
    assert {name: held(model) for name, model in parts.models.items()} == {"writer": 0, "painter": 0}
    writer: Any = parts.engines["rewrite"]
    assert set(writer.dtypes.values()) == {dtype}
    assert writer.taken == [], "what trains comes with the first sync"

    # The frozen painter's weights pass through, read from the checkpoint one by one.
    painter: Any = parts.engines["image"]
    (update,) = painter.taken
    assert isinstance(update.tensors, MadeTensors)
    whole = build_parts(composed(recipe), catalog=Catalog.discover()).models["painter"].trainable
    expected = dict(whole.named_parameters())
    assert update.tensors.keys() == expected.keys()
    assert update.checksum == checksum(expected)


def test_a_train_rank_that_does_not_generate_leaves_out_the_frozen_model(recipe: Path) -> None:
    parts = build_parts(composed(recipe), catalog=Catalog.discover(), rewards="backpropagated", with_engine=False)
    assert parts.backends.keys() == {"writer"}
    # The tiny writer has weights, and trains them in fp32.
    assert held(parts.models["writer"]) == 4 * sum(p.numel() for p in parts.models["writer"].trainable.parameters()) > 0
    assert held(parts.models["painter"]) == 0


def test_a_process_that_generates_and_trains_holds_what_it_trains(recipe: Path) -> None:
    parts = build_parts(elsewhere(composed(recipe)), catalog=Catalog.discover())
    assert parts.backends.keys() == {"writer"} and held(parts.models["writer"]) > 0
    assert held(parts.models["painter"]) == 0


def test_reference_workers_hold_the_models_that_are_asked_for_alone(recipe: Path) -> None:
    for kl_coef, expected in ((0.1, {"writer"}), (0.0, set[str]())):
        plan = composed(recipe, f"algorithm.rewrite.kl_coef={kl_coef}", "backend.writer.reference_copy=true")
        parts = build_parts(plan, catalog=Catalog.discover(), rewards="none", with_engine=False)
        assert {name for name, model in parts.models.items() if held(model)} == expected
        assert parts.backends.keys() == expected


# On Ray, with the engines themselves.

PLUGIN = """
import dataclasses, gc, json, os
from pathlib import Path

import torch
from unirl.core.plugins.hookspec import hookimpl
from unirl.engines.vllm.plugin import SPEC as VLLM
from unirl.engines.vllm_omni.plugin import SPEC as OMNI
from unirl.models.sd3.plugin import SPEC as SD3

def counted(engine, model):
    load = engine.load_weights

    def load_weights(update):
        receipt = load(update)
        alive = gc.get_objects()
        note = {
            "engine": type(engine).__name__,
            "version": receipt.version,
            "checksum": receipt.checksum,
            "kind": update.kind,
            "trainable": sum(param.nbytes for param in model.trainable.parameters() if not param.is_meta),
            "parameters": sum(
                one.nbytes for one in alive if type(one) is torch.nn.Parameter and not one.is_meta
            ),
            "optimizers": sum(isinstance(one, torch.optim.Optimizer) for one in alive),
        }
        with Path(FOLDER, f"{os.getpid()}.jsonl").open("a") as file:
            print(json.dumps(note), file=file)
        return receipt

    engine.load_weights = load_weights
    return engine

def vllm(config, *, model, device):
    from unirl.engines.vllm.engine import build

    return counted(build(config, model=model, device=device), model)

def omni(config, *, model, device):
    from unirl.engines.vllm_omni.engine import build

    return counted(build(config, model=model, device=device), model)

@hookimpl
def unirl_engines():
    return [
        dataclasses.replace(VLLM, name="counted-vllm", build=f"{__name__}:vllm", reads_weights=READS),
        dataclasses.replace(OMNI, name="counted-omni", build=f"{__name__}:omni", reads_weights=READS),
    ]

@hookimpl
def unirl_models():
    bridges = {**SD3.bridges, "counted-omni": SD3.bridges["vllm-omni"]}
    return [dataclasses.replace(SD3, name="counted-sd3", bridges=bridges)]
"""
"""Both engines, writing down what their process holds after each weight update."""
SETTINGS = (
    "run.max_steps=2",
    "run.save_every=1",
    # Weights of another version are then off by far more than rounding.
    "backend.writer.lr=1e-2",
    # No two images share it, so that every step trains.
    "+reward@reward.light=brightness",
    "reward.light.weight=0.1",
    "engine@engine.rewrite=counted-vllm",
    "engine.rewrite.kv_cache_mb=64",
    "engine.rewrite.max_num_seqs=16",
    "engine@engine.image=counted-omni",
    "model@model.painter=counted-sd3",
)
RAY = (
    "launcher=ray",
    "launcher.placement=separate",
    "launcher.cpus=0.1",
    "launcher.reward_cpus=0.1",
    "+launcher.stage_workers.image=1",
)


@pytest.fixture(scope="module")
def ray_here() -> Iterator[None]:
    with ray_clusters.joined():
        yield


def counted_run(recipe: Path, folder: Path, *words: str, reads: bool = False) -> tuple[Mapping[int, Any], list[Any]]:
    """Metrics of each step, and what was noted after each weight update of a worker."""
    (plugins := folder / "plugins").mkdir(parents=True)
    (notes := folder / "notes").mkdir()
    name = f"counted_{folder.name}"
    (plugins / f"{name}.py").write_text(PLUGIN.replace("FOLDER", repr(str(notes))).replace("READS", str(reads)))
    catalog = Catalog.discover(files=plugin_files(plugins))
    plan = compose(str(recipe), [*SETTINGS, *RAY, *words, f"run.dir={folder / 'run'}"], catalog=catalog)
    steps: dict[int, Any] = {}

    def note(event: Event) -> None:
        if event.kind == "step":
            steps[event.step] = event.data["metrics"]

    train(plan, catalog=catalog, listeners=[note])
    lines = [line for file in sorted(notes.iterdir()) for line in file.read_text().splitlines()]
    return steps, [json.loads(line) for line in lines]


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_workers_of_external_engines_hold_no_trained_weights_and_sample_with_those_they_are_sent(
    recipe: Path, tmp_path: Path, ray_here: None
) -> None:
    make("vllm")
    make("vllm-omni")
    steps, notes = counted_run(recipe, tmp_path / "without")
    whole = build_parts(composed(recipe), catalog=Catalog.discover()).models
    encoders = [part for name, part in whole["painter"].pipeline.components.items() if "text_encoder" in name]  # type: ignore[attr-defined]
    # Embeddings of CLIP's and T5's are tied: parameters() has each once.
    encoded = sum(param.nbytes for part in encoders for param in part.parameters())
    first = checksum(saved_weights(composed(recipe), tmp_path / "without" / "run", step=1)["writer"])
    start = {name: checksum(dict(model.trainable.named_parameters())) for name, model in whole.items()}
    writer = [note for note in notes if note["engine"] == "ExternalTextEngine"]
    painter = [note for note in notes if note["engine"] == "ExternalLatentEngine"]
    assert [(note["version"], note["checksum"]) for note in writer] == [(0, start["writer"]), (1, first)]
    assert [(note["version"], note["checksum"]) for note in painter] == [(0, start["painter"])]
    for note, parameters in ((writer[0], 0), (writer[1], 0), (painter[0], encoded)):
        assert (note["trainable"], note["parameters"], note["optimizers"]) == (0, parameters, 0)
    for step in (1, 2):
        assert steps[step]["rewrite/updates"] == 1
        assert steps[step]["rewrite/logp_mismatch_max"] < ROUNDING
