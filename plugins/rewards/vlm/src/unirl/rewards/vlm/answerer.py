"""Who answers a judge's questions."""

from __future__ import annotations

from typing import Any

from .config import AnswererConfig
from .question import Answerer

__all__ = ["answerer"]


def answerer(config: AnswererConfig, *, device: Any) -> Answerer:
    """The endpoint of `base_url`, or the model in this process. Raises RecipeError for one that cannot be used."""
    if config.base_url:
        from .endpoint import Endpoint

        return Endpoint(config)
    from .local import LocalJudge

    return LocalJudge(config, device=device)
