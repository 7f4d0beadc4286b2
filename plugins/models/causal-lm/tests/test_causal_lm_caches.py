"""Rollouts with every kind of cache that transformers has, and the rows that a rollout selects from it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from causal_lm_families import OTHERS, STATES
from torch import Tensor
from transformers import cache_utils
from unirl.core.errors import RecipeError
from unirl.core.types.inputs import Inputs
from unirl.core.types.request import TextRequest
from unirl.core.types.sampling import TextSamplingConfig
from unirl.model_host.tokens.cache_rows import select_rows
from unirl.models.causal_lm.model import AutoCausalLm
from unirl.numerics.tokens.batches import pad_batch
from unirl.numerics.tokens.rollout import generate_text

REFUSED = {
    "DeepseekV4": r"differ by [0-9.]+ in a cached batch .*masks, positions and rows of a cache",
    "MiniMax": r"differ by [0-9.]+ in a cached batch .*masks, positions and rows of a cache",
    "RecurrentGemma": r"logits that differ by .* factor alone",
    "Rwkv": r"differ by [0-9.]+ in a cached batch .*masks, positions and rows of a cache",
    "xLSTM": r"logits that differ by .* factor alone",
}
"""DeepSeek-V4 compresses windows from the first padding token on, transformers' MiniMax counts its cache by a layer
without keys, RWKV reads padding, and two cap their logits."""
KINDS = {*cache_utils.STATIC_LAYER_TYPE_MAPPING.values(), *cache_utils.DYNAMIC_LAYER_TYPE_MAPPING.values()}
ROWS = (2, 0, 0, 1, 2)


@pytest.mark.parametrize("name", [*STATES, *OTHERS])
def test_a_family_replays_what_it_generates_or_is_refused_by_name(name: str, load: Callable[..., AutoCausalLm]) -> None:
    if name in REFUSED:
        with pytest.raises(RecipeError, match=rf"^model\.path: '{name}ForCausalLM' .*{REFUSED[name]}"):
            load(name)
        return
    model = load(name)
    sampling = TextSamplingConfig(max_new_tokens=10)
    # Several rows of a prompt, prompts of other lengths, and rows that end: a fifth of all tokens stops.
    texts = ("What is 47 + 85?",) * 3 + ("a",) * 3 + ("Say it in French: the ring is red.",) * 2
    prompts = model.prompt_tokens(Inputs.of_texts(texts), sampling=sampling)
    request = TextRequest(
        sampling=sampling,
        prompt_tokens=tuple(prompts),
        stop_tokens=tuple(range(0, 256, 5)),
        seeds=tuple(range(len(texts))),
    )
    result = generate_text(model, request)
    assert len({len(row) for row in result.tokens}) > 2, "rows end at different steps"
    with torch.no_grad():
        replayed, _ = model.score(pad_batch(prompts, list(result.tokens), pad_token=model.pad_token), temperature=1.0)
    # fp32: sums of some 30 terms in another order; logits of Nemotron-H, with squared activations, are of size 100.
    torch.testing.assert_close(replayed, torch.cat(result.log_probs), rtol=0, atol=5e-5)


@pytest.mark.parametrize("kind", sorted(one.__name__ for one in KINDS))
def test_rows_are_selected_from_every_state_of_every_layer_of_a_cache(kind: str) -> None:
    layer = getattr(cache_utils, kind)(max_cache_len=8, sliding_window=4)
    if hasattr(layer, "update"):
        layer.update(numbered(3, 2, 3, 4), numbered(3, 2, 3, 4))
    if hasattr(layer, "update_conv_state"):
        layer.update_conv_state(numbered(3, 2, 4))
        layer.update_recurrent_state(numbered(3, 2, 4, 4))
    if hasattr(layer, "update_indexer"):
        layer.update_indexer(numbered(3, 3, 4))
        layer.indexer_position_ids = numbered(3, 2, 3).transpose(0, 1)
    cache = select_rows(cache_utils.Cache(layers=[layer]), torch.tensor(ROWS))
    states = {name: one for name, one in named_states(cache) if one.dim() > 1}
    assert states
    for name, state in states.items():
        axis = 1 if name == "indexer_position_ids" else 0
        others = [dim for dim in range(state.dim()) if dim != axis]
        # Static layers keep room for further tokens, of zeros.
        assert state.amax(dim=others).tolist() == [row + 1 for row in ROWS], name


def test_rows_are_selected_from_caches_that_select_a_part_or_nothing_themselves() -> None:
    """The layers of MiniMax have an own list for linear attention, RWKV's cache is a list, and a tuple stays one."""
    layer = cache_utils.DynamicLayer()
    layer.update(numbered(3, 2, 3, 4), numbered(3, 2, 3, 4))
    cache: Any = cache_utils.Cache(layers=[layer])
    cache.linear_cache, cache.counts, cache.table = [[], numbered(3, 4)], torch.arange(3), numbered(7, 4)
    select_rows(cache, torch.tensor(ROWS))
    expected = [row + 1 for row in ROWS]
    assert cache.linear_cache[1][:, 0].tolist() == layer.keys[:, 0, 0, 0].tolist() == expected
    # Neither has one entry of several elements a row.
    assert cache.counts.tolist() == [0, 1, 2] and len(cache.table) == 7
    first, (second, nothing) = select_rows((numbered(3, 2), [numbered(3, 1), None]), torch.tensor(ROWS))
    assert first[:, 0].tolist() == second[:, 0].tolist() == expected and nothing is None


def keys_alone(cache: Any, rows: Tensor) -> Any:
    for layer in cache.layers:
        cache_utils.CacheLayerMixin.reorder_cache(layer, rows)
    return cache


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (keys_alone, r"does not take padded batches and a cache"),
        (lambda cache, rows: select_rows(cache, rows.sort().values), r"in a cached batch .* rows of a cache"),
    ],
    ids=["states stay", "rows in another order"],
)
def test_rows_that_a_rollout_would_mix_up_are_found_when_the_model_is_loaded(
    wrong: Any, says: str, load: Callable[..., AutoCausalLm], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("unirl.model_host.tokens.causal_lm.select_rows", wrong)
    with pytest.raises(RecipeError, match=rf"^model\.path: 'FalconH1ForCausalLM' .*{says}"):
        load("FalconH1")


def numbered(*size: int) -> Tensor:
    """Row n holds n + 1."""
    return (torch.arange(size[0]) + 1.0).view(-1, *[1] * (len(size) - 1)).expand(size).clone()


def named_states(part: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    if isinstance(part, Tensor):
        yield name, part
    entries = part.items() if isinstance(part, dict) else getattr(part, "__dict__", {}).items()
    for key, value in entries:
        for one in value if isinstance(value, list) else [value]:
            yield from named_states(one, str(key) if isinstance(key, str) else name)
