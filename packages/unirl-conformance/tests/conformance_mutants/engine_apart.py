"""An external engine: conformance starts it once for many claims."""

from __future__ import annotations

import dataclasses
import os
import sys
from pathlib import Path
from typing import Any

from unirl.algorithms.grpo import plugin as grpo
from unirl.backends.fsdp2 import plugin as fsdp2
from unirl.conformance.doubles import tiny_decoder as text_model
from unirl.conformance.doubles import tiny_denoiser as latent_model
from unirl.core.errors import RunFailed
from unirl.core.plugins.catalog import Catalog
from unirl.core.roles import WeightReceipt, WeightUpdate
from unirl.core.specs.capability import Cap
from unirl.engine_host.process import EngineProcess, Program

from conformance_mutants.engine_copying import SPEC as COPYING
from conformance_mutants.engine_copying import CopyingEngine
from conformance_mutants.mutant import plugin

STARTS = "UNIRL_TEST_STARTS"
"""Environment variable that names the file which every start is noted in: its process, and the engine's."""


class Environment:
    """One that is present. Fits `unirl.engine_host.environment.EngineEnvironment`."""

    def is_present(self, accel: str) -> bool:
        return accel == "cpu"

    def command(self, accel: str) -> str:
        return f"unirl engine-env apart --accel {accel}"

    def packages(self, accel: str) -> dict[str, str]:
        return {"torch": "1.0", "unknown": "2.0"}


ENVIRONMENT = Environment()
SPEC = dataclasses.replace(
    COPYING,
    name="apart",
    build=f"{__name__}:build",
    environment=f"{__name__}:ENVIRONMENT",
    kernels=(),
    capabilities=COPYING.capabilities - {Cap.LATENT_ROLLOUT, Cap.SLEEP},
)


OF_LATENTS = dataclasses.replace(
    SPEC,
    name="apart-latents",
    kernels=COPYING.kernels,
    capabilities=COPYING.capabilities - {Cap.TEXT_ROLLOUT},
)


class Apart(CopyingEngine):
    """An engine with a separate process: a server that answers no call."""

    def __init__(self, config: Any, *, model: Any) -> None:
        super().__init__(config, model=model)
        self.is_closed = False
        self._process = EngineProcess(
            # `dict()` serves no calls.
            Program(name="idle", python=Path(sys.executable), serve="builtins:dict", modules=(), start_timeout_s=60)
        )
        self._process.start()
        with Path(os.environ[STARTS]).open("a", encoding="utf-8") as file:
            file.write(f"{os.getpid()} {self._process.pid}\n")

    def close(self) -> None:
        self.is_closed = True
        self._process.close()
        super().close()

    def load_weights(self, update: WeightUpdate) -> WeightReceipt:
        if self.is_closed:
            raise RunFailed(f"weights: version {update.version} was sent to engine 'apart', which was closed.")
        return super().load_weights(update)


def build(config: Any, *, model: Any, device: Any) -> Apart:
    return Apart(config, model=model)


def catalog_of_latents() -> Catalog:
    return Catalog.of({"unirl-apart": plugin(models=[latent_model.SPEC], engines=[OF_LATENTS])})


def catalog() -> Catalog:
    algorithm = next(spec for spec in grpo.unirl_algorithms() if spec.name == "grpo")
    return Catalog.of(
        {
            "unirl-apart": plugin(models=[text_model.SPEC], engines=[SPEC], algorithms=[algorithm]),
            "unirl-fsdp2": fsdp2,
        }
    )
