"""Cache of the conditions of inputs across steps."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from unirl.core.errors import BatchError
from unirl.core.roles import Model, diffusion_model, text_model
from unirl.core.types.array import Ragged
from unirl.core.types.batch import join
from unirl.core.types.data import MediaRef
from unirl.core.types.inputs import Inputs, Turn, distinct
from unirl.core.types.sampling import LatentSamplingConfig, SamplingConfig
from unirl.core.types.track import Conditions

__all__ = ["InputCache"]

_Key = tuple[str, str, tuple[MediaRef, ...], tuple[Turn, ...] | None, tuple[int, ...], str]


class InputCache:
    """Encodes each distinct input once, alone, and keeps the conditions of the newest `size` of them in host memory.

    Alone, because a row's last bits may depend on its batch. Conditions are then a function of their input, whatever
    else is in the request, in earlier steps or in a resumed run.
    """

    def __init__(self, model: Model, *, size: int) -> None:
        self._model = model
        self._size = size
        self._kept: OrderedDict[_Key, Mapping[str, Ragged]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    def conditions(self, inputs: Inputs, *, sampling: SamplingConfig) -> Conditions:
        """Conditions of these samples on the model's device, one entry of values per distinct input."""
        rows, index = distinct(inputs)
        result = [self._encoded(inputs.select([row]), sampling=sampling) for row in rows]
        values = {name: self._joined(name, [one[name] for one in result]) for name in result[0]}
        return Conditions(values=values, index=torch.tensor(index, dtype=torch.int64).to(self._model.device))

    def _encoded(self, one: Inputs, *, sampling: SamplingConfig) -> Mapping[str, Ragged]:
        """name -> one entry. one: a single row."""
        # Text and media besides the id: files for training and evaluation may use one id for different prompts. Then
        # the settings an encoder may read; steps, kernel, guidance and schedule never reach it.
        settings = ()
        if isinstance(sampling, LatentSamplingConfig):
            settings = (sampling.max_sequence_length, sampling.height, sampling.width, sampling.frames)
        options = json.dumps(sampling.options, sort_keys=True)
        turns = None if one.turns is None else one.turns[0]
        key = (one.ids[0], one.texts[0], one.media[0], turns, settings, options)
        if key in self._kept:
            self._kept.move_to_end(key)
            return self._kept[key]
        if isinstance(sampling, LatentSamplingConfig):
            encoded = diffusion_model(self._model).encode(one, sampling=sampling)
        else:
            encoded = text_model(self._model).conditions(one, sampling=sampling)
        if self._size:
            self._kept[key] = {name: _moved(value, "cpu") for name, value in encoded.items()}
            while len(self._kept) > self._size:
                self._kept.popitem(last=False)
        return encoded

    def _joined(self, name: str, values: Sequence[Ragged]) -> Ragged:
        shapes = {tuple(value.shape[1:]) for value in values if not isinstance(value, tuple)}
        if len(shapes) > 1:
            raise BatchError(
                f"model {self._model.spec.name!r}: condition {name!r} has rows of different shapes "
                f"{sorted(map(str, shapes))}; pad to sampling.max_sequence_length, not to the longest prompt."
            )
        return join(name, [_moved(value, self._model.device) for value in values])


def _moved(value: Ragged, device: Any) -> Ragged:
    return tuple(part.to(device) for part in value) if isinstance(value, tuple) else value.to(device)
