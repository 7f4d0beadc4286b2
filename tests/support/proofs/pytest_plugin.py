"""Groups of tests: the longest first, those that are proven already not again.

    pytest --proven        # leave out what a committed record proves, but for a tenth of it
    pytest --prove         # run everything, and write down which groups passed, with which key
    pytest --prove --proven    # the same for what the record does not prove; all the rest is left out

A group that is left out is counted as *proven*, never as passed, with the commit that it was proven at. A file all of
whose groups are left out is not even imported: one item stands for each group, and is counted as the tests of its proof.
"""

from __future__ import annotations

import json
import re
import sys
from collections import defaultdict
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import pytest

from . import keys, record
from .record import Proof
from .sources import Workspace

DURATIONS = Path("tests") / "durations.json"
"""Group -> seconds, of those that take at least one; `--prove` writes it. Which group starts first depends on it, and
nothing else."""
REASON = "proven at "
NEVER = r"not run: (needs a CUDA device$|run\.batch_invariant: |the extra \S+ is not installed$)"
PROVEN = pytest.StashKey[dict[str, str]]()
"""Group -> the commit that it was proven at, of those that do not run."""
WHOLE = pytest.StashKey[dict[str, list[str]]]()
"""File -> its groups, of files that are not imported."""
STANDS = "all tests"
"""Name of an item that stands for a group; of a function it could not be."""
ACCOUNT = pytest.StashKey["Account"]()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("proofs", "what is proven already")
    group.addoption("--proven", action="store_true", help="leave out the groups that tests/proven.json proves")
    group.addoption("--prove", action="store_true", help="write the groups that pass to tests/proven.json")


def pytest_configure(config: pytest.Config) -> None:
    root, option = config.rootpath, config.option
    if hasattr(config, "workerinput"):
        config.stash[PROVEN], config.stash[WHOLE] = config.workerinput["proven"]
        if option.prove:
            config.stash[ACCOUNT] = Account(root)
        return
    config.stash[PROVEN], config.stash[WHOLE] = {}, {}
    narrower = ("keyword", "markexpr", "deselect", "lf")
    narrows = any(getattr(option, name, None) for name in narrower) or any("::" in str(word) for word in config.args)
    if option.prove:
        if narrows:
            raise pytest.UsageError("--prove: a proof is of whole files; leave out -k, -m, --lf, --deselect and `::`.")
        if changed := record.uncommitted(root):
            raise pytest.UsageError(f"--prove: a proof names the commit that it was made at; commit {changed} first.")
        config.stash[ACCOUNT] = Account(root)
    if option.proven:
        config.stash[PROVEN], whole = _proven(root, with_tenth=not option.prove)
        config.stash[WHOLE] = {} if narrows else whole


def _proven(root: Path, *, with_tenth: bool) -> tuple[dict[str, str], dict[str, list[str]]]:
    """The commits of the groups that are proven, and the files of which all groups are."""
    workspace, commit, machine = Workspace(root), record.commit_of(root), keys.instruction_set()
    proofs = record.read(root)
    known: dict[str, Proof] = {}
    files: dict[str, list[str]] = defaultdict(list)
    for group in keys.groups(workspace):
        files[group.partition("[")[0]].append(group)
        proof = proofs.get((group, machine))
        if proof and proof.cpu == record.cpu() and proof.key == keys.key_of_group(group, workspace):
            known[group] = proof
    again = record.tenth({group: proof.seconds for group, proof in known.items()}, commit) if with_tenth else ()
    result = {group: proof.commit for group, proof in known.items() if group not in again}
    return result, {file: groups for file, groups in files.items() if result.keys() >= set(groups)}


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    node.workerinput["proven"] = (node.config.stash[PROVEN], node.config.stash[WHOLE])


@pytest.hookimpl(tryfirst=True)
def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Collector | None:
    root = parent.config.rootpath
    file = module_path.relative_to(root).as_posix() if module_path.is_relative_to(root) else ""
    return ProvenFile.from_parent(parent, path=module_path) if file in parent.config.stash[WHOLE] else None


class ProvenFile(pytest.File):
    """A file of tests that are all proven."""

    def collect(self) -> Iterator[pytest.Item]:
        for group in self.config.stash[WHOLE][self.path.relative_to(self.config.rootpath).as_posix()]:
            _, bracket, kind = group.partition("[")
            yield ProvenGroup.from_parent(self, name=f"{STANDS}{bracket}{kind}")


