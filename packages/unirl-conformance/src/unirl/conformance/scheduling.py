"""Distribution of claims over the workers of pytest-xdist: loaded when a run is parallel."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling  # pyright: ignore[reportMissingTypeStubs]

__all__ = ["RowScheduling"]


class RowScheduling(LoadScopeScheduling):
    """Hands claims out one by one, except for those that share a started engine: they are a row, for one worker. Rows
    come first, the longest before the others.

    pytest-xdist's own `--dist loadgroup` reads the names of groups off `Item._nodeid`, which pytest 9.2 no longer has.
    """

    def __init__(self, config: pytest.Config, log: Any, rows: Mapping[str, str]) -> None:
        """rows: id of a subject -> name of its row."""
        super().__init__(config, log)
        self._rows = rows

    def _split_scope(self, nodeid: str) -> str:
        subject = nodeid.rpartition("[")[2].rpartition("]")[0]
        return self._rows.get(subject, nodeid)

    def remove_node(self, node: Any) -> str | None:
        """Gives back what a worker that ended had left, and returns the claim that it died on.

        That one has failed and is not tried again, and units that are done stay done: pytest-xdist 3.8 hands both to
        the next worker, where a unit with nothing left to try never ends.
        """
        units = self.assigned_work[node]
        crashed = next((nodeid for unit in units.values() for nodeid, done in unit.items() if not done), None)
        if crashed is not None:
            units[self._split_scope(crashed)][crashed] = True
        self.assigned_work[node] = {scope: unit for scope, unit in units.items() if not all(unit.values())}
        super().remove_node(node)
        return crashed
