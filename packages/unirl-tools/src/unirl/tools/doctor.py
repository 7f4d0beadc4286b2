"""Checks of this installation: plugins, shadowed namespaces, files against their records, version bounds, disk space,
and the environments of external engines."""

from __future__ import annotations

import os
import platform
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import distributions
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from unirl.core.errors import PluginNotInstalled, UniRLError
from unirl.core.names import canonical
from unirl.core.plugins.catalog import LEAVE_OUT
from unirl.core.plugins.dists import find_unmet, installed_version
from unirl.core.plugins.installed_files import damaged_dists, find_shadows
from unirl.core.specs.diagnosis import KEY_DISTS, ClusterDiagnosis, Finding
from unirl.core.specs.environment import Environment
from unirl.core.specs.spec import EngineSpec, LauncherSpec

if TYPE_CHECKING:
    from unirl.core.plugins.catalog import Catalog

__all__ = ["Diagnosis", "diagnose", "look_at_cluster"]


NOT_LOOKED_AT = "cannot be looked at"
LOW_DISK_BYTES = 2 * 2**30


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    facts: Mapping[str, Any]
    """JSON-able: python, platform, torch, dists, disk, plugins, environments."""
    findings: tuple[Finding, ...]

    @property
    def exit_code(self) -> int:
        """0 no problems, 1 a problem, 3 a plugin failed to load."""
        if any(finding.check == "plugin" for finding in self.findings):
            return 3
        return 1 if self.findings else 0


def look_at_cluster(catalog: Catalog, address: str) -> ClusterDiagnosis:
    """Have every launcher that supports clusters check this one. Raises PluginNotInstalled when none is installed."""
    result = [spec.look for spec in catalog.specs("launcher") if isinstance(spec, LauncherSpec) and spec.look]
    if not result:
        raise PluginNotInstalled(
            "--cluster: no installed launcher supports clusters. Install one: `pip install unirl-launcher-ray`."
        )
    diagnoses: list[ClusterDiagnosis] = [catalog.resolve(target)(address) for target in result]
    return ClusterDiagnosis(
        machines=tuple(machine for one in diagnoses for machine in one.machines),
        findings=tuple(finding for one in diagnoses for finding in one.findings),
    )


def diagnose(catalog: Catalog, *, folder: Path | None = None) -> Diagnosis:
    """Check this environment. Imports torch if it is installed; `folder` is where runs would be written."""
    torch_facts, torch_findings = _torch()
    disk_facts, disk_findings = _disk(folder or Path.cwd())
    records = catalog.records
    environments = list(_environments(catalog, accel=str(torch_facts.get("device", "cpu"))))
    owners = {record.dist for record in records}
    facts = {
        "python": {"version": platform.python_version(), "executable": sys.executable},
        "platform": {"system": platform.platform(), "cpus": os.cpu_count()},
        "torch": torch_facts,
        "dists": {name: version for name in KEY_DISTS if (version := installed_version(name))},
        "disk": disk_facts,
        "plugins": [
            {"name": r.name, "dist": r.dist, "version": r.version, "status": r.status, "error": r.error}
            for r in records
        ],
        "environments": environments,
    }
    findings = [
        Finding(check="plugin", text=f"{record.label} is {record.status}: {record.error}")
        for record in records
        if record.status in ("broken", "refused")
    ]
    findings += [
        Finding(check="conflict", text=f"{record.label}: {sentence}. {LEAVE_OUT}")
        for record in records
        for sentence in record.conflicts
    ]
    findings += [
        Finding(check="engine", text=f"{row['engine']} {row['state']}")
        for row in environments
        if row["state"].startswith(NOT_LOOKED_AT)
    ]
    findings += [Finding(check="namespace", text=text) for text in find_shadows(sys.path)]
    ours = _ours(owners)
    findings += [Finding(check="files", text=text) for text in [damaged_dists()] if text]
    findings += [Finding(check="version", text=text) for text in find_unmet(ours)]
    return Diagnosis(facts=facts, findings=(*findings, *torch_findings, *disk_findings))


def _ours(owners: Iterable[str]) -> set[str]:
    """Dists of this project and those that provide plugins."""
    names = {cast(str | None, dist.metadata["Name"]) for dist in distributions() if dist.metadata}
    ours = {name for name in names if name is not None and canonical(name).startswith("unirl-")}
    return {canonical(name) for name in (*ours, *owners)}


def _environments(catalog: Catalog, *, accel: str) -> Iterator[dict[str, str]]:
    """The engines' environments for this machine's accelerator. A missing one is not a problem: an installed engine
    need not be used."""
    for spec in catalog.specs("engine"):
        if not isinstance(spec, EngineSpec) or not spec.environment:
            continue
        try:
            result: Environment = catalog.resolve(spec.environment)
            if accel not in result.locks:
                state = f"unsupported here; it runs on {', '.join(sorted(result.locks))}"
                yield {"engine": spec.name, "accel": accel, "state": state}
                continue
            is_present = result.is_present(accel)
        except UniRLError as error:
            yield {"engine": spec.name, "accel": accel, "state": f"{NOT_LOOKED_AT}: {error}"}
            continue
        state = str(result.folder(accel)) if is_present else f"missing; create it: {result.command(accel)}"
        yield {"engine": spec.name, "accel": accel, "state": state}
        for release in spec.releases:
            # Few users need more than the newest one.
            if (earlier := result.of(release)).is_present(accel):
                yield {"engine": f"{spec.name} {release}", "accel": accel, "state": str(earlier.folder(accel))}


def _torch() -> tuple[dict[str, Any], Sequence[Finding]]:
    if installed_version("torch") is None:
        text = "torch is not installed; training needs it. Install it: `pip install torch`."
        return {"version": None}, [Finding(check="torch", text=text)]
    try:
        import torch
    except (ImportError, OSError) as error:
        # OSError: a shared library is missing or incompatible.
        text = f"torch {installed_version('torch')} is installed but cannot be imported: {error}. Reinstall it."
        return {"version": installed_version("torch")}, [Finding(check="torch", text=text)]
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
