"""vLLM itself, on a CPU: what every engine for text is tried for, and what is its own."""

from __future__ import annotations

import pytest
from external_engines.text_engines import *
from external_engines.text_engines import check_deaths
from external_engines.texts import Ask
from unirl.core.roles import TextModel
from unirl.engine_host.text_engine import ExternalTextEngine

pytestmark = [pytest.mark.slow, pytest.mark.nightly]


def test_a_cut_distribution_gives_texts_without_log_probs(engine: ExternalTextEngine, ask: Ask) -> None:
    """vLLM's are of the tokens that were left, and everything here is of all tokens."""
    one = engine.generate(ask(engine, top_k=1)).text
    greedy = engine.generate(ask(engine, temperature=0.0)).text
    assert one.log_probs is None
    assert [row.tolist() for row in one.tokens] == [row.tolist() for row in greedy.tokens]


def test_killed_in_a_sync_and_in_a_rollout_it_says_so_and_comes_back(
    engine: ExternalTextEngine, model: TextModel, ask: Ask
) -> None:
    """Last, for it starts vLLM again."""
    check_deaths(engine, model, ask)
