"""Settings of the environments."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unirl.core.limits import Reason, limit, one_of
from unirl.core.specs.part_config import EnvironmentConfig

if TYPE_CHECKING:
    from unirl.core.specs.plan import Plan, Stage

__all__ = ["CalculatorConfig", "FunctionConfig", "GridConfig", "GymnasiumConfig"]


@dataclass
class CalculatorConfig(EnvironmentConfig):
    role: str = one_of("user", "tool", default="tool")
    """Role of the calculator in the chat template."""
    opens: str = "<calc>"
    """Marker before an expression."""
    closes: str = "</calc>"
    """Marker behind an expression."""
    call_reward: float = limit(0.0, least=-1e9, most=1e9)
    """Reward of an answer whose expressions all have a value."""
    error_reward: float = limit(0.0, least=-1e9, most=1e9)
    """Reward of an answer with an expression that has none, such as a negative one."""

    def problems(self, plan: Plan | None, stage: Stage | None) -> Iterator[Reason]:
        """Also markers that are missing."""
        yield from super().problems(plan, stage)
        for name in ("opens", "closes"):
            if not getattr(self, name).strip():
                yield Reason(key=f".{name}", text=f"got {getattr(self, name)!r}, expected a marker such as '<calc>'.")


@dataclass
class GridConfig(EnvironmentConfig):
    size: int = limit(4, least=2, most=64)
    """Rows, and columns."""
    holes: int = limit(2, least=0, most=1024)
    """Number of holes."""
    step_reward: float = limit(0.0, least=-1e9, most=1e9)
    """Reward of each answer that does not end the game, such as a small negative one for each step."""

    def problems(self, plan: Plan | None, stage: Stage | None) -> Iterator[Reason]:
        """Also more holes than leave a way to the goal."""
        yield from super().problems(plan, stage)
        if self.holes > (self.size - 1) ** 2:
            text = f"got {self.holes}, expected at most {(self.size - 1) ** 2} in a grid of {self.size} x {self.size}."
            yield Reason(key=".holes", text=text)


@dataclass
class GymnasiumConfig(EnvironmentConfig):
    id: str = ""
    """Id of the environment in gymnasium's registry."""
    module: str = ""
    """Module that is imported first, because it registers the environment; empty for gymnasium's own."""
    arguments: dict[str, Any] = field(default_factory=lambda: dict[str, Any]())
    """Further arguments of `gymnasium.make`."""
    actions: list[str] = field(default_factory=lambda: list[str]())
    """Names of the actions of a `Discrete` space, in their order: the last one in an answer is taken. Empty for actions
    that are texts."""

    def problems(self, plan: Plan | None, stage: Stage | None) -> Iterator[Reason]:
        """Also a missing id."""
        yield from super().problems(plan, stage)
        if not self.id:
            yield Reason(key=".id", text="got none, expected the id of a text environment.")

    def named_code(self) -> Mapping[str, str | Path]:
        named = {".id": f"the environment {self.id!r} of gymnasium"}
        return {**named, **({".module": f"the module {self.module!r}"} if self.module else {})}


@dataclass
class FunctionConfig(EnvironmentConfig):
    role: str = one_of("user", "tool", default="tool")
    """Role of the function in the chat template."""
    target: str = ""
    """The function: `file.py:function`, with a path from the current folder."""

    def __post_init__(self) -> None:
        file, colon, name = self.target.rpartition(":")
        if colon and file.endswith(".py"):
            self.target = f"{Path(file).expanduser().absolute()}:{name}"

    @property
    def file(self) -> Path:
        return Path(self.target.rpartition(":")[0])

    def problems(self, plan: Plan | None, stage: Stage | None) -> Iterator[Reason]:
        """Also a missing file, and a target of another form."""
        yield from super().problems(plan, stage)
        file, _, name = self.target.rpartition(":")
        if not file.endswith(".py") or not name.isidentifier():
            yield Reason(key=".target", text=f"got {self.target!r}, expected `file.py:function`.")
        elif not self.file.is_file():
            yield Reason(key=".target", text=f"got {file!r}, which is not a file.")

    def named_code(self) -> Mapping[str, str | Path]:
        return {".target": self.file} if self.target else {}

    def read_files(self) -> Mapping[str, Path]:
        """The file of the function. Modules that it imports are not included."""
        return {".target": self.file}
