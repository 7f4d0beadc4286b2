"""Schedules against diffusers and against published numbers."""

import numpy as np
import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, UniPCMultistepScheduler
from hypothesis import given, settings
from hypothesis import strategies as st
from unirl.numerics.diffusion.schedules import (
    dynamic_sigmas,
    flux2_mu,
    linear_mu,
    sigmas_from_scheduler_config,
    static_sigmas,
)

# diffusers works in fp32: a few roundings of numbers of at most 1.
FP32 = 1e-6


def of_diffusers(config, *, num_steps, mu=None, with_sigmas=True):
    scheduler = FlowMatchEulerDiscreteScheduler(**config)
    if with_sigmas:
        scheduler.set_timesteps(sigmas=np.linspace(1.0, 1 / num_steps, num_steps), mu=mu)
    else:
        scheduler.set_timesteps(num_steps, mu=mu)
    return scheduler.sigmas


def test_the_static_shift_gives_the_published_points():
    expected = [1, 0.964286, 0.923077, 0.875, 0.818182, 0.75, 0.666667, 0.5625, 0.428571, 0.25, 0]
    result = static_sigmas(10, shift=3.0)
    torch.testing.assert_close(result, torch.tensor(expected), rtol=0, atol=5e-7)  # six published digits
    assert result.dtype == torch.float32
    assert result[0] == 1 and result[-1] == 0


def test_the_double_shift_of_diffusers_gives_the_published_points():
    expected = [1, 0.960129, 0.913349, 0.857692, 0.790368, 0.707278, 0.602151, 0.464876, 0.278049, 0.008929, 0]
    result = sigmas_from_scheduler_config({"shift": 3.0}, num_steps=10, variant="diffusers-default")
    torch.testing.assert_close(result, torch.tensor(expected), rtol=0, atol=6e-7)  # six published digits


CONFIGS = [
    {},
    {"shift": 3.0},
    {"shift": 6.5, "num_train_timesteps": 500},
    {"shift": 3.0, "shift_terminal": 0.05},
    {"use_dynamic_shifting": True},
    {"use_dynamic_shifting": True, "shift": 3.0, "time_shift_type": "linear"},
    {
        "use_dynamic_shifting": True,
        "base_shift": 0.5,
        "max_shift": 0.9,
        "max_image_seq_len": 8192,
        "shift_terminal": 0.02,
    },
    {"use_dynamic_shifting": True, "time_shift_type": "linear", "shift_terminal": 0.1},
]


@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.parametrize("num_steps", [2, 10, 28])
@pytest.mark.parametrize("variant", ["exact", "diffusers-default"])
def test_the_schedule_of_a_config_is_that_of_diffusers(config, num_steps, variant):
    line = {key: config[key] for key in ("base_shift", "max_shift", "max_image_seq_len") if key in config}
    mu = linear_mu(1024, **line) if config.get("use_dynamic_shifting") else None
    result = sigmas_from_scheduler_config(
        {"_class_name": "FlowMatchEulerDiscreteScheduler", "_diffusers_version": "0.40.0", **config},
        num_steps=num_steps,
        image_seq_len=1024,
        variant=variant,
    )
    theirs = of_diffusers(config, num_steps=num_steps, mu=mu, with_sigmas=variant == "exact")
    torch.testing.assert_close(result, theirs, rtol=0, atol=FP32)


@given(st.integers(16, 20_000), st.integers(1, 100))
@settings(max_examples=50)
def test_mu_is_that_of_the_pipelines(image_seq_len, num_steps):
    def line(x0, y0, x1, y1, x):
        return float(np.polyval(np.polyfit([x0, x1], [y0, y1], 1), x))

    # A fit of a line against its formula, in fp64.
    assert linear_mu(image_seq_len) == pytest.approx(line(256, 0.5, 4096, 1.15, image_seq_len), abs=1e-9)
    at_200 = 0.00016927 * image_seq_len + 0.45666666
    if image_seq_len > 4300:
        assert flux2_mu(image_seq_len, num_steps=num_steps) == at_200
    else:
        at_10 = 8.73809524e-05 * image_seq_len + 1.89833333
        expected = line(10, at_10, 200, at_200, num_steps)
        assert flux2_mu(image_seq_len, num_steps=num_steps) == pytest.approx(expected, abs=1e-9)


def test_a_flux2_schedule_uses_the_empirical_mu():
    config = {"use_dynamic_shifting": True}
    result = sigmas_from_scheduler_config(config, num_steps=20, image_seq_len=1024, mu_rule="flux2")
    theirs = of_diffusers(config, num_steps=20, mu=flux2_mu(1024, num_steps=20))
    torch.testing.assert_close(result, theirs, rtol=0, atol=FP32)
    torch.testing.assert_close(result, dynamic_sigmas(20, mu=flux2_mu(1024, num_steps=20)), rtol=0, atol=0)


