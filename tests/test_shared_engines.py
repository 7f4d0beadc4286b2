"""Stages of one model that one engine serves."""

from __future__ import annotations

import os
from pathlib import Path
from typing import cast

import pytest
from small_runs import catalog
from unirl.core.recipe.compose import compose
from unirl.core.specs.plan import Plan
from unirl.engine_host.program import log_path
from unirl.engines.vllm_omni.config import VllmOmniConfig
from unirl.engines.vllm_omni.environment import PRODUCT
from unirl.loop.build import build_parts
from unirl.loop.run_plan import with_run_folder

pytestmark = pytest.mark.slow

OWN = ("~engine", "+engine@engine.plan=trainside", "+engine@engine.image=trainside")


def unified(*words: str) -> Plan:
    return compose("quickstart-unified", words, catalog=catalog())


def test_stages_share_an_engine_by_its_settings_not_by_its_section() -> None:
    """One section, two equal ones, and two that differ."""
    for words, is_shared in (((), True), (OWN, True), ((*OWN, "engine.image.forward_batch=4"), False)):
        plan = unified(*words)
        plan_stage, image = plan.stages
        assert plan_stage.shares_engine(image) is is_shared
        engines = build_parts(plan, catalog=catalog()).engines
        assert (engines["plan"] is engines["image"]) is is_shared


def test_stages_with_an_engine_in_common_write_one_log(tmp_path: Path) -> None:
    """Of vLLM-Omni, which is not started; the folder is that of the first stage."""
    words = ("~engine", "+engine@engine.plan=vllm-omni", "+engine@engine.image=vllm-omni")
    for further, names in (((), ("plan", "plan")), (("engine.plan.max_num_texts=4",), ("plan", "image"))):
        stages = with_run_folder(unified(*words, *further), tmp_path).stages
        files = [str(log_path(cast(VllmOmniConfig, stage.engine.config), PRODUCT)) for stage in stages]
        assert files == [f"{tmp_path}/logs/{name}/vllm-omni-{os.getpid()}.log" for name in names]
        assert stages[0].shares_engine(stages[1]) is (names[0] == names[1])
