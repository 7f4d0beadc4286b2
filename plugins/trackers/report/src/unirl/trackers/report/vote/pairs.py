"""Pairs to vote on: images of one prompt and step of a run, or images or videos of one prompt and noise of two runs."""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from unirl.core.types.data import MediaRef

from ..history import RunHistory
from ..media import RunFolderError, Sample, open_picture

__all__ = ["Key", "Picture", "VotePair", "held_out_pairs", "training_pairs"]

Key = tuple[str, str, str]
"""Prompt, and SHA-256 of both files: a vote is about these images, wherever they are."""


@dataclass(frozen=True, kw_only=True)
class Picture:
    """A saved image of a run, or the animation of a video."""

    file: Path
    sha256: str
    """Of the file when the vote began."""
    name: str
    """Path of the file within its run folder."""


@dataclass(frozen=True, kw_only=True)
class VotePair:
    """Two images or videos of a prompt. Of two runs, the first one is of the first run."""

    prompt: str
    first: Picture
    second: Picture
    inputs: tuple[Path, ...]
    """Images that the prompt refers to, scaled down."""
    media: tuple[MediaRef, ...]
    """All media that the prompt refers to."""

    @property
    def key(self) -> Key:
        return self.prompt, self.first.sha256, self.second.sha256

    def is_first_left(self, *, seed: int) -> bool:
        """The side of the first image: random, and the same whenever the pair is shown."""
        return _draw(seed, "side", *self.key) % 2 == 0


def training_pairs(run: RunHistory, *, seed: int) -> list[VotePair]:
    """Pairs of the run's saved training images, of one prompt and step each, in a random order.

    All prompts come once, with different images, before any image comes again. Two equal images are not a pair.
    Raises RunFolderError for a run without such images, and for images that no prompt file can refer to.
    """
    groups: dict[tuple[int, str, tuple[Path, ...]], list[Sample]] = defaultdict(list)
    for step, sample in _images(run, "train"):
        groups[step, *sample.question].append(sample)
    found: list[tuple[int, VotePair]] = []
    for group in groups.values():
        shown = [(sample, _picture(run, sample)) for sample in group]
        shown.sort(key=lambda item: _draw(seed, "order", item[1].name, item[1].sha256))
        for number, pairs in enumerate(_rounds(len(shown))):
            for one, other in pairs:
                # In a fixed order, whatever else is in the group: a vote is found again by it.
                pictures = sorted((shown[one][1], shown[other][1]), key=lambda picture: picture.sha256)
                if pictures[0].sha256 != pictures[1].sha256:
                    found.append((number, _pair(shown[one][0], *pictures)))
    if not found:
        samples = _setting(run, "data", "samples_per_prompt")
        raise RunFolderError(
            f"{run.folder}: got no prompt with two different saved images of one step, and "
            f"data.samples_per_prompt={samples}. Train with at least two, and let the report save them: "
            "tracker.report.max_images is the number of images saved of a step, prompt by prompt."
        )
    return _ordered(found, seed=seed)


def held_out_pairs(first: RunHistory, second: RunHistory, *, seed: int) -> list[VotePair]:
    """Pairs of the images or videos that both runs made at their last evaluation from the same prompt and noise, in a
    random order, every prompt once before any comes again.

    Raises RunFolderError for runs without such samples, with other noise, or without a common prompt.
    """
    seeds = [run.evaluation.get("seed", "none recorded") for run in (first, second)]
    if seeds[0] != seeds[1]:
        raise RunFolderError(
            f"eval.seed: got {seeds[0]} in {first.folder} and {seeds[1]} in {second.folder}, expected one seed: images "
            "of other noise differ by chance. Evaluate both with the same eval.seed."
        )
    sides = [_last_evaluation(run) for run in (first, second)]
    found: list[tuple[int, VotePair]] = []
    seen: Counter[str] = Counter()
    for (name, prompt), one in sides[0].items():
        if name and (name, prompt) in sides[1]:
            pictures = _picture(first, one), _picture(second, sides[1][name, prompt])
            found.append((seen[prompt], _pair(one, *pictures)))
            seen[prompt] += 1
    if not found:
        names = [" ".join(min((prompt, name) for name, prompt in side)) for side in sides]
        raise RunFolderError(
            f"{first.folder} and {second.folder}: their last evaluations share no prompt of one id, got "
            f"{names[0]!r:.80} and {names[1]!r:.80}. Noise follows from the id: evaluate both on one data.eval."
        )
    shown = [_size(picture) for picture in (found[0][1].first, found[0][1].second)]
    if shown[0] != shown[1]:
        raise RunFolderError(
            f"{first.folder} and {second.folder}: got held-out samples of {shown[0]} and of {shown[1]}, expected one "
            "size: it would tell the runs apart, and other sizes have other noise."
        )
    return _ordered(found, seed=seed)


