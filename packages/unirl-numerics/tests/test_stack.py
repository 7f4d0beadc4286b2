"""The train stack, with a linear model, SGD written out by hand, and ranks that are threads."""

from __future__ import annotations

import dataclasses
import math
import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from unirl.core.errors import BatchError, RunFailed
from unirl.core.match.mismatch_bounds import MismatchBounds
from unirl.core.roles import Job, Losses, LossTerm, Metric, Replayed
from unirl.core.specs.config import TrainConfig
from unirl.core.types.inputs import Inputs
from unirl.core.types.track import LatentSegment, Sampler, Status, Track
from unirl.numerics.loss.tally import Tally
from unirl.numerics.train.partition import micro_batches_by_rows, mini_batches
from unirl.numerics.train.stack import StepReport, UpdateSettings, train_on

DEADLINE_S = 20


class Alone:
    """An updater for one rank that notes what it was asked to do. The model is one vector."""

    device = torch.device("cpu")
    num_ranks = 1
    gradient_reduction = "mean"

    def __init__(self, *, lr=0.0):
        self.weight = torch.tensor([0.5, -0.25, 1.0], dtype=torch.float64, requires_grad=True)
        self.lr = lr
        self.calls = []
        self.gradients = []

    def zero_grad(self):
        self.calls.append("zero")
        self.weight.grad = None

    def backward(self, loss, *, last):
        self.calls.append("last" if last else "backward")
        loss.backward()

    def joined(self, gradient):
        return gradient

    def step(self):
        gradient = self.joined(self.weight.grad)
        self.calls.append("step")
        self.gradients.append(gradient.clone())
        skipped = not bool(torch.isfinite(gradient).all())
        if not skipped:
            with torch.no_grad():
                self.weight -= self.lr * gradient
        norm = float(gradient.norm())
        return StepReport(grad_norm=norm, grad_rms=norm / 3, skipped=skipped, metrics={"lr": self.lr})

    def all_reduce_sum(self, values):
        return values

    def all_reduce_max(self, values):
        return values

    @property
    def replay(self):
        return Forwarded(self.weight)


class Forwarded:
    """Log-probs that depend on the model: the latent's first three entries times its weight."""

    def __init__(self, weight):
        self.weight, self.meter = weight, None

    def __call__(self, track, *, policy="live"):
        inputs = track.latent.latents[:, 0, :3].double()
        log_probs = (inputs * self.weight).sum(1, keepdim=True).expand(-1, 2)
        still = torch.zeros(track.num_rows, 2, 1)
        valid = track.latent.sde_steps >= 0
        replayed = Replayed(log_probs=log_probs, means=still, std=still, g=still, next=still, valid=valid)
        if policy == "live" and self.meter is not None:
            self.meter.observe(track, replayed)
        return replayed


class ThreadRank(Alone):
    """One of several ranks: threads that meet at every collective, or fail together after the deadline."""

    def __init__(self, rank, board, barrier, reduction, *, lr):
        super().__init__(lr=lr)
        self.rank, self.board, self.barrier = rank, board, barrier
        self.num_ranks = barrier.parties
        self.gradient_reduction = reduction

    def gathered(self, values):
        self.board[self.rank] = values.clone()
        self.barrier.wait(DEADLINE_S)
        every = torch.stack([self.board[rank] for rank in range(self.num_ranks)])
        self.barrier.wait(DEADLINE_S)
        return every

    def joined(self, gradient):
        every = self.gathered(gradient)
        return every.mean(0) if self.gradient_reduction == "mean" else every.sum(0)

    def all_reduce_sum(self, values):
        return self.gathered(values).sum(0)

    def all_reduce_max(self, values):
        return self.gathered(values).amax(0)


