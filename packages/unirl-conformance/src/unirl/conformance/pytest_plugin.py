"""The pytest side of conformance: `pytest -p unirl.conformance.pytest_plugin --pyargs unirl.conformance.suite`.

Claims are parametrised by the subjects of the catalog; their ends become the five states; numbers and states travel in
the reports' `user_properties`, so that they also reach the controller of a parallel run and a JUnit file.
"""

from __future__ import annotations

import json
import time
from collections.abc import Generator
from datetime import UTC, datetime
from importlib import import_module
from pathlib import Path
from tempfile import mkdtemp
from typing import Any, cast

import pytest
from unirl.core.capability import Cap, Support
from unirl.core.catalog import Catalog
from unirl.core.errors import UniRLError
from unirl.core.spec import KINDS, AlgorithmSpec, EngineSpec, Gap, Kind, ModelSpec, Spec

from .claims import SUBJECT_KINDS, TIERS, Claim, SubjectKind, Tier, claim_of
from .results import Collector
from .subjects import Selection, Subject, devices_of, subjects
from .verdicts import NotApplicable, NotRun, Record
from .workshop import Workshop

__all__ = ["COLLECTOR", "PROPERTY"]

PROPERTY = "unirl"
"""Name of the user property that carries a claim's state, reason and numbers as JSON."""
COLLECTOR = pytest.StashKey[Collector]()
_CATALOG = pytest.StashKey[Catalog]()
_SUBJECTS = pytest.StashKey[list[Subject]]()
_WORKSHOP = pytest.StashKey[Workshop]()
_RECORD = pytest.StashKey[Record]()
_GAP = pytest.StashKey[Gap]()
_ABSENT = pytest.StashKey[str]()
"""Why the engine of a claim's subject cannot be started here."""
_BEGAN = pytest.StashKey[float]()

BENCHES: dict[SubjectKind, str] = {
    "plugin": "unirl.conformance.benches.plugin:PluginBench",
    "model": "unirl.conformance.benches.model:ModelBench",
    "engine": "unirl.conformance.benches.engine:EngineBench",
    "algorithm": "unirl.conformance.benches.algorithm:AlgorithmBench",
    "backend": "unirl.conformance.benches.backend:BackendBench",
    "reward": "unirl.conformance.benches.reward:RewardBench",
    "tracker": "unirl.conformance.benches.tracker:TrackerBench",
    "launcher": "unirl.conformance.benches.launcher:LauncherBench",
    "transport": "unirl.conformance.benches.transport:TransportBench",
    "cell": "unirl.conformance.benches.cell:CellBench",
}
"""Imported when a claim of that kind runs."""
BENCHES_BY_TRACK: dict[tuple[SubjectKind, str], str] = {
    ("model", "latent"): "unirl.conformance.benches.latent_model:LatentModelBench",
    ("model", "text"): "unirl.conformance.benches.text_model:TextModelBench",
    ("engine", "latent"): "unirl.conformance.benches.latent_engine:LatentEngineBench",
    ("engine", "text"): "unirl.conformance.benches.text_engine:TextEngineBench",
}
"""Those of kinds whose parts differ by the track; they have what that of the kind promises, and more."""


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("unirl", "UniRL conformance")
    for kind in KINDS:
        group.addoption(f"--unirl-{kind}", action="append", default=[], metavar="NAME", help=f"try this {kind} alone")
    group.addoption("--unirl-plugin", action="append", default=[], metavar="DIST", help="try the parts of this dist")
    group.addoption("--unirl-kind", action="append", default=[], choices=SUBJECT_KINDS, help="claims of this kind")
    group.addoption("--unirl-claim", action="append", default=[], metavar="CLAIM", help="this claim alone")
    group.addoption("--unirl-tier", default="tiny", choices=TIERS, help="how much to run (default: tiny)")
    group.addoption(
        "--unirl-report",
        default="",
        metavar="DIR",
        help="write conformance.json, the page, MATRIX.md and the badges there",
    )
    group.addoption(
        "--unirl-catalog",
        default="",
        metavar="MODULE:FUNCTION",
        help="function that gives the catalog, instead of what is installed",
    )


def pytest_configure(config: pytest.Config) -> None:
    option: Any = config.getoption
    names: dict[Kind, tuple[str, ...]] = {kind: tuple(option(f"--unirl-{kind}")) for kind in KINDS}
    selection = Selection(
        names={kind: found for kind, found in names.items() if found},
        plugins=tuple(option("--unirl-plugin")),
        kinds=tuple(option("--unirl-kind")),
        claims=tuple(option("--unirl-claim")),
    )
    tier: Tier = option("--unirl-tier")
    try:
        catalog = _catalog(option("--unirl-catalog"))
        selection.check(catalog)
    except UniRLError as error:
        raise pytest.UsageError(str(error)) from error
    config.stash[_CATALOG] = catalog
    config.stash[_SUBJECTS] = subjects(catalog, selection, devices=devices_of(tier))
    if not hasattr(config, "workerinput"):
        collector = Collector(catalog=catalog, tier=tier, subjects=config.stash[_SUBJECTS], property_name=PROPERTY)
        config.stash[COLLECTOR] = collector
        config.stash[_BEGAN] = time.perf_counter()
        config.pluginmanager.register(collector, "unirl-collector")


