"""Generation with a cache against the plain definition, and replay against both."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from tiny_text_model import VOCABULARY, TinyTextModel
from unirl.core.errors import BatchError
from unirl.core.roles import Job, Losses, LossTerm
from unirl.core.specs.config import TrainConfig
from unirl.core.types.inputs import Inputs
from unirl.core.types.request import TextRequest
from unirl.core.types.sampling import TextSamplingConfig
from unirl.core.types.track import PER_TOKEN, Conditions, Status, TextSegment, Track
from unirl.loop.requests import sample_seed
from unirl.numerics.tokens.draws import BLOCK, choose_tokens, draws
from unirl.numerics.tokens.log_probs import token_log_probs
from unirl.numerics.tokens.replay import per_token, replay_text
from unirl.numerics.tokens.rollout import generate_text, visible_texts
from unirl.numerics.train.stack import StepReport, train_on
from unirl.numerics.train.track_replay import TrackReplay

# Log-probs are kept in fp32: half a unit in the last place of a number below 16.
ROUNDING = 1e-6


def wanted(prompts, *, per_prompt=3, **settings):
    sampling = TextSamplingConfig(**{"max_new_tokens": 12, **settings})
    tokens = TinyTextModel().prompt_tokens(
        Inputs.of_texts([prompt for prompt in prompts for _ in range(per_prompt)]), sampling=sampling
    )
    ids = [f"r0/{prompt}/{number}" for prompt in prompts for number in range(per_prompt)]
    seeds = tuple(sample_seed(seed=1, rollout=0, sample_id=name) for name in ids)
    return TextRequest(sampling=sampling, prompt_tokens=tuple(tokens), stop_tokens=(0,), seeds=seeds)


def by_definition(model, prompt, seed, *, temperature, longest):
    """One sample, the whole text through the model for every token: where the cumulative probability passes the draw."""
    draws = np.random.Generator(np.random.Philox(key=seed)).random(longest)
    tokens = list(prompt)
    for draw in draws:
        batch = torch.tensor(tokens)[None]
        mask, places = torch.ones_like(batch, dtype=torch.bool), torch.arange(len(tokens))[None]
        state = model.states(batch, places, mask, torch.zeros(1, 6, dtype=torch.float64))[0, -1]
        chances = torch.softmax((state @ model.head.T) / temperature, dim=0).detach().numpy()
        tokens.append(int(np.searchsorted(chances.cumsum(), draw, side="right")))
        if tokens[-1] == 0:
            break
    return tokens[len(prompt) :]


def test_a_block_of_draws_is_that_part_of_the_stream_of_its_seed() -> None:
    """numpy's own generator of that key, drawn from its beginning."""
    stream = np.random.Generator(np.random.Philox(key=2**62 + 5)).random(3 * BLOCK)
    for block in (0, 2):
        assert draws(2**62 + 5, block).tolist() == stream[block * BLOCK : (block + 1) * BLOCK].tolist()


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_a_text_is_what_its_seed_draws_token_by_token(temperature):
    model, request = TinyTextModel(), wanted(["a", "cab", "bbbbb"], temperature=temperature)
    result = generate_text(model, request)
    for row, (prompt, seed) in enumerate(zip(request.prompt_tokens, request.seeds, strict=True)):
        expected = by_definition(model, prompt, seed, temperature=temperature, longest=12)
        assert result.tokens[row].tolist() == expected
        assert result.truncated[row] == (expected[-1] != 0)
    assert len({tuple(row.tolist()) for row in result.tokens}) > 3, "the samples of a prompt differ"
    assert len(set(map(len, result.tokens))) > 1, "rows that end early are in it"


def test_any_split_and_order_of_a_request_gives_the_same_texts():
    model, request = TinyTextModel(), wanted(["a", "cab", "bbbbb"])
    whole = generate_text(model, request)
    for rows in ([4], [8, 0, 3], [1, 2]):
        part = generate_text(model, request.select(rows))
        for place, row in enumerate(rows):
            assert torch.equal(part.tokens[place], whole.tokens[row])
            torch.testing.assert_close(part.log_probs[place], whole.log_probs[row], rtol=0, atol=ROUNDING)


