"""The graph of a run's stages: where its boxes and arrows are on the page."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from .history import RunHistory

__all__ = ["Arrow", "Box", "Graph", "stage_graph"]

WIDTH, STAGE, SMALL = 228, 72, 32
"""Pixels: the width of a box, and the heights of a stage and of the others."""
GAP, BETWEEN = 24, 44
"""Pixels between neighbours, and between levels for an arrow and its label."""
ASIDE = 16
"""Pixels from the middle of a box of two arrows that go opposite ways."""


@dataclass(frozen=True, kw_only=True)
class Box:
    """Prompts, a stage or a reward."""

    lines: tuple[str, ...]
    x: float
    y: float
    height: int
    learner: int | None = None
    """Which model of the run trains in this stage, from 0; None for a frozen one and for anything but a stage."""
    is_stage: bool = False
    width: int = WIDTH

    @property
    def middle(self) -> float:
        return self.x + self.width / 2


@dataclass(frozen=True, kw_only=True)
class Arrow:
    """Samples go down, from the box above to the one below; scores and credit go up."""

    above: Box
    below: Box
    label: str
    is_up: bool
    aside: int = 0
    """Pixels right of the middle of both boxes."""

    @property
    def path(self) -> str:
        """As the `d` of an SVG path, from above to below."""
        start, end = self.above.middle + self.aside, self.below.middle + self.aside
        top, bottom = self.above.y + self.above.height, self.below.y
        return f"M{start:g} {top:g} C{start:g} {self.middle_y:g} {end:g} {self.middle_y:g} {end:g} {bottom:g}"

    @property
    def middle_x(self) -> float:
        return (self.above.middle + self.below.middle) / 2 + self.aside

    @property
    def middle_y(self) -> float:
        return (self.above.y + self.above.height + self.below.y) / 2


@dataclass(frozen=True, kw_only=True)
class Graph:
    boxes: tuple[Box, ...]
    arrows: tuple[Arrow, ...]
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
    arrows: list[Arrow] = []
    columns = 0

    def place(name: str | None, y: float) -> Box:
        """The box of a stage, or of the prompts, centred over what is below it."""
        nonlocal columns
        height = SMALL if name is None else STAGE
        down = y + height + BETWEEN
        children = [one for one in stages.values() if one["parent"] == name]
        below = [place(str(child["name"]), down) for child in children]
        for reward in stages[name]["rewards"] if name is not None else ():
            box = Box(lines=(f"reward {reward}",), x=columns * (WIDTH + GAP), y=down, height=SMALL)
            columns += 1
            boxes.append(box)
            below.append(box)
        if not below:
            x = float(columns * (WIDTH + GAP))
            columns += 1
        else:
            x = (below[0].x + below[-1].x) / 2
        if name is None:
            count = history.settings("data").get("prompts_per_step")
            box = Box(lines=(f"{count} prompts" if count else "prompts",), x=x, y=y, height=height)
        else:
            learner = trained.index(stages[name]["learner"]) if stages[name]["algorithm"] else None
            box = Box(lines=_lines(stages[name]), x=x, y=y, height=height, learner=learner, is_stage=True)
        boxes.append(box)
        for child, one in zip(children, below, strict=False):
            has_credit = child["credit"] != "none"
            samples = f"\N{MULTIPLICATION SIGN} {child['samples']}"
            arrows.append(Arrow(above=box, below=one, label=samples, is_up=False, aside=-ASIDE if has_credit else 0))
            if has_credit:
                credit = f"{child['credit']} credit"
                arrows.append(Arrow(above=box, below=one, label=credit, is_up=True, aside=ASIDE))
        scored = below[len(children) :]
        arrows.extend(Arrow(above=box, below=one, label="score", is_up=True) for one in scored)
        return box

    place(None, 1.0)
    return Graph(
        boxes=tuple(boxes),
        arrows=tuple(arrows),
        width=max(box.x + WIDTH for box in boxes) + 2,
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
