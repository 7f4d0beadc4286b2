"""Tokens of a sample shared by ranks: two and four gloo ranks against diffusers' own forward on one."""

from pathlib import Path

import pytest
import torch
from rank_processes import launch
from sequence_ranks import CASES, SPLITS, run

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).with_name("sequence_ranks.py")
RECOMPUTED = [(name, "again") for name in SPLITS]


@pytest.fixture(scope="module", params=[2, 4])
def ranks(request, tmp_path_factory):
    """(results, refusals) of each rank."""
    folder = tmp_path_factory.mktemp("ranks")
    launch(SCRIPT, request.param, folder, ranks=request.param)
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(request.param)]


@pytest.mark.parametrize(("name", "latents"), [*CASES, *RECOMPUTED])
def test_ranks_of_a_sequence_give_the_output_and_the_gradients_of_one(name, latents, ranks):
    is_again = latents == "again"
    expected, gradients = run(name, "odd" if is_again else latents, recomputes=is_again)
    largest = max(float(gradient.abs().max()) for gradient in gradients.values())
    results = [result[name, latents] for result, _ in ranks]
    for output, _ in results:
        # fp64, with rotations that diffusers rounds to fp32, 6e-8: a rounding error before one may change its result.
        assert float((output - expected).abs().max()) < 1e-6 * float(expected.abs().max())
    assert all(own.keys() == gradients.keys() for _, own in results)
    for key, gradient in gradients.items():
        total = sum(own[key] for _, own in results)
        # Norms of diffusers sum their gradients over tokens in fp32, and the ranks sum their tokens' first. Keys' biases
        # without rotation have a gradient of 0, as a softmax ignores them: there, both are rounding errors.
        bound = 2e-6 * float(gradient.abs().max()) + 1e-9 * largest
        assert float((total - gradient).abs().max()) < bound, key


def test_attention_that_cannot_be_shared_is_refused(ranks):
    number = len(ranks)
    said = [refusals for _, refusals in ranks]
    assert all(one == said[0] for one in said)
    start = f"backend.mesh.sequence: got {number}, but "
    assert all(text.startswith(start) for text in said[0].values())
    assert "the 3 attention heads" in said[0]["heads"] and "Use a divisor of 3" in said[0]["heads"]
    assert "attention by AttnProcessor cannot be split" in said[0]["processor"]
    assert "a latent has 1 tokens" in said[0]["tokens"]
    assert "WanAttention does not compute attention by torch's scaled_dot_product_attention" in said[0]["kernel"]
