"""vLLM-Omni itself, on a CPU: what every engine for latents is tried for, and what is its own."""

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
from external_engines.latents import Ask, Fault
from unirl.core.errors import RunFailed
from unirl.core.roles import DiffusionModel
from unirl.engine_host.latent_engine import ExternalLatentEngine

pytestmark = [pytest.mark.slow, pytest.mark.nightly]


def test_a_row_does_not_depend_on_the_batch_that_it_is_made_in(engine: ExternalLatentEngine, ask: Ask) -> None:
    check_rows(engine, ask, batches=(2, 4))


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("drops_a_sigma", "sigmas: the request says"),
        ("drops_the_sde_steps", "sde_steps: the request says"),
        ("drops_the_noise", "initial_noise of 'r5/p0/0'"),
        ("drops_the_negative_prompt", r"negative_prompt of row 0: the request says 'blurred', .* used ''"),
        ("drops_the_guidance", r"negative_prompt of row 0: the request says 'blurred', .* used None"),
        ("swaps_rows", "sample_id of row 0: the request says 'r5/p0/0', .* used 'r5/p2/1'"),
    ],
)
def test_an_engine_that_does_something_else_is_caught_in_a_rollout_and_at_its_start(
    engine: ExternalLatentEngine, ask: Ask, fault: Fault, name: str, what: str
) -> None:
    check_caught(engine, ask, fault, name=name, what=what)


def test_prompts_that_it_encodes_otherwise_are_caught_at_its_start(engine: ExternalLatentEngine, fault: Fault) -> None:
    check_conditions_caught(engine, fault, name="drops_the_last_word")


def test_requests_that_lose_what_they_carry_are_an_error_of_the_engine(
    engine: ExternalLatentEngine, ask: Ask, fault: Fault
) -> None:
    fault("drops_extra_args")
    with pytest.raises(RunFailed, match="dropped extra_args"):
        engine.generate(ask(engine))
    fault("")
    engine.generate(ask(engine))


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("fails_half_way", "the memory is gone"),
        ("writes_something_else", "was loaded, but the weight held differs"),
    ],
)
def test_an_update_that_is_applied_by_half_leaves_nothing_to_generate_with_until_full_weights_come(
    engine: ExternalLatentEngine, model: DiffusionModel, ask: Ask, fault: Fault, name: str, what: str
) -> None:
    check_half_applied(engine, model, ask, fault, name=name, what=what)


def test_killed_in_a_rollout_in_a_sync_and_asleep_it_says_so_and_goes_on_as_before(
    engine: ExternalLatentEngine, model: DiffusionModel, ask: Ask
) -> None:
    """Last, for it ends three processes of vLLM-Omni."""
    check_deaths(engine, model, ask)