class Weighted:
    """Rows weigh their weight times their valid steps; the loss is the advantage times the log-prob."""

    def __init__(self):
        self.anchored = []
        self.trained = []

    def with_old_log_probs(self, track, replay):
        self.anchored.append(track.sample_ids)
        segment = dataclasses.replace(track.latent, log_probs=replay(track).log_probs.float())
        return dataclasses.replace(track, segment=segment)

    def loss_weights(self, track):
        return {"policy": track.sample_weights[:, None] * (track.latent.sde_steps >= 0)}

    def loss(self, track, replay, *, progress):
        self.trained.append(track.sample_ids)
        new = replay(track).log_probs
        ratio = (new - track.latent.log_probs).exp()
        weights = self.loss_weights(track)["policy"].double()
        values = -track.advantages[:, None] * ratio
        ratio = ratio.detach()
        counted = weights > 0
        return Losses(
            terms=[LossTerm(name="policy", values=values, weights=weights)],
            metrics={
                "ratio_mean": Metric(total=float((ratio * weights).sum()), weight=float(weights.sum())),
                "ratio_max_dev": Metric(total=float(torch.where(counted, (ratio - 1).abs(), 0.0).max()), reduce="max"),
                "progress": Metric(total=progress),
            },
        )


class FromEngine(Weighted):
    """Keeps the log-probs of the engine."""

    def with_old_log_probs(self, track, replay):
        return track


class Pairs(Weighted):
    """DPO's loss: -log sigmoid of the difference of the log-probs of the rows of a unit, the better one first."""

    def loss_weights(self, track):
        return {"pairs": track.sample_weights[[rows[0] for rows in track.units()]]}

    def loss(self, track, replay, *, progress):
        self.trained.append(track.sample_ids)
        better, worse = torch.tensor(track.units()).unbind(dim=1)
        log_probs = replay(track).log_probs[:, 0]
        values = -torch.nn.functional.logsigmoid(log_probs[better] - log_probs[worse])
        return Losses(terms=[LossTerm(name="pairs", values=values, weights=self.loss_weights(track)["pairs"])])


def make_track(num_rows=8, *, groups=None, log_probs=None):
    generator = torch.Generator().manual_seed(0)
    steps = torch.tensor([[0, 1]] * num_rows)
    steps[1::3, 1] = -1  # ragged: some rows have one step
    segment = LatentSegment(
        latents=torch.randn(num_rows, 3, 4, generator=generator),
        positions=torch.tensor([[0, 1, 2]] * num_rows),
        sde_steps=steps,
        sigmas=torch.tensor([1.0, 0.5, 0.0]),
        sampler=Sampler(kernel="flow-sde", eta=0.7),
        log_probs=log_probs,
    )
    return Track(
        name="image",
        sample_ids=tuple(f"s{i}" for i in range(num_rows)),
        group_ids=groups or tuple(f"g{i // 4}" for i in range(num_rows)),
        inputs=Inputs.of_texts(("",) * num_rows),
        metadata=({},) * num_rows,
        segment=segment,
        advantages=torch.randn(num_rows, generator=generator),
        sample_weights=torch.ones(num_rows),
        status=(Status.COMPLETED,) * num_rows,
        policy_version=(0,) * num_rows,
    )


def run(track, algorithm=None, *, rank=None, logp_mismatch_max=None, logp_mismatch_mean=None, **settings):
    rank = rank or Alone()
    report = train_on(
        [Job(track=track, algorithm=algorithm or Weighted())],
        forward=rank.replay,
        updater=rank,
        settings=UpdateSettings(
            mismatch_bounds=MismatchBounds(largest=logp_mismatch_max, mean=logp_mismatch_mean), **settings
        ),
        progress=0.25,
    )
    return rank, report


def run_ranks(tracks, *, reduction="mean", lr=0.0, **settings):
    board, barrier = {}, threading.Barrier(len(tracks))
    ranks = [ThreadRank(i, board, barrier, reduction, lr=lr) for i in range(len(tracks))]
    result = [None] * len(tracks)

    def work(i):
        try:
            result[i] = run(tracks[i], rank=ranks[i], **settings)
        except (BatchError, RunFailed) as error:
            result[i] = error

    threads = [threading.Thread(target=work, args=(i,), daemon=True) for i in range(len(tracks))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * DEADLINE_S)
        assert not thread.is_alive()
    return result


