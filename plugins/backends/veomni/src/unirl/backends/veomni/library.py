"""VeOmni itself, imported when a backend is built."""

from __future__ import annotations

import logging
import sys
from importlib import import_module
from typing import Any

from unirl.core.errors import RecipeError

__all__ = ["veomni"]


def veomni(module: str) -> Any:
    """A module of VeOmni, by its name within the package. Imports it, which takes seconds and patches transformers:
    its losses, and attentions named `veomni_*`.

    Raises RecipeError when it is not installed or cannot be imported.
    """
    if sys.modules.get("veomni") is None:
        _load()
    return import_module(f"veomni.{module}")


def _load() -> None:
    disabled = logging.root.manager.disable
    # It prints its environment and patches to stdout, which is the reports'.
    logging.disable(logging.INFO)
    try:
        import_module("veomni")
    except ImportError as error:
        hint = "it has no release for Python 3.13" if sys.version_info >= (3, 13) else "pip install veomni==0.1.12"
        raise RecipeError(
            f"backend: veomni cannot be imported ({error}); {hint}. transformers must be at least 5.12 and below 5.23, "
            "and torchvision, where it is installed, of torch's own build."
        ) from error
    finally:
        logging.disable(disabled)
    logging.getLogger("veomni").setLevel(logging.WARNING)