UNIPC = {
    "_class_name": "UniPCMultistepScheduler",
    "prediction_type": "flow_prediction",
    "use_flow_sigmas": True,
    "final_sigmas_type": "zero",
}


@pytest.mark.parametrize("options", [{"flow_shift": 3.0}, {"flow_shift": 5.0, "shift_terminal": 0.02}], ids=str)
@pytest.mark.parametrize("num_steps", [2, 10, 50])
@pytest.mark.parametrize("variant", ["exact", "diffusers-default"])
def test_a_unipc_scheduler_for_flows_gives_its_shifted_grid(options, num_steps, variant):
    result = sigmas_from_scheduler_config({**UNIPC, **options}, num_steps=num_steps, variant=variant)
    scheduler = UniPCMultistepScheduler.from_config({**UNIPC, **options})
    grid = np.linspace(1.0, 1 / num_steps, num_steps) if variant == "exact" else None
    scheduler.set_timesteps(num_steps, sigmas=grid)
    # It takes 1e-6 from the first sigma, for the logarithms of its solver.
    assert float(result[0]) == 1
    assert float(scheduler.sigmas[0]) == pytest.approx(1 - 1e-6, abs=1e-7)
    torch.testing.assert_close(result[1:], scheduler.sigmas[1:], rtol=0, atol=FP32)
    static = sigmas_from_scheduler_config({**UNIPC, "flow_shift": 7.0}, num_steps=num_steps, shift=2.0)
    assert torch.equal(static, static_sigmas(num_steps, shift=2.0))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"use_flow_sigmas": False}, "got use_flow_sigmas = False, expected True"),
        ({"prediction_type": "epsilon"}, "got prediction_type = 'epsilon', expected 'flow_prediction'"),
        ({"final_sigmas_type": "sigma_min"}, "got final_sigmas_type = 'sigma_min', expected 'zero'"),
        ({"use_karras_sigmas": True}, "use_karras_sigmas = True is not honoured"),
    ],
    ids=str,
)
def test_a_unipc_scheduler_for_anything_else_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        sigmas_from_scheduler_config({**UNIPC, **changes}, num_steps=10)


def test_an_explicit_shift_wins_over_the_checkpoint():
    for config in ({"shift": 3.0}, {"use_dynamic_shifting": True}):
        for variant in ("exact", "diffusers-default"):
            result = sigmas_from_scheduler_config(config, num_steps=10, shift=5.0, variant=variant)
            theirs = of_diffusers({"shift": 5.0}, num_steps=10, with_sigmas=variant == "exact")
            torch.testing.assert_close(result, theirs, rtol=0, atol=FP32)


@given(st.floats(0.2, 20), st.integers(1, 80))
@settings(max_examples=40)
def test_every_schedule_falls_strictly_from_1_to_0(shift, num_steps):
    sigmas = static_sigmas(num_steps, shift=shift)
    assert sigmas.shape == (num_steps + 1,)
    assert sigmas[0] == 1 and sigmas[-1] == 0
    assert bool((sigmas[1:] < sigmas[:-1]).all())


@pytest.mark.parametrize(
    "option", ["use_karras_sigmas", "use_beta_sigmas", "use_exponential_sigmas", "invert_sigmas", "use_new_sigmas"]
)
def test_an_option_that_is_not_honoured_is_refused_by_name(option):
    with pytest.raises(ValueError, match=option):
        sigmas_from_scheduler_config({option: True}, num_steps=10)
    sigmas_from_scheduler_config({option: False}, num_steps=10)


def test_what_cannot_be_scheduled_is_refused():
    with pytest.raises(ValueError, match="image_seq_len is needed"):
        sigmas_from_scheduler_config({"use_dynamic_shifting": True}, num_steps=10)
    with pytest.raises(ValueError, match="'DDIMScheduler' is not honoured"):
        sigmas_from_scheduler_config({"_class_name": "DDIMScheduler"}, num_steps=10)
    with pytest.raises(ValueError, match="variant 'fast' is not known"):
        sigmas_from_scheduler_config({}, num_steps=10, variant="fast")
    with pytest.raises(ValueError, match="1-step schedule"):
        sigmas_from_scheduler_config({"shift_terminal": 0.02}, num_steps=1)
    with pytest.raises(ValueError, match="num_steps: got 0"):
        static_sigmas(0, shift=1.0)
    with pytest.raises(ValueError, match="shift = 0"):
        static_sigmas(10, shift=0)
