"""Every engine that runs in a separate environment, before one starts."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
import time
from collections.abc import Mapping
from ipaddress import ip_address
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from external_engines.listening import Listening
from external_engines.locks import Pin, read_lock
from source_imports import imports
from unirl.core.errors import RecipeError, RunFailed
from unirl.core.match.parts import match_pair
from unirl.core.plugins.catalog import Catalog
from unirl.core.roles import Model
from unirl.core.specs.capability import Cap
from unirl.core.specs.spec import EngineSpec, ModelSpec
from unirl.engine_host.process import SERVING
from unirl.engine_host.source_files import source_files
from unirl.models.qwen3 import tiny as tiny_qwen3
from unirl.models.qwen3.config import Qwen3Config
from unirl.models.qwen3.model import build as build_qwen3
from unirl.models.sd3 import tiny as tiny_sd3
from unirl.models.sd3.config import Sd3Config
from unirl.models.sd3.model import build as build_sd3

CATALOG = Catalog.discover()
ENGINES = {spec.name: spec for spec in CATALOG.specs("engine") if isinstance(spec, EngineSpec) and spec.environment}
MODELS = [spec for spec in CATALOG.specs("model") if isinstance(spec, ModelSpec)]
BRIDGED = sorted(name for name, spec in ENGINES.items() if spec.needs_bridge)
each_engine = pytest.mark.parametrize("name", sorted(ENGINES))
each_accel = pytest.mark.parametrize("accel", ["cpu", "cuda"])
each_release = pytest.mark.parametrize(
    ("name", "release"), [(name, release) for name in sorted(ENGINES) for release in ("", *ENGINES[name].releases)]
)


def environment_of(name: str) -> ModuleType:
    """The module with an engine's `ENVIRONMENT` and `PRODUCT`."""
    return importlib.import_module(ENGINES[name].environment.partition(":")[0])


def locked(name: str, accel: str, release: str = "") -> Mapping[str, Pin]:
    return read_lock(environment_of(name).ENVIRONMENT.of(release).lock(accel).decode())


@each_accel
@each_release
def test_a_lock_pins_and_hashes_every_line_and_holds_a_version_that_was_tried(
    name: str, release: str, accel: str
) -> None:
    product, pins = environment_of(name).PRODUCT, locked(name, accel, release)
    dist = product.title.lower()
    # The build of vLLM for CPUs has another name.
    result = pins[f"{dist}-cpu" if f"{dist}-cpu" in pins else dist].version
    product.check_version(result)
    assert not release or result == release
    assert {"torch", "safetensors"} <= pins.keys()


@each_engine
def test_the_releases_that_a_spec_names_are_those_that_there_are_locks_for(name: str) -> None:
    assert set(ENGINES[name].releases) == environment_of(name).ENVIRONMENT.earlier.keys()


@each_engine
def test_a_version_that_was_not_tried_is_refused_with_the_range(name: str) -> None:
    product = environment_of(name).PRODUCT
    for result in ("0.1", "99.0"):
        reply = f"has {product.title} {result}; this engine was tested with {product.tested}"
        with pytest.raises(RunFailed, match=re.escape(reply)):
            product.check_version(result)


MODULE_OF = {"pillow": "PIL"}
"""Dist -> its module, where that has another name."""


@each_engine
def test_the_source_that_goes_along_imports_nothing_that_stays_behind(name: str) -> None:
    """Neither do the bridges of all models, nor functions that are called only there."""
    bridges = [spec.bridges[name].partition(":")[0] for spec in MODELS if name in spec.bridges]
    there = {*sys.stdlib_module_names, *(MODULE_OF.get(dist, dist.replace("-", "_")) for dist in locked(name, "cuda"))}
    for module, file in source_files([SERVING, *environment_of(name).ENVIRONMENT.modules, *bridges]).items():
        for imported in imports(file):
            assert imported.partition(".")[0] in {*there, "unirl"}, f"{module} imports {imported}"


def model_for(engine: EngineSpec, folder: Path, **settings: Any) -> Model:
    """A miniature of the kind that an engine generates with."""
    if Cap.LATENT_ROLLOUT not in engine.capabilities:
        tiny_qwen3.write(folder, seed=0)
        return build_qwen3(Qwen3Config(path=str(folder)), device="cpu")
    tiny_sd3.write(folder, seed=0, **settings)
    return build_sd3(Sd3Config(path=str(folder)), device="cpu")


def built(engine: EngineSpec, *, model: Model, **settings: Any) -> Any:
    return CATALOG.resolve(engine.build)(CATALOG.resolve(engine.config)(**settings), model=model, device="cpu")


def test_the_watch_over_listening_sockets_sees_every_interface_of_a_child() -> None:
    listener = "import socket, sys, time; s = socket.create_server((sys.argv[1], 0)); print(flush=True); time.sleep(60)"
    for address, is_open in (("127.0.0.1", False), ("0.0.0.0", True)):
        watch = Listening()
        with (
            subprocess.Popen([sys.executable, "-IS", "-c", listener, address], stdout=subprocess.PIPE) as child,
            watch.watched(),
        ):
            assert child.stdout is not None
            child.stdout.readline()
            time.sleep(0.5)
            child.kill()
        assert watch.beyond_loopback() == ([address] if is_open else [])
        assert watch.addresses == {ip_address(address)}


@each_engine
def test_without_its_environment_it_says_which_command_makes_it(name: str, tmp_path: Path) -> None:
    model = model_for(ENGINES[name], tmp_path / "tiny")
    with pytest.raises(RunFailed, match=rf"unirl engine-env {name} --accel cpu --dir {tmp_path}"):
        built(ENGINES[name], model=model, env_dir=str(tmp_path))


@pytest.mark.parametrize("name", BRIDGED)
def test_a_model_that_it_does_not_compute_is_refused(name: str, tmp_path: Path) -> None:
    model = model_for(ENGINES[name], tmp_path / "small", with_t5=False)
    with pytest.raises(RecipeError, match="encodes prompts of Stable Diffusion 3 with T5, but the model was loaded"):
        built(ENGINES[name], model=model)


@pytest.mark.parametrize("name", BRIDGED)
def test_models_without_a_bridge_are_refused(name: str) -> None:
    """Every latent model that is installed either brings one or is refused by name."""
    latent = [spec for spec in MODELS if "latent" in spec.tracks.values()]
    for spec in latent:
        verdict = match_pair(model=spec, engine=ENGINES[name])
        assert verdict.accepted is (name in spec.bridges)
        # Of a model that also writes, an engine of images lacks the text track first.
        lacks_texts = "text" in spec.tracks.values() and Cap.TEXT_ROLLOUT not in ENGINES[name].capabilities
        said = f"track of model {spec.name!r}" if lacks_texts else f"model {spec.name!r} has none for it"
        assert verdict.accepted or said in str(verdict.reasons[0])
    assert any(name in spec.bridges for spec in latent)
