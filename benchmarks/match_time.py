"""match() over every installed combination of model, engine, algorithm, backend and reward."""

from __future__ import annotations

import itertools
import time

from unirl.core.match.parts import match_parts
from unirl.core.plugins.catalog import Catalog

ROUNDS = 20


def main() -> None:
    start = time.perf_counter()
    catalog = Catalog.discover()
    discovery = time.perf_counter() - start
    kinds = ("model", "engine", "algorithm", "backend", "reward")
    specs = {kind: [catalog.get(kind, name).spec for name in catalog.names(kind)] for kind in kinds}
    combinations = list(itertools.product(*specs.values()))
    best, accepted = float("inf"), 0
    for _ in range(ROUNDS):
        start = time.perf_counter()
        accepted = sum(
            match_parts(model=m, engine=e, algorithm=a, backend=b, rewards={r.name: r}).accepted
            for m, e, a, b, r in combinations
        )
        best = min(best, time.perf_counter() - start)
    print(f"discovery of {len(catalog.records)} plugins    {discovery * 1000:8.1f} ms")
    print(f"match of {len(combinations)} combinations    {best * 1000:8.3f} ms ({accepted} accepted)")


if __name__ == "__main__":
    main()
