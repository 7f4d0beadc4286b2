"""What is installed here, and what is wrong with it: plugins, shadowed namespaces, version bounds, disk space, and the
environments of engines that run in their own."""

from __future__ import annotations

import os
import platform
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import Distribution, PackageNotFoundError, distribution, distributions
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.version import InvalidVersion

from .errors import PluginBroken, PluginNotInstalled
from .plugin_loading import canonical
from .spec import EngineSpec, LauncherSpec

if TYPE_CHECKING:
    from .catalog import Catalog

__all__ = [
    "KEY_DISTS",
    "NAMESPACES",
    "ClusterDiagnosis",
    "Diagnosis",
    "Finding",
    "diagnose",
    "find_shadows",
    "find_unmet",
    "look_at_cluster",
    "unmet",
]

NAMESPACES = (
    "unirl",
    "unirl.models",
    "unirl.engines",
    "unirl.backends",
    "unirl.algorithms",
    "unirl.rewards",
    "unirl.trackers",
    "unirl.launchers",
    "unirl.transports",
)
"""Packages that many dists share. One that ships an `__init__.py` for any of them hides the parts of all others."""

KEY_DISTS = ("torch", "diffusers", "transformers", "peft", "hydra-core", "pluggy", "safetensors", "numpy", "ray")
LOW_DISK_BYTES = 2 * 2**30


@dataclass(frozen=True, kw_only=True)
class Finding:
    """Something that is wrong, and what to do."""

    check: str
    """`plugin`, `conflict`, `namespace`, `version`, `torch` or `disk`; in a cluster `machine`, `port`, `device`."""
    text: str


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    facts: Mapping[str, Any]
    """JSON-able: python, platform, torch, dists, disk, plugins, environments."""
    findings: tuple[Finding, ...]

    @property
    def exit_code(self) -> int:
        """0 good, 1 a finding, 3 a plugin did not load."""
        if any(finding.check == "plugin" for finding in self.findings):
            return 3
        return 1 if self.findings else 0


@dataclass(frozen=True, kw_only=True)
class ClusterDiagnosis:
    """What a launcher found on the machines that it would use."""

    machines: tuple[Mapping[str, Any], ...]
    """JSON-able; `name`, `address`, `python`, `cpus`, `gpus`, `devices`, `dists` and `port` of each."""
    findings: tuple[Finding, ...]


class Environment(Protocol):
    """What `EngineSpec.environment` names, as far as it is looked at here."""

    @property
    def locks(self) -> Mapping[str, str]:
        """Accelerator -> what its packages are locked in."""
        ...

    def of(self, release: str) -> Environment:
        """That of another release of the engine."""
        ...

    def is_present(self, accel: str) -> bool: ...
    def folder(self, accel: str) -> Path: ...
    def command(self, accel: str) -> str:
        """The command that makes it."""
        ...


def look_at_cluster(catalog: Catalog, address: str) -> ClusterDiagnosis:
    """Have every launcher that knows machines look at the cluster. Raises PluginNotInstalled when none is installed."""
    found = [spec.look for spec in catalog.specs("launcher") if isinstance(spec, LauncherSpec) and spec.look]
    if not found:
        raise PluginNotInstalled(
            "--cluster: no launcher here knows machines. Install one: `pip install unirl-runtime`."
        )
    diagnoses: list[ClusterDiagnosis] = [catalog.resolve(target)(address) for target in found]
    return ClusterDiagnosis(
        machines=tuple(machine for one in diagnoses for machine in one.machines),
        findings=tuple(finding for one in diagnoses for finding in one.findings),
    )


