"""The train stack: gradients, geometry, metrics and jobs, on a linear model."""

from __future__ import annotations

import dataclasses
import math
import weakref

import pytest
import torch
from linear_ranks import Alone, Forwarded, Weighted, make_track, run, run_ranks
from unirl.core.errors import BatchError, RunFailed
from unirl.core.roles import Job, Losses, Metric
from unirl.core.specs.config import TrainConfig
from unirl.core.types.track import Status, Track
from unirl.numerics.loss.tally import Tally
from unirl.numerics.train.partition import mini_batches
from unirl.numerics.train.stack import train_on


def test_the_gradient_is_the_weighted_mean_over_all_elements():
    track = make_track()
    rank, report = run(track)
    # At ratio 1 the gradient of one element is -advantage * inputs; rows weigh as many elements as they have steps.
    elements = (track.latent.sde_steps >= 0).sum(1).double()
    inputs = track.latent.latents[:, 0, :3].double()
    expected = -(elements * track.advantages)[:, None] * inputs
    # The old log-probs are stored in fp32, so the ratio is 1 to 1e-7.
    torch.testing.assert_close(rank.gradients[0], expected.sum(0) / elements.sum(), rtol=1e-6, atol=1e-8)
    assert report.only["loss"] == pytest.approx(float(-(elements * track.advantages).sum() / elements.sum()), 1e-6)
    assert report.num_updates == 1 and report.num_skipped == 0