def test_the_gradient_is_the_weighted_mean_over_all_elements():
    track = make_track()
    rank, report = run(track)
    # At ratio 1 the gradient of one element is -advantage * inputs; rows weigh as many elements as they have steps.
    elements = (track.latent.sde_steps >= 0).sum(1).double()
    inputs = track.latent.latents[:, 0, :3].double()
    expected = -(elements * track.advantages)[:, None] * inputs
    # The old log-probs are stored in fp32, so the ratio is 1 to 1e-7.
    torch.testing.assert_close(rank.gradients[0], expected.sum(0) / elements.sum(), rtol=1e-6, atol=1e-8)
    assert report.metrics["loss"] == pytest.approx(float(-(elements * track.advantages).sum() / elements.sum()), 1e-6)
    assert report.num_updates == 1 and report.num_skipped == 0


@pytest.mark.parametrize("micro_batch_size", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("updates", [1, 2, 3])
def test_micro_batches_change_neither_gradient_nor_metric(micro_batch_size, updates):
    whole, expected = run(make_track(10), updates=updates, rank=Alone(lr=0.1))
    parts, result = run(make_track(10), updates=updates, micro_batch_size=micro_batch_size, rank=Alone(lr=0.1))
    for one, other in zip(parts.gradients, whole.gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-9)  # the weights are fp32
    assert result.metrics == pytest.approx(expected.metrics, rel=1e-5, abs=1e-7)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize(
    "rows", [([0, 1, 2, 3], [4, 5, 6, 7]), ([0, 1, 2, 3, 4, 5, 6], [7]), ([0, 1, 2], [3, 4], [5, 6, 7])]
)
def test_ranks_change_neither_gradient_nor_metric(rows, reduction):
    track = make_track()
    alone, expected = run(track, rank=Alone(lr=0.1))
    for rank, report in run_ranks([track.select(r) for r in rows], reduction=reduction, lr=0.1, micro_batch_size=2):
        torch.testing.assert_close(rank.gradients[0], alone.gradients[0], rtol=1e-6, atol=1e-9)
        assert report.metrics == pytest.approx(expected.metrics, rel=1e-5, abs=1e-7)


def test_ranks_make_the_same_updates_where_groups_divide():
    track = make_track()
    alone, _ = run(track, updates=2, rank=Alone(lr=0.1))
    pieces = [track.select(range(4)), track.select(range(4, 8))]
    for rank, _ in run_ranks(pieces, lr=0.1, updates=2, micro_batch_size=1):
        for one, other in zip(rank.gradients, alone.gradients, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-9)


def test_ranks_run_equally_many_forwards_also_with_nothing_of_their_own():
    track = make_track()
    nothing = dataclasses.replace(track.select([0]), sample_weights=torch.zeros(1), status=(Status.PADDING,))
    result = run_ranks([track, nothing], micro_batch_size=3, lr=0.1)
    alone, _ = run(track, rank=Alone(lr=0.1))
    assert result[0][0].calls == result[1][0].calls
    torch.testing.assert_close(result[1][0].gradients[0], alone.gradients[0], rtol=1e-6, atol=1e-9)


def test_a_rank_without_rows_is_an_error_on_every_rank():
    track = make_track()
    result = run_ranks([track, track.select([])])
    assert all(isinstance(error, BatchError) and "a rank has no rows at all" in str(error) for error in result)


def test_padding_and_filtered_rows_are_left_out():
    track = make_track(6)
    expected, _ = run(track)
    algorithm = Weighted()
    filtered = Track.concat([track, dataclasses.replace(make_track(8).select([6, 7]), sample_weights=torch.zeros(2))])
    result, _ = run(filtered.padded(11), algorithm)
    assert torch.equal(result.gradients[0], expected.gradients[0])
    assert algorithm.trained == [track.sample_ids]


def test_the_anchor_pass_sees_exactly_the_micro_batches_of_the_updates_and_comes_first():
    algorithm = Weighted()
    seen = []
    rank = Alone(lr=0.5)
    original = rank.step
    rank.step = lambda: (seen.append(len(algorithm.anchored)), original())[1]
    _, report = run(make_track(10), algorithm, rank=rank, updates=2, micro_batch_size=2)
    assert algorithm.anchored == algorithm.trained
    assert [len(ids) for ids in algorithm.trained] == [2, 2, 1, 2, 2, 1]
    assert seen == [6, 6]
    assert rank.calls == ["zero", "backward", "backward", "last", "step"] * 2
    # The second update starts from other weights than the anchors; the first does not.
    assert report.metrics["ratio_max_dev_first"] < 1e-6 < report.metrics["ratio_max_dev"]
    assert report.metrics["progress"] == 0.25


def test_mini_batches_are_balanced_over_groups_and_sizes():
    groups = ["a", "b", "a", "b", "a", "b", "b", "c"]
    partition = mini_batches(groups, 2)
    # In group order: a 0 2 4, b 1 3 5 6, c 7, dealt in turn.
    assert partition == [[0, 3, 4, 6], [1, 2, 5, 7]]
    assert mini_batches(groups, 1) == [list(range(8))]
    for updates in range(1, 9):
        sizes = [len(rows) for rows in mini_batches(groups, updates)]
        assert sum(sizes) == 8 and max(sizes) - min(sizes) <= 1


UNITS = ("a", "b", "a", "c", "b", "c", "d", "d")
"""Pairs whose rows are apart."""


def paired(track, units=UNITS):
    return dataclasses.replace(track, group_ids=("g",) * track.num_rows, unit_ids=tuple(units))


@pytest.mark.parametrize("micro_batch_size", [2, 3, 4, 7])
@pytest.mark.parametrize("updates", [1, 2, 3])
def test_no_split_that_keeps_units_changes_the_gradient(micro_batch_size, updates):
    whole, _ = run(paired(make_track()), Pairs(), updates=updates, rank=Alone(lr=0.1))
    algorithm, rank = Pairs(), Alone(lr=0.1)
    run(paired(make_track()), algorithm, updates=updates, micro_batch_size=micro_batch_size, rank=rank)
    for one, other in zip(rank.gradients, whole.gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-9)  # the weights are fp32
    for ids in algorithm.trained:
        assert len(ids) <= micro_batch_size
        units = [UNITS[int(name[1:])] for name in ids]
        assert all(units.count(unit) == 2 for unit in units)


@pytest.mark.parametrize(
    "rows", [([0, 2, 1, 4], [3, 5, 6, 7]), ([0, 2], [1, 4, 3, 5, 6, 7]), ([0, 2, 1, 4, 3, 5, 6, 7],)]
)
@pytest.mark.parametrize("micro_batch_size", [0, 2, 4])
def test_ranks_that_keep_units_do_not_change_the_gradient(rows, micro_batch_size):
    """A rank with fewer units repeats a whole one; one without any has padding."""
    track = paired(make_track())
    alone, _ = run(track, Pairs(), rank=Alone(lr=0.1))
    parts = [track.select(some) for some in rows]
    parts += [parts[0].padding([0, 1])] if len(parts) == 1 else []
    result = run_ranks(parts, algorithm=Pairs(), lr=0.1, micro_batch_size=micro_batch_size)
    assert result[0][0].calls == result[1][0].calls
    for rank, _ in result:
        torch.testing.assert_close(rank.gradients[0], alone.gradients[0], rtol=1e-6, atol=1e-9)


def test_ranks_with_units_of_other_sizes_run_equally_many_forwards():
    """Four rows and one, of which the micro-batches of four hold two units on one rank and one on the other."""
    track = make_track()
    one = paired(track.select([0, 1, 2, 3]), "aabb")
    other = paired(track.select([4, 5, 6, 7]), "cccd")
    alone, _ = run(track, rank=Alone(lr=0.1))
    result = run_ranks([one, other], lr=0.1, micro_batch_size=3)
    assert result[0][0].calls == result[1][0].calls
    for rank, _ in result:
        torch.testing.assert_close(rank.gradients[0], alone.gradients[0], rtol=1e-6, atol=1e-9)


def test_a_unit_stays_whole_when_one_of_its_rows_weighs_nothing():
    track = paired(make_track())
    weights = torch.ones(8)
    weights[[0, 6, 7]] = 0.0
    algorithm = Weighted()
    run(dataclasses.replace(track, sample_weights=weights), algorithm)
    assert algorithm.trained == [("s0", "s1", "s2", "s3", "s4", "s5")]


def test_a_unit_larger_than_a_micro_batch_is_refused_on_every_rank():
    track = paired(make_track())
    message = (
        "train.micro_batch_size: got 1, but unit 'a' of track 'image' has 2 rows, and a unit is never split. Use 2 or "
        "more."
    )
    with pytest.raises(BatchError) as caught:
        run(track, Pairs(), micro_batch_size=1)
    assert str(caught.value) == message
    single = dataclasses.replace(track.select([0]), unit_ids=("a",))
    result = run_ranks([single, track.select([1, 4])], micro_batch_size=1)
    assert all(isinstance(error, BatchError) for error in result)
    assert "another rank has a unit larger" in str(result[0])
    assert "unit 'b' of track 'image' has 2 rows" in str(result[1])


def test_more_updates_than_units_are_refused():
    with pytest.raises(BatchError, match=r"got 5 updates, but this rank has 4 units of track 'image'"):
        run(paired(make_track()), Pairs(), updates=5)


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(1, 5)), max_size=20), st.integers(1, 6))
@settings(max_examples=200, deadline=None)
def test_every_unit_is_in_one_update_and_sizes_differ_by_at_most_a_unit(units, updates):
    groups, sizes = [str(group) for group, _ in units], [size for _, size in units]
    partition = mini_batches(groups, updates, sizes=sizes)
    assert len(partition) == updates
    assert sorted(unit for part in partition for unit in part) == list(range(len(units)))
    rows = [sum(sizes[unit] for unit in part) for part in partition]
    assert max(rows) - min(rows) <= max(sizes, default=0)
    if len(set(sizes)) <= 1:
        assert partition == mini_batches(groups, updates)
        # Round-robin over the groups one after the other.
        order = sorted(range(len(groups)), key=lambda unit: (groups.index(groups[unit]), unit))
        assert partition == [sorted(order[number::updates]) for number in range(updates)]