def pytest_sessionfinish(session: pytest.Session) -> None:
    config = session.config
    if _WORKSHOP in config.stash:
        config.stash[_WORKSHOP].close()
    folder: str = cast(Any, config.getoption)("--unirl-report")
    if folder and COLLECTOR in config.stash:
        from .report.write import write_reports

        created = datetime.now(UTC).isoformat(timespec="seconds")
        seconds = time.perf_counter() - config.stash[_BEGAN]
        write_reports(config.stash[COLLECTOR].report(created=created, seconds=seconds), Path(folder))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    claim = claim_of(metafunc.function)
    if claim is None:
        return
    config = metafunc.config
    option: Any = config.getoption
    tier: Tier = option("--unirl-tier")
    wanted: list[str] = option("--unirl-claim")
    covered = TIERS.index(claim.tier) <= TIERS.index(tier) and (not wanted or claim.name in wanted)
    found = [s for s in config.stash[_SUBJECTS] if s.kind == claim.kind] if covered else []
    metafunc.parametrize("subject", found, ids=[subject.id for subject in found])


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Take out the place holders of claims without subjects, mark the claims that a spec declares as gaps, and put
    those together that use one started engine: one after the other, in one process."""
    kept: list[pytest.Item] = []
    rows: dict[tuple[str, str, str], list[tuple[bool, pytest.Item]]] = {}
    absent: dict[tuple[str, str], str] = {}
    for item in items:
        pair = _claim_and_subject(item)
        if pair is None:
            continue
        claim, subject = pair
        gap = _gap(claim, subject)
        if gap is not None:
            item.stash[_GAP] = gap
            item.add_marker(pytest.mark.xfail(strict=True, reason=gap.reason))
        if not own_programs(subject) or not_applicable(claim, subject):
            kept.append(item)
            continue
        engine, model = subject.found("engine").spec.name, subject.found("model").spec.name
        if (engine, subject.device) not in absent:
            absent[engine, subject.device] = absent_environment(subject, catalog=config.stash[_CATALOG])
        item.stash[_ABSENT] = absent[engine, subject.device]
        # Claims that start one of their own come last, when the shared one is no longer needed.
        rows.setdefault((engine, subject.device, model), []).append((claim.own_engine, item))
    for row in rows.values():
        kept += [item for _, item in sorted(row, key=lambda pair: pair[0])]
    items[:] = kept


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> object:
    """With `-n`, claims that use one started engine stay in one process; with another `--dist` pytest-xdist decides."""
    if cast(Any, config.getoption)("dist") != "load":
        return None
    from .scheduling import RowScheduling

    rows = {
        subject.id: f"{program.name} on {subject.device}"
        for subject in config.stash[_SUBJECTS]
        for program in own_programs(subject)
        if not subject.refused and not absent_environment(subject, catalog=config.stash[_CATALOG])
    }
    return RowScheduling(config, log, rows)


def pytest_runtest_setup(item: pytest.Item) -> None:
    pair = _claim_and_subject(item)
    assert pair is not None
    claim, subject = pair
    reason = not_applicable(claim, subject)
    if reason:
        raise NotApplicable(reason)
    if subject.device == "cuda":
        import torch

        if not torch.cuda.is_available():
            raise NotRun("no CUDA device is here")
    absent = item.stash.get(_ABSENT, "")
    if absent:
        raise NotRun(absent)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    pair = _claim_and_subject(item)
    if pair is None:
        return report
    claim, subject = pair
    found: dict[str, Any] = {"claim": claim.name, "subject": subject.id, "kind": subject.kind}
    raised = call.excinfo.value if call.excinfo else None
    gap = item.stash.get(_GAP, None)
    if isinstance(raised, NotRun):
        found |= {"state": "not run", "reason": str(raised)}
    elif isinstance(raised, _SKIPPED):
        found |= {"state": "n/a", "reason": str(raised)}
    elif gap is not None and report.skipped:
        found |= {"state": "gap", "reason": gap.reason, "link": gap.link}
    elif gap is not None and report.failed and raised is None:
        text = f"the claim passes, and {_names(subject)} declares it as a gap ({gap.reason}). Take the gap out."
        found |= {"state": "fail", "reason": text}
    elif report.failed:
        found |= {"state": "fail", "reason": _sentence(raised) if raised else "", "detail": report.longreprtext}
    elif report.when == "call":
        found |= {"state": "pass", "reason": ""}
    if report.when == "call" and _RECORD in item.stash:
        found["numbers"] = [vars(number) for number in item.stash[_RECORD].numbers]
    report.user_properties.append((PROPERTY, json.dumps(found)))
    return report


_SKIPPED = pytest.skip.Exception


@pytest.fixture
def bench(request: pytest.FixtureRequest, subject: Subject) -> Any:
    """What the claim works with, by the kind of its subject."""
    config = request.config
    if _WORKSHOP not in config.stash:
        factory: pytest.TempPathFactory = request.getfixturevalue("tmp_path_factory")
        config.stash[_WORKSHOP] = Workshop(config.stash[_CATALOG], factory.mktemp("workshop"))
    pair = _claim_and_subject(request.node)
    assert pair is not None
    module, _, name = bench_of(*pair).partition(":")
    claim = pair[0]
    record = request.node.stash[_RECORD] = Record()
    workshop = config.stash[_WORKSHOP]
    # pytest's own `tmp_path` looks through the folders of all claims before, and turns a link round.
    folder = Path(mkdtemp(prefix="claim-", dir=workshop.folder))
    make = getattr(import_module(module), name)
    return make(subject=subject, workshop=workshop, record=record, folder=folder, own_engine=claim.own_engine)


def not_applicable(claim: Claim, subject: Subject) -> str:
    """Why a claim means nothing for a subject, or an empty string."""
    if subject.refused:
        return subject.refused
    if subject.own is not None:
        reason = _unpromised(subject.own, claim.proves)
        if reason:
            return reason
    tracks = tracks_of(subject)
    if tracks and claim.track not in ("any", *tracks):
        spec = next(found.spec for found in subject.parts if _tracks(found.spec) == tracks)
        verb = "has" if isinstance(spec, ModelSpec) else "is tried on"
        return f"the claim is about {claim.track} tracks; {spec.kind} {spec.name!r} {verb} {', '.join(_tracks(spec))}"
    for kind, caps in claim.needs.items():
        reason = _unpromised(subject.found(kind).spec, caps)
        if reason:
            return reason
    return ""


def absent_environment(subject: Subject, *, catalog: Catalog) -> str:
    """Why the engine of a subject cannot be started here, or an empty string: its own environment is not there."""
    for spec in own_programs(subject):
        environment = catalog.resolve(spec.environment)
        if not environment.is_present(subject.device):
            return f"the environment of engine {spec.name!r} is not here; `{environment.command(subject.device)}`"
    return ""


def own_programs(subject: Subject) -> tuple[EngineSpec, ...]:
    """The engines of a subject that run in a Python environment of their own."""
    specs = (found.spec for found in subject.parts)
    return tuple(spec for spec in specs if isinstance(spec, EngineSpec) and spec.environment)


def tracks_of(subject: Subject) -> tuple[str, ...]:
    """Kinds of tracks that the subject is tried on, latents first; none where it has to do with neither."""
    found = [tracks for tracks in (_tracks(part.spec) for part in subject.parts) if tracks]
    return tuple(track for track in found[0] if all(track in others for others in found)) if found else ()


def bench_of(claim: Claim, subject: Subject) -> str:
    """What a claim is given. A claim about any track is tried on the first kind that the subject has."""
    track = next(iter(tracks_of(subject)), "") if claim.track == "any" else claim.track
    return BENCHES_BY_TRACK.get((subject.kind, track), BENCHES[subject.kind])


def _tracks(spec: Spec) -> tuple[str, ...]:
    if isinstance(spec, ModelSpec):
        return tuple(sorted(set(spec.tracks.values())))
    if isinstance(spec, AlgorithmSpec):
        return ("text",) if spec.needs.track == "text" else ("latent",)
    return ()


def _unpromised(spec: Spec, caps: tuple[Cap, ...]) -> str:
    for cap in caps:
        support = spec.support(cap)
        if support is not Support.NATIVE:
            says = "does not state it" if support is Support.UNKNOWN else f"states {support.value!r}"
            return f"the claim is about {cap.value!r}; {spec.kind} {spec.name!r} {says}"
    return ""


def _gap(claim: Claim, subject: Subject) -> Gap | None:
    specs = [found.spec for found in subject.parts] or list(subject.plugin.specs if subject.plugin else ())
    names = {spec.name for spec in specs}
    for spec in specs:
        for gap in spec.gaps:
            if gap.claim == claim.name and (not gap.only_with or names & set(gap.only_with)):
                return gap
    return None


def _claim_and_subject(item: pytest.Item) -> tuple[Claim, Subject] | None:
    claim = claim_of(getattr(item, "function", None))
    callspec = getattr(item, "callspec", None)
    subject = callspec.params.get("subject") if callspec is not None else None
    return (claim, subject) if claim is not None and isinstance(subject, Subject) else None


def _catalog(factory: str) -> Catalog:
    if not factory:
        return Catalog.discover()
    module, _, name = factory.partition(":")
    return getattr(import_module(module), name)()


def _names(subject: Subject) -> str:
    return (
        subject.plugin.dist if subject.plugin else " or ".join(f"{f.spec.kind} {f.spec.name!r}" for f in subject.parts)
    )


def _sentence(error: BaseException) -> str:
    """The message of a failure: of an assertion the words that the claim gave it, without pytest's explanation."""
    text = str(error).split("\nassert ")[0].strip() or type(error).__name__
    return text if isinstance(error, AssertionError) else f"{type(error).__name__}: {text}"
