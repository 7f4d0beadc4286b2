"""Texts from a pipeline of vLLM-Omni: UniRL's token loop, with logits of vLLM-Omni's transformer through the decoder of
the model's bridge.

Runs in the engine's worker. vLLM-Omni generates one completion at a time and gives no log-probs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from io import BytesIO
from typing import TYPE_CHECKING, Any

import torch
from unirl.core.types.request import TextRequest
from unirl.core.types.sampling import TextSamplingConfig
from unirl.core.types.track import Conditions
from unirl.core.types.weights import checksum
from unirl.engine_host.frames import read_frame
from unirl.engine_host.received import Row, rows
from unirl.numerics.tokens.rollout import GeneratedText, generate_text

if TYPE_CHECKING:
    from unirl.numerics.tokens.rollout import TokenDecoder

__all__ = ["TEXTS", "written"]

TEXTS = "unirl_texts"
"""Key of a request's extra arguments: a call `generate` for texts, with all its rows, as a frame."""


def written(decoder: TokenDecoder, asked: bytes) -> dict[str, Any]:
    """The arguments of `unirl.engine_host.received.generated`, as plain values.

    asked: a frame of the call's arguments and tensors, see `unirl.engine_host.received.rows` and
    `unirl.engines.vllm_omni.settings.text_arguments`.
    """
    arguments, tensors = read_frame(BytesIO(asked).read)
    each, settings = rows(arguments, tensors), arguments["sampling"]
    # Of the tensors that are used, not those that the host meant to send.
    keys = {id(row.media): checksum(row.media) if row.media else "" for row in each}
    wanted = TextRequest(
        sampling=TextSamplingConfig(**settings["config"]),
        prompt_tokens=tuple(torch.tensor(row.prompt) for row in each),
        stop_tokens=tuple(settings["stop_tokens"]),
        seeds=tuple(arguments["seeds"]),
        options=tuple(settings["options"].items()),
        length=settings["length"],
    )
    conditions, parts, start = _conditions(each, device=decoder.device), list[GeneratedText](), 0
    for piece in wanted.chunks(settings["batch"]):
        own = None if conditions is None else conditions.select(range(start, start + piece.num_rows))
        parts.append(generate_text(decoder, piece, conditions=own))
        start += piece.num_rows
    result = GeneratedText.concat(parts)
    return {
        "tokens": [tokens.tolist() for tokens in result.tokens],
        "log_probs": [log_probs.tolist() for log_probs in result.log_probs],
        "finish_reasons": ["length" if is_cut else "stop" for is_cut in result.truncated],
        "prompts": [tokens.tolist() for tokens in result.prompt_tokens],
        "media": [keys[id(row.media)] for row in each],
        "temperatures": [result.temperature] * len(each),
        "options": dict(result.options),
        "mask": None if result.mask is None else [own.tolist() for own in result.mask],
    }


def _conditions(each: Sequence[Row], *, device: Any) -> Conditions | None:
    """The media of the rows, each once; a row without has none of what the others have. None where no row has any."""
    distinct: dict[int, Mapping[str, Any]] = {id(row.media): row.media for row in each}
    places, media = list(distinct), list(distinct.values())
    shown = next(filter(None, media), None)
    if shown is None:
        return None
    nothing = {name: value[:0] for name, value in shown.items()}
    return Conditions(
        values={name: tuple((own or nothing)[name].to(device) for own in media) for name in shown},
        index=torch.tensor([places.index(id(row.media)) for row in each]),
    )
