"""Media of inputs and of their turns on their way to an engine: each image is read once, as training reads it, and
written once to a file that the engine's workers read. Their echo is a hash of the pixels that were encoded."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from unirl.core.types.data import MediaRef
from unirl.core.types.inputs import Inputs, Turn
from unirl.numerics.media import LoadedImage, load_image

from .received_media import PIXELS, echoed
from .transfer import place_for

__all__ = ["SentMedia", "sent_media"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class SentMedia:
    """Inputs as an engine gets them."""

    inputs: Inputs
    """Their media, those of turns included, are files for `received_media.read_media`."""
    hashes: Mapping[str, str]
    """Path of a file -> hash of its pixels, that of `LoadedImage`."""

    def of(self, inputs: Inputs) -> list[list[str]]:
        """The echo expected of each row, see `received_media.echoed`. inputs: with media and turns of `inputs`, such
        as a branch's."""
        turns = inputs.turns or ((),) * inputs.num_rows
        return [
            echoed(self._hashed(media), [_with_media(turn, self._hashed(turn.media)) for turn in own])
            for media, own in zip(inputs.media, turns, strict=True)
        ]

    def _hashed(self, media: Sequence[MediaRef]) -> tuple[MediaRef, ...]:
        return tuple(dataclasses.replace(ref, uri=self.hashes[ref.uri]) for ref in media)


@contextmanager
def sent_media(inputs: Inputs, *, folder: str) -> Iterator[SentMedia]:
    """The inputs with their media in files, which are deleted when the block ends. Equal pixels share a file.

    folder: for the files; empty uses shared memory, or the temporary folder if they do not fit.
    Raises DataError for unreadable files and for media other than images, RunFailed when the disk is full.
    """
    # Without repetitions, in order. References that are equal have equal pixels.
    turns = inputs.turns or ((),) * inputs.num_rows
    shown = (turn.media for own in turns for turn in own)
    refs = list(dict.fromkeys(ref for media in (*inputs.media, *shown) for ref in media))
    if not refs:
        yield SentMedia(inputs=inputs, hashes={})
        return
    with tempfile.TemporaryDirectory(prefix="unirl-media-", dir=place_for(0, folder=folder, what="media")) as name:
        files: dict[MediaRef, str] = {}
        hashes: dict[str, str] = {}
        for ref in refs:
            pixels = load_image(ref)
            content = LoadedImage.of(pixels, role=ref.role).uri
            file = Path(name) / f"{content.rpartition(':')[2]}.safetensors"
            if str(file) not in hashes:
                packed = _packed(pixels)
                place_for(packed.nbytes, folder=str(file.parent), what="media")
                save_file({PIXELS: packed}, file)
            files[ref], hashes[str(file)] = str(file), content

        def placed(media: Sequence[MediaRef]) -> tuple[MediaRef, ...]:
            return tuple(MediaRef(modality=ref.modality, role=ref.role, uri=files[ref]) for ref in media)

        sent = dataclasses.replace(
            inputs,
            media=tuple(map(placed, inputs.media)),
            turns=None
            if inputs.turns is None
            else tuple(tuple(_with_media(turn, placed(turn.media)) for turn in own) for own in turns),
        )
        yield SentMedia(inputs=sent, hashes=hashes)


def _with_media(turn: Turn, media: tuple[MediaRef, ...]) -> Turn:
    return dataclasses.replace(turn, media=media)


def _packed(pixels: Tensor) -> Tensor:
    """[3, H, W] in 8 bits where they hold it exactly."""
    levels = (pixels * 255).round().to(torch.uint8)
    return levels if torch.equal(levels.float() / 255, pixels) else pixels.contiguous()
