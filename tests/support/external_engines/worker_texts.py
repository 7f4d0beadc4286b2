"""The call for texts that reaches a worker of vLLM-Omni, without an engine."""

from __future__ import annotations

from io import BytesIO
from typing import Any

import pytest
from torch import Tensor
from unirl.core.roles import TextModel
from unirl.core.types.request import Request
from unirl.engine_host.frames import read_frame, to_frame
from unirl.engine_host.text_engine import ExternalTexts
from unirl.engines.vllm_omni.environment import PRODUCT
from unirl.engines.vllm_omni.settings import text_arguments
from unirl.numerics.tokens.rollout import text_conditions

__all__ = ["sent"]


def sent(model: TextModel, request: Request) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The call that the host makes for a request, in batches of four rows."""
    calls: list[tuple[Any, Any]] = []

    class Sent(Exception):
        pass

    def note(arguments: Any, tensors: Any) -> Any:
        calls.append((arguments, dict(tensors)))
        raise Sent

    texts = ExternalTexts(
        PRODUCT,
        model=model,
        sampling=lambda wanted: text_arguments(wanted, batch=4),
        conditions=text_conditions,
        track=lambda *args, **made: pytest.fail("nothing was answered"),
    )
    with pytest.raises(Sent):
        texts.track(request, generate=note, version=0)
    # As it comes out of the frame in the engine's process.
    return read_frame(BytesIO(to_frame(*calls[0])).read)
