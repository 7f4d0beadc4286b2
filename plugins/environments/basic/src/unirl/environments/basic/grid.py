"""A grid game in text: walk to the goal, around the holes."""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from typing import Any

from unirl.core.roles import Observation
from unirl.core.specs.check import check_config

from .config import GridConfig
from .one_by_one import OneByOne

__all__ = ["Grid", "build"]

Cell = tuple[int, int]
"""Row and column, from the top left."""
MOVES: Mapping[str, Cell] = {"up": (-1, 0), "down": (1, 0), "left": (0, -1), "right": (0, 1)}
STOP = "stop"
WORDS = re.compile("|".join([*MOVES, STOP]), re.IGNORECASE)


def build(config: GridConfig) -> OneByOne:
    check_config(config, key="environment")

    def make(prompt: str, metadata: Mapping[str, Any], seed: int) -> Grid:
        return Grid(size=config.size, num_holes=config.holes, step_reward=config.step_reward, seed=seed)

    return OneByOne(make)


class Grid:
    """One game. `@` is the player, `G` the goal, `O` a hole, `.` free; the last direction in an answer is the move.

    The goal gives 1 and ends the game; a hole and the word "stop" give 0 and end it; every other answer gives
    `step_reward`. Without a direction, and at the edge, the player stays. The goal can always be reached.
    """

    def __init__(self, *, size: int, num_holes: int, step_reward: float, seed: int) -> None:
        self._size, self._step_reward = size, step_reward
        generator = random.Random(seed)
        cells = [(row, column) for row in range(size) for column in range(size)]
        while True:
            self._player, self._goal, *holes = generator.sample(cells, 2 + num_holes)
            self._holes = frozenset(holes)
            if self._goal in self._reached():
                break

    @property
    def board(self) -> str:
        marks = {**dict.fromkeys(self._holes, "O"), self._goal: "G", self._player: "@"}
        rows = range(self._size)
        return "\n".join("".join(marks.get((row, column), ".") for column in rows) for row in rows)

    def start(self) -> Observation:
        return Observation(text=self.board)

    def step(self, answer: str) -> Observation:
        words = WORDS.findall(answer)
        if not words:
            return Observation(text=f"Say {', '.join(MOVES)} or {STOP}.\n{self.board}", reward=self._step_reward)
        word = words[-1].lower()
        if word == STOP:
            return Observation(text="You gave up.", done=True)
        self._player = self._moved(self._player, MOVES[word])
        if self._player == self._goal:
            return Observation(text="You are there.", reward=1.0, done=True)
        if self._player in self._holes:
            return Observation(text="You fell into a hole.", done=True)
        return Observation(text=self.board, reward=self._step_reward)

    def close(self) -> None:
        """Nothing is held."""

    def _moved(self, cell: Cell, move: Cell) -> Cell:
        row, column = cell[0] + move[0], cell[1] + move[1]
        return (row, column) if 0 <= row < self._size and 0 <= column < self._size else cell

    def _reached(self) -> set[Cell]:
        """Cells that can be reached from the player's."""
        result, edge = {self._player}, [self._player]
        while edge:
            cell = edge.pop()
            near = {self._moved(cell, move) for move in MOVES.values()} - result - self._holes
            result |= near
            edge += near
        return result
