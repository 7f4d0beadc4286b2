"""SGLang itself, on a CPU: what every engine for latents is tried for, and what is its own."""

from __future__ import annotations

import pytest
from external_engines.latent_engines import *
from external_engines.latent_engines import (
    check_caught,
    check_conditions_caught,
    check_deaths,
    check_half_applied,
    check_rows,
)
from external_engines.latents import ROUNDING, Ask, Fault, adapter, assert_same, gap, trainside
from unirl.conformance.doubles.weight_updates import full_update
from unirl.core.errors import RunFailed
from unirl.core.roles import DiffusionModel
from unirl.engine_host.latent_engine import ExternalLatentEngine

pytestmark = [pytest.mark.slow, pytest.mark.nightly]


def test_a_row_does_not_depend_on_the_batch_that_it_is_made_in(engine: ExternalLatentEngine, ask: Ask) -> None:
    """Rows of one prompt go together."""
    check_rows(engine, ask, batches=(2,))


@pytest.mark.parametrize(
    ("mode", "options"),
    [
        ("two-pass", {}),
        ("norm-corrected", {}),
        ("interval", {"low": 0.3, "high": 0.9}),
        ("two-scale", {"scale_low": 1.5, "boundary": 0.8}),
    ],
)
def test_guidances_that_sglang_does_not_have_for_a_model_are_those_of_trainside(
    engine: ExternalLatentEngine, model: DiffusionModel, ask: Ask, mode: str, options: dict[str, float]
) -> None:
    engine.load_weights(full_update(model, version=1))
    request = ask(engine, guidance_scale=3.5, guidance_mode=mode, guidance_options=options, negative_prompt="blurred")
    result = engine.generate(request)
    assert gap(result, model) < ROUNDING
    assert_same(result, trainside(model, request))


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("drops_a_sigma", "sigmas: the request says"),
        ("drops_the_sde_steps", "sde_steps: the request says"),
        ("drops_the_noise", "initial_noise of 'r5/p0/0'"),
        ("drops_the_negative_prompt", r"negative_prompt of row 0: the request says 'blurred', .* used ''"),
        ("drops_the_guidance", r"negative_prompt of row 0: the request says 'blurred', .* used None"),
        ("changes_the_guidance", r"sampler\.guidance_scale: the request says 2\.0, .* used 7\.0"),
        ("swaps_rows", "sample_id of row 0: the request says 'r5/p0/0', .* used 'r5/p0/1'"),
    ],
)
def test_an_engine_that_does_something_else_is_caught_in_a_rollout_and_at_its_start(
    engine: ExternalLatentEngine, ask: Ask, fault: Fault, name: str, what: str
) -> None:
    check_caught(engine, ask, fault, name=name, what=what)


def test_prompts_that_it_encodes_otherwise_are_caught_at_its_start(engine: ExternalLatentEngine, fault: Fault) -> None:
    check_conditions_caught(engine, fault, name="pads_prompts_otherwise")


@pytest.mark.parametrize(
    ("name", "what"),
    [("drops_extra", "it dropped extra"), ("makes_its_own_schedule", "SGLang is at step 0, from sigma 0.999")],
)
def test_requests_that_lose_what_they_carry_are_an_error_of_the_engine(
    engine: ExternalLatentEngine, ask: Ask, fault: Fault, name: str, what: str
) -> None:
    fault(name)
    with pytest.raises(RunFailed, match=what):
        engine.generate(ask(engine))
    fault("")
    engine.generate(ask(engine))


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("fails_half_way", "the memory is gone"),
        ("loses_a_weight", "update weight check failed: checksum mismatch for 1 tensor"),
    ],
)
def test_an_update_that_is_applied_by_half_leaves_nothing_to_generate_with_until_full_weights_come(
    engine: ExternalLatentEngine, model: DiffusionModel, ask: Ask, fault: Fault, name: str, what: str
) -> None:
    check_half_applied(engine, model, ask, fault, name=name, what=what)


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("names_layers_otherwise", "No LoRA layers updated"),
        ("loses_a_layer", "has an adapter in the update, but SGLang did not apply it"),
        ("scales_otherwise", "was loaded, but the weights held differ"),
    ],
)
def test_an_adapter_that_sglang_calls_a_success_and_is_none_is_caught(
    engine: ExternalLatentEngine, model: DiffusionModel, ask: Ask, fault: Fault, name: str, what: str
) -> None:
    engine.load_weights(full_update(model, version=1))
    update, _ = adapter(model, targets=model.spec.lora_targets, version=2)
    fault(name)
    with pytest.raises(RunFailed, match=what):
        engine.load_weights(update)
    fault("")
    with pytest.raises(RunFailed, match="the sync of version 2 did not complete"):
        engine.generate(ask(engine))
    engine.load_weights(full_update(model, version=3))
    assert gap(engine.generate(ask(engine)), model) < ROUNDING


def test_killed_in_a_rollout_in_a_sync_and_asleep_it_says_so_and_goes_on_as_before(
    engine: ExternalLatentEngine, model: DiffusionModel, ask: Ask
) -> None:
    """Last, for it ends three processes of SGLang."""
    check_deaths(engine, model, ask)
