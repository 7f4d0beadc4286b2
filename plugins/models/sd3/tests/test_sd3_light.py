from __future__ import annotations

from unirl.core.specs.capability import Cap
from unirl.models.sd3.plugin import SPEC, unirl_models


def test_the_spec_states_what_it_has() -> None:
    assert list(unirl_models()) == [SPEC]
    assert SPEC.tracks == {"image": "latent"}
    assert SPEC.capabilities == {
        Cap.LATENT_STAGE,
        Cap.LORA,
        Cap.GUIDANCE,
        Cap.CONDITIONS,
        Cap.LAZY_BUILD,
    }
