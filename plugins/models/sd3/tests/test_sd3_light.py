from __future__ import annotations

import subprocess
import sys

from unirl.core.capability import Cap
from unirl.models.sd3.plugin import SPEC, unirl_models


def test_the_plugin_file_loads_nothing_heavy() -> None:
    code = (
        "import sys, unirl.models.sd3.plugin, unirl.models.sd3.config\n"
        "print([m for m in ('torch', 'diffusers', 'transformers', 'hydra', 'ray') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_spec_states_what_it_has_and_what_it_lacks() -> None:
    assert list(unirl_models()) == [SPEC]
    assert SPEC.tracks == {"image": "latent"}
    assert {cap for cap, support in SPEC.capabilities.items() if support == "native"} == {
        Cap.LATENT_STAGE,
        Cap.LORA,
        Cap.GUIDANCE,
        Cap.CONDITIONS,
    }