@given(st.lists(st.integers(0, 8), max_size=20), st.integers(0, 9))
@settings(max_examples=200, deadline=None)
def test_every_unit_is_whole_in_one_micro_batch(of_row, size):
    units = [[row for row, unit in enumerate(of_row) if unit == number] for number in dict.fromkeys(of_row)]
    batches = micro_batches_by_rows(units, size)
    assert sorted(row for batch in batches for row in batch) == list(range(len(of_row)))
    for unit in units:
        assert [set(unit) <= set(batch) for batch in batches].count(True) == 1
    for batch in batches:
        assert not size or len(batch) <= size or batch in units
    if len(units) == len(of_row):
        full = size or max(len(of_row), 1)
        assert batches == [list(range(len(of_row)))[start : start + full] for start in range(0, len(of_row), full)]


@pytest.mark.parametrize("algorithm", [Weighted, FromEngine])
def test_the_gap_to_the_engines_log_probs_is_measured(algorithm):
    rank = Alone()
    track = make_track()
    exact = rank.replay(track).log_probs.detach().float()
    off = exact.clone()
    off[0, 0] += 0.25
    off[2, 1] -= 0.5
    off[1, 1] += 99.0  # no step of that row
    track = dataclasses.replace(track, segment=dataclasses.replace(track.latent, log_probs=off)).padded(9)
    _, report = run(track, algorithm(), rank=rank, micro_batch_size=3)
    elements = int((make_track().latent.sde_steps >= 0).sum())
    assert report.metrics["logp_mismatch_max"] == pytest.approx(0.5, rel=1e-6)
    assert report.metrics["logp_mismatch_mean"] == pytest.approx(0.75 / elements, rel=1e-5)

    rank = Alone(lr=0.1)
    with pytest.raises(RunFailed, match=r"train.logp_mismatch_max: .* off by up to 0.5 .* 0.4 is allowed"):
        run(track, algorithm(), rank=rank, logp_mismatch_max=0.4)
    assert "step" not in rank.calls
    # 0.75 over 13 elements.
    with pytest.raises(RunFailed, match=r"train.logp_mismatch_mean: .* off by 0.0577 on average .* 0.05 is allowed"):
        run(track, algorithm(), rank=rank, logp_mismatch_mean=0.05)
    assert "step" not in rank.calls
    run(track, algorithm(), logp_mismatch_max=0.6, logp_mismatch_mean=0.06)


