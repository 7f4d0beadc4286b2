"""The sampler as a record and as the objects that compute."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from unirl.core.limits import limit
from unirl.core.types.sampling import LatentSamplingConfig
from unirl.core.types.track import Sampler
from unirl.numerics.diffusion.guidance import Cfg, IntervalCfg, make_guidance
from unirl.numerics.diffusion.kernels import Cps, Dpm2, EulerOde, FlowSde
from unirl.numerics.diffusion.sampler import (
    guidance_of,
    kernel_of,
    sampler_of,
    schedule_coefficients,
    with_every_option,
)


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
    guidance = make_guidance("two-pass", scale=3.5)
    assert sampler_of(kernel, guidance) == record  # type: ignore[arg-type]
    assert kernel_of(record) == kernel
    assert guidance_of(record) == guidance


def test_options_that_are_left_at_their_defaults_are_named_as_well() -> None:
    assert with_every_option(LatentSamplingConfig(kernel="cps", eta=0.5)).kernel_options == {"constants": True}
    assert with_every_option(LatentSamplingConfig(kernel="flow-sde", eta=0.5)).kernel_options == {}
    with pytest.raises(ValueError, match="option 'constant' is not known"):
        with_every_option(LatentSamplingConfig(kernel="cps", eta=0.5, kernel_options={"constant": False}))
    own = LatentSamplingConfig(kernel="of-an-engine", kernel_options={"order": 3})
    assert with_every_option(own) == own
    guided = with_every_option(LatentSamplingConfig(guidance_mode="interval", guidance_options={"high": 0.7}))
    assert guided.guidance_options == {"low": 0.0, "high": 0.7}
    with pytest.raises(ValueError, match="option 'lowest' is not known; its options are: high, low"):
        with_every_option(LatentSamplingConfig(guidance_mode="interval", guidance_options={"lowest": 0.7}))


def test_the_options_of_a_guidance_are_recorded() -> None:
    guidance = IntervalCfg(scale=3.5, low=0.25)
    record = sampler_of(FlowSde(0.4), guidance)
    assert (record.guidance_mode, record.guidance_scale) == ("interval", 3.5)
    assert record.guidance_options == (("high", 1.0), ("low", 0.25))
    assert guidance_of(record) == guidance


@dataclass(frozen=True)
class Halved(FlowSde):
    """A kernel of a plugin."""

    share: float = limit(0.5, above=0, most=1)


@dataclass(frozen=True, kw_only=True)
class Reversed(Cfg):
    """A guidance of a plugin."""

    strength: float = limit(1.0, least=0)


def test_classes_of_plugins_are_recorded_by_module_and_class() -> None:
    kernel, guidance = f"{__name__}:Halved", f"{__name__}:Reversed"
    record = sampler_of(Halved(0.4, share=0.25), Reversed(scale=2.0))
    assert (record.kernel, record.options) == (kernel, (("share", 0.25),))
    assert (record.guidance_mode, record.guidance_options) == (guidance, (("strength", 1.0),))
    assert kernel_of(record) == Halved(0.4, share=0.25)
    assert guidance_of(record) == Reversed(scale=2.0)
    named = with_every_option(LatentSamplingConfig(kernel=kernel, guidance_mode=guidance))
    assert (named.kernel_options, named.guidance_options) == ({"share": 0.5}, {"strength": 1.0})


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("flow_sde", "kernel 'flow_sde' is not known; choose one of flow-sde"),
        ("unirl.nowhere:Kernel", "it cannot be imported: No module named 'unirl.nowhere'"),
        ("unirl.numerics.noise:Kernel", "it cannot be imported: module .* has no attribute 'Kernel'"),
        (
            "unirl.numerics.noise:noise",
            "expected a frozen dataclass that inherits unirl.numerics.diffusion.kernels.Kernel",
        ),
        ("unirl.numerics.diffusion.guidance:Cfg", "expected a frozen dataclass that inherits"),
        (f"{__name__}:Halved", "share: got 3.0, expected more than 0 and at most 1"),
    ],
)
def test_names_that_lead_to_no_kernel_are_refused(name: str, says: str) -> None:
    options = {"share": 3.0} if name.endswith("Halved") else {}
    with pytest.raises(ValueError, match=says):
        kernel_of(Sampler(kernel=name, eta=0.5, options=tuple(options.items())))


def test_the_noise_of_a_schedule_is_that_of_its_steps() -> None:
    sigmas = torch.tensor([1, 27 / 28, 12 / 13, 0.875, 9 / 11, 0.75, 2 / 3, 0.5625, 3 / 7, 0.25, 0.0])
    # Flow-SDE at eta 0.7 on ten steps with shift 3: its published values, to five digits.
    expected = [0.7, 0.73837, 0.53169, 0.44146, 0.38774, 0.35, 0.3195, 0.29047, 0.25617, 0.20207]
    result = schedule_coefficients(Sampler(kernel="flow-sde", eta=0.7), sigmas)
    torch.testing.assert_close(result.std, torch.tensor(expected), rtol=0, atol=6e-6)
    # sigma' sin(eta pi / 2) of coefficient-preserving sampling, 0 where it ends.
    cps = schedule_coefficients(Sampler(kernel="cps", eta=1.0), sigmas)
    torch.testing.assert_close(cps.std, sigmas[1:], rtol=1e-6, atol=0)


def test_a_kernel_with_a_history_has_no_coefficients() -> None:
    with pytest.raises(ValueError, match="got Dpm2, expected a OneStepKernel"):
        schedule_coefficients(Sampler(kernel="dpm2", eta=0.0), torch.tensor([1.0, 0.5, 0.0]))