def _last_evaluation(run: RunHistory) -> dict[tuple[str, str], Sample]:
    """Id and prompt -> sample. Samples of one id have the same noise, in every run with this seed. With several stages,
    prompts are those that the first stage was given, and so are those of the index."""
    images = _images(run, "eval")
    last = max(step for step, _ in images)
    return {(sample.name, sample.prompt): sample for step, sample in images if step == last}


def _images(run: RunHistory, key: Literal["train", "eval"]) -> list[tuple[int, Sample]]:
    """Step and sample of all saved images of the last stage that made any."""
    batches = run.batches("images", key)
    if not batches:
        raise RunFolderError(f"{run.folder}: {_why_none(run, key)}")
    images = [(batch.step, sample) for batch in batches for sample in batch.samples]
    if key == "train" and any(sample.animation for _, sample in images):
        raise RunFolderError(
            f"{run.folder}: got videos, expected images: of a video a small animation is saved, which is not to train "
            "on. Videos of two runs can be compared: give both."
        )
    if key == "train" and any(sample.parent is not None for _, sample in images):
        raise RunFolderError(
            f"{run.folder}: images of {batches[0].key.partition('/')[2]!r} are made from samples of another stage, "
            "which a prompt file cannot state. Vote on a run whose images are made from prompts."
        )
    if key == "train" and any(sample.inputs and not sample.media for _, sample in images):
        raise RunFolderError(
            f"{run.folder}: its prompts refer to images, and it was made by an earlier report, which did not save "
            "where these are. Make the samples anew."
        )
    return images


def _why_none(run: RunHistory, key: Literal["train", "eval"]) -> str:
    of = "training" if key == "train" else "held-out"
    if run.batches("texts", key):
        return f"it saved {of} completions and no images, which is what there is to vote on."
    trackers = [section for section in run.settings("tracker").values() if isinstance(section, dict)]
    has_report = any(section.get("use") == "report" for section in trackers)
    got = f"tracker 'report' {'on' if has_report else 'off'}"
    every, data = _setting(run, "run", "media_every"), _setting(run, "data", "eval")
    if key == "train":
        return (
            f"it saved no training images: got {got} and run.media_every={every}. The report saves those of every "
            "run.media_every-th step: train with +tracker@tracker.report=report and run.media_every=1."
        )
    return (
        f"it saved no held-out images: got {got} and data.eval={data or 'none'}. The report saves those of every "
        "evaluation: train with +tracker@tracker.report=report and data.eval."
    )


def _setting(run: RunHistory, section: str, name: str) -> str:
    return str(run.settings(section).get(name, "not recorded"))


def _picture(run: RunHistory, sample: Sample) -> Picture:
    shown = sample.animation or sample.file
    try:
        with shown.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise RunFolderError(f"{shown}: it cannot be read: {error.strerror}") from error
    return Picture(file=shown, sha256=digest, name=shown.relative_to(run.folder).as_posix())


def _size(picture: Picture) -> str:
    """For people: pixels, and of an animation its frames and how long each is shown."""
    opened = open_picture(picture.file)
    width, height = opened.size
    frames = getattr(opened, "n_frames", 1)
    return f"{width} x {height} pixels" + (f", {frames} frames of {opened.info['duration']} ms" if frames > 1 else "")


def _pair(sample: Sample, first: Picture, second: Picture) -> VotePair:
    return VotePair(prompt=sample.prompt, first=first, second=second, inputs=sample.inputs, media=sample.media)


def _rounds(count: int) -> Iterator[list[tuple[int, int]]]:
    """Every pair of `count` places once, in rounds that have each place at most once: the circle method."""
    ring = list(range(count + count % 2))
    for _ in ring[1:]:
        across = zip(ring[: len(ring) // 2], ring[::-1], strict=False)
        yield [(one, other) for one, other in across if max(one, other) < count]
        ring = [ring[0], ring[-1], *ring[1:-1]]


def _ordered(found: Sequence[tuple[int, VotePair]], *, seed: int) -> list[VotePair]:
    keyed = sorted(found, key=lambda item: (item[0], _draw(seed, "order", *item[1].key)))
    return [pair for _, pair in keyed]


def _draw(seed: int, *words: str) -> int:
    """A random number of 64 bits, the same for the same words."""
    text = "\0".join((str(seed), *words)).encode("utf-8", "replace")
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")