def test_an_anchor_that_replays_the_reference_alone_measures_no_gap():
    """The first update does, as where the anchor replays nothing."""

    class FromReference(FromEngine):
        def with_old_log_probs(self, track, replay):
            replay(track, policy="reference")
            return track

    track = make_track()
    off = Alone().replay(track).log_probs.detach().float() + 0.25
    track = dataclasses.replace(track, segment=dataclasses.replace(track.latent, log_probs=off))
    _, report = run(track, FromReference())
    assert report.metrics["logp_mismatch_max"] == pytest.approx(0.25, rel=1e-6)
    rank = Alone(lr=0.1)
    with pytest.raises(RunFailed, match=r"off by up to 0\.25"):
        run(track, FromReference(), rank=rank, logp_mismatch_max=0.2)
    assert "step" not in rank.calls


@pytest.mark.parametrize("algorithm", [Weighted, FromEngine])
def test_the_gap_of_samples_of_older_weights_is_not_measured(algorithm):
    rank = Alone()
    track = make_track()
    off = rank.replay(track).log_probs.detach().float()
    off[0, 0] += 0.25
    off[2, 1] -= 0.5
    segment = dataclasses.replace(track.latent, log_probs=off)
    versions = tuple(6 if row == 2 else 7 for row in range(track.num_rows))
    track = dataclasses.replace(track, segment=segment, policy_version=versions)
    _, report = run(track, algorithm(), rank=rank, micro_batch_size=3, version=7, logp_mismatch_max=0.4)
    # Row 2 is of the version before: only the 0.25 of row 0 is the engine's.
    assert report.metrics["logp_mismatch_max"] == pytest.approx(0.25, rel=1e-6)
    _, report = run(track, algorithm(), version=8)
    assert not any(name.startswith("logp_mismatch") for name in report.metrics)