class ProvenGroup(pytest.Item):
    """Marked like every test that is proven, and so never run."""

    def reportinfo(self) -> tuple[Path, int, str]:
        return self.path, 0, self.name

    def runtest(self) -> None:
        raise AssertionError(f"{self.nodeid} is no test")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    proven = config.stash[PROVEN]
    for item in items:
        commit = proven.get(keys.group_of(item.nodeid))
        if commit is not None:
            item.add_marker(pytest.mark.skip(reason=f"{REASON}{commit[:12]}"), append=False)
    if hasattr(config, "workerinput"):
        place = config.rootpath / DURATIONS
        seconds: dict[str, float] = json.loads(place.read_text(encoding="utf-8")) if place.is_file() else {}
        groups = [keys.group_of(item.nodeid) for item in items]
        # After the long ones those with many tests, as xdist has it.
        counts = {name: groups.count(name) for name in set(groups)}

        def place_of(item: pytest.Item) -> tuple[float, int]:
            group = keys.group_of(item.nodeid)
            return (0.0 if group in proven else -seconds.get(group, 0.0), -counts[group])

        items.sort(key=place_of)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> object:
    """`--dist loadfile` in the order that the workers collect, and the mutants by their kind."""
    option: Any = config.option
    if option.dist != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class LongestFirst(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return keys.group_of(nodeid)

    option.loadscopereorder = False
    return LongestFirst(config, log)


def pytest_report_teststatus(report: pytest.TestReport) -> tuple[str, str, str] | None:
    return ("proven", "", "PROVEN") if _is_proven(report) else None


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    proven = config.stash[PROVEN]
    reports = terminalreporter.stats.get("proven", [])
    if not reports:
        return
    known, machine = record.read(config.rootpath), keys.instruction_set()
    counts: dict[str, int] = defaultdict(int)
    tests: list[Any] = []
    for report in reports:
        group = keys.group_of(report.nodeid)
        stands = report.nodeid.partition("::")[2].startswith(STANDS)
        tests += [report] * (known[group, machine].num_tests if stands else 1)
        counts[group] += len(tests) - sum(counts.values())
    # Of which the last line tells the number.
    terminalreporter.stats["proven"] = tests
    terminalreporter.section("proven already, not run")
    for group, number in sorted(counts.items()):
        seconds = known[group, machine].seconds
        terminalreporter.line(f"{REASON}{proven[group][:12]}: {group} ({number} tests, {seconds:.0f} s when they ran)")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Any:
    if ACCOUNT in item.config.stash:
        item.config.stash[ACCOUNT].now = keys.group_of(item.nodeid)
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Any:
    """What a module opens while it is imported counts for its tests, but for the modules of mutants, which all share."""
    if ACCOUNT not in collector.config.stash or not isinstance(collector, pytest.Module):
        return (yield)
    account = collector.config.stash[ACCOUNT]
    account.now = keys.group_of(collector.nodeid)
    try:
        return (yield)
    finally:
        account.now = ""


def pytest_collection_finish(session: pytest.Session) -> None:
    account = session.config.stash.get(ACCOUNT, None)
    if account is not None and not session.config.option.numprocesses:
        account.expect([item.nodeid for item in session.items])


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_node_collection_finished(node: Any, ids: list[str]) -> None:
    if ACCOUNT in node.config.stash:
        node.config.stash[ACCOUNT].expect(ids)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    # A worker's reports reach its controller, which counts them.
    if COUNTING:
        COUNTING[0].count(report)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object) -> None:
    if ACCOUNT in node.config.stash:
        for group, files in node.workeroutput.get("opened", {}).items():
            node.config.stash[ACCOUNT].opened[group].update(map(Path, files))


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    config: Any = session.config
    account = config.stash.get(ACCOUNT, None)
    if account is None:
        return
    if hasattr(config, "workerinput"):
        config.workeroutput["opened"] = {group: sorted(map(str, paths)) for group, paths in account.opened.items()}
        return
    reply = account.close(left_out=config.stash[PROVEN])
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    if reporter is not None:
        for line in reply:
            reporter.line(line)


COUNTING: list[Account] = []
"""That of the process that counts."""


