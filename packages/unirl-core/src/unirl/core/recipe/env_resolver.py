"""`${oc.env:NAME}` in recipes, except for secrets: values of a recipe are recorded with the run."""

from __future__ import annotations

import re

from omegaconf.resolvers import oc

from ..errors import RecipeError

__all__ = ["env"]

SECRET = re.compile(
    r"SECRET|PASSW|PASSPHRASE|CREDENTIAL|COOKIE|BEARER|WEBHOOK|AUTHORIZATION|CONNECTION_?STRING"
    # Ends of words: `GITHUBTOKEN`, `SSHPASS`, `OAUTH`.
    r"|(?:KEY|TOKEN|AUTH|DSN)S?_|(?<!COM)(?<!BY)PASS_|(?<!OLD)PWD_"
    r"|_(?:PAT|PW|CREDS?|PRIVATE|SESSION(?:S|ID)?|JWT|OTP|SAS)_"
)
"""Searched in a name whose words are in capitals, with an underscore around each."""
WITH_PASSWORD = re.compile(r"\w[\w+.-]*://[^/\s:@]*:[^/\s@]+@")
"""A URL such as `postgres://ada:secret@host/db`."""
_ABSENT = "_UNIRL_ABSENT_"


def env(name: str, default: str | None = _ABSENT) -> str | None:
    """The value of an environment variable, as OmegaConf's own `oc.env` gives it.

    Raises RecipeError for a name that looks like a secret, and a value that is a URL with a password: it would end up
    in the events, the trackers and the requests of the run, where the author of the recipe could read it.
    """
    value: str | None = None
    if not _names_a_secret(name):
        value = oc.env(name) if default == _ABSENT else oc.env(name, default)
        if value is None or not WITH_PASSWORD.search(value):
            return value
    looks = "looks like a secret" if value is None else "is a URL with a password"
    raise RecipeError(
        f"${{oc.env:{name}}} {looks}, and values of a recipe are recorded with the run and sent to its "
        "trackers. Remove it: libraries that need the variable read the environment themselves."
    )


def _names_a_secret(name: str) -> bool:
    words = re.findall(r"[A-Z]+", re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).upper())
    # The working directory.
    return words != ["PWD"] and SECRET.search(f"_{'_'.join(words)}_") is not None
