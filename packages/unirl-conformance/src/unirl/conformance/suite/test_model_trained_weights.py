"""Trainable parameters: no conditions depend on them, and all use of them is inside one forward."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from unirl.conformance.claims import claim
from unirl.conformance.fixtures.latent_model import LatentModelCase
from unirl.conformance.fixtures.model import ModelCase
from unirl.conformance.fixtures.text_model import TextModelCase

CASES: dict[str, type[ModelCase[Any]]] = {"latent": LatentModelCase, "text": TextModelCase}


@claim("model", track="any")
def test_conditions_do_not_depend_on_what_trains(case: ModelCase) -> None:
    """Conditions and prompt tokens are the same bit for bit after every weight of `trainable` has changed, with media
    and without. They are encoded once, kept across steps and replayed: a hidden state of the trained module among them
    would be stale after the first update, and get no gradient.

    If it fails: put tokens and pixels into the conditions, and run the trained module on them in `velocity` or `score`;
    keep the parts that `encode` runs out of `trainable`.
    """
    # A second model: the first may cache what it encoded.
    changed = case.learner()
    _change(changed.trainable)
    for each in _of_each_kind(case):
        with each.model() as model:
            expected = each.all_conditions(model)
            result = each.all_conditions(changed)
        for mine, its in zip(result, expected, strict=True):
            assert mine.keys() == its.keys(), f"names differ: {sorted(mine.keys() ^ its.keys())}"
            for name, rows in its.items():
                same = all(torch.equal(one, other) for one, other in zip(mine[name], rows, strict=True))
                assert same, f"{name!r} changed with the weights of {case.spec.trainable!r}"


@claim("model", track="any")
def test_trained_weights_are_used_inside_the_root_forward(case: ModelCase) -> None:
    """Velocities, log-probs, next logits and media are computed by calling the whole module that `trainable` gives:
    nothing reads a parameter of it, or calls a layer of it, from outside. A backend that shards it gathers the
    parameters in hooks of that call; outside of it each rank has a shard, and torch fails with "got mixed torch.Tensor
    and DTensor".

    If it fails: call `trainable` itself, and give its `forward` an argument for each way in which it is used, see
    `unirl.model_host.tokens.token_scores`.
    """
    for each in _of_each_kind(case):
        with each.model() as model, _watched(model.trainable) as watch:
            each.compute(model)
        assert not watch.outside, (
            f"{len(watch.outside)} operations on parameters are outside of the forward of {case.spec.trainable!r}; the "
            f"first is {watch.outside[0]}"
        )
        assert watch.calls, f"{case.spec.trainable!r} was never called"


def _of_each_kind(case: ModelCase) -> list[ModelCase]:
    """The case for each kind of track that the model has."""
    return [CASES[kind](**vars(case)) for kind in case.subject.tracks]


@torch.no_grad()
def _change(module: nn.Module) -> None:
    """Add random numbers of the size of 1 to every parameter, the same each time."""
    random = torch.Generator().manual_seed(5)
    for param in module.parameters():
        if param.is_floating_point():
            param.add_(torch.randn(param.shape, generator=random).to(param))


class _Watch(TorchDispatchMode):
    """Operations on the memory of a module's parameters outside of its forward."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        # By address: views are other tensors, and all tensors of a file may share one storage.
        self._places = [(p.data_ptr(), p.data_ptr() + p.nbytes, name) for name, p in module.named_parameters()]
        self._depth = 0
        self.calls = 0
        self.outside: list[str] = []
        """`operation on 'parameter'`."""

    def enter(self, *_: object) -> None:
        self._depth += 1
        self.calls += 1

    def leave(self, *_: object) -> None:
        self._depth -= 1

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self._depth:
            self._look(func, tree_leaves((args, kwargs)))
        return func(*args, **(kwargs or {}))

    def _look(self, func: Any, values: Sequence[Any]) -> None:
        for place in (value.data_ptr() for value in values if isinstance(value, Tensor)):
            self.outside += [f"{func} on {name!r}" for start, end, name in self._places if start <= place < end]


@contextmanager
def _watched(module: nn.Module) -> Iterator[_Watch]:
    watch = _Watch(module)
    handles = [
        module.register_forward_pre_hook(watch.enter, prepend=True),
        # Pipelines may end a forward by an exception.
        module.register_forward_hook(watch.leave, always_call=True),
    ]
    try:
        with watch:
            yield watch
    finally:
        for handle in handles:
            handle.remove()
