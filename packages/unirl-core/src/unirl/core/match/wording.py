"""Words that refusals share."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ..limits import Reason
from ..specs.capability import Cap, Support
from ..specs.spec import Spec

__all__ = ["lacks", "listed"]


def lacks(key: str, spec: Spec, cap: Cap, *, asks: str, others: Iterable[Spec] = ()) -> Iterator[Reason]:
    result = spec.support(cap)
    if result is not Support.NATIVE:
        says = "does not state it" if result is Support.UNKNOWN else f"states {result.value!r}"
        able = [other.name for other in others if other.support(cap) is Support.NATIVE]
        advice = f" Installed {spec.kind}s that provide it: {listed(able)}." if able else ""
        yield Reason(key=key, text=f"{asks} needs {cap.value!r}; {spec.kind} {spec.name!r} {says}.{advice}")


def listed(values: Iterable[str]) -> str:
    return ", ".join(sorted(str(value) for value in values)) or "nothing"
