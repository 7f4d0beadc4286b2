"""The gap between the engine's log-probs and those of the replay is measured and bounded."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from linear_ranks import Alone, FromEngine, Weighted, make_track, run, run_ranks
from unirl.core.errors import RunFailed


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
    assert report.only["logp_mismatch_max"] == pytest.approx(0.5, rel=1e-6)
    assert report.only["logp_mismatch_mean"] == pytest.approx(0.75 / elements, rel=1e-5)

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
    assert report.only["logp_mismatch_max"] == pytest.approx(0.25, rel=1e-6)
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
    assert report.only["logp_mismatch_max"] == pytest.approx(0.25, rel=1e-6)
    _, report = run(track, algorithm(), version=8)
    assert not any(name.startswith("logp_mismatch") for name in report.only)


def test_a_gap_that_is_no_number_exceeds_every_bound():
    track = make_track(log_probs=torch.full((8, 2), math.nan))
    with pytest.raises(RunFailed, match="off by up to inf"):
        run(track, logp_mismatch_max=1e9)


def test_without_log_probs_of_the_engine_there_is_no_gap():
    _, report = run(make_track())
    assert not any(name.startswith("logp_mismatch") for name in report.only)


def test_a_gap_on_one_rank_stops_all():
    track = make_track()
    log_probs = Alone().replay(track).log_probs.detach().float()
    log_probs[7] += 1.0
    track = dataclasses.replace(track, segment=dataclasses.replace(track.latent, log_probs=log_probs))
    result = run_ranks([track.select(range(4)), track.select(range(4, 8))], logp_mismatch_max=0.5)
    assert all(isinstance(error, RunFailed) for error in result)
