"""SGLang itself, on a CPU: what every engine for text is tried for, and what is its own."""

from __future__ import annotations

import pytest
from external_engines.text_engines import *
from external_engines.text_engines import check_deaths
from external_engines.texts import ROUNDING, Ask, gap
from unirl.conformance.doubles.weight_updates import full_update
from unirl.core.roles import TextModel
from unirl.engine_host.text_engine import ExternalTextEngine
from unirl.numerics.tokens.rollout import generate_text

pytestmark = [pytest.mark.slow, pytest.mark.nightly, pytest.mark.timeout(600)]
"""SGLang imports itself in three processes: half a minute on free cores, minutes on busy ones."""


def test_a_seed_gives_the_text_that_training_in_process_gives(
    engine: ExternalTextEngine, model: TextModel, ask: Ask
) -> None:
    """Both draw the same number for the same step. A draw between the two cumulative sums, 1e-6 apart, is not met."""
    engine.load_weights(full_update(model, version=1))
    for settings in ({"temperature": 0.7}, {"top_k": 20}, {"top_p": 0.5, "temperature": 1.3}):
        request = ask(engine, **settings)
        track, there = engine.generate(request), generate_text(model, request.text)
        assert [row.tolist() for row in track.text.tokens] == [row.tolist() for row in there.tokens]
        # Those of all tokens, also where some were left out of the draw.
        assert gap(track, model) < ROUNDING


def test_killed_in_a_sync_and_in_a_rollout_it_says_so_and_comes_back(
    engine: ExternalTextEngine, model: TextModel, ask: Ask
) -> None:
    """Last, for it starts SGLang again."""
    check_deaths(engine, model, ask)
