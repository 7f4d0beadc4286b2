"""What is decided before SGLang starts: settings, versions, the environment. None of this needs SGLang."""

from __future__ import annotations

import ast
import json
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from unirl.core.bridges import import_bridge
from unirl.core.catalog import Catalog
from unirl.core.config import LatentSamplingConfig
from unirl.core.errors import RecipeError, RunFailed
from unirl.core.match import match, match_pair
from unirl.core.recipe import compose
from unirl.core.spec import EngineSpec, ModelSpec
from unirl.engines.sglang.bridge import Bridge
from unirl.engines.sglang.config import SglangConfig
from unirl.engines.sglang.engine import build
from unirl.engines.sglang.environment import ENVIRONMENT, PRODUCT
from unirl.engines.sglang.plugin import SPEC
from unirl.engines.sglang.settings import server_arguments
from unirl.models.sd3 import tiny
from unirl.models.sd3.bridges.sglang import BRIDGE
from unirl.models.sd3.config import Sd3Config
from unirl.models.sd3.model import Sd3Model
from unirl.models.sd3.model import build as build_model
from unirl.runtime.engine_host.diffusers_folder import checkpoint_folder

IN_THE_LOCK = {"numpy", "safetensors", "sglang", "torch"}
"""What the carried modules import besides themselves and the standard library."""


def arguments(**settings: Any) -> Mapping[str, Any]:
    return server_arguments(
        SglangConfig(**settings), folder=Path("/there"), dtype=torch.bfloat16, bridge=BRIDGE, on_cpu=False
    )


def bridge_of(model: Sd3Model) -> Bridge:
    return import_bridge(model.spec, SPEC)


def test_a_version_that_was_not_tried_is_refused_with_the_range() -> None:
    PRODUCT.check_version("0.5.23")
    for found in ("0.5.22", "0.5.24"):
        with pytest.raises(RunFailed, match=rf"holds SGLang {found}; this engine was tried with <0.5.24,>=0.5.23"):
            PRODUCT.check_version(found)


@pytest.mark.parametrize("accel", ["cpu", "cuda"])
def test_every_line_of_a_lock_is_pinned_and_hashed(accel: str) -> None:
    lines = ENVIRONMENT.lock(accel).decode().replace("\\\n", " ").splitlines()
    requirements = [line.split() for line in lines if line and not line.startswith("#")]
    names = {words[0].partition("==")[0] for words in requirements}
    assert {"sglang", "torch", "diffusers", "cache-dit"} <= names
    for words in requirements:
        assert "==" in words[0], words[0]
        assert any(word.startswith("--hash=sha256:") for word in words), words[0]


def test_the_source_that_goes_along_imports_nothing_that_stays_behind() -> None:
    """Also what a module imports only in a function that is called there, and the bridge."""
    names = {*ENVIRONMENT.modules, "unirl.models.sd3.bridges.sglang"}
    for name in names:
        spec = find_spec(name)
        assert spec is not None and spec.origin is not None
        for imported in imports_of(Path(spec.origin), package=name.rpartition(".")[0]):
            top = imported.partition(".")[0]
            if top == "unirl":
                assert imported in names, f"{name} imports {imported}, which stays behind"
            else:
                assert top in IN_THE_LOCK or top in sys.stdlib_module_names, f"{name} imports {imported}"