def test_a_gap_that_is_no_number_exceeds_every_bound():
    track = make_track(log_probs=torch.full((8, 2), math.nan))
    with pytest.raises(RunFailed, match="off by up to inf"):
        run(track, logp_mismatch_max=1e9)


def test_without_log_probs_of_the_engine_there_is_no_gap():
    _, report = run(make_track())
    assert not any(name.startswith("logp_mismatch") for name in report.metrics)


def test_a_gap_on_one_rank_stops_all():
    track = make_track()
    log_probs = Alone().replay(track).log_probs.detach().float()
    log_probs[7] += 1.0
    track = dataclasses.replace(track, segment=dataclasses.replace(track.latent, log_probs=log_probs))
    result = run_ranks([track.select(range(4)), track.select(range(4, 8))], logp_mismatch_max=0.5)
    assert all(isinstance(error, RunFailed) for error in result)


def test_a_step_that_was_skipped_is_counted():
    track = make_track()
    advantages = track.advantages.clone()
    advantages[0] = math.nan
    rank, report = run(dataclasses.replace(track, advantages=advantages), updates=2)
    assert (report.num_updates, report.num_skipped) == (1, 1)
    assert report.metrics["grad_norm"] == float(rank.gradients[1].norm()) == report.metrics["grad_norm_max"]


def test_an_update_without_weight_takes_no_step():
    track = make_track(4)
    track = dataclasses.replace(track, sample_weights=torch.tensor([1.0, 0.0, 0.0, 0.0]))
    rank, report = run(track, updates=2)
    assert report.num_updates == 1 and report.metrics["updates_empty"] == 1
    assert rank.calls.count("step") == 1


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"updates": 9}, r"train.updates_per_step: got 9 updates, but this rank has 8 samples"),
        ({"updates": 0}, r"train.updates_per_step: got 0, expected 1 or more"),
        ({"micro_batch_size": -1}, r"train.micro_batch_size: got -1"),
    ],
)
def test_geometry_that_does_not_fit_is_one_clear_error(settings, message):
    with pytest.raises(BatchError, match=message):
        run(make_track(), **settings)


def test_weights_that_were_not_announced_are_refused():
    class Wrong(Weighted):
        def loss_weights(self, track):
            return {"policy": 2 * super().loss_weights(track)["policy"]}

        def loss(self, track, replay, *, progress):
            losses = super().loss(track, replay, progress=progress)
            return Losses(terms=[dataclasses.replace(losses.terms[0], weights=losses.terms[0].weights / 2)])

    rank = Alone()
    with pytest.raises(BatchError, match=r"loss_weights\(\) announced .* 26.0"):
        run(make_track(), Wrong(), rank=rank)
    assert "step" not in rank.calls


