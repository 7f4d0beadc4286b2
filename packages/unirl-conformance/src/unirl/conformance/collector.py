"""Collects the outcomes of a pytest run into a report, whichever worker ran the claims."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Literal, cast

import pytest
from unirl.core.plugins.catalog import Catalog
from unirl.core.specs.spec import EngineSpec

from .claims import Claim, SubjectKind, Tier, all_claims, claim_kinds
from .environment import describe_environment
from .results import Outcome, Report, Untried, subject_info
from .subjects import Subject, not_applicable
from .verdicts import Number

__all__ = ["PROPERTY", "Collector"]

PROPERTY = "unirl"
"""Name of the user property that carries a claim's state, reason and numbers as JSON."""
_Place = tuple[Literal["n/a", "not run"], SubjectKind, str, str]
"""State, kind, device and reason of claims without an outcome."""
_NO_RESULT = "the process that tried it ended without a result"


class Collector:
    """A pytest plugin of the controlling process."""

    def __init__(
        self,
        *,
        catalog: Catalog,
        tier: Tier,
        selection: Sequence[str],
        subjects: Sequence[Subject],
        covers: Callable[[Claim], bool],
        absent: Mapping[str, str],
    ) -> None:
        """covers: whether a claim is selected.  absent: device -> why nothing can run on it."""
        self._catalog = catalog
        self._tier: Tier = tier
        self._selection = tuple(selection)
        self._subjects = list(subjects)
        self._covers = covers
        self._absent = absent
        self._results: dict[str, dict[str, Any]] = {}
        self._collected: set[str] = set()

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self._collected.update(item.nodeid for item in session.items)

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, node: Any, ids: Sequence[str]) -> None:
        self._collected.update(ids)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        for name, value in report.user_properties:
            if name != PROPERTY:
                continue
            result = json.loads(cast(str, value))
            known = self._results.setdefault(report.nodeid, result)
            # A later phase has more to say; only a failure is final.
            if known is not result and known.get("state") != "fail":
                known.update(result)
        if report.failed:
            # When a worker dies, its report has no state, and nothing at all if the claim had not begun.
            died = {"state": "fail", "reason": _NO_RESULT}
            self._results[report.nodeid] = {**died, **self._results.get(report.nodeid, _named(report.nodeid))}

    def report(self, *, created: str, seconds: float, is_stopped: bool = False) -> Report:
        """Everything so far. is_stopped: claims without a result are not run; otherwise they have failed."""
        ended = {nodeid: result for nodeid, result in self._results.items() if "state" in result or not is_stopped}
        tried = [_outcome(result) for result in ended.values()]
        if is_stopped:
            reason = "the run was stopped before it was tried"
            left = self._collected - ended.keys()
            tried += [Outcome(**_named(nodeid), state="not run", reason=reason) for nodeid in left]
        untried: Counter[_Place] = Counter()
        devices = {(one.kind, one.id): one.device for one in self._subjects}
        for one in tried:
            if one.state == "n/a":
                untried["n/a", one.kind, devices[one.kind, one.subject], one.reason] += 1
        claims = self._claims({one.claim for one in tried}, untried)
        order = {claim.name: place for place, claim in enumerate(claims)}
        outcomes = sorted((o for o in tried if o.state != "n/a"), key=lambda o: (order[o.claim], o.subject))
        about = {(one.kind, one.subject) for one in tried}
        return Report(
            created=created,
            tier=self._tier,
            selection=self._selection,
            environment=describe_environment(self._catalog, self._engines()),
            dists={record.dist: record.version for record in self._catalog.records},
            seconds=round(seconds, 2),
            claims=tuple(claims),
            subjects=tuple(subject_info(one) for one in self._subjects if (one.kind, one.id) in about),
            outcomes=tuple(outcomes),
            untried=tuple(
                Untried(state=state, kind=kind, device=device, num_claims=count, reason=reason)
                for (state, kind, device, reason), count in untried.items()
            ),
        )

    def _claims(self, tried: Collection[str], untried: Counter[_Place]) -> list[Claim]:
        """The claims of this run. Counts those that never became tests: not applicable, or on an absent device."""
        # All that is static is about plugins; the modules of other claims import torch.
        kinds: set[SubjectKind] = {"plugin"} if self._tier == "static" else {one.kind for one in self._subjects}
        claims: list[Claim] = []
        for claim in filter(self._covers, all_claims(kinds)):
            own: Counter[_Place] = Counter()
            about = [one for one in self._subjects if one.kind == claim.kind]
            for subject in about:
                if reason := not_applicable(claim, subject):
                    own["n/a", subject.kind, subject.device, reason] += 1
                elif reason := self._absent.get(subject.device, ""):
                    own["not run", subject.kind, subject.device, reason] += 1
            # pytest may have been told to leave out claims that apply to something.
            if claim.name in tried or own.total() == len(about) > 0:
                claims.append(claim)
                untried += own
        return claims

    def _engines(self) -> list[EngineSpec]:
        """Engines of the subjects, each once."""
        specs = (result.spec for subject in self._subjects for result in subject.parts)
        return list({spec.name: spec for spec in specs if isinstance(spec, EngineSpec)}.values())


def _outcome(result: Mapping[str, Any]) -> Outcome:
    return Outcome(
        claim=result["claim"],
        subject=result["subject"],
        kind=result["kind"],
        state=result.get("state", "fail"),
        reason=result.get("reason", _NO_RESULT),
        link=result.get("link", ""),
        numbers=tuple(Number(**number) for number in result.get("numbers", ())),
        detail=result.get("detail", ""),
    )


def _named(nodeid: str) -> dict[str, Any]:
    """Claim, subject and its kind, from a pytest node id."""
    claim, _, subject = nodeid.rpartition("::")[2].removesuffix("]").partition("[")
    name = claim.removeprefix("test_").replace("_", "-")
    return {"claim": name, "subject": subject, "kind": claim_kinds()[name]}
