"""State that an algorithm carries from step to step: taken for checkpoints and workers, and restored."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from unirl.core.errors import CheckpointError, RunFailed
from unirl.core.roles import Algorithm

__all__ = ["algorithm_state", "end_algorithm_step", "resume_algorithm"]


def algorithm_state(algorithm: Algorithm) -> dict[str, Any]:
    """The state of an algorithm, a copy; empty where it keeps none.

    Raises RunFailed for a state that JSON does not round-trip: a checkpoint would change it.
    """
    state = dict(algorithm.state())
    try:
        back: dict[str, Any] = json.loads(json.dumps(state))
    except (TypeError, ValueError) as error:
        raise RunFailed(
            f"algorithm {type(algorithm).__name__!r}: its state() cannot be written to a checkpoint: {error}. It must "
            "be of plain JSON values: numbers, texts, truth values, None, lists and mappings of them."
        ) from error
    # Compared by repr: NaN does not equal itself.
    changed = [key for key in state if repr(back.get(key, "absent")) != repr(state[key])]
    if changed:
        raise RunFailed(
            f"algorithm {type(algorithm).__name__!r}: state()[{changed[0]!r}] is {state[changed[0]]!r}, and a "
            f"checkpoint would give back {back.get(changed[0], 'nothing')!r}. Use lists for tuples and texts as keys."
        )
    return back


def end_algorithm_step(algorithm: Algorithm, metrics: Mapping[str, float], *, samples: int) -> dict[str, float]:
    """Let the algorithm move on to the next step; returns its additions to the log."""
    result = dict(algorithm.end_step({**metrics, "samples": float(samples)}))
    taken = sorted(result.keys() & metrics.keys())
    if taken:
        raise RunFailed(
            f"algorithm {type(algorithm).__name__!r}: end_step() gives the metric {taken[0]!r}, which the step has "
            "already; give it another name."
        )
    return result


def resume_algorithm(algorithm: Algorithm, state: Mapping[str, Any], *, folder: Path) -> None:
    """Restore the algorithm's state from a checkpoint.

    folder: of the checkpoint, for messages.
    Raises CheckpointError when only one of the two has a state, or when the algorithm cannot take this one.
    """
    own = algorithm_state(algorithm)
    if not state and not own:
        return
    name = type(algorithm).__name__
    if not state:
        raise CheckpointError(
            f"{folder}: it has no state of the algorithm, and {name!r} goes on with {_keys(own)}. It was made by a "
            "version of the algorithm without; resume with that version, or start a new run."
        )
    if not own:
        raise CheckpointError(
            f"{folder}: it has the state {_keys(state)} of the algorithm, and {name!r} keeps none. It was made by "
            "another version of the algorithm; resume with that version, or start a new run."
        )
    try:
        algorithm.load_state(state)
    except ValueError as error:
        raise CheckpointError(f"{folder}: algorithm {name!r} cannot go on from the state in it: {error}") from error


def _keys(state: Mapping[str, Any]) -> str:
    return ", ".join(repr(key) for key in sorted(state))
