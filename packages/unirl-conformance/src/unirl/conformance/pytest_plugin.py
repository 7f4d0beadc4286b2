"""The pytest side of conformance: `pytest -p unirl.conformance.pytest_plugin --pyargs unirl.conformance.suite`.

Claims are parametrised by the subjects of the catalog; their ends become the five states; numbers and states travel in
the reports' `user_properties`, so that they also reach the controller of a parallel run and a JUnit file.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import ExitStack, closing
from datetime import UTC, datetime
from functools import partial
from importlib import import_module
from pathlib import Path
from tempfile import mkdtemp
from typing import Any, cast

import pytest
from unirl.core.cli.discovery import discover
from unirl.core.errors import UniRLError
from unirl.core.plugins.catalog import Catalog
from unirl.core.specs.spec import KINDS, Gap, Kind
from unirl.numerics.batch_invariant import batch_invariant

from .claims import SUBJECT_KINDS, TIERS, Claim, SubjectKind, Tier, claim_of
from .collector import PROPERTY, Collector
from .part_factory import PartFactory
from .subjects import Selection, Subject, not_applicable, subjects
from .verdicts import NotRun, Record

__all__ = ["COLLECTOR"]

COLLECTOR = pytest.StashKey[Collector]()
_CATALOG = pytest.StashKey[Catalog]()
_SUBJECTS = pytest.StashKey[list[Subject]]()
_COVERS = pytest.StashKey[Callable[[Claim], bool]]()
"""Whether a claim is selected."""
_RECORD = pytest.StashKey[Record]()
_GAP = pytest.StashKey[Gap]()
_BEGAN = pytest.StashKey[float]()

CASES: dict[SubjectKind | tuple[SubjectKind, str], str] = {
    "plugin": "plugin:PluginCase",
    ("model", "latent"): "latent_model:LatentModelCase",
    ("model", "text"): "text_model:TextModelCase",
    ("engine", "latent"): "latent_engine:LatentEngineCase",
    ("engine", "text"): "text_engine:TextEngineCase",
    "algorithm": "algorithm:AlgorithmCase",
    "backend": "backend:BackendCase",
    "reward": "reward:RewardCase",
    "environment": "environment:EnvironmentCase",
    "tracker": "tracker:TrackerCase",
    "launcher": "launcher:LauncherCase",
    "transport": "transport:TransportCase",
    "cell": "cell:CellCase",
}
"""Module of `unirl.conformance.fixtures` and class of the argument of claims, by kind of subject, and by the kind of
track where parts differ by it. Imported when such a claim runs."""


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("unirl", "UniRL conformance")
    for kind in KINDS:
        group.addoption(f"--unirl-{kind}", action="append", default=[], metavar="NAME", help=f"try this {kind} alone")
    group.addoption("--unirl-plugin", action="append", default=[], metavar="DIST", help="try the parts of this dist")
    group.addoption("--unirl-kind", action="append", default=[], choices=SUBJECT_KINDS, help="claims of this kind")
    group.addoption("--unirl-claim", action="append", default=[], metavar="CLAIM", help="this claim alone")
    group.addoption("--unirl-without", action="append", default=[], metavar="X", help="not this subject or claim")
    group.addoption("--unirl-tier", default="tiny", choices=TIERS, help="how much to run (default: tiny)")
    group.addoption("--unirl-batch-invariant", action="store_true", help="compute with batch-invariant numerics")
    group.addoption(
        "--unirl-report",
        default="",
        metavar="DIR",
        help="write conformance.json, the page and MATRIX.md there",
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
        names={kind: result for kind, result in names.items() if result},
        plugins=tuple(option("--unirl-plugin")),
        kinds=tuple(option("--unirl-kind")),
        claims=tuple(option("--unirl-claim")),
        without=tuple(option("--unirl-without")),
    )
    tier: Tier = option("--unirl-tier")
    try:
        if option("--unirl-batch-invariant"):
            mode = ExitStack()
            mode.enter_context(batch_invariant())
            config.add_cleanup(mode.close)
        catalog = _catalog(option("--unirl-catalog"))
        selection.check(catalog)
    except UniRLError as error:
        raise pytest.UsageError(str(error)) from error
    config.stash[_CATALOG] = catalog
    chosen = subjects(catalog, selection, tier=tier)
    absent = _absent_devices(chosen)
    config.stash[_SUBJECTS] = [subject for subject in chosen if subject.device not in absent]
    config.stash[_COVERS] = partial(selection.covers, tier=tier)
    if not hasattr(config, "workerinput"):
        collector = Collector(
            catalog=catalog,
            tier=tier,
            selection=selection.options(),
            subjects=chosen,
            covers=config.stash[_COVERS],
            absent=absent,
        )
        config.stash[COLLECTOR] = collector
        config.stash[_BEGAN] = time.perf_counter()
        config.pluginmanager.register(collector, "unirl-collector")


def pytest_sessionfinish(session: pytest.Session) -> None:
    config = session.config
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
    about = config.stash[_SUBJECTS] if config.stash[_COVERS](claim) else []
    # The others are n/a in the report, and nine of ten: none of pytest's business.
    result = [one for one in about if one.kind == claim.kind and not not_applicable(claim, one)]
    metafunc.parametrize("subject", result, ids=[subject.id for subject in result])


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Take out the place holders of claims without subjects, mark the claims that a spec declares as gaps, put those
    together that use one started engine (one after the other, in one process), and claims about plugins last."""
    kept: list[pytest.Item] = []
    rows: dict[tuple[str, str, str], list[tuple[bool, pytest.Item]]] = {}
    for item in items:
        pair = _claim_and_subject(item)
        if pair is None:
            continue
        claim, subject = pair
        gap = _gap(claim, subject)
        if gap is not None:
            item.stash[_GAP] = gap
            item.add_marker(pytest.mark.xfail(strict=True, reason=gap.reason))
        if not subject.programs:
            kept.append(item)
            continue
        engine, model = subject.found("engine").spec.name, subject.found("model").spec.name
        # Claims that start one of their own come last, when the shared one is no longer needed.
        rows.setdefault((engine, subject.device, model), []).append((claim.own_engine, item))
    for row in rows.values():
        kept += [item for _, item in sorted(row, key=lambda pair: pair[0])]
    items[:] = sorted(kept, key=lambda item: cast(Any, item).callspec.params["subject"].kind == "plugin")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> object:
    """With `-n`, claims that use one started engine stay in one process; with another `--dist` pytest-xdist decides."""
    if cast(Any, config.getoption)("dist") != "load":
        return None
    from .scheduling import RowScheduling

    rows = {
        subject.id: f"{program.name} on {subject.device}"
        for subject in config.stash[_SUBJECTS]
        for program in subject.programs
        if not subject.refused and not absent_environment(subject, catalog=config.stash[_CATALOG])
    }
    return RowScheduling(config, log, rows)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    pair = _claim_and_subject(item)
    if pair is None:
        return report
    claim, subject = pair
    result: dict[str, Any] = {"claim": claim.name, "subject": subject.id, "kind": subject.kind}
    raised = call.excinfo.value if call.excinfo else None
    gap = item.stash.get(_GAP, None)
    if isinstance(raised, NotRun):
        result |= {"state": "not run", "reason": str(raised)}
    elif isinstance(raised, _SKIPPED):
        result |= {"state": "n/a", "reason": str(raised)}
    elif gap is not None and report.skipped:
        result |= {"state": "gap", "reason": gap.reason, "link": gap.link}
    elif gap is not None and report.failed and raised is None:
        text = f"the claim passes, and {_names(subject)} declares it as a gap ({gap.reason}). Take the gap out."
        result |= {"state": "fail", "reason": text}
    elif report.failed:
        result |= {"state": "fail", "reason": _sentence(raised) if raised else "", "detail": report.longreprtext}
    elif report.when == "call":
        result |= {"state": "pass", "reason": ""}
    if report.when == "call" and _RECORD in item.stash:
        result["numbers"] = [vars(number) for number in item.stash[_RECORD].numbers]
    report.user_properties.append((PROPERTY, json.dumps(result)))
    return report


