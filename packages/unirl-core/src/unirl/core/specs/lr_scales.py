"""Learning rates by part of a model: factors by regular expressions on the names of its parameters."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Mapping

from ..errors import RecipeError

__all__ = ["lr_scales_of"]


def lr_scales_of(patterns: Mapping[str, float], names: Collection[str], *, module: str) -> dict[str, float]:
    """Factor of the learning rate of each parameter, by name: that of the first pattern found in it, or 1.

    names: the model's trainable parameters.  module: its class, for messages.
    Raises RecipeError, key `backend.lr_scales.<pattern>`, for a pattern that is the first in no name, and for factors
    that freeze every parameter.
    """
    first = {name: next((pattern for pattern in patterns if re.search(pattern, name)), None) for name in names}
    for pattern in (one for one in patterns if one not in first.values()):
        matched = [name for name in names if re.search(pattern, name)]
        if matched:
            problem = (
                f"{len(matched)} trainable parameters of {module}, such as {matched[0]!r}, but earlier patterns match "
                "all of them, and the first one counts. Put it before those, or leave it out."
            )
        else:
            near = ", ".join(map(repr, difflib.get_close_matches(pattern, names, n=3, cutoff=0)))
            problem = (
                f"no trainable parameter of {module}, expected a regular expression found in the name of one, such as "
                f"{near}. Correct it, or leave it out."
            )
        raise RecipeError(f"backend.lr_scales.{pattern}: got a pattern that matches {problem}")
    scales = {name: 1.0 if pattern is None else patterns[pattern] for name, pattern in first.items()}
    if patterns and not any(scales.values()):
        *_, last = patterns
        raise RecipeError(
            f"backend.lr_scales.{last}: got 0, which freezes the last of the {len(names)} trainable parameters of "
            f"{module}, expected at least one that trains. Give some of them a factor above 0, or narrow the pattern."
        )
    return scales
