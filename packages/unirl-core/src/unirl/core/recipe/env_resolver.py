"""`${oc.env:NAME}` in recipes, except for secrets: values of a recipe are recorded with the run."""

from __future__ import annotations

import re

from omegaconf.resolvers import oc

from ..errors import RecipeError

__all__ = ["env"]

SECRET = re.compile(r"KEY|TOKEN|SECRET|PASSW|CREDENTIAL|AUTH|COOKIE", re.IGNORECASE)
_ABSENT = "_UNIRL_ABSENT_"


def env(name: str, default: str | None = _ABSENT) -> str | None:
    """The value of an environment variable, as OmegaConf's own `oc.env` gives it.

    Raises RecipeError for a name that looks like a secret: its value would end up in the events, the trackers and the
    requests of the run, where the author of the recipe could read it.
    """
    if SECRET.search(name):
        raise RecipeError(
            f"${{oc.env:{name}}} looks like a secret, and values of a recipe are recorded with the run and sent to its "
            "trackers. Remove it: libraries that need the variable read the environment themselves."
        )
    return oc.env(name) if default == _ABSENT else oc.env(name, default)