def test_a_prompt_goes_through_the_model_once_whatever_goes_on_from_it():
    model = TinyTextModel()
    generate_text(model, wanted(["abc"], per_prompt=5, max_new_tokens=1))
    assert model.num_forwards == 1


@pytest.mark.parametrize("packing", [True, False])
def test_replay_gives_the_log_probs_of_the_rollout(packing):
    """The ratio of a first update is 1: the engine's log-probs and the replayed ones are the same function."""
    model, request = TinyTextModel(), wanted(["a", "cab", "bbbbb"], temperature=0.7)
    segment = a_segment(model, request)
    result = replay_text(model, a_track(segment), packing=packing)
    torch.testing.assert_close(
        result.log_probs.detach().float(), per_token(segment, "log_probs"), rtol=0, atol=ROUNDING
    )
    assert result.valid.sum(dim=1).tolist() == list(segment.lengths)
    # The entropy of each distribution, written out.
    batch = torch.cat([segment.prompt_tokens[4], segment.tokens[4]])[None]
    mask, places = torch.ones_like(batch, dtype=torch.bool), torch.arange(batch.shape[1])[None]
    states = model.states(batch, places, mask, torch.zeros(1, 6, dtype=torch.float64))[0, 2:-1]
    chances = torch.softmax((states @ model.head.T) / 0.7, dim=1)
    torch.testing.assert_close(result.entropy[4, : segment.lengths[4]], -(chances * chances.log()).sum(1))


def test_tokens_that_are_masked_are_not_valid():
    model, request = TinyTextModel(), wanted(["a"], per_prompt=2)
    segment = a_segment(model, request)
    mask = tuple(torch.arange(length) % 2 == 0 for length in segment.lengths)
    result = replay_text(model, a_track(dataclasses.replace(segment, mask=mask)), packing=True)
    assert result.valid[0].sum() == (segment.lengths[0] + 1) // 2
    assert not result.log_probs[~result.valid].any()


class LooksAtPatches(TinyTextModel):
    """Starts each row from the sum of its patches: a model that reads ragged media beside its tokens."""

    def states(self, tokens, positions, mask, start):
        return super().states(tokens, positions + 1, mask, start)

    def first(self, conditions):
        return torch.stack([patches.sum(dim=0) for patches in conditions["patches"]])

    def score(self, batch, *, temperature, with_entropy=False):
        mask = batch.attention_mask
        states = self.states(batch.tokens, batch.positions, mask, self.first(batch.conditions))
        hidden = states.flatten(0, 1)[batch.target_index]
        return token_log_probs(hidden, self.head, batch.targets, temperature=temperature, with_entropy=with_entropy)

    def next_logits(self, tokens, *, positions, attention_mask, cache, conditions=None):
        start = self.first(conditions) if cache is None else cache
        state = self.states(tokens, positions, attention_mask[:, -tokens.shape[1] :], start)[:, -1]
        return (state @ self.head.T).float(), state


def test_equal_prompts_over_other_media_are_other_prompts():
    """Two images under one instruction, with as many tokens each: their texts are their own, and are replayed so."""
    model, request = LooksAtPatches(), wanted(["ab"], per_prompt=6, temperature=0.7)
    patches = tuple(torch.full((size, 6), value, dtype=torch.float64) for size, value in ((1, 0.9), (3, -0.4)))
    conditions = Conditions(values={"patches": patches}, index=torch.tensor([0, 1, 0, 1, 0, 1]))
    whole = generate_text(model, request, conditions=conditions)
    assert model.num_forwards == 1 + max(map(len, whole.tokens)) - 1, "one prefill of both"
    for row in range(request.num_rows):
        alone = generate_text(model, request.select([row]), conditions=conditions.select([row]))
        assert torch.equal(alone.tokens[0], whole.tokens[row])
        torch.testing.assert_close(alone.log_probs[0], whole.log_probs[row], rtol=0, atol=ROUNDING)
    other = dataclasses.replace(conditions, index=1 - conditions.index)
    moved = generate_text(model, request, conditions=other)
    assert all(a[0] != b[0] for a, b in zip(moved.log_probs, whole.log_probs, strict=True))
    segment = a_segment(model, request, conditions=conditions)
    track = dataclasses.replace(a_track(segment), conditions={"positive": conditions}).select([5, 0, 3])
    result = replay_text(model, track, packing=False)
    torch.testing.assert_close(
        result.log_probs.detach().float(), per_token(track.text, "log_probs"), rtol=0, atol=ROUNDING
    )