_SKIPPED = pytest.skip.Exception


@pytest.fixture(scope="session")
def factory(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> Iterator[PartFactory]:
    """Builds parts for the claims, and keeps what they share until the last of them."""
    with closing(PartFactory(pytestconfig.stash[_CATALOG], tmp_path_factory.mktemp("factory"))) as made:
        yield made


@pytest.fixture
def case(request: pytest.FixtureRequest, subject: Subject, factory: PartFactory) -> Any:
    """The argument of the claim, by the kind of its subject. Raises NotRun without the GPU or the environment that the
    subject needs."""
    if subject.device == "cuda":
        import torch

        if not torch.cuda.is_available():
            raise NotRun("no CUDA device is here")
    programs = f"environments of {[program.name for program in subject.programs]} on {subject.device}"
    if absent := factory.shared(programs, lambda: absent_environment(subject, catalog=factory.catalog)):
        raise NotRun(absent)
    claim = claim_of(request.function)
    assert claim is not None
    # A claim about any track is tried on the first kind that the subject has.
    track = next(iter(subject.tracks), "") if claim.track == "any" else claim.track
    module, _, name = CASES[subject.kind if subject.kind in CASES else (subject.kind, track)].partition(":")
    make = getattr(import_module(f"{__package__}.fixtures.{module}"), name)
    record = request.node.stash[_RECORD] = Record()
    # pytest's own `tmp_path` looks through the folders of all claims before, and turns a link round.
    folder = Path(mkdtemp(prefix="claim-", dir=factory.folder))
    return make(subject=subject, factory=factory, record=record, folder=folder, own_engine=claim.own_engine)


def _absent_devices(chosen: Iterable[Subject]) -> dict[str, str]:
    """Device of these subjects that is not here -> why nothing can run on it."""
    if not any(subject.device == "cuda" for subject in chosen):
        return {}
    import torch

    return {} if torch.cuda.is_available() else {"cuda": "no CUDA device is here"}


def absent_environment(subject: Subject, *, catalog: Catalog) -> str:
    """Why the engine of a subject cannot be started here, or an empty string: its own environment is not there."""
    for spec in subject.programs:
        environment = catalog.resolve(spec.environment)
        if not environment.is_present(subject.device):
            return f"the environment of engine {spec.name!r} is not here; `{environment.command(subject.device)}`"
    return ""


def _gap(claim: Claim, subject: Subject) -> Gap | None:
    specs = [result.spec for result in subject.parts] or list(subject.plugin.specs if subject.plugin else ())
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
        return discover()
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