def diagnose(catalog: Catalog, *, folder: Path | None = None) -> Diagnosis:
    """Look at this environment. Imports torch where it is installed; `folder` is where runs would be written."""
    torch_facts, torch_findings = _torch()
    disk_facts, disk_findings = _disk(folder or Path.cwd())
    records = catalog.records
    owners = {record.dist for record in records}
    facts = {
        "python": {"version": platform.python_version(), "executable": sys.executable},
        "platform": {"system": platform.platform(), "cpus": os.cpu_count()},
        "torch": torch_facts,
        "dists": {name: version for name in KEY_DISTS if (version := _version(name))},
        "disk": disk_facts,
        "plugins": [
            {"name": r.name, "dist": r.dist, "version": r.version, "status": r.status, "error": r.error}
            for r in records
        ],
        "environments": list(_environments(catalog, accel=str(torch_facts.get("device", "cpu")))),
    }
    findings = [
        Finding(check="plugin", text=f"{record.label} is {record.status}: {record.error}")
        for record in records
        if record.status in ("broken", "refused")
    ]
    findings += [
        Finding(check="conflict", text=f"{record.label}: {sentence}. Uninstall one of them.")
        for record in records
        for sentence in record.conflicts
    ]
    findings += [Finding(check="namespace", text=text) for text in find_shadows(sys.path)]
    findings += [Finding(check="version", text=text) for text in find_unmet(_ours(owners))]
    return Diagnosis(facts=facts, findings=(*findings, *torch_findings, *disk_findings))


def find_shadows(path: Iterable[str]) -> Iterator[str]:
    """A sentence for each file on this module path that makes a shared namespace the package or module of one dist."""
    seen: set[Path] = set()
    for entry in path:
        root = Path(entry or ".").resolve()
        if root in seen or not root.is_dir():
            continue
        seen.add(root)
        for namespace in NAMESPACES:
            place = root.joinpath(*namespace.split("."))
            for file in (place / "__init__.py", place.with_suffix(".py")):
                if file.is_file():
                    owner = _owner_of(file, root)
                    yield (
                        f"{file} makes {namespace!r} a plain module, which hides every other dist that shares it. "
                        + (f"It belongs to {owner}: uninstall that." if owner else "No dist owns it: delete it.")
                    )


def find_unmet(names: Iterable[str]) -> Iterator[str]:
    """A sentence for each requirement of these dists, and of all that they require, that is not met here."""
    waiting = [(name, frozenset[str]()) for name in sorted(names)]
    seen, told = set(waiting), set[str]()
    while waiting:
        name, extras = waiting.pop(0)
        try:
            dist = distribution(name)
        except PackageNotFoundError:
            continue
        if not extras:
            yield from _unmet_python(dist)
        for requirement in _requirements(dist, extras):
            sentence = unmet(requirement)
            if sentence:
                text = f"{name} {dist.version} requires {_written(requirement)}; {sentence}"
                # A dist that is required with and without extras is looked at twice.
                if text not in told:
                    told.add(text)
                    yield text
                continue
            further = (canonical(requirement.name), frozenset(requirement.extras))
            for item in (further, (further[0], frozenset[str]())):
                if item not in seen:
                    seen.add(item)
                    waiting.append(item)


def _requirements(dist: Distribution, extras: frozenset[str]) -> Iterator[Requirement]:
    for line in dist.requires or ():
        try:
            requirement = Requirement(line)
        except InvalidRequirement:
            # Metadata of old dists that no installer reads any more either.
            continue
        marker = requirement.marker
        if marker is None or any(marker.evaluate({"extra": extra}) for extra in extras or {""}):
            yield requirement


def unmet(requirement: Requirement) -> str:
    """What is installed instead, as a sentence; empty when the requirement is met. Its marker is for the caller."""
    version = _version(requirement.name)
    if version is None:
        return f"it is not installed. Install it: `pip install '{_written(requirement)}'`."
    try:
        fits = requirement.specifier.contains(version, prereleases=True)
    except InvalidVersion:
        return f"installed is {version!r}, which is no version."
    return "" if fits else f"installed is {version}. Install one that fits: `pip install '{_written(requirement)}'`."


