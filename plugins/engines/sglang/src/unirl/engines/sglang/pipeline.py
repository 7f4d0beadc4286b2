"""SGLang's pipeline of a model, with rollout stages and additional calls, registered as an out-of-tree pipeline.
Runs in SGLang's environment, in its worker."""

# SGLang is in the engine's environment alone, where type checking does not look.
# pyright: reportMissingImports=false

from __future__ import annotations

import gc
import json
import os
from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any

from unirl.engine_host.serving import rendezvous

from sglang.multimodal_gen.registry import register_pipeline
from sglang.multimodal_gen.runtime.pipelines_core.schedule_batch import OutputBatch
from sglang.multimodal_gen.runtime.pipelines_core.stages.progressive_resolution.denoising import (
    ProgressiveDenoisingStageRouter,
)
from sglang.multimodal_gen.runtime.platforms.plugins import HookRegistry
from sglang.srt.plugins.hook_registry import HookType

from .control import ANSWER, CALL, MODEL_ID, SETTINGS_VARIABLE
from .stages import STAGES
from .weights import HeldWeights

if TYPE_CHECKING:
    from .bridge import Bridge

__all__ = ["RolloutPipeline", "register_rollouts"]

UNSYNCED = -1
INIT_GROUP = "sglang.multimodal_gen.runtime.distributed.parallel_state.init_distributed_environment"


def register_rollouts(name: str) -> None:
    """Replace the stock pipeline with the rollout pipeline. name: `"module:attribute"` of the bridge."""
    bridge = _resolve(name)
    stock = _resolve(bridge.pipeline)
    own = {"bridge": bridge, "unirl_settings": json.loads(os.environ[SETTINGS_VARIABLE])}
    pipeline = type(f"Rollout{stock.__name__}", (RolloutPipeline, stock), own)
    register_pipeline(
        pipeline,
        sampling_param_cls=_resolve(bridge.sampling_params),
        pipeline_config_cls=_resolve(bridge.pipeline_config),
        # Found by the id that the server names: SGLang's own settings are found by a folder's name, before detectors.
        hf_model_paths=[f"unirl/{MODEL_ID}"],
        overwrite=True,
    )
    HookRegistry.register(INIT_GROUP, _meet_at_a_file, HookType.BEFORE)


def _meet_at_a_file(*arguments: Any, **settings: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return arguments, {**settings, "distributed_init_method": rendezvous()}


class RolloutPipeline(HeldWeights):
    """Mixed into a pipeline class of SGLang, so its names begin with `unirl_`."""

    bridge: Bridge
    unirl_settings: Mapping[str, Any]
    """See `Bridge.settings`."""
    unirl_version = UNSYNCED
    """Policy version of the weights in use."""
    unirl_torn = ""
    """Why the weights match no version; empty if they do."""

    def add_stage(self, stage: Any, stage_name: str | None = None) -> Any:
        """The stages of the stock pipeline, each replaced by its rollout counterpart."""
        if isinstance(stage, ProgressiveDenoisingStageRouter):
            # Progressive resolution is not part of a request.
            stage = stage.standard_stage
        if type(stage) in STAGES:
            stage.__class__ = STAGES[type(stage)]
            stage.pipeline_of = lambda: self
        return super().add_stage(stage, stage_name)  # type: ignore[misc]

    def forward(self, batch: Any, server_args: Any) -> Any:
        """Handle a request, which carries either a rollout or a call."""
        if (call := batch.extra.get(CALL)) is not None:
            name, arguments = call
            answer = getattr(self, f"unirl_{name}")(*arguments)
            return OutputBatch(usage={ANSWER: answer}, metrics=batch.metrics)
        if self.unirl_torn:
            raise RuntimeError(f"cannot generate with these weights: {self.unirl_torn}")
        return super().forward(batch, server_args)  # type: ignore[misc]

    def unirl_freeze(self) -> None:
        """Exclude what the start has created from garbage collection. SGLang collects several times in each weight
        update, which takes 0.4 s for the objects of its imports alone."""
        gc.collect()
        gc.freeze()


def _resolve(name: str) -> Any:
    """The object that `"module:attribute"` names."""
    module, _, attribute = name.partition(":")
    return getattr(import_module(module), attribute)
