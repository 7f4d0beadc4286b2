"""Words that refusals share."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ..limits import Reason
from ..specs.capability import Cap
from ..specs.spec import EngineSpec, ModelSpec, RewardSpec, Spec

__all__ = ["lacks", "lacks_token_rules", "listed"]


def lacks(key: str, spec: Spec, cap: Cap, *, asks: str, others: Iterable[Spec] = (), at: str = "") -> Iterator[Reason]:
    """others: parts that may be chosen instead, with the override key `at`."""
    if cap not in spec.capabilities:
        able = [other for other in others if cap in other.capabilities]
        advice = f" Installed {spec.kind}s that provide it: {listed(other.name for other in able)}." if able else ""
        if able and at:
            # The prompts are known to have the metadata of the part in place.
            example = min(able, key=lambda other: _unlike(other, spec))
            advice += f" Put one in its place: `{at}={example.name}`."
        yield Reason(
            key=key, text=f"{asks} needs {cap.value!r}; {spec.kind} {spec.name!r} does not provide it.{advice}"
        )


def lacks_token_rules(key: str, engine: EngineSpec, model: ModelSpec, tracks: Iterable[str]) -> Iterator[Reason]:
    """Tracks whose texts this engine cannot generate as their model says."""
    for track in tracks:
        rules = {"whose logits depend on options": model.token_options, "which restricts tokens": model.restricts}
        if broken := [rule for rule, names in rules.items() if track in names]:
            asks = f"track {track!r} of model {model.name!r}, {broken[0]},"
            yield from lacks(key, engine, Cap.TOKEN_RULES, asks=asks)


def _unlike(other: Spec, spec: Spec) -> tuple[int, int]:
    """How far a reward is from another in the metadata that it reads, and whether it has its own weights."""
    assert isinstance(other, RewardSpec) and isinstance(spec, RewardSpec)
    return len(set(other.metadata) ^ set(spec.metadata)), bool(other.tiny)


def listed(values: Iterable[str]) -> str:
    return ", ".join(sorted(str(value) for value in values)) or "nothing"
