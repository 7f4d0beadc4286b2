"""Metadata of a batch, checked."""

from __future__ import annotations

from unirl.core.errors import RewardFailed
from unirl.core.roles import ScoreInput


def words_of(samples: ScoreInput, key: str, *, reward: str) -> list[str]:
    """The string under `key` of every sample. Raises RewardFailed, naming the sample, when it is not there."""
    words: list[str] = []
    for row, metadata in enumerate(samples.metadata):
        word = metadata.get(key)
        if not isinstance(word, str):
            result = f"is {word!r}, not a string" if key in metadata else "is missing"
            raise RewardFailed(
                f"reward.{reward}: metadata {key!r} of sample {samples.sample_ids[row]!r} "
                f"(prompt {samples.inputs.prompts[row]!r}) {result}; add it to the prompt file."
            )
        words.append(word)
    return words


def indices_of(samples: ScoreInput, key: str, known: tuple[str, ...], *, reward: str) -> list[int]:
    """Position in `known` of the word under `key` of every sample. Raises RewardFailed for any other word."""
    words = words_of(samples, key, reward=reward)
    for row, word in enumerate(words):
        if word not in known:
            raise RewardFailed(
                f"reward.{reward}: metadata {key!r} of sample {samples.sample_ids[row]!r} is {word!r}; "
                f"it is one of {', '.join(known)}."
            )
    return [known.index(word) for word in words]