@pytest.mark.parametrize("micro_batch_size", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("updates", [1, 2, 3])
def test_micro_batches_change_neither_gradient_nor_metric(micro_batch_size, updates):
    whole, expected = run(make_track(10), updates=updates, rank=Alone(lr=0.1))
    parts, result = run(make_track(10), updates=updates, micro_batch_size=micro_batch_size, rank=Alone(lr=0.1))
    for one, other in zip(parts.gradients, whole.gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-9)  # the weights are fp32
    assert result.only == pytest.approx(expected.only, rel=1e-5, abs=1e-7)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize(
    "rows", [([0, 1, 2, 3], [4, 5, 6, 7]), ([0, 1, 2, 3, 4, 5, 6], [7]), ([0, 1, 2], [3, 4], [5, 6, 7])]
)
def test_ranks_change_neither_gradient_nor_metric(rows, reduction):
    track = make_track()
    alone, expected = run(track, rank=Alone(lr=0.1))
    for rank, report in run_ranks([track.select(r) for r in rows], reduction=reduction, lr=0.1, micro_batch_size=2):
        torch.testing.assert_close(rank.gradients[0], alone.gradients[0], rtol=1e-6, atol=1e-9)
        assert report.only == pytest.approx(expected.only, rel=1e-5, abs=1e-7)


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
    _, report = run(make_track(10), algorithm, rank=rank, updates=2, micro_batch_size=2, old_log_probs="replay")
    assert algorithm.anchored == algorithm.trained
    assert [len(ids) for ids in algorithm.trained] == [2, 2, 1, 2, 2, 1]
    assert seen == [6, 6]
    assert rank.calls == ["zero", "backward", "backward", "last", "step"] * 2
    # The second update starts from other weights than the anchors; the first does not.
    assert report.only["ratio_max_dev_first"] < 1e-6 < report.only["ratio_max_dev"]
    assert report.only["progress"] == 0.25


def test_detached_old_log_probs_are_those_of_the_first_updates_own_forward_passes(monkeypatch):
    replay, forwards = Forwarded.__call__, []

    def noted(self, track, **which):
        forwards.append(track.sample_ids)
        return replay(self, track, **which)

    monkeypatch.setattr(Forwarded, "__call__", noted)
    # The engine's are off by 0.1, so that what is measured is more than 0.
    given = run(make_track(10))[0].replay(make_track(10)).log_probs.float() + 0.1
    result = {}
    # After a quarter of the run `auto` is `detached`.
    for source in ("replay", "detached", "auto"):
        algorithm = Weighted()
        forwards.clear()
        rank, report = run(
            make_track(10, log_probs=given),
            algorithm,
            rank=Alone(lr=0.5),
            updates=2,
            micro_batch_size=2,
            old_log_probs=source,
        )
        first, second = algorithm.trained[:3], algorithm.trained[3:]
        ahead = first + second if source == "replay" else second
        assert forwards == ahead + first + second
        result[source] = rank.gradients, report.only
    (expected, metrics), *others = result.values()
    for gradients, found in others:
        assert all(torch.equal(one, other) for one, other in zip(expected, gradients, strict=True))
        assert found == metrics
    # 0.1 in fp32 log-probs of order 1.
    assert metrics["logp_mismatch_mean"] == pytest.approx(0.1, abs=1e-6)


def test_a_run_replays_its_first_step_and_every_step_with_a_critic():
    auto = TrainConfig(updates_per_step=4)
    assert not auto.detaches(critic=False, progress=0.0)
    assert auto.detaches(critic=False, progress=0.01) and not auto.detaches(critic=True, progress=0.01)
    assert (auto.replayed_share(critic=False), auto.replayed_share(critic=True)) == (0.75, 1.0)
    for source, share in (("replay", 1.0), ("detached", 0.75), ("engine", 0.0)):
        assert dataclasses.replace(auto, old_log_probs=source).replayed_share(critic=False) == share


def test_a_mismatch_seen_in_the_first_updates_own_forward_pass_ends_it_before_its_step():
    rank = Alone(lr=0.5)
    given = rank.replay(make_track(10)).log_probs.detach().float() + 0.1
    with pytest.raises(RunFailed, match=r"train\.logp_mismatch_max"):
        run(make_track(10, log_probs=given), rank=rank, old_log_probs="detached", logp_mismatch_max=0.05)
    assert "step" not in rank.calls


def test_mini_batches_are_balanced_over_groups_and_sizes():
    groups = ["a", "b", "a", "b", "a", "b", "b", "c"]
    partition = mini_batches(groups, 2)
    # In group order: a 0 2 4, b 1 3 5 6, c 7, dealt in turn.
    assert partition == [[0, 3, 4, 6], [1, 2, 5, 7]]
    assert mini_batches(groups, 1) == [list(range(8))]
    for updates in range(1, 9):
        sizes = [len(rows) for rows in mini_batches(groups, updates)]
        assert sum(sizes) == 8 and max(sizes) - min(sizes) <= 1


def test_a_step_that_was_skipped_is_counted():
    track = make_track()
    advantages = track.advantages.clone()
    advantages[0] = math.nan
    rank, report = run(dataclasses.replace(track, advantages=advantages), updates=2)
    assert (report.num_updates, report.num_skipped) == (1, 1)
    assert report.only["grad_norm"] == float(rank.gradients[1].norm()) == report.only["grad_norm_max"]


def test_an_update_without_weight_takes_no_step():
    track = make_track(4)
    track = dataclasses.replace(track, sample_weights=torch.tensor([1.0, 0.0, 0.0, 0.0]))
    rank, report = run(track, updates=2)
    assert report.num_updates == 1 and report.only["updates_empty"] == 1
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


def test_metrics_as_tensors_are_those_as_numbers():
    numbers = {"m": (3.5, 2.0, "mean"), "x": (-5.0, 1.0, "max"), "s": (1.25, 1.0, "sum"), "none": (9.0, 0.0, "mean")}
    tally, tensors = Tally(), Tally()
    for _ in range(2):
        for one, made in ((tally, float), (tensors, torch.tensor)):
            one.add({k: Metric(total=made(t), weight=made(w), reduce=r) for k, (t, w, r) in numbers.items()})
    assert tally.reduced(Alone()) == tensors.reduced(Alone()) == {"m": 1.75, "x": -5.0, "s": 2.5}


def test_a_tally_keeps_no_graph():
    weight = torch.ones(3, requires_grad=True)
    tally, total = Tally(), (weight * 2).sum()
    freed = weakref.ref(total)
    tally.add({"m": Metric(total=total)})
    del total
    assert freed() is None
    assert tally.reduced(Alone()) == {"m": 6.0}


def test_ranks_with_other_metrics_fail_instead_of_hanging():
    class Chatty(Weighted):
        def loss(self, track, replay, *, progress):
            losses = super().loss(track, replay, progress=progress)
            further = {"further": Metric(total=1.0)} if "s0" in track.sample_ids else {}
            return Losses(terms=losses.terms, metrics={**losses.metrics, **further})

    track = make_track()
    result = run_ranks([track.select(range(4)), track.select(range(4, 8))], algorithm=Chatty())
    assert all(isinstance(error, BatchError) and "report different ones" in str(error) for error in result)


def run_jobs(jobs, *, rank=None, updates=1, **settings):
    rank = rank or Alone()
    report = train_on(
        jobs, forward=rank.replay, updater=rank, train=TrainConfig(updates_per_step=updates, **settings), progress=0.25
    )
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
    assert report.num_updates == 1 and all(
        {"loss", "grad_norm"} <= report.metrics[name].keys() for name in ("one", "other")
    )


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
    assert report.num_updates == 1 and not any("updates_empty" in job for job in report.metrics.values())
