"""Plans, and why they are refused before anything starts."""

from __future__ import annotations

from unirl.core.catalog import Catalog
from unirl.core.match import match
from unirl.core.recipe import compose

__all__ = ["reasons_against"]


def reasons_against(recipe: str, *words: str) -> list[str]:
    """What is said of a recipe with these words after it; nothing when it is accepted."""
    catalog = Catalog.discover()
    verdict = match(compose(recipe, list(words), catalog=catalog), catalog=catalog)
    return [str(reason) for reason in verdict.reasons]
