"""Samples that cannot be scored raise, and a reward can be closed."""

from __future__ import annotations

import dataclasses
import math

import torch
from unirl.conformance.claims import claim
from unirl.conformance.fixtures.reward import RewardCase, pixels_of, with_media
from unirl.conformance.verdicts import NotApplicable
from unirl.core.roles import Reward, ScoreInput


@claim("reward")
def test_non_finite_pixels_raise(case: RewardCase) -> None:
    """One NaN pixel in one sample raises: a model that has come apart must not get a score as if nothing had happened.

    If it fails: look for `nan_to_num`, a cast to uint8, or comparisons, which are all false for NaN; check the pixels
    first and name the sample.
    """
    if not case.has_pixels:
        raise NotApplicable(f"the reward scores {case.spec.media}, which has no pixels")
    with case.reward() as reward:
        for samples in case.batches():
            pixels = pixels_of(samples)
            pixels[-1, ..., 0, 0] = math.nan
            error = refusal(reward, with_media(samples, pixels, media=case.spec.media))
            assert error is not None, f"sample {samples.sample_ids[-1]!r} has NaN pixels and was scored like any other"


@claim("reward")
def test_samples_without_their_media_raise(case: RewardCase) -> None:
    """A track that was not decoded, or of another kind, raises instead of getting a score.

    If it fails: look for a default that replaces missing images or texts, such as zeros.
    """
    with case.reward() as reward:
        for samples in case.batches():
            error = refusal(reward, dataclasses.replace(samples, media=None))
            assert error is not None, f"samples without any {case.spec.media} were scored like any other"


@claim("reward")
def test_a_missing_metadata_key_raises_with_its_name(case: RewardCase) -> None:
    """A sample that lacks a key of the spec's `metadata` raises, and the message has the key: it is what to mend.

    If it fails: read the key without a default (`metadata["answer"]`, not `.get`), for every sample, and name it in
    the error.
    """
    if not case.spec.metadata:
        raise NotApplicable("the spec names no metadata that every prompt must have")
    with case.reward() as reward:
        for samples in case.batches():
            for key in case.spec.metadata:
                lacking = [dict(result) for result in samples.metadata]
                del lacking[-1][key]
                error = refusal(reward, dataclasses.replace(samples, metadata=tuple(lacking)))
                assert error is not None, f"a sample without metadata {key!r} was scored like any other"
                assert key in str(error), f"metadata {key!r} is missing, and the error does not say so: {error}"


@claim("reward")
def test_the_metadata_that_the_spec_names_is_enough(case: RewardCase) -> None:
    """Samples with the keys of the spec's `metadata` and no others can be scored: runs check those before they start.

    If it fails: add the key that the reward reads to the spec's `metadata`, or give it a default.
    """
    with case.reward() as reward:
        for samples in case.batches():
            stated = tuple({key: result[key] for key in case.spec.metadata} for result in samples.metadata)
            error = refusal(reward, dataclasses.replace(samples, metadata=stated))
            assert error is None, (
                f"with metadata {sorted(case.spec.metadata)} alone it raises {type(error).__name__}: {error}"
            )


@claim("reward")
def test_a_reward_may_be_closed_twice(case: RewardCase) -> None:
    """`close` after `close` does nothing: a run that fails may end a reward that has ended already.

    If it fails: let `close` look whether there is still something to let go of.
    """
    with case.reward() as reward:
        for samples in case.batches():
            reward.score(samples)
        reward.close()
        try:
            reward.close()
        except Exception as error:
            raise AssertionError(f"the second close raises {type(error).__name__}: {error}") from error


def refusal(reward: Reward, samples: ScoreInput) -> Exception | None:
    """The error of a reward on these samples, if any. Scores that are not finite are not an error."""
    try:
        scores = reward.score(samples)
    except Exception as error:  # noqa: BLE001 - the claims look at it
        return error
    assert isinstance(scores.values, torch.Tensor), f"`values` is a {type(scores.values).__name__}, no tensor"
    return None
