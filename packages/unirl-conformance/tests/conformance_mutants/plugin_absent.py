"""A part that needs a package that does not exist."""

from __future__ import annotations

import a_package_that_is_not_installed  # noqa: F401


def build(config: object) -> None: ...
