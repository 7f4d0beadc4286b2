"""Padded and packed rows say the same, and work is divided within its bounds."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from unirl.numerics.tokens.batches import from_rows, micro_batches_by_tokens, pack_batch, pad_batch, to_rows


def ids(*numbers):
    return torch.tensor(numbers, dtype=torch.int64)


PROMPTS = [ids(10, 11), ids(20), ids(30, 31, 32)]
TOKENS = [ids(12, 13), ids(), ids(33)]


def test_a_padded_batch_by_hand():
    batch = pad_batch(PROMPTS, TOKENS, pad_token=0)
    assert batch.tokens.tolist() == [[10, 11, 12, 13], [20, 0, 0, 0], [30, 31, 32, 33]]
    assert batch.attention_mask.tolist() == [[True] * 4, [True, False, False, False], [True] * 4]
    assert batch.positions.tolist() == [[0, 1, 2, 3]] * 3
    assert batch.target_index.tolist() == [1, 2, 10]  # 11 predicts 12, 12 predicts 13, 32 predicts 33
    assert (batch.max_length, batch.cu_seqlens, batch.lengths) == (4, None, (2, 0, 1))


def test_a_packed_batch_by_hand():
    batch = pack_batch(PROMPTS, TOKENS)
    assert batch.tokens.tolist() == [[10, 11, 12, 13, 20, 30, 31, 32, 33]]
    assert batch.positions.tolist() == [[0, 1, 2, 3, 0, 0, 1, 2, 3]]
    assert batch.cu_seqlens.tolist() == [0, 4, 5, 9] and batch.cu_seqlens.dtype == torch.int32
    assert batch.target_index.tolist() == [1, 2, 7]
    assert (batch.max_length, batch.attention_mask, batch.lengths) == (4, None, (2, 0, 1))


rows = st.lists(st.tuples(st.integers(1, 5), st.integers(0, 6)), min_size=1, max_size=6)


@given(rows)
@settings(max_examples=60)
def test_both_layouts_have_the_same_targets_each_predicted_from_the_place_before_it(sizes):
    prompts = [ids(*range(100 * row, 100 * row + p)) for row, (p, _) in enumerate(sizes)]
    tokens = [ids(*range(100 * row + p, 100 * row + p + n)) for row, (p, n) in enumerate(sizes)]
    padded, packed = pad_batch(prompts, tokens, pad_token=0), pack_batch(prompts, tokens)
    for batch in (padded, packed):
        assert batch.targets.tolist() == torch.cat(tokens).tolist()
        assert batch.rows.tolist() == [row for row, (_, n) in enumerate(sizes) for _ in range(n)]
        flat, places = batch.tokens.flatten(), batch.positions.flatten()
        assert torch.equal(flat[batch.target_index + 1], batch.targets)
        # Tokens of a row are numbered in order, so what predicts one is its predecessor, of the same row.
        assert torch.equal(flat[batch.target_index], batch.targets - 1)
        within = torch.cat([torch.arange(p, p + n) for p, n in sizes])
        assert torch.equal(places[batch.target_index + 1], within)
    assert torch.equal(padded.tokens[padded.attention_mask], packed.tokens[0])
    assert torch.equal(padded.positions[padded.attention_mask], packed.positions[0])


@given(rows)
@settings(max_examples=30)
def test_rows_and_flat_are_each_others_inverse_with_gradient(sizes):
    lengths = [n for _, n in sizes]
    flat = torch.arange(1.0, sum(lengths) + 1, requires_grad=True)
    padded, valid = to_rows(flat, lengths)
    assert padded.shape == valid.shape == (len(lengths), max(lengths))
    assert valid.sum(dim=1).tolist() == lengths and bool((padded[~valid] == 0).all())
    assert torch.equal(from_rows(padded, valid), flat)
    if sum(lengths):
        (gradient,) = torch.autograd.grad((padded * 3).sum(), [flat])
        assert torch.equal(gradient, torch.full_like(flat, 3))


def test_a_causal_model_gives_the_same_numbers_for_both_layouts():
    """One layer of causal attention in fp64: padding on the right reaches no real token."""
    generator = torch.Generator().manual_seed(0)
    table = torch.randn(40, 6, generator=generator, dtype=torch.float64)
    places = torch.randn(8, 6, generator=generator, dtype=torch.float64)

    def attended(x):
        scores = x @ x.transpose(-1, -2)
        later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        return scores.masked_fill(later, float("-inf")).softmax(-1) @ x

    padded, packed = pad_batch(PROMPTS, TOKENS, pad_token=39), pack_batch(PROMPTS, TOKENS)
    one = attended(table[padded.tokens] + places[padded.positions]).flatten(0, 1)[padded.target_index]
    x = (table[packed.tokens] + places[packed.positions])[0]
    starts = packed.cu_seqlens.tolist()
    other = torch.cat([attended(x[a:b]) for a, b in itertools.pairwise(starts)])[packed.target_index]
    torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)  # fp64


def test_batches_that_cannot_be_are_refused():
    with pytest.raises(ValueError, match="prompt of row 1 is empty"):
        pack_batch([ids(1), ids()], [ids(2), ids(3)])
    with pytest.raises(ValueError, match=r"tokens of row 0: got torch.float32 \[1\]"):
        pad_batch([ids(1)], [torch.ones(1)], pad_token=0)
    with pytest.raises(ValueError, match="2 prompts and 1 rows of tokens"):
        pack_batch([ids(1), ids(2)], [ids(3)])
    with pytest.raises(ValueError, match="0 prompts"):
        pack_batch([], [])
    with pytest.raises(ValueError, match=r"got shape \[3\], expected \[4\]"):
        to_rows(torch.zeros(3), [1, 3])
    with pytest.raises(ValueError, match="must be equal"):
        from_rows(torch.zeros(2, 3), torch.ones(3, 2, dtype=torch.bool))


@given(st.lists(st.integers(0, 30), max_size=12), st.integers(1, 40), st.booleans())
@settings(max_examples=200)
def test_every_row_is_in_one_micro_batch_within_the_budget(lengths, budget, padded):
    batches = micro_batches_by_tokens(lengths, budget, padded=padded)
    assert sorted(row for batch in batches for row in batch) == list(range(len(lengths)))
    for batch in batches:
        sizes = [lengths[row] for row in batch]
        cost = len(sizes) * max(sizes) if padded else sum(sizes)
        assert batch == sorted(batch) and (cost <= budget or len(batch) == 1)
    assert [batch[0] for batch in batches] == sorted(batch[0] for batch in batches)
    if not padded and all(length <= budget for length in lengths):
        # First fit: what is in the later of two did not fit into the earlier.
        totals = [sum(lengths[row] for row in batch) for batch in batches]
        assert all(one + other > budget for one, other in itertools.combinations(totals, 2))
    assert batches == micro_batches_by_tokens(lengths, budget, padded=padded)


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 30)), max_size=12), st.integers(1, 60), st.booleans())
@settings(max_examples=200)
def test_units_are_whole_in_micro_batches_within_the_budget(rows, budget, padded):
    lengths = [length for _, length in rows]
    units = [
        [row for row, (unit, _) in enumerate(rows) if unit == number] for number in dict.fromkeys(u for u, _ in rows)
    ]
    batches = micro_batches_by_tokens(lengths, budget, units=units, padded=padded)
    assert sorted(row for batch in batches for row in batch) == list(range(len(rows)))
    for unit in units:
        assert [set(unit) <= set(batch) for batch in batches].count(True) == 1
    for batch in batches:
        sizes = [lengths[row] for row in batch]
        cost = len(sizes) * max(sizes) if padded else sum(sizes)
        assert batch == sorted(batch) and (cost <= budget or batch in units)
    if len(units) == len(rows):
        assert batches == micro_batches_by_tokens(lengths, budget, padded=padded)


def test_micro_batches_by_hand():
    # Units of 11, 8 and 7 tokens.
    assert micro_batches_by_tokens([3, 8, 5, 2, 8], 18, units=[[0, 4], [1], [2, 3]]) == [[0, 2, 3, 4], [1]]
    # Padded: 16, 8 and 10 tokens, and the second and third together 24.
    assert micro_batches_by_tokens([3, 8, 5, 2, 8], 24, units=[[0, 4], [1], [2, 3]], padded=True) == [[0, 1, 4], [2, 3]]
    assert micro_batches_by_tokens([3, 8, 5, 2, 9], 10) == [[0, 2], [1, 3], [4]]
    assert micro_batches_by_tokens([3, 8, 5, 2, 9], 10, padded=True) == [[0, 2], [1], [3], [4]]
    assert micro_batches_by_tokens([50, 1], 10) == [[0], [1]]  # a row above the budget is alone
    with pytest.raises(ValueError, match="budget of 0"):
        micro_batches_by_tokens([1], 0)
    with pytest.raises(ValueError, match="length of row 1 is -2"):
        micro_batches_by_tokens([1, -2], 5)
