"""Encoders of the model in the host's process, which an external engine with its own is compared with when it starts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from unirl.engine_host.latent_engine import ExternalLatentEngine
from unirl.model_host.diffusion.pipeline_model import PipelineModel


class Pipeline(PipelineModel):
    """Notes what is offloaded."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.offloaded: list[tuple[str, ...]] = []

    encode_texts = latent_shape = velocity = None  # type: ignore[assignment]

    def offload_idle(self, *parts: Any) -> None:
        self.offloaded.append(parts)


@pytest.mark.parametrize(("device", "offloaded"), [("cuda:1", [("encode",)]), ("cpu", [])])
def test_they_leave_a_gpu_once_they_have_been_compared(device: str, offloaded: list[tuple[str, ...]]) -> None:
    engine = object.__new__(ExternalLatentEngine)
    engine._probes, engine._texts, engine._encoder = (), None, Pipeline(torch.device(device))
    engine._started({})
    assert engine._encoder.offloaded == offloaded
