"""Settings that trade numbers for speed or memory: declared, documented, listed by compose, and refused by the match."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from click.testing import CliRunner
from unirl.core.acceleration import InEffect, declared
from unirl.core.cli import cli
from unirl.core.data.run_data import RunData
from unirl.core.errors import CheckpointError
from unirl.core.match.match import match
from unirl.core.plugins.catalog import Catalog
from unirl.core.recipe.compose import compose
from unirl.core.specs.config import RunConfig, TrainConfig
from unirl.core.types.sampling import LatentSamplingConfig
from unirl.loop.checkpoints import Checkpoints
from unirl.loop.resume import checkpoint_state, checkpoint_to_resume

PAGE = Path(__file__).parents[1] / "docs/explanation/numbers.md"
CATALOG = Catalog.discover()
SECTIONS: list[tuple[str, str, type[Any]]] = [
    ("run", "", RunConfig),
    ("train", "", TrainConfig),
    ("sampling", "", LatentSamplingConfig),
    *((part.spec.kind, part.spec.name, CATALOG.resolve(part.spec.config)) for part in CATALOG.parts()),
]


def in_words(scope: Any, error: float) -> tuple[str, str]:
    one = InEffect(key="", value=None, scope=scope, error=error)
    return one.where, one.loss


def declarations() -> dict[tuple[str, str, str], set[str]]:
    """Setting, scope and loss -> names of the parts that declare it."""
    result: dict[tuple[str, str, str], set[str]] = defaultdict(set)
    for section, part, config in SECTIONS:
        for name, one in declared(config).items():
            errors = one.error.values() if isinstance(one.error, Mapping) else [one.error]
            for error in errors:
                result[(f"{section}.{name}", *in_words(one.scope, error))].add(part)
    return result


def rows() -> dict[tuple[str, str, str], str]:
    """The same of the page: the cell with the parts."""
    result: dict[tuple[str, str, str], str] = {}
    text = PAGE.read_text(encoding="utf-8")
    table = text.partition("| setting | of | changes | loss |")[2].partition("\n\n")[0]
    for line in table.splitlines()[2:]:
        settings, parts, where, loss, _ = (cell.strip() for cell in line.strip().strip("|").split("|"))
        for setting in re.findall(r"`([^`]+)`", settings):
            assert (setting, where, loss) not in result, f"{setting} is listed twice"
            result[setting, where, loss] = parts
    return result


def test_the_page_lists_what_parts_declare() -> None:
    listed, expected = rows(), declarations()
    assert listed.keys() == expected.keys()
    for key, cell in listed.items():
        if named := set(re.findall(r"`([^`]+)`", cell)):
            assert named == expected[key], key


def test_a_declared_key_is_a_setting_or_an_entry_of_a_free_mapping() -> None:
    for section, part, config in SECTIONS:
        kinds = {item.name: str(item.type) for item in dataclasses.fields(config)}
        for name in declared(config):
            field, _, entry = name.partition(".")
            assert field in kinds, f"{section} {part}: {name}"
            assert kinds[field].startswith("dict") == bool(entry), f"{section} {part}: {name}"


def test_compose_lists_what_is_in_effect() -> None:
    words = ["model.autocast=bfloat16", "train.old_log_probs=detached", "engine.cached_prompts=0"]
    shown = CliRunner().invoke(cli, ["compose", "quickstart", *words])
    assert shown.exit_code == 0, shown.output
    listed = [line for line in shown.output.splitlines() if line.startswith("faster or smaller: ")]
    assert listed == [
        "faster or smaller: train.old_log_probs=detached in training, exact",
        "faster or smaller: model.autocast=bfloat16 in training and rollouts in process, bounded, numbers round to "
        "0.004 of themselves",
    ]
    as_json = CliRunner().invoke(cli, ["compose", "quickstart", *words, "--json"])
    assert json.loads(as_json.output)["accelerations"] == [
        {"key": "train.old_log_probs", "value": "detached", "scope": "training", "loss": "none", "error": 0.0},
        # bf16 has 8 bits: half a unit in the last place.
        {"key": "model.autocast", "value": "bfloat16", "scope": "both", "loss": "bounded", "error": 2**-8},
    ]


CACHE = "+engine.environment.SGLANG_CACHE_DIT_ENABLED=true"
FP8 = "+engine.extra.kv_cache_dtype=fp8"
VLLM = ["engine=vllm", "engine.lora_rank=16"]
UNBOUNDED = "which changes what rollouts compute, and training not, without a bound"


@pytest.mark.parametrize(
    ("recipe", "words", "key"),
    [
        ("quickstart-text", [*VLLM, FP8], "engine.extra.kv_cache_dtype"),
        ("quickstart-text", ["engine=sglang-llm", "engine.lora_rank=16", FP8], "engine.extra.kv_cache_dtype"),
        ("quickstart", ["engine=sglang", CACHE], "engine.environment.SGLANG_CACHE_DIT_ENABLED"),
        (
            "quickstart",
            ["engine=sglang", "+engine.extra.attention_backend=SAGE_ATTN"],
            "engine.extra.attention_backend",
        ),
        (
            "quickstart",
            ["engine=vllm-omni", "+engine.extra.diffusion_attention_config={default: SAGE_ATTN}"],
            "engine.extra.diffusion_attention_config",
        ),
        # The divergence of flow-dppo is of means that are replayed: no ratio to the engine's policy corrects it.
        (
            "quickstart",
            ["engine=sglang", CACHE, "algorithm=flow-dppo", "train.old_log_probs=engine"],
            "engine.environment.SGLANG_CACHE_DIT_ENABLED",
        ),
    ],
)
def test_another_policy_in_rollouts_is_refused_where_log_probs_are_needed(
    recipe: str, words: list[str], key: str
) -> None:
    verdict = match(compose(recipe, words, catalog=CATALOG), catalog=CATALOG)
    assert [reason.key for reason in verdict.reasons] == [key]
    assert UNBOUNDED in verdict.reasons[0].text


@pytest.mark.parametrize(
    ("recipe", "words"),
    [
        ("quickstart-text", [*VLLM, FP8, "algorithm.tis=token"]),
        ("quickstart-text", [*VLLM, FP8, "train.old_log_probs=engine"]),
        ("quickstart-text", [*VLLM, "+engine.extra.kv_cache_dtype=auto"]),
        ("quickstart", ["engine=sglang", CACHE, "algorithm=awm"]),
        ("quickstart", ["engine=sglang", CACHE, "train.old_log_probs=engine"]),
        ("quickstart", ["engine=sglang", "+engine.environment.SGLANG_CACHE_DIT_ENABLED=false"]),
        ("quickstart", ["engine=sglang", "+engine.extra.attention_backend=fa"]),
    ],
)
def test_it_is_accepted_where_the_loss_corrects_for_it_or_needs_none(recipe: str, words: list[str]) -> None:
    verdict = match(compose(recipe, words, catalog=CATALOG), catalog=CATALOG)
    assert verdict.reasons == ()


@pytest.mark.parametrize(
    ("recipe", "words", "says"),
    [
        (
            "quickstart-text",
            [*VLLM, "+engine.extra.quantization=fp8"],
            "engine.extra.quantization: not allowed; weights",
        ),
        ("quickstart", ["engine=sglang", "+engine.extra.enable_cache_dit=true"], "SGLANG_CACHE_DIT_ENABLED=true"),
        ("quickstart", ["engine=vllm-omni", "+engine.extra.cache_backend=tea_cache"], "caches of denoiser outputs"),
        (
            "quickstart",
            ["engine=vllm-omni", "+engine.environment.DIFFUSION_CACHE_BACKEND=tea_cache"],
            "engine.environment.DIFFUSION_CACHE_BACKEND: not allowed",
        ),
    ],
)
def test_what_an_engine_cannot_honour_is_refused_whatever_the_algorithm(
    recipe: str, words: list[str], says: str
) -> None:
    for algorithm in ("", "algorithm=awm" if recipe == "quickstart" else "algorithm.tis=token"):
        verdict = match(compose(recipe, [*words, *([algorithm] if algorithm else [])], catalog=CATALOG))
        assert len(verdict.reasons) == 1 and says in str(verdict.reasons[0]), verdict.reasons


def test_a_loss_is_that_of_the_value() -> None:
    dtype = declared(CATALOG.resolve("unirl.models.qwen3.config:Qwen3Config"))["dtype"]
    assert [dtype.error_of(value) for value in ("float32", "bfloat16", "float16")] == [None, 2**-8, 2**-11]
    fp8 = declared(CATALOG.resolve("unirl.engines.vllm.config:VllmConfig"))["extra.kv_cache_dtype"]
    assert [fp8.error_of(value) for value in (None, "auto", "fp8")] == [None, None, math.inf]


def test_an_optimizer_of_another_kind_does_not_continue_a_run(tmp_path: Path) -> None:
    data = cast("RunData", SimpleNamespace(hashes={}))
    first = compose("quickstart", [], catalog=CATALOG)
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    checkpoints.save(1, write=lambda _: None, state=checkpoint_state(first, data=data, algorithms={}))
    other = compose("quickstart", ["backend.optimizer=adamw_8bit"], catalog=CATALOG)
    with pytest.raises(CheckpointError, match=r"another recipe: backend\.optimizer was 'adamw', is 'adamw_8bit'\. Res"):
        checkpoint_to_resume(other, checkpoints, tmp_path, data=data)
    assert checkpoint_to_resume(first, checkpoints, tmp_path, data=data) is not None
