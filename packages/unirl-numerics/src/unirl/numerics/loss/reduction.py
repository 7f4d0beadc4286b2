"""Reduction of per-element losses to a scalar, such that no split of the batch changes the gradient.

The denominator is the weight of the whole optimiser step over all ranks, known before the first backward; a
micro-batch adds its share.  No average of averages is taken.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import cast

import torch
from torch import Tensor
from unirl.core.roles import LossTerm


def reduce_terms(terms: Iterable[LossTerm], *, totals: Mapping[str, Tensor]) -> Tensor:
    """Sum over terms of scale * sum(values * weights) / totals[name].  Returns a scalar to call backward on.

    totals: name -> scalar weight (or normalizer) of the whole step, `weight_totals` of all its micro-batches,
    summed over ranks. Keep them on the CPU, because their values are read.
    A term whose total is 0 gives exactly 0, still attached to the graph, so that ranks stay in step.

    A value at weight 0 may be NaN or infinite: it is masked before it is multiplied, and gets gradient 0.
    What made it must have finite derivatives, for 0 times infinity is NaN again.

    Raises ValueError when a total is missing, or is 0 although an element has weight.
    """
    reduced: list[Tensor] = []
    for term in terms:
        if term.name not in totals:
            raise ValueError(f"loss term '{term.name}' has no total; totals are for {sorted(totals)}.")
        is_counted = term.weights > 0
        values = torch.where(is_counted, term.values, torch.zeros_like(term.values))
        total = float(totals[term.name])
        if not total > 0:
            if total < 0 or bool(is_counted.any()):
                raise ValueError(
                    f"loss term '{term.name}': its total is {total}, but elements have weight. Totals must "
                    "count the weights of every micro-batch of the step."
                )
            total = 1.0
        reduced.append(term.scale * (values * term.weights).sum() / total)
    if not reduced:
        raise ValueError("reduce_terms: there are no loss terms. An algorithm returns at least one.")
    return torch.stack(reduced).sum()


def weight_totals(terms_or_weights: Iterable[LossTerm] | Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weight each name carries, or its normalizer where it has one, as fp64 scalars.

    Add them up over micro-batches and ranks.

    terms_or_weights: loss terms, where equal names add up, or name -> weights of any shape.
    """
    named: Iterable[tuple[str, Tensor]]
    if isinstance(terms_or_weights, Mapping):
        named = cast("Mapping[str, Tensor]", terms_or_weights).items()
    else:
        named = ((term.name, term.weights if term.normalizer is None else term.normalizer) for term in terms_or_weights)
    totals: dict[str, Tensor] = {}
    for name, weights in named:
        weight = weights.detach().double().sum()
        totals[name] = totals[name] + weight if name in totals else weight
    return totals
