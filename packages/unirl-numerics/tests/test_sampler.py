"""The sampler as a record and as the objects that compute."""

from __future__ import annotations

import pytest
from unirl.core.types.sampling import LatentSamplingConfig
from unirl.core.types.track import Sampler
from unirl.numerics.diffusion.guidance import Guidance
from unirl.numerics.diffusion.kernels import Cps, Dpm2, EulerOde, FlowSde
from unirl.numerics.diffusion.sampler import guidance_of, kernel_of, sampler_of, with_every_option


@pytest.mark.parametrize(
    ("kernel", "record"),
    [
        (FlowSde(0.4), Sampler(kernel="flow-sde", eta=0.4, guidance_scale=3.5, guidance_mode="two-pass")),
        (
            Cps(0.5, constants=False),
            Sampler(
                kernel="cps", eta=0.5, options=(("constants", False),), guidance_scale=3.5, guidance_mode="two-pass"
            ),
        ),
        (EulerOde(), Sampler(kernel="euler", eta=0.0, guidance_scale=3.5, guidance_mode="two-pass")),
        (Dpm2(), Sampler(kernel="dpm2", eta=0.0, guidance_scale=3.5, guidance_mode="two-pass")),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_a_record_is_read_off_the_objects_and_makes_them_again(kernel: object, record: Sampler) -> None:
    guidance = Guidance(scale=3.5, mode="two-pass", norm_dims=(1,))
    assert sampler_of(kernel, guidance) == record  # type: ignore[arg-type]
    assert kernel_of(record) == kernel
    assert guidance_of(record, latent_rank=4) == guidance


def test_options_that_are_left_at_their_defaults_are_named_as_well() -> None:
    assert with_every_option(LatentSamplingConfig(kernel="cps", eta=0.5)).kernel_options == {"constants": True}
    assert with_every_option(LatentSamplingConfig(kernel="flow-sde", eta=0.5)).kernel_options == {}
    with pytest.raises(ValueError, match="option 'constant' is not known"):
        with_every_option(LatentSamplingConfig(kernel="cps", eta=0.5, kernel_options={"constant": False}))
    own = LatentSamplingConfig(kernel="of-an-engine", kernel_options={"order": 3})
    assert with_every_option(own) is own
