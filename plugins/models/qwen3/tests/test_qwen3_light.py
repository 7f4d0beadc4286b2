from __future__ import annotations

from unirl.core.specs.capability import Cap
from unirl.models.qwen3.plugin import MOE, SPEC, unirl_models


def test_the_spec_states_what_it_has() -> None:
    assert list(unirl_models()) == [SPEC, MOE]
    assert SPEC.tracks == MOE.tracks == {"text": "text"}
    for spec in (SPEC, MOE):
        assert spec.capabilities == {Cap.TEXT_STAGE, Cap.LORA, Cap.LAZY_BUILD, Cap.OBSERVATIONS}
