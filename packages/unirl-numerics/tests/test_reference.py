"""Stored outputs of the reference policy in a track replace a forward under that policy."""

from __future__ import annotations

import dataclasses
from contextlib import contextmanager, nullcontext

import torch
from test_text_rollout import a_segment, a_track, wanted
from test_track_replay import Model, make_track
from tiny_text_model import TinyTextModel
from unirl.numerics.train.reference import with_reference
from unirl.numerics.train.track_replay import TrackReplay


class Unasked:
    """A model that must not run."""

    def velocity(self, x, sigma, conditions):
        raise AssertionError("the model ran, and the track brings what it would say")


@contextmanager
def refused(policy):
    raise AssertionError(f"policy {policy} was asked for, and the track brings what it says")
    yield


def test_the_means_of_latent_steps_are_kept_with_the_track():
    model = Model()
    track = make_track(model)
    replay = TrackReplay(model, stacked=True, policy_context=lambda policy: nullcontext())
    expected = replay(track, policy="reference")
    brought = with_reference(track, replay)
    for rows in ([0, 1, 2], [2, 0]):
        result = TrackReplay(Unasked(), stacked=True, policy_context=refused)(brought.select(rows), policy="reference")
        for name in ("means", "std", "g", "log_probs", "next", "valid"):
            # The forward of a whole batch and what was kept of it: the very same numbers.
            assert torch.equal(getattr(result, name), getattr(expected, name)[rows]), name


def test_the_log_probs_of_tokens_are_kept_with_the_track():
    model, request = TinyTextModel(), wanted(["a", "cab"])
    segment = a_segment(model, request)
    mask = tuple(torch.arange(length) != 1 for length in segment.lengths)
    track = a_track(dataclasses.replace(segment, mask=mask))
    replay = TrackReplay(model, stacked=True, policy_context=lambda policy: nullcontext())
    expected = replay(track, policy="reference")
    result = TrackReplay(None, stacked=True, policy_context=refused)(with_reference(track, replay), policy="reference")
    assert torch.equal(result.log_probs, expected.log_probs.detach())
    assert torch.equal(result.valid, expected.valid)