def test_metrics_reduce_by_their_kind():
    tally, update = Tally(), Tally()
    update.add(
        {
            "m": Metric(total=3.0, weight=2.0),
            "x": Metric(total=-5.0, reduce="max"),
            "s": Metric(total=1.0, reduce="sum"),
        }
    )
    update.add(
        {
            "m": Metric(total=5.0, weight=2.0),
            "x": Metric(total=-7.0, reduce="max"),
            "s": Metric(total=2.0, reduce="sum"),
        }
    )
    update.add({"m": Metric(total=math.nan, weight=0.0), "x": Metric(total=9.0, weight=0.0, reduce="max")})
    tally.merge(update)
    tally.merge(update)
    assert tally.reduced(Alone()) == {"m": 2.0, "x": -5.0, "s": 3.0}
    with pytest.raises(BatchError, match="metric 'm'"):
        tally.add({"m": Metric(total=0.0, reduce="max")})


def test_ranks_with_other_metrics_fail_instead_of_hanging():
    class Chatty(Weighted):
        def loss(self, track, replay, *, progress):
            losses = super().loss(track, replay, progress=progress)
            further = {"further": Metric(total=1.0)} if "s0" in track.sample_ids else {}
            return Losses(terms=losses.terms, metrics={**losses.metrics, **further})

    track = make_track()
    result = run_ranks([track.select(range(4)), track.select(range(4, 8))], algorithm=Chatty())
    assert all(isinstance(error, BatchError) and "report different ones" in str(error) for error in result)


def run_jobs(jobs, *, rank=None, **settings):
    rank = rank or Alone()
    report = train_on(jobs, forward=rank.replay, updater=rank, settings=UpdateSettings(**settings), progress=0.25)
    return rank, report


@pytest.mark.parametrize("micro_batch_size", [0, 3])
def test_the_gradient_of_a_joint_step_is_the_weighted_sum_of_those_of_its_jobs(micro_batch_size):
    one, other = make_track(8), make_track(5, groups=("h",) * 5)
    jobs = [Job(name="one", track=one, algorithm=Weighted()), Job(name="other", track=other, algorithm=Weighted())]
    alone = [run(track, micro_batch_size=micro_batch_size)[0].gradients[0] for track in (one, other)]
    jobs[1] = dataclasses.replace(jobs[1], weight=3.0)
    joint, report = run_jobs(jobs, micro_batch_size=micro_batch_size)
    (gradient,) = joint.gradients
    # Sums of the same fp64 terms in another order; the log-probs that they come from are fp32.
    torch.testing.assert_close(gradient, alone[0] + 3 * alone[1], rtol=1e-6, atol=1e-9)
    assert report.num_updates == 1 and {"one/loss", "other/loss", "grad_norm"} <= set(report.metrics)


def test_jobs_take_settings_of_their_own_and_equally_many_updates():
    track = make_track(8)
    job = Job(name="one", track=track, algorithm=Weighted(), train=TrainConfig(updates_per_step=2))
    rank, report = run_jobs([job, dataclasses.replace(job, name="other", train=TrainConfig(updates_per_step=2))])
    assert report.num_updates == len(rank.gradients) == 2
    with pytest.raises(BatchError, match=r"train\.updates_per_step: got jobs of \[1, 2\] updates"):
        run_jobs([job, dataclasses.replace(job, name="other", train=None)])


def test_a_job_without_weight_leaves_the_step_to_the_others():
    track = make_track(8)
    empty = dataclasses.replace(track, sample_weights=torch.zeros(8))
    alone, _ = run(track)
    joint, report = run_jobs(
        [
            Job(name="one", track=track, algorithm=Weighted()),
            Job(name="empty", track=empty, algorithm=Weighted()),
        ]
    )
    torch.testing.assert_close(joint.gradients[0], alone.gradients[0], rtol=0, atol=0)
    assert report.num_updates == 1 and "updates_empty" not in report.metrics