def test_greedy_text_cannot_be_trained_on():
    model, request = TinyTextModel(), wanted(["a"], temperature=0.0)
    with pytest.raises(BatchError, match="sampled at temperature 0"):
        replay_text(model, a_track(a_segment(model, request)), packing=True)


def test_temperature_0_is_greedy():
    logits = torch.tensor([[0.0, 2.0, 1.0], [3.0, -1.0, 3.0]])
    tokens, log_probs = choose_tokens(logits, torch.zeros(2), temperature=0.0)
    assert tokens.tolist() == [1, 0]
    assert log_probs[0] == pytest.approx(2 - np.log(1 + np.e**2 + np.e), abs=ROUNDING)


@pytest.mark.parametrize(("settings", "kept"), [({}, 4), ({"top_k": 2}, 2), ({"top_p": 0.75}, 3), ({"top_p": 0.1}, 1)])
def test_evenly_spread_draws_give_each_token_its_share(settings, kept):
    """10,000 draws at the middles of equal intervals: the count of a token is its probability to one draw."""
    chances = torch.tensor([0.1, 0.4, 0.2, 0.3])
    draws = (torch.arange(10_000, dtype=torch.float64) + 0.5) / 10_000
    tokens, log_probs = choose_tokens(chances.log().expand(10_000, 4), draws, temperature=1.0, **settings)
    likeliest = chances.sort(descending=True).indices[:kept]
    share = torch.zeros(4).index_put((likeliest,), chances[likeliest] / chances[likeliest].sum())
    counts = torch.bincount(tokens, minlength=4)
    assert (counts - share * 10_000).abs().max() <= 1.0 + 1e-2
    # Over all tokens, whatever was left out.
    torch.testing.assert_close(log_probs, chances.log()[tokens])


def test_a_draw_next_to_1_takes_a_token_that_has_a_probability():
    logits = torch.tensor([[0.0, 0.0, -torch.inf]])
    tokens, _ = choose_tokens(logits, torch.tensor([1 - 2**-53], dtype=torch.float64), temperature=1.0)
    assert tokens.tolist() == [1]


def test_a_stop_string_ends_a_text_and_is_not_seen_by_rewards():
    model = TinyTextModel()
    free = generate_text(model, wanted(["a", "cab"], per_prompt=4))
    letters = model.texts(free.tokens)
    stop = next(text[1:3] for text in letters if len(text) > 4)
    request = wanted(["a", "cab"], per_prompt=4, stop=[stop])
    result = generate_text(model, request)
    for whole, tokens, truncated in zip(letters, result.tokens, result.truncated, strict=True):
        (text,) = model.texts([tokens])
        assert text == (whole[: whole.find(stop) + 2] if stop in whole else whole)
        assert not (stop in whole and truncated)
        assert visible_texts(model, [tokens], request.sampling) == [text.split(stop)[0]]


def test_ranks_that_share_a_model_step_until_all_have_ended():
    """While another rank continues, the model runs until the limit, and the texts are the same."""
    model, request = TinyTextModel(), wanted(["a"], per_prompt=2, max_new_tokens=9)
    alone = generate_text(model, request)
    model.num_forwards = 0
    together = generate_text(model, request, anyone=lambda goes_on: True)
    assert model.num_forwards == 10
    assert all(torch.equal(a, b) for a, b in zip(alone.tokens, together.tokens, strict=True))


