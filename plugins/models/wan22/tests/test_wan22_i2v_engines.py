"""Two experts from a first frame in SGLang and vLLM-Omni themselves, on a CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
from external_engines.edits import *
from external_engines.first_frames import *
from external_engines.first_frames import check_frame_run
from external_engines.image_models import test_a_full_sync_and_adapters_are_sampled_from_and_a_full_sync_ends_them
from unirl.engine_host.latent_engine import ExternalLatentEngine
from unirl.numerics.diffusion.wan_first_frame import WanFirstFrame
from wan22_experts import *

__all__ = ["test_a_full_sync_and_adapters_are_sampled_from_and_a_full_sync_ends_them"]


@pytest.mark.slow
def test_a_run_trains_both_experts_from_first_frames_with_ratio_1(
    engine: ExternalLatentEngine, model: WanFirstFrame, i2v_folder: Path, tmp_path: Path
) -> None:
    check_frame_run("wan22-i2v", [], engine=engine, model=model, checkpoint=i2v_folder, folder=tmp_path)
