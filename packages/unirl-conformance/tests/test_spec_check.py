"""A spec that claims what it lacks is found out, one sentence for each claim."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
from unirl.conformance.spec_check import check_spec
from unirl.core.plugins.catalog import Catalog
from unirl.core.specs.capability import Cap, Needs
from unirl.core.specs.spec import (
    AlgorithmSpec,
    BackendSpec,
    EngineSpec,
    Miniature,
    ModelSpec,
    RewardExample,
    RewardSpec,
    Spec,
    TrackerSpec,
)

CODE = """
from dataclasses import dataclass
from unirl.core.specs.part_config import BackendConfig, PartConfig, RewardConfig

NUMBER = 3

@dataclass
class Config(PartConfig):
    clip_range: float = 0.1
    path: str = ""

@dataclass
class Backend(BackendConfig): ...

@dataclass
class Score(RewardConfig): ...

@dataclass
class NoDefault(PartConfig):
    def __post_init__(self):
        raise ValueError("path is needed")

@dataclass
class Foreign: ...

def build_model(config, *, device): ...
def build_tracker(config): ...
def build_any(config, **parts): ...
def tiny(folder, *, seed): ...
"""


@pytest.fixture(autouse=True)
def parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "spec_check_parts.py").write_text(CODE, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    import sys

    sys.modules.pop("spec_check_parts", None)


P = "spec_check_parts"
MODEL = ModelSpec(
    name="m",
    summary="A model of images.",
    build=f"{P}:build_model",
    config=f"{P}:Config",
    capabilities={Cap.LATENT_STAGE, Cap.LORA},
    tracks={"image": "latent"},
    trainable="net",
    lora_targets=("to_q",),
    tiny=Miniature(write=f"{P}:tiny"),
)
ALGORITHM = AlgorithmSpec(
    name="a",
    summary="An algorithm over latents.",
    build=f"{P}:build_any",
    config=f"{P}:Config",
    needs=Needs(track="latent", trajectory="window", log_probs="gaussian", stochastic=True),
    when={"clip_range": Needs(reference="policy")},
    clip_key="clip_range",
    paper="It is made up for this test alone.",
)
REWARD = RewardSpec(
    name="r",
    summary="A reward of images.",
    build=f"{P}:build_model",
    config=f"{P}:Score",
    scale="unbounded number of kB",
    media="image",
)
BACKEND = BackendSpec(name="b", summary="A backend for one process.", build=f"{P}:build_any", config=f"{P}:Backend")
ENGINE = EngineSpec(
    name="e",
    summary="An engine in process.",
    build=f"{P}:build_any",
    config=f"{P}:Config",
    capabilities={Cap.WEIGHTS_SHARED},
)
TRACKER = TrackerSpec(name="t", summary="A tracker of numbers.", build=f"{P}:build_tracker", config=f"{P}:Config")


@pytest.mark.parametrize(
    "spec", [MODEL, ALGORITHM, REWARD, BACKEND, ENGINE, TRACKER], ids=lambda spec: cast(Spec, spec).kind
)
def test_a_spec_that_keeps_what_it_says_passes(spec: Spec) -> None:
    assert check_spec(spec, Catalog.of({}).resolve) == []


@pytest.mark.parametrize(
    ("spec", "change", "says"),
    [
        (MODEL, {"build": f"{P}:gone"}, "build: .*it has no attribute 'gone'"),
        (MODEL, {"build": f"{P}:NUMBER"}, "build: .* is not a function but of type int"),
        (
            MODEL,
            {"build": f"{P}:build_tracker"},
            r"build: .* is called as build\(config, device=\).*unexpected keyword",
        ),
        (TRACKER, {"build": f"{P}:build_model"}, r"is called as build\(config\).*missing a required .*'device'"),
        (
            MODEL,
            {"config": f"{P}:Foreign"},
            "config: .* is not a dataclass that inherits unirl.core.specs.part_config.PartConfig",
        ),
        (MODEL, {"config": f"{P}:build_model"}, "config: .* is not a dataclass"),
        (REWARD, {"config": f"{P}:Config"}, "inherits unirl.core.specs.part_config.RewardConfig"),
        (MODEL, {"config": "nowhere:Config"}, "config: .*importing it raised ModuleNotFoundError"),
        (MODEL, {"config": f"{P}:NoDefault"}, "cannot be created from its defaults: ValueError: path is needed"),
        (MODEL, {"tiny": Miniature(write=f"{P}:gone")}, "tiny.write: .*it has no attribute 'gone'"),
        (MODEL, {"tiny": Miniature(write=f"{P}:build_tracker")}, r"tiny.write: .* is called as write\(folder, seed=\)"),
        (
            MODEL,
            {"lora_targets": ("to_q",), "tiny": Miniature(write=f"{P}:tiny", idle_layers=("blocks.1.auto_q",))},
            "tiny.idle_layers: 'blocks.1.auto_q' is not a layer that `lora_targets` match",
        ),
        (
            MODEL,
            {"capabilities": {"latent-stge"}},
            "'latent-stge' is not a Cap; did you mean 'latent-stage'",
        ),
        (
            MODEL,
            {"capabilities": set()},
            "tracks: the model has latent tracks, and does not state the capability latent-stage",
        ),
        (
            MODEL,
            {"capabilities": MODEL.capabilities | {Cap.TEXT_STAGE}},
            "has no text track, and states the capability text-stage",
        ),
        (BACKEND, {"capabilities": {Cap.SLEEP}}, "capabilities.sleep: a backend has no such capability"),
        (MODEL, {"lora_targets": ()}, "lora_targets: empty, but the capability lora is claimed"),
        (MODEL, {"restricts": {"image"}}, "restricts: 'image' is not a text track of the model"),
        (MODEL, {"token_options": {"text"}}, "token_options: 'text' is not a text track of the model"),
        (
            MODEL,
            {"tracks": {"text": "text"}, "token_options": {"text"}},
            "token_options: track 'text' has no `options` that its logits could depend on",
        ),
        (MODEL, {"bridged_options": {"omni"}}, "bridged_options: the model has no bridge to 'omni'"),
        (
            MODEL,
            {"bridged_options": {"omni"}, "bridges": {"omni": f"{P}:tiny"}},
            "bridged_options: got 'omni', but no latent track has `options`",
        ),
        (MODEL, {"bridged_texts": {"omni"}}, "bridged_texts: the model has no bridge to 'omni'"),
        (
            MODEL,
            {"bridged_texts": {"omni"}, "bridges": {"omni": f"{P}:tiny"}},
            "bridged_texts: got 'omni', but the model has no text track",
        ),
        (MODEL, {"summary": "Notes"}, "summary: got 'Notes', expected one line"),
        (MODEL, {"summary": "A model\nof images"}, "summary: got .*, expected one line"),
        (REWARD, {"scale": "0 to"}, "scale: got '0 to', expected the meaning of the score"),
        (REWARD, {"scale": "a size in kB"}, r"range: \(-inf, inf\) has no bound"),
        (ALGORITHM, {"paper": "see below"}, "paper: got 'see below', expected an arXiv number"),
        (ENGINE, {"reads_weights": False}, "reads_weights: False, but the capability weights-shared says"),
        (BACKEND, {"trial": {"lrr": 1.0}}, "trial: .* has no key 'lrr'; did you mean 'lr'"),
        (BACKEND, {"enabled_by": {Cap.EMA: {"average.kind": "x"}}}, r"enabled_by\[ema\]: .* has no key 'average'"),
        (BACKEND, {"config": f"{P}:Config"}, "inherits unirl.core.specs.part_config.BackendConfig"),
        (REWARD, {"range": (1.0, 0.0)}, "range: .* is empty"),
        (REWARD, {"examples": ()}, "examples: none"),
        (REWARD, {"examples": (RewardExample(draw=f"{P}:gone"),)}, r"examples\[0\].draw: .*no attribute 'gone'"),
        (
            REWARD,
            {"examples": (RewardExample(draw=f"{P}:tiny"),)},
            r"examples\[0\].draw: .* is called as draw\(height=, width=, seed=\)",
        ),
        (REWARD, {"metadata": ("answer",)}, r"examples\[0\].metadata: 'answer' is missing"),
        (MODEL, {"path_key": "folder"}, "path_key: .* has no key 'folder'"),
        (MODEL, {"bridges": {"far": f"{P}:no_such"}}, "bridges\\[.far.\\]: .*no_such"),
        (MODEL, {"adapter_layouts": {"comfy": f"{P}:no_such"}}, "adapter_layouts\\[.comfy.\\]: .*no_such"),
        (MODEL, {"parity": f"{P}:tiny"}, r"parity: .* is called as parity\(folder, prompts=, sampling=, initial=\)"),
        (
            MODEL,
            {"inputs": {"image": {"source": "needs"}}, "parity": f"{P}:tiny"},
            r"tiny.media: empty, but the model needs media.*\n.*called as parity\(folder, inputs=, sampling=, initial=\)",
        ),
        (ALGORITHM, {"reference": f"{P}:gone"}, "reference: .*it has no attribute 'gone'"),
        (ALGORITHM, {"clip_key": "clip"}, "clip_key: .* has no key 'clip'"),
        (ALGORITHM, {"stateful": {"kl_targt": 1.0}}, "stateful: .* has no key 'kl_targt'"),
        (ALGORITHM, {"when": {"kl": Needs()}}, "when: .* has no key 'kl'"),
        (ALGORITHM, {"needs": Needs(track=cast(Any, "latnt"))}, "needs.track: 'latnt' is not one of latent, text, any"),
        (ALGORITHM, {"needs": Needs(log_probs="gaussian", trajectory="window")}, "stochastic is False"),
        (
            ALGORITHM,
            {"needs": Needs(track="text", log_probs="gaussian", stochastic=True)},
            "needs: got gaussian log-probs for a text track",
        ),
        (
            ALGORITHM,
            {"needs": Needs(track="latent", log_probs="gaussian", stochastic=True)},
            "log-probs of a latent track need its trajectory",
        ),
    ],
)
def test_a_spec_that_claims_what_it_lacks_is_found_out(spec: Spec, change: dict[str, Any], says: str) -> None:
    problems = check_spec(dataclasses.replace(spec, **change), Catalog.of({}).resolve)
    with pytest.raises(AssertionError, match=says):
        raise AssertionError("\n".join(problems))
    assert not any("MISSING" in problem for problem in problems)
