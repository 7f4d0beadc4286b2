"""Wan 2.2 from a first frame in SGLang and vLLM-Omni themselves, on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from external_engines.edits import *
from external_engines.image_models import test_a_full_sync_and_adapters_are_sampled_from_and_a_full_sync_ends_them
from external_engines.latents import Ask
from unirl.engine_host.latent_engine import ExternalLatentEngine
from unirl.models.wan.model import WanFirstFrame
from wan_engines import *
from wan_engines import check_expert, check_frame_run

pytestmark = [pytest.mark.slow, pytest.mark.nightly]

__all__ = ["test_a_full_sync_and_adapters_are_sampled_from_and_a_full_sync_ends_them"]


@pytest.fixture(scope="module")
def name() -> str:
    return "wan22-i2v"


@pytest.mark.parametrize("expert", ["transformer", "transformer_2"])
def test_full_weights_and_adapters_of_one_expert_are_sampled_from(
    engine: ExternalLatentEngine, model: WanFirstFrame, ask: Ask, expert: str
) -> None:
    check_expert(engine, model, ask, expert)


def test_a_run_trains_both_experts_from_first_frames_with_ratio_1(
    engine: ExternalLatentEngine, model: WanFirstFrame, tiny: Callable[[str], Path], tmp_path: Path
) -> None:
    check_frame_run([], engine=engine, model=model, checkpoint=tiny("wan22-i2v"), folder=tmp_path)
