"""Results of a run: the claims, the subjects they were tried on, and how each ended."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from .claims import Claim, SubjectKind, Tier
from .environment import Environment
from .subjects import Subject, common_tracks, subject_id, tracks_of
from .verdicts import STATES, Number, State

__all__ = ["Outcome", "PartInfo", "Report", "SubjectInfo", "Untried", "subject_info"]


@dataclass(frozen=True, kw_only=True)
class PartInfo:
    """A part of a subject; of the kind `plugin`, the dist itself."""

    kind: SubjectKind
    name: str
    dist: str
    tracks: tuple[str, ...] = ()
    """Kinds of tracks that it has or is tried on; empty for parts that work with any."""


@dataclass(frozen=True, kw_only=True)
class SubjectInfo:
    """A subject that at least one claim was tried on; all of its claims may have turned out not to apply."""

    kind: SubjectKind
    device: str
    parts: tuple[PartInfo, ...]

    @property
    def id(self) -> str:
        return subject_id((part.name for part in self.parts), self.device)

    @property
    def names(self) -> dict[SubjectKind, str]:
        """Kind -> name of each part."""
        return {part.kind: part.name for part in self.parts}

    @property
    def dists(self) -> tuple[str, ...]:
        return tuple(sorted({part.dist for part in self.parts}))

    @property
    def tracks(self) -> tuple[str, ...]:
        """Kinds of tracks that it is tried on."""
        return common_tracks([part.tracks for part in self.parts])


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The result of one claim on one subject. n/a is counted instead, see `Untried`."""

    claim: str
    subject: str
    """Id of the subject, unique within its kind, which is that of the claim."""
    kind: SubjectKind
    state: State
    reason: str = ""
    """One sentence for every state but pass."""
    link: str = ""
    """Link to the follow-up of a gap."""
    numbers: tuple[Number, ...] = ()
    detail: str = ""
    """Traceback of a failure."""


@dataclass(frozen=True, kw_only=True)
class Untried:
    """Claims on subjects of one kind that could not have an outcome here: n/a, or for a device that is absent."""

    state: Literal["n/a", "not run"]
    kind: SubjectKind
    device: str
    num_claims: int
    """Pairs of a claim and a subject."""
    reason: str = ""
    """A report that was read back has none for n/a."""


@dataclass(frozen=True, kw_only=True)
class Report:
    """One run."""

    created: str
    """ISO 8601, UTC."""
    tier: Tier
    selection: tuple[str, ...]
    """Options that narrowed the run, such as `--engine=trainside`; empty for everything."""
    environment: Environment
    dists: Mapping[str, str]
    """Every installed unirl dist and its version."""
    seconds: float
    claims: tuple[Claim, ...]
    """The claims that were made. Without texts when a file names one that is not installed."""
    subjects: tuple[SubjectInfo, ...]
    outcomes: tuple[Outcome, ...]
    untried: tuple[Untried, ...] = ()

    def count(self, state: State) -> int:
        return sum(one.state == state for one in self.outcomes) + sum(
            one.num_claims for one in self.untried if one.state == state
        )

    @property
    def counts(self) -> dict[State, int]:
        return {state: self.count(state) for state in STATES}

    @property
    def exit_code(self) -> int:
        """0 success, 1 a claim failed, 3 nothing could run because something is absent."""
        if self.count("fail"):
            return 1
        ran = self.count("pass") + self.count("gap")
        return 3 if not ran and self.count("not run") else 0

    @property
    def devices(self) -> tuple[str, ...]:
        """Devices of the run's subjects, the CPU first."""
        return tuple(sorted({one.device for one in (*self.subjects, *self.untried)}))

    def on(self, device: str) -> Report:
        """The results on one device."""
        subjects = tuple(one for one in self.subjects if one.device == device)
        ids = {(one.kind, one.id) for one in subjects}
        return replace(
            self,
            subjects=subjects,
            outcomes=tuple(one for one in self.outcomes if (one.kind, one.subject) in ids),
            untried=tuple(one for one in self.untried if one.device == device),
        )


def subject_info(subject: Subject) -> SubjectInfo:
    if subject.plugin is not None:
        dist = subject.plugin.dist
        parts = (PartInfo(kind="plugin", name=dist, dist=dist),)
    else:
        parts = tuple(
            PartInfo(kind=part.spec.kind, name=part.spec.name, dist=part.dist, tracks=tracks_of(part.spec))
            for part in subject.parts
        )
    return SubjectInfo(kind=subject.kind, device=subject.device, parts=parts)
