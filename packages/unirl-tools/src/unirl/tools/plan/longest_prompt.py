"""The prompt that a plan is made for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from unirl.core.data.run_data import read_data
from unirl.core.errors import DataError
from unirl.core.types.inputs import Inputs
from unirl.core.types.sampling import LatentSamplingConfig

if TYPE_CHECKING:
    from unirl.core.specs.plan import Plan, Stage

__all__ = ["longest_prompt"]


def longest_prompt(plan: Plan, stage: Stage) -> tuple[Inputs, list[str]]:
    """The longest prompt of the data. A plan can be made before there is data: then one of the length that the settings
    allow, and a note that says why the data were not read. Raises DataError for a model that needs media."""
    try:
        longest = max(read_data(plan).prompts, key=lambda prompt: len(prompt.text))
        return Inputs.of_prompts([longest]), []
    except DataError as error:
        if stage.model.spec.needs_media:
            raise
        length = stage.sampling.max_sequence_length if isinstance(stage.sampling, LatentSamplingConfig) else 1
        return Inputs.of_texts([" ".join(["a"] * length)]), [
            f"lengths of your prompts, which could not be read ({error}); prompts are as long as the settings allow"
        ]
