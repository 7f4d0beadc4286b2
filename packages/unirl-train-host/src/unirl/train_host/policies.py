"""The weights of each policy: the live ones, and the copies that a backend keeps of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Literal

from torch import Tensor, nn
from unirl.core.errors import RecipeError

from .averages import Average, make_copies
from .sharding import reshard

if TYPE_CHECKING:
    from unirl.core.roles import Policy

    from .config import ShardedConfig

__all__ = ["Policies"]


class Policies:
    """Which weights the module holds, and those of the other policies."""

    def __init__(self, module: nn.Module, *, params: Mapping[str, Tensor], config: ShardedConfig) -> None:
        """params: those that train, by their names."""
        self._module, self._trains = module, config.trains
        self.copies = make_copies(params, config)
        self.using: Policy | None = "live"
        """Whose weights the module holds; None while they are exchanged, and if a signal ended that."""

    @property
    def averages(self) -> dict[str, Average]:
        return {name: copy for name, copy in self.copies.items() if isinstance(copy, Average)}

    def move(self, when: Literal["step", "rollout"]) -> None:
        """Move the averages that follow the live weights then."""
        for average in self.averages.values():
            if average.config.every == when:
                average.move()

    def check_live(self, why: str) -> None:
        """Assert that the module holds the live weights. why: what would happen otherwise."""
        assert self.using == "live", f"inside policy {self.using!r}: {why}"

    @contextmanager
    def use(self, which: Policy) -> Iterator[None]:
        """Use these weights inside the block; those before are restored after it, bit for bit, also after an error.

        Raises RecipeError for a policy that is not kept.
        """
        if which == self.using:
            yield
            return
        if self.using != "fake":
            self.check_live(f"policy {which!r} was requested")
        before = self.using
        assert before is not None
        self._turn(which)
        try:
            yield
        finally:
            # Else an exchange inside was ended: the weights are mixed, and stay so.
            if self.using is not None:
                self._turn(before)

    def _turn(self, which: Policy) -> None:
        """Give the module these weights."""
        turns: tuple[tuple[Policy | None, bool], ...] = ((self.using, False), (which, True))
        switches = [(self.switch(policy), on) for policy, on in turns if policy and policy != "live"]
        reshard(self._module)
        # Mixed weights must not be saved or exported as those of a policy.
        self.using = None
        for switch, on in switches:
            switch(on)
        self.using = which

    def switch(self, which: Policy) -> Callable[[bool], None]:
        """A function that switches to a policy (True) and back (False). Raises RecipeError for one that is not kept."""
        copy = self.copies.get(which)
        if copy is not None:
            return lambda on: copy.swap()
        if which == "reference" and self._trains == "lora":
            from .adapters import switch_lora

            return lambda on: switch_lora(self._module, on=not on)
        keys = {"reference": "reference_copy=true", "fake": "fake_score.lr, such as 1e-5"}
        key = keys.get(which, f"{which}.kind, such as constant")
        raise RecipeError(f"backend: policy {which!r} is needed, but not kept. Set backend.{key}.")

    def shard_of(self, name: str, held: Tensor, policy: Policy) -> Tensor:
        """This rank's shard of a parameter under a policy; nothing is switched for it. held: that in the module."""
        if policy == self.using:
            return held
        assert self.using and "live" in (policy, self.using), (
            f"weights of {policy!r} were asked for inside policy {self.using!r}"
        )
        # Inside a policy its copy holds the live weights.
        copy = self.copies.get(policy if self.using == "live" else self.using)
        return held if copy is None else copy.values.get(name, held)