def _unmet_python(dist: Distribution) -> Iterator[str]:
    wanted = cast(Mapping[str, str | None], dist.metadata).get("Requires-Python")
    try:
        fits = not wanted or SpecifierSet(wanted).contains(platform.python_version(), prereleases=True)
    except InvalidSpecifier:
        return
    if not fits:
        yield f"{dist.name} {dist.version} requires Python {wanted}; this is Python {platform.python_version()}."


def _written(requirement: Requirement) -> str:
    """A requirement without its marker."""
    extras = f"[{','.join(sorted(requirement.extras))}]" if requirement.extras else ""
    return f"{requirement.name}{extras}{requirement.specifier}"


def _ours(owners: Iterable[str]) -> set[str]:
    """Dists of this project, and those that provide plugins."""
    names = {cast(str | None, dist.metadata["Name"]) for dist in distributions() if dist.metadata}
    ours = {name for name in names if name is not None and canonical(name).startswith("unirl-")}
    return {canonical(name) for name in (*ours, *owners)}


def _version(name: str) -> str | None:
    try:
        return distribution(name).version
    except PackageNotFoundError:
        return None


def _owner_of(file: Path, root: Path) -> str | None:
    """The installed dist that lists a file, or whose editable folder this is."""
    for dist in distributions():
        for item in dist.files or ():
            if item.name == file.name and Path(str(dist.locate_file(item))).resolve() == file:
                return f"{dist.name} {dist.version}"
            # An editable install lists a .pth file that holds its source folder.
            if item.suffix == ".pth":
                pth = Path(str(dist.locate_file(item)))
                if pth.is_file() and str(root) in pth.read_text(encoding="utf-8", errors="replace").split("\n"):
                    return f"{dist.name} {dist.version}"
    return None


def _environments(catalog: Catalog, *, accel: str) -> Iterator[dict[str, str]]:
    """The environments of engines, for what torch computes on here. One that is missing is no finding: an engine that
    is installed need not be used."""
    for spec in catalog.specs("engine"):
        if not isinstance(spec, EngineSpec) or not spec.environment:
            continue
        try:
            found: Environment = catalog.resolve(spec.environment)
        except PluginBroken as error:
            yield {"engine": spec.name, "accel": accel, "state": f"cannot be looked at: {error}"}
            continue
        if accel not in found.locks:
            yield {"engine": spec.name, "accel": accel, "state": f"none; it runs on {', '.join(sorted(found.locks))}"}
            continue
        is_present = found.is_present(accel)
        state = str(found.folder(accel)) if is_present else f"missing; make it: {found.command(accel)}"
        yield {"engine": spec.name, "accel": accel, "state": state}
        for release in spec.releases:
            # Few want more than the newest one.
            if (earlier := found.of(release)).is_present(accel):
                yield {"engine": f"{spec.name} {release}", "accel": accel, "state": str(earlier.folder(accel))}


def _torch() -> tuple[dict[str, Any], Sequence[Finding]]:
    if _version("torch") is None:
        text = "torch is not installed, so nothing can train. Install it: `pip install torch`."
        return {"version": None}, [Finding(check="torch", text=text)]
    try:
        import torch
    except (ImportError, OSError) as error:
        # OSError: a shared library that is missing or does not fit.
        text = f"torch {_version('torch')} is installed and cannot be imported: {error}. Install it again."
        return {"version": _version("torch")}, [Finding(check="torch", text=text)]
    devices = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    facts: dict[str, Any] = {
        "version": str(torch.__version__),
        "device": "cuda" if devices else "cpu",
        "cuda": torch.version.cuda,
        "devices": devices,
        "threads": torch.get_num_threads(),
    }
    return facts, []


def _disk(folder: Path) -> tuple[dict[str, Any], Sequence[Finding]]:
    usage = shutil.disk_usage(folder)
    facts = {"folder": str(folder), "free_bytes": usage.free, "total_bytes": usage.total}
    if usage.free >= LOW_DISK_BYTES:
        return facts, []
    text = f"{folder}: {usage.free / 2**30:.1f} GiB are free; checkpoints may not fit. Free some, or set run.dir."
    return facts, [Finding(check="disk", text=text)]