class Plain:
    """An updater for one rank over the tiny model."""

    device, num_ranks, gradient_reduction = torch.device("cpu"), 1, "sum"

    def __init__(self, model):
        self.model = model
        self.num_backwards = 0

    def zero_grad(self):
        for weight in (self.model.embedding, self.model.mixing, self.model.head):
            weight.grad = None

    def backward(self, loss, *, last):
        self.num_backwards += 1
        loss.backward()

    def step(self):
        return StepReport(grad_norm=float(self.model.head.grad.norm()), grad_rms=0.0)

    def all_reduce_sum(self, values):
        return values

    def all_reduce_max(self, values):
        return values


class Reinforce:
    """The token-mean of -A log p."""

    trains_critic = False
    trains_fake_score = False
    separates_steps = False

    def with_old_log_probs(self, track, replay):
        replay(track)
        return track

    def loss_weights(self, track):
        return {"policy": track.sample_weights[:, None] * (per_token(track.text, "log_probs") != 0)}

    def loss(self, track, replay, *, progress):
        values = -track.advantages[:, None] * replay(track).log_probs
        return Losses(
            terms=[LossTerm(name="policy", values=values, weights=self.loss_weights(track)["policy"].double())]
        )


def test_micro_batches_by_tokens_give_the_gradient_of_the_whole_batch():
    model, request = TinyTextModel(), wanted(["a", "cab", "bbbbb"])
    track = a_track(a_segment(model, request))
    gradients, counts = [], []
    for budget, packing in ((0, True), (40, True), (40, False), (1, True)):
        updater = Plain(model)
        replay = TrackReplay(model, stacked=True, policy_context=None, packing=packing)
        report = train_on(
            [Job(track=track, algorithm=Reinforce())],
            forward=replay,
            updater=updater,
            train=TrainConfig(micro_batch_tokens=budget, packing=packing, logp_mismatch_max=ROUNDING),
            progress=0.0,
        )
        gradients.append(model.head.grad.clone())
        counts.append(updater.num_backwards)
        assert report.only["logp_mismatch_max"] <= ROUNDING
    assert counts[0] == 1
    assert 1 < counts[1] <= counts[2] < 9
    assert counts[3] == 9, "a row longer than the budget goes alone"
    for gradient in gradients[1:]:
        # The sums of fp64 gradients, in another order.
        torch.testing.assert_close(gradient, gradients[0], rtol=1e-12, atol=1e-14)


