"""Tokens of rows shared by two and four gloo ranks, for every family: log-probs, entropies and gradients of one rank.

`test_causal_lm.py` compares those of one rank with transformers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from causal_lm_families import SETTINGS, write
from causal_lm_ranks import CASES, run
from rank_processes import launch

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).with_name("causal_lm_ranks.py")


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("families")
    for name in SETTINGS:
        write(folder / name, name)
    write(folder / "three", "Qwen3", num_attention_heads=3, num_key_value_heads=3)
    return folder


@pytest.fixture(scope="module", params=[2, 4])
def ranks(request: pytest.FixtureRequest, checkpoints: Path) -> list[Any]:
    """(results, refusals) of each rank."""
    number: int = request.param
    launch(SCRIPT, number, checkpoints, ranks=number)
    return [torch.load(checkpoints / f"{rank}-of-{number}.pt", weights_only=False) for rank in range(number)]


@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_ranks_that_share_the_tokens_of_rows_give_the_scores_and_gradients_of_one(
    case: tuple[str, str], ranks: list[Any], checkpoints: Path
) -> None:
    expected = run(case, checkpoints)
    results = [result[case] for result, _ in ranks]
    for result in results:
        for one, other in zip(result["scores"], expected["scores"], strict=True):
            # fp32: logits of size 10 with about 1e-6 of rounding, in another order of sums for another shape.
            torch.testing.assert_close(one, other, rtol=0, atol=2e-5)
        for one, other in zip(result["texts"], expected["texts"], strict=True):
            assert torch.equal(one, other)
    largest = max(float(gradient.abs().max()) for gradient in expected["gradients"].values())
    for key, gradient in expected["gradients"].items():
        shares = [result["gradients"][key] for result in results if key in result["gradients"]]
        # Sums of some 100 tokens in another order: 1e-5 of the largest element is ten times their rounding.
        scale = max(float(gradient.abs().max()), 1e-3 * largest)
        assert float((sum(shares) - gradient).abs().max()) < 1e-5 * scale, key


def test_attention_that_would_see_the_tokens_of_one_rank_alone_is_refused(ranks: list[Any]) -> None:
    number, said = len(ranks), ranks[0][1]
    assert said["eager"].startswith(f"backend.mesh.sequence: got {number} with model.attention=eager")
    assert "Set model.attention=sdpa" in said["eager"]
    assert "the 3 attention heads" in said["heads"] and "Use a divisor of 3" in said["heads"]
