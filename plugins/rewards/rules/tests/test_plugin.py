from __future__ import annotations

import importlib
import subprocess
import sys

import pytest
from unirl.core.specs.part_config import RewardConfig
from unirl.core.specs.spec import RewardSpec
from unirl.rewards.rules.plugin import unirl_rewards


@pytest.mark.parametrize("spec", unirl_rewards(), ids=lambda spec: spec.name)
def test_specs_point_at_what_exists(spec: RewardSpec) -> None:
    module, _, name = spec.config.partition(":")
    config = getattr(importlib.import_module(module), name)(**spec.trial)
    assert isinstance(config, RewardConfig)
    module, _, name = spec.build.partition(":")
    getattr(importlib.import_module(module), name)(config, device="cpu").close()


def test_the_plugin_imports_nothing_heavy() -> None:
    code = "import sys, unirl.rewards.rules.plugin; print(sorted({'torch', 'numpy', 'PIL'} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
