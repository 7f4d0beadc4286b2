"""A trunk of transformers that is told which tokens are images, and encodes each image once."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, cast

import torch
from torch import Tensor
from unirl.core.errors import BatchError

__all__ = ["Placement", "placing", "shown", "stacked"]


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Where the images of a batch go. Inputs are distinct, in the order of the tensors; samples may share one."""

    is_image: Tensor
    """[B, L] bool, the tokens that stand for images: a completion may hold the same token."""
    samples: Tensor
    """[n, B, L] bool, the tokens of each sample."""
    inputs: Sequence[int]
    """[n] Number of each sample's input."""
    lengths: Mapping[str, Sequence[int]]
    """Name of a tensor -> its first dim for each input."""
    may_go_on: bool
    """Whether a completion may follow a prompt within `is_image`: images are then the first of its tokens."""

    def split(self, features: Tensor, *, sizes: Sequence[int]) -> tuple[list[Tensor], Tensor]:
        """[N, D] -> of each input [n, D], and the tokens [B, L] that show them.  sizes: of the pieces that the features
        came in, such as one of each image.

        Raises BatchError for a sample whose tokens are not as many as the features of its images.
        """
        is_image, counts = self.is_image, [int((self.is_image & own).sum()) for own in self.samples]
        # The pieces belong to inputs as images or patches do, whichever they are as many as.
        pieces = next((each for each in self.lengths.values() if sum(each) == len(sizes)), None)
        if pieces is not None:
            encoded = [sum(sizes[start:end]) for start, end in pairwise(accumulate(pieces, initial=0))]
            for sample, number in enumerate(self.inputs):
                is_image = shown(is_image, self.samples[sample], encoded[number], sample=sample, cut=self.may_go_on)
            return _split(features, encoded), is_image
        expected = [counts[self.inputs.index(number)] for number in range(max(self.inputs) + 1)]
        if sum(expected) != len(features):
            raise BatchError(
                f"images: got {sum(expected)} image tokens in {len(expected)} prompts, expected {len(features)} for "
                "their images. Prompts and conditions are of different inputs."
            )
        return _split(features, expected), is_image


def shown(is_image: Tensor, own: Tensor, expected: int, *, sample: int, cut: bool) -> Tensor:
    """[B, L] bool, with as many image tokens of a sample, whose tokens are `own` [B, L], as its images are encoded to.

    cut: leave later ones out. Raises BatchError, naming the sample, when there are others.
    """
    mine = is_image & own
    count = int(mine.sum())
    if count < expected or (count > expected and not cut):
        raise BatchError(
            f"images: sample {sample} has {count} image tokens, expected {expected} for its images. Its prompt and its "
            "conditions are of different inputs."
        )
    if count > expected:
        later = mine[own].cumsum(dim=0) > expected
        is_image = is_image.masked_scatter(own, is_image[own] & ~later)
    return is_image


def placing(trunk: Any) -> None:
    """Let a loaded trunk take `placement` in its forward. Without it the forward is that of transformers.

    The trunk must have `get_image_features` and `get_placeholder_mask`, as those of transformers do.
    """
    kind = trunk.__class__
    # In the module of the class, under its name: the checkpoints that it writes are ordinary ones.
    trunk.__class__ = type(
        kind.__name__, (_PlacesImages, kind), {"__module__": kind.__module__, "__doc__": kind.__doc__}
    )


def stacked(parts: Sequence[Tensor]) -> Tensor:
    """The tensors of several inputs, one after the other along the first dim, the others filled up with zeros at their
    ends, as processors stack images of several sizes."""
    most = [max(sizes) for sizes in zip(*(part.shape[1:] for part in parts), strict=True)]
    return torch.cat([
        torch.nn.functional.pad(part, _ends(part, most)) if list(part.shape[1:]) != most else part for part in parts
    ])  # fmt: skip


def _split(features: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    return list(cast("Any", features).split(sizes))


def _ends(part: Tensor, most: Sequence[int]) -> list[int]:
    pairs = ((0, size - have) for size, have in zip(most[::-1], part.shape[:0:-1], strict=True))
    return [end for pair in pairs for end in pair]


class _PlacesImages:
    _placement: Placement | None = None
    _is_image: Tensor | None = None

    def forward(
        self, input_ids: Tensor | None = None, *args: Any, placement: Placement | None = None, **kwargs: Any
    ) -> Any:
        plain: Any = super()
        self._placement, self._is_image = placement, None if placement is None else placement.is_image
        try:
            return plain.forward(input_ids, *args, **kwargs)
        finally:
            self._placement, self._is_image = None, None

    def get_placeholder_mask(self, input_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        plain: Any = super()
        if self._is_image is not None:
            settings: Any = cast("Any", self).config
            named = {value for key, value in settings.to_dict().items() if key.endswith("_token_id")}
            text = next(token for token in range(len(named) + 1) if token not in named)
            input_ids = input_ids.masked_fill((input_ids == settings.image_token_id) & ~self._is_image, text)
        return plain.get_placeholder_mask(input_ids, *args, **kwargs)

    def get_image_features(self, *args: Any, **kwargs: Any) -> Any:
        plain: Any = super()
        if (placement := self._placement) is None:
            return plain.get_image_features(*args, **kwargs)
        # Not the layout of the packed text.
        known = inspect.signature(plain.get_image_features).parameters.keys() | {"return_dict"}
        result = plain.get_image_features(*args, **{name: kwargs[name] for name in kwargs if name in known})
        result.pooler_output, self._is_image = _repeated(result.pooler_output, placement)
        if "deepstack_features" in result:
            result.deepstack_features = [_repeated(layer, placement)[0] for layer in result.deepstack_features]
        return result


def _repeated(features: Any, placement: Placement) -> tuple[Any, Tensor]:
    """Features of each sample's images, from those of each input's, in the form that they came in: a tensor
    [images, n, D] or [N, D], or several; and the tokens that show them."""
    is_tensor = isinstance(features, Tensor)
    flat = features.flatten(0, -2) if is_tensor else torch.cat([one.flatten(0, -2) for one in features])
    sizes = [one[..., 0].numel() for one in features] if not is_tensor or features.ndim > 2 else []
    parts, is_image = placement.split(flat, sizes=sizes)
    each = [parts[number] for number in placement.inputs]
    if not is_tensor:
        return each, is_image
    whole = torch.cat(each)
    return whole if features.ndim == 2 else whole[(None,) * (features.ndim - 2)], is_image