class Account:
    """What is known of each group at the end of a run that proves."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.now = ""
        self.opened: dict[str, set[Path]] = defaultdict(set)
        """Files below the root that Python opened while tests of a group ran."""
        self._expected: dict[str, set[str]] = defaultdict(set)
        self._passed: dict[str, set[str]] = defaultdict(set)
        self._seconds: dict[str, float] = defaultdict(float)
        self._spoilt: dict[str, str] = {}
        sys.addaudithook(self._note)
        COUNTING.append(self)

    def _note(self, event: str, words: tuple[Any, ...]) -> None:
        if event != "open" or not self.now or not isinstance(words[0], str):
            return
        if words[0].startswith(str(self.root)) and not _collects_constants():
            self.opened[self.now].add(Path(words[0]))

    def expect(self, nodeids: list[str]) -> None:
        for nodeid in nodeids:
            self._expected[keys.group_of(nodeid)].add(nodeid)

    def count(self, report: pytest.TestReport) -> None:
        group = keys.group_of(report.nodeid)
        self._seconds[group] += report.duration
        if report.failed or (report.skipped and not _never_runs_here(report)):
            self._spoilt.setdefault(group, f"{report.nodeid} ended as {report.outcome}")
        elif report.when == "call" or report.skipped:
            self._passed[group].add(report.nodeid)

    def close(self, *, left_out: Collection[str]) -> list[str]:
        """Write the record and the durations; a line for each group that has a key and is not proven.

        left_out: groups that the record proved before."""
        # What is read from here on no test reads.
        self.now = ""
        workspace, machine = Workspace(self.root), keys.instruction_set()
        proofs, reply = dict(record.read(self.root)), list[str]()
        commit, light, collected = record.commit_of(self.root), _light(workspace), _collected(workspace)
        tracked = record.tracked(self.root)
        for group in keys.groups(workspace):
            if group not in self._expected or group in left_out:
                continue
            files = keys.reached_by(group, workspace)
            opened = _sources(self.opened[group], tracked) - {path.resolve() for path in files} - light
            if group.startswith(keys.MUTANTS):
                opened -= collected
            missed = sorted(path for path in opened if keys.counts(path, group, self.root))
            if group in self._spoilt or self._passed[group] != self._expected[group]:
                proofs.pop((group, machine), None)
                reply.append(f"not proven: {group}: {self._spoilt.get(group, 'not all of its tests ended')}")
            elif missed:
                proofs.pop((group, machine), None)
                names = ", ".join(str(path.relative_to(self.root)) for path in missed[:5])
                reply.append(f"not proven: {group}: its key lacks {len(missed)} files that it opened: {names}")
            else:
                proofs[group, machine] = Proof(
                    key=keys.key_of_group(group, workspace),
                    commit=commit,
                    machine=machine,
                    cpu=record.cpu(),
                    num_tests=len(self._passed[group]),
                    seconds=round(self._seconds[group], 1),
                )
        record.write(self.root, proofs)
        self._write_durations(left_out)
        return reply

    def _write_durations(self, left_out: Collection[str]) -> None:
        place = self.root / DURATIONS
        known: dict[str, float] = json.loads(place.read_text(encoding="utf-8")) if place.is_file() else {}
        known |= {group: round(seconds) for group, seconds in self._seconds.items() if group not in left_out}
        long = sorted((pair for pair in known.items() if pair[1]), key=lambda pair: (-pair[1], pair[0]))
        place.write_text(json.dumps(dict(long), indent=1) + "\n", encoding="utf-8")


def _collects_constants() -> bool:
    """Whether Hypothesis reads the sources of all modules that are loaded, for constants to draw."""
    frame = sys._getframe(2)
    while frame is not None:
        if frame.f_globals.get("__name__") == "hypothesis.internal.constants_ast":
            return True
        frame = frame.f_back
    return False


def _sources(opened: set[Path], tracked: set[Path]) -> set[Path]:
    """Files of the repository among those that were opened; of byte code its source, of a link what it leads to."""
    result: set[Path] = set()
    for path in opened:
        if path.parent.name == "__pycache__":
            path = path.parent.parent / f"{path.name.partition('.')[0]}.py"
        result.add(path.resolve())
    # A new plugin gets a copy of the license, whatever it says.
    return {path for path in result & tracked if "proofs" not in path.parts and path.name != "LICENSE"}


def _light(workspace: Workspace) -> set[Path]:
    """What finding the plugins that are installed imports, recipes that are only listed, and what a report hashes."""
    modules = [module for dist in workspace.dists for module in workspace.of_plugin(dist)]
    packages = {module.parent / "__init__.py" for module in modules}
    # A report names the hash of the claims, for which their doubles are read as texts.
    doubles = workspace.modules["unirl.conformance.suite"].parents[1] / "doubles"
    listed = set(workspace.recipes) | packages | set(doubles.glob("*.py"))
    return workspace.reached(modules, follows=lambda path: False) | listed


def _collected(workspace: Workspace) -> set[Path]:
    """What the claims and mutants of all kinds import: pytest collects them, and runs those of one kind."""
    suite = workspace.modules["unirl.conformance.suite"].parent
    mutants = (workspace.root / keys.MUTANTS).parent / "conformance_mutants"
    roots = [path for folder in (suite, mutants) for path in folder.glob("*.py")]
    return workspace.reached(roots)


def _is_proven(report: Any) -> bool:
    reason = report.longrepr[2] if report.skipped and isinstance(report.longrepr, tuple) else ""
    return reason.removeprefix("Skipped: ").startswith(REASON)


def _never_runs_here(report: Any) -> bool:
    """Whether what a proof names already decides that a test is not run: the machine, or the packages of the lock."""
    reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else ""
    return re.search(NEVER, reason) is not None
