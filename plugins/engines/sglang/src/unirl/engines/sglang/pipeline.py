"""SGLang's pipeline of a model, with stages for rollouts and calls of our own: registered by SGLang's interface for
pipelines from outside. Runs in SGLang's environment, in its worker."""

# SGLang is in the engine's environment alone, where type checking does not look.
# pyright: reportMissingImports=false

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from sglang.multimodal_gen.registry import register_pipeline
from sglang.multimodal_gen.runtime.pipelines_core.schedule_batch import OutputBatch
from sglang.multimodal_gen.runtime.pipelines_core.stages.progressive_resolution.denoising import (
    ProgressiveDenoisingStageRouter,
)

from .control import ANSWER, CALL
from .stages import STAGES
from .weights import HeldWeights

if TYPE_CHECKING:
    from .bridge import Bridge

__all__ = ["RolloutPipeline", "register_rollouts"]

UNSYNCED = -1


def register_rollouts(name: str) -> None:
    """Put the pipeline with rollouts in the place of the stock one. name: `"module:attribute"` of the bridge."""
    bridge = _resolve(name)
    stock = _resolve(bridge.pipeline)
    pipeline = type(f"Rollout{stock.__name__}", (RolloutPipeline, stock), {"bridge": bridge})
    register_pipeline(
        pipeline,
        sampling_param_cls=_resolve(bridge.sampling_params),
        pipeline_config_cls=_resolve(bridge.pipeline_config),
        # Else the settings are chosen by the name of the checkpoint's folder.
        model_detectors=[lambda path: True],
        overwrite=True,
    )


class RolloutPipeline(HeldWeights):
    """Goes before a pipeline of SGLang. Its own names begin with `unirl_`."""

    bridge: Bridge
    unirl_version = UNSYNCED
    """Policy version of the weights that it computes with."""
    unirl_torn = ""
    """Why those are of no version, while it is so."""

    def add_stage(self, stage: Any, stage_name: str | None = None) -> Any:
        """The stages of the stock pipeline, each as its counterpart for rollouts."""
        if isinstance(stage, ProgressiveDenoisingStageRouter):
            # Resolutions that grow are none of a request's.
            stage = stage.standard_stage
        if type(stage) in STAGES:
            stage.__class__ = STAGES[type(stage)]
            stage.pipeline_of = lambda: self
        return super().add_stage(stage, stage_name)  # type: ignore[misc]

    def forward(self, batch: Any, server_args: Any) -> Any:
        """A rollout, or a call: SGLang's requests carry one or the other."""
        if (call := batch.extra.get(CALL)) is not None:
            name, arguments = call
            answer = getattr(self, f"unirl_{name}")(*arguments)
            return OutputBatch(usage={ANSWER: answer}, metrics=batch.metrics)
        if self.unirl_torn:
            raise RuntimeError(f"nothing is generated with these weights: {self.unirl_torn}")
        return super().forward(batch, server_args)  # type: ignore[misc]


def _resolve(name: str) -> Any:
    """What `"module:attribute"` names."""
    module, _, attribute = name.partition(":")
    return getattr(import_module(module), attribute)
