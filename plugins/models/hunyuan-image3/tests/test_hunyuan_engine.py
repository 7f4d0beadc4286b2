"""HunyuanImage-3.0's images from vLLM-Omni, on a CPU and in fp32, against those of the trained module."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from external_engines.image_models import started
from external_engines.sequence_models import *
from external_engines.sequence_models import asked, check
from unirl.conformance.doubles.weight_updates import full_update
from unirl.core.types.inputs import Turn
from unirl.engine_host.latent_engine import ExternalLatentEngine
from unirl.models.hunyuan_image3.config import HunyuanImageConfig
from unirl.models.hunyuan_image3.model import HunyuanImageModel, build

pytestmark = [pytest.mark.slow, pytest.mark.nightly]


@pytest.fixture(scope="module")
def engine(tiny_folder: Path) -> Iterator[ExternalLatentEngine]:
    with started("vllm-omni", build(HunyuanImageConfig(path=str(tiny_folder)), device="cpu")) as result:
        yield result


@pytest.fixture
def guidances() -> list[dict[str, Any]]:
    return [
        {"guidance_scale": 5.0, "guidance_mode": "two-pass"},
        {"guidance_scale": 3.0, "guidance_mode": "interval", "guidance_options": {"low": 0.4}},
    ]


def test_it_continues_from_a_thought_and_its_recaption(engine: ExternalLatentEngine, model: HunyuanImageModel) -> None:
    """Whole, and cut within the thought, whose tag is then closed."""
    engine.load_weights(full_update(model, version=1))
    request = asked(model, engine, options={"begin": "think"})
    marks = model.marks
    whole = (70, 71, marks.think_end, marks.recaption, 72, marks.recaption_end)
    turns = tuple(
        (Turn(stage="think", text="x", tokens=tokens),) for tokens in (whole, (73, 74), whole[:4]) for _ in range(2)
    )
    check(engine, model, dataclasses.replace(request, inputs=dataclasses.replace(request.inputs, turns=turns)))