def test_a_rank_with_fewer_micro_batches_fills_up_with_rows_of_weight_0():
    model, request = TinyTextModel(), wanted(["a", "cab"])
    track = a_track(a_segment(model, request))
    updater = Plain(model)
    # Another rank says that it has 7 micro-batches, and as many rows as this one.
    updater.all_reduce_max = lambda values: torch.maximum(values, torch.tensor([7.0])) if len(values) == 1 else values
    replay = TrackReplay(model, stacked=True, policy_context=None)
    train_on(
        [Job(track=track, algorithm=Reinforce())],
        forward=replay,
        updater=updater,
        train=TrainConfig(micro_batch_tokens=10_000),
        progress=0.0,
    )
    assert updater.num_backwards == 7
    filled = model.head.grad.clone()
    updater.all_reduce_max = lambda values: values
    train_on(
        [Job(track=track, algorithm=Reinforce())],
        forward=replay,
        updater=updater,
        train=TrainConfig(),
        progress=0.0,
    )
    torch.testing.assert_close(filled, model.head.grad, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("packing", [True, False])
def test_micro_batches_by_tokens_keep_units(packing):
    model, request = TinyTextModel(), wanted(["a", "cab", "bbbbb"])
    track = a_track(a_segment(model, request))
    units = tuple(f"u{row // 3}" for row in range(9))
    track = dataclasses.replace(track, unit_ids=units)
    lengths = track.text.total_lengths
    costs = [sum(lengths[row : row + 3]) if packing else 3 * max(lengths[row : row + 3]) for row in range(0, 9, 3)]
    seen = []

    class Noting(Reinforce):
        def loss(self, track, forward, *, progress):
            seen.append(track.unit_ids)
            return super().loss(track, forward, progress=progress)

    gradients = []
    for budget in (0, max(costs)):
        updater = Plain(model)
        replay = TrackReplay(model, stacked=True, policy_context=None, packing=packing)
        settings = TrainConfig(micro_batch_tokens=budget, packing=packing)
        train_on([Job(track=track, algorithm=Noting())], forward=replay, updater=updater, train=settings, progress=0.0)
        gradients.append(model.head.grad.clone())
    # The sums of fp64 gradients, in another order.
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-12, atol=1e-14)
    assert len(seen) > 2 and all(ids.count(unit) == 3 for ids in seen for unit in ids)
    settings = TrainConfig(micro_batch_tokens=max(costs) - 1, packing=packing)
    worst = units[3 * costs.index(max(costs))]
    with pytest.raises(BatchError) as caught:
        train_on([Job(track=track, algorithm=Noting())], forward=replay, updater=updater, train=settings, progress=0.0)
    assert str(caught.value) == (
        f"train.micro_batch_tokens: got {max(costs) - 1}, but unit {worst!r} of track 'text' has {max(costs)} tokens, "
        f"and a unit is never split. Use {max(costs)} or more."
    )


def test_a_track_of_which_nothing_weighs_takes_no_step_also_by_tokens():
    model = TinyTextModel()
    track = a_track(a_segment(model, wanted(["a"])))
    track = dataclasses.replace(track, sample_weights=torch.zeros(3))
    updater, replay = Plain(model), TrackReplay(model, stacked=True, policy_context=None)
    settings = TrainConfig(micro_batch_tokens=40)
    report = train_on(
        [Job(track=track, algorithm=Reinforce())], forward=replay, updater=updater, train=settings, progress=0.0
    )
    assert report.num_updates == 0 and report.only["updates_empty"] == 1
    assert updater.num_backwards == 0


def test_tokens_are_counted_on_text_alone():
    model = TinyTextModel()
    track = dataclasses.replace(a_track(a_segment(model, wanted(["a"]))), segment=None)
    with pytest.raises(BatchError, match=r"train.micro_batch_tokens: got 5; track 'text' is not a text"):
        train_on(
            [Job(track=track, algorithm=Reinforce())],
            forward=None,
            updater=Plain(model),
            train=TrainConfig(micro_batch_tokens=5),
            progress=0.0,
        )


def test_a_field_that_nothing_filled_in_is_named():
    segment = a_segment(TinyTextModel(), wanted(["a"]))
    for name in PER_TOKEN:
        if getattr(segment, name) is None:
            with pytest.raises(BatchError, match=rf"TextSegment\.{name}: it is needed"):
                per_token(segment, name)


def a_segment(model, request, conditions=None):
    result = generate_text(model, request, conditions=conditions)
    assert all(int(token) < VOCABULARY for row in result.tokens for token in row)
    return TextSegment(
        prompt_tokens=request.prompt_tokens,
        tokens=result.tokens,
        log_probs=result.log_probs,
        temperature=request.sampling.temperature,
    )


def a_track(segment):
    count = segment.num_rows
    return Track(
        name="text",
        sample_ids=tuple(f"s{row}" for row in range(count)),
        group_ids=tuple(f"g{row // 3}" for row in range(count)),
        inputs=Inputs.of_texts(("",) * count),
        metadata=({},) * count,
        segment=segment,
        advantages=torch.linspace(-1, 1.3, count),
        sample_weights=torch.ones(count),
        status=(Status.COMPLETED,) * count,
        policy_version=(0,) * count,
    )
