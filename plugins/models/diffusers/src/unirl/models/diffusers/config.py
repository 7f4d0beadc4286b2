"""Settings of the generic diffusion model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from unirl.core.limits import Reason
from unirl.core.specs.plan import Plan, Stage
from unirl.model_host.diffusion.pipeline_config import PipelineConfig

__all__ = ["DiffusersConfig"]


@dataclass
class DiffusersConfig(PipelineConfig):
    call: dict[str, Any] = field(default_factory=lambda: dict[str, Any]())
    """Further arguments of the pipeline's call, such as `guidance_scale: 3.5` of a model with embedded guidance."""

    def problems(self, plan: Plan | None, stage: Stage | None) -> Iterator[Reason]:
        """An engine that runs dedicated models alone; not where this one is a teacher, which no engine runs."""
        from .bridged import instead_of

        yield from super().problems(plan, stage)
        engine = stage.engine if stage is not None and stage.model.config is self else None
        if engine is not None and (why := instead_of(engine.name, path=self.path)):
            yield Reason(key=engine.key, text=why)
