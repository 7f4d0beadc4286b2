"""The graph of a run's stages: where its boxes and arrows stand on the page."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from .history import RunHistory

__all__ = ["Box", "Credit", "Graph", "Link", "stage_graph"]

WIDTH, STAGE, SMALL = 228, 72, 32
"""Pixels: the width of a box, and the heights of a stage and of the others."""
GAP, BETWEEN = 24, 44
"""Pixels between neighbours, and between levels for an arrow and its label."""
CREDIT = 96
"""Pixels at the right for an arrow of credit and its label."""


@dataclass(frozen=True, kw_only=True)
class Box:
    """Prompts, a stage or a reward."""

    lines: tuple[str, ...]
    x: float
    y: float
    height: int
    learner: int | None = None
    """Which model of the run trains in this stage, from 0; None for a frozen one and for what is no stage."""
    is_stage: bool = False
    width: int = WIDTH

    @property
    def middle(self) -> float:
        return self.x + self.width / 2


@dataclass(frozen=True, kw_only=True)
class Link:
    """An arrow from the box above to the one below; of a reward, back up."""

    above: Box
    below: Box
    label: str
    is_reward: bool


@dataclass(frozen=True, kw_only=True)
class Credit:
    """An arrow from a child stage to its parent, at their right."""

    child: Box
    parent: Box
    label: str

    @property
    def outside(self) -> float:
        """How far right it goes."""
        return max(self.child.x, self.parent.x) + WIDTH + 22


@dataclass(frozen=True, kw_only=True)
class Graph:
    boxes: tuple[Box, ...]
    links: tuple[Link, ...]
    credits: tuple[Credit, ...]
    width: float
    height: float
    description: str
    """The same in words."""


def stage_graph(history: RunHistory) -> Graph | None:
    """The stages of a run from its prompts down, with rewards and credit. None for a run of one stage."""
    stages = {str(stage["name"]): stage for stage in history.stages}
    if len(stages) < 2:
        return None
    trained = list(dict.fromkeys(stage["learner"] for stage in stages.values() if stage["algorithm"]))
    boxes: list[Box] = []
    links: list[Link] = []
    placed: dict[str, Box] = {}
    columns = 0

    def place(name: str | None, y: float) -> tuple[Box, list[tuple[Box, str, bool]]]:
        """The box of a stage, or of the prompts, centred over what is below it."""
        nonlocal columns
        height = SMALL if name is None else STAGE
        down = y + height + BETWEEN
        below: list[tuple[Box, str, bool]] = []
        for child in (one for one in stages.values() if one["parent"] == name):
            below.append((place(str(child["name"]), down)[0], f"\N{MULTIPLICATION SIGN} {child['samples']}", False))
        for reward in stages[name]["rewards"] if name is not None else ():
            box = Box(lines=(f"reward {reward}",), x=columns * (WIDTH + GAP), y=down, height=SMALL)
            columns += 1
            boxes.append(box)
            below.append((box, "score", True))
        if not below:
            x = float(columns * (WIDTH + GAP))
            columns += 1
        else:
            x = (below[0][0].x + below[-1][0].x) / 2
        if name is None:
            count = history.resolved.get("data", {}).get("prompts_per_step")
            box = Box(lines=(f"{count} prompts" if count else "prompts",), x=x, y=y, height=height)
        else:
            learner = trained.index(stages[name]["learner"]) if stages[name]["algorithm"] else None
            box = Box(lines=_lines(stages[name]), x=x, y=y, height=height, learner=learner, is_stage=True)
            placed[name] = box
        boxes.append(box)
        links.extend(Link(above=box, below=one, label=label, is_reward=back) for one, label, back in below)
        return box, below

    place(None, 1.0)
    credit = tuple(
        Credit(child=placed[name], parent=placed[stage["parent"]], label=f"{stage['credit']} credit")
        for name, stage in stages.items()
        if stage["credit"] != "none"
    )
    return Graph(
        boxes=tuple(boxes),
        links=tuple(links),
        credits=credit,
        width=max([box.x + WIDTH for box in boxes] + [one.outside + CREDIT - 22 for one in credit]) + 2,
        height=max(box.y + box.height for box in boxes) + 2,
        description=" ".join(_sentence(stage) for stage in stages.values()),
    )


def _lines(stage: Mapping[str, object]) -> tuple[str, ...]:
    return (
        str(stage["name"]) + (f" ({stage['medium']})" if stage["medium"] != stage["name"] else ""),
        f"{_model(stage)} on {stage['engine']}",
        f"trains with {stage['algorithm']}" if stage["algorithm"] else "frozen",
    )


def _model(stage: Mapping[str, object]) -> str:
    return f"{stage['learner']}: {stage['model']}" if stage["learner"] else str(stage["model"])


def _sentence(stage: Mapping[str, object]) -> str:
    name, rewards = stage["name"], stage["rewards"]
    assert isinstance(rewards, list)
    parts = [f"Stage {name} makes {stage['samples']} samples of each {stage['parent'] or 'prompt'} ({stage['medium']})"]
    parts.append(f"with {stage['model']} on {stage['engine']}, {_lines(stage)[2]}")
    parts += [f"scored by {', '.join(map(str, rewards))}"] if rewards else []
    parts += [f"giving {stage['credit']} credit to {stage['parent']}"] if stage["credit"] != "none" else []
    return f"{', '.join(parts)}."
