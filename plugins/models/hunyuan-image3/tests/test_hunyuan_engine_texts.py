"""HunyuanImage-3.0's texts from vLLM-Omni, on a CPU and in fp32, against those of the trained module: from the same
process, and with the same weights, as its images."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from external_engines.image_models import started
from external_engines.sequence_texts import *
from external_engines.sequence_texts import asking, check_text
from external_engines.text_engines import check_deaths
from external_engines.texts import ROUNDING, Ask
from unirl.conformance.doubles.weight_updates import full_update
from unirl.core.types.data import MediaRef
from unirl.engine_host.latent_engine import ExternalLatentEngine
from unirl.models.hunyuan_image3.config import HunyuanImageConfig
from unirl.models.hunyuan_image3.model import HunyuanImageModel, build

pytestmark = [pytest.mark.slow, pytest.mark.nightly]


@pytest.fixture(scope="module")
def engine(tiny_folder: Path) -> Iterator[ExternalLatentEngine]:
    """Texts four at a time; its weights are those that the test before left."""
    own = build(HunyuanImageConfig(path=str(tiny_folder)), device="cpu")
    with started("vllm-omni", own, max_num_texts=4) as result:
        yield result


@pytest.fixture
def model(tiny_folder: Path) -> HunyuanImageModel:
    """The trained module with the weights of the checkpoint, to be modified by tests."""
    return build(HunyuanImageConfig(path=str(tiny_folder)), device="cpu")


@pytest.fixture(scope="module")
def ask(tiny_folder: Path) -> Ask:
    return asking(build(HunyuanImageConfig(path=str(tiny_folder)), device="cpu"))


@pytest.fixture
def variants() -> list[dict[str, Any]]:
    """By what a text begins with."""
    return [{"options": {"begin": begin}} for begin in ("", "think", "recaption")]


@pytest.fixture
def spoiled() -> tuple[str, str]:
    return "model.layers.1.mlp.shared_mlp.down_proj.weight", r"layers\.1\.mlp\.shared_mlp\.down_proj"


def test_a_recaption_is_forced_behind_a_thought_and_masked(
    engine: ExternalLatentEngine, model: HunyuanImageModel, ask: Ask, media: list[tuple[MediaRef, ...]]
) -> None:
    """With weights that often end thoughts; from sources, sampled and greedy, and nowhere in a text without a tag."""
    marks = model.marks
    with torch.no_grad():
        # Its logit is then the largest of about half of all states.
        model.transformer.lm_head.weight[marks.think_end] *= 8
    engine.load_weights(full_update(model, version=1))

    def thinking(**settings: Any) -> int:
        """Number of thoughts that ended."""
        request = ask(engine, options={"begin": "think"}, media=lambda number: media[number], **settings)
        # Logits that are 8 times as large are rounded 8 times as much.
        text = check_text(engine, model, request, rounding=8 * ROUNDING).text
        assert text.mask is not None and text.log_probs is not None
        assert dict(text.options) == {"begin": "think"}
        ends = 0
        for tokens, mask, log_probs in zip(text.tokens, text.mask, text.log_probs, strict=True):
            behind = [0, *(tokens[:-1] == marks.think_end).nonzero()[:, 0].add(1).tolist()][1:]
            assert [place for place, is_on in enumerate(mask.tolist()) if not is_on] == behind
            # The one token that is allowed has all of the probability.
            assert tokens[behind].tolist() == [marks.recaption] * len(behind) and not log_probs[behind].any()
            ends += len(behind)
        return ends

    assert thinking() and thinking(temperature=0.0) and thinking(top_k=3)
    free = engine.generate(ask(engine)).text
    assert free.mask is not None and all(bool(mask.all()) for mask in free.mask)
    assert any(
        marks.think_end in tokens[:-1].tolist() and marks.recaption not in tokens.tolist() for tokens in free.tokens
    )


def test_an_engine_that_dies_is_reported_and_started_again(engine: Any, model: HunyuanImageModel, ask: Ask) -> None:
    """In a sync, and while it writes. Last, for it ends the engine."""
    check_deaths(engine, model, ask)