def is_module(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:
        return False


def imports_of(path: Path, *, package: str) -> set[str]:
    """Modules that a file imports, but for those under TYPE_CHECKING."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    unseen = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    found: set[str] = set()
    for node in ast.walk(tree):
        if id(node) in unseen:
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            parts = package.split(".")
            base = parts[: len(parts) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            # `from package import module` names modules, unlike `from module import thing`.
            inside = {f"{module}.{alias.name}" for alias in node.names} if module.startswith("unirl.") else set[str]()
            modules = {name for name in inside if is_module(name)}
            found |= modules or {module}
    return found


def test_without_its_environment_it_says_which_command_makes_it(model: Sd3Model, tmp_path: Path) -> None:
    with pytest.raises(RunFailed, match=rf"unirl engine-env sglang --accel cpu --dir {tmp_path}"):
        build(SglangConfig(env_dir=str(tmp_path)), model=model, device="cpu")


def test_the_checkpoint_is_that_of_the_model_unless_another_is_named(
    model: Sd3Model, folder: Path, tmp_path: Path
) -> None:
    architecture = bridge_of(model).architecture
    assert checkpoint_folder(PRODUCT, SglangConfig(), model, architecture=architecture) == folder.resolve()
    named = SglangConfig(path=str(tmp_path))
    with pytest.raises(RecipeError, match=r"engine\.path: .* has no model_index\.json"):
        checkpoint_folder(PRODUCT, named, model, architecture=architecture)
    (tmp_path / "model_index.json").write_text(json.dumps({"_class_name": "FluxPipeline"}))
    with pytest.raises(RecipeError, match=r"a checkpoint of 'FluxPipeline'; model 'sd3' is 'StableDiffusion3Pipeline'"):
        checkpoint_folder(PRODUCT, named, model, architecture=architecture)


def test_a_model_that_sglang_does_not_compute_is_refused(tmp_path: Path) -> None:
    tiny.write(tmp_path / "small", seed=0, with_t5=False)
    model = build_model(Sd3Config(path=str(tmp_path / "small")), device="cpu")
    with pytest.raises(RecipeError, match="encodes prompts of Stable Diffusion 3 with T5, and the model was loaded"):
        build(SglangConfig(), model=model, device="cpu")


def test_each_encoder_gets_the_tokens_that_its_own_tokenizer_has() -> None:
    """SGLang by itself gives CLIP 77, which are other conditions where its tokenizer has fewer."""
    tokenizers = [SimpleNamespace(model_max_length=length) for length in (8, 9, 99)]
    assert BRIDGE.encoder_lengths(tokenizers, LatentSamplingConfig(max_sequence_length=16)) == (8, 9, 16)


def test_settings_become_arguments_of_sglang() -> None:
    found = arguments(port=5000, log_level="ERROR", extra={"attention_backend": "fa"})
    assert (found["model_path"], found["backend"], found["num_gpus"]) == ("/there", "sglang", 1)
    assert (found["dit_precision"], found["vae_precision"]) == ("bf16", "bf16")
    assert found["text_encoder_precisions"] == ["bf16"] * 3
    assert (found["scheduler_port"], found["log_level"], found["attention_backend"]) == (5000, "error", "fa")
    assert found["enable_torch_compile"] is True
    assert arguments(enforce_eager=True)["enable_torch_compile"] is False
    assert "scheduler_port" not in arguments()


def test_arguments_that_would_undo_what_is_promised_are_refused() -> None:
    for key, value in (("enable_cache_dit", True), ("lora_merge_mode", "dynamic"), ("tp_size", 2)):
        with pytest.raises(RecipeError, match=rf"engine\.extra\.{key}: it cannot be given"):
            arguments(extra={key: value})


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ([], ""),
        (["engine.max_num_seqs=0"], "engine.max_num_seqs: 0 was asked for; it must be 1 or more"),
        (["engine.port=70000"], "engine.port: 70000 was asked for; it must be from 0 to 65535"),
        (["launcher=ray", "launcher.placement=colocate"], "set engine.sleep_mode=true"),
        (["sampling.kernel=ddim-eta"], "'ddim-eta' was asked for; engine 'sglang' runs"),
    ],
)
def test_plans_that_cannot_work_are_refused_before_anything_starts(words: list[str], reason: str) -> None:
    catalog = Catalog.discover()
    verdict = match(compose("quickstart", ["engine=sglang", *words], catalog=catalog), catalog=catalog)
    assert bool(verdict.reasons) is bool(words)
    assert not words or any(reason in found.text or reason in f"{found.key}: {found.text}" for found in verdict.reasons)


def test_models_without_a_bridge_are_refused() -> None:
    """Every latent model that is installed either brings one or is refused by name."""
    models = [spec for spec in Catalog.discover().specs("model") if isinstance(spec, ModelSpec)]
    latent = [spec for spec in models if "latent" in spec.tracks.values()]
    assert isinstance(SPEC, EngineSpec)
    for spec in latent:
        verdict = match_pair(model=spec, engine=SPEC)
        assert verdict.accepted is (SPEC.name in spec.bridges)
        assert verdict.accepted or f"model {spec.name!r} brings none for it" in str(verdict.reasons[0])
    assert any(SPEC.name in spec.bridges for spec in latent)
