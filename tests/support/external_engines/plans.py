"""Plans, and why they are rejected before anything starts."""

from __future__ import annotations

from unirl.core.match.match import match
from unirl.core.plugins.catalog import Catalog
from unirl.core.recipe.compose import compose

__all__ = ["reasons_against"]


def reasons_against(recipe: str, *words: str) -> list[str]:
    """The message for a recipe with these overrides; empty when it is accepted."""
    catalog = Catalog.discover()
    verdict = match(compose(recipe, list(words), catalog=catalog), catalog=catalog)
    return [str(reason) for reason in verdict.reasons]
