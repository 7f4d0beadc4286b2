"""Pre-flight check of every machine in a cluster: versions, devices, and connectivity between machines."""

from __future__ import annotations

import logging
import platform
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distributions, version
from typing import Any, cast

from unirl.core.errors import PlanRejected
from unirl.core.specs.diagnosis import KEY_DISTS, ClusterDiagnosis, Finding

from .ray_worker import SETTINGS

__all__ = ["Machine", "look"]

WITHIN_S = 120.0
"""Timeout for a machine to start a process and answer; importing torch from a cold disk takes a minute."""
CONNECT_S = 5.0


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Software and devices of one machine."""

    name: str
    """Host and Ray node; several nodes may share a host."""
    address: str
    python: str
    dists: Mapping[str, str]
    cpus: float
    gpus: float
    devices: tuple[str, ...]
    """Names of the CUDA devices visible to torch."""
    port: int
    """A free port that could be bound."""


def look(address: str) -> ClusterDiagnosis:
    """Probe every machine of the cluster at `address` (`auto` or `host:port`) and compare it with this one.

    Raises PlanRejected when no cluster answers there.
    """
    import ray

    is_ours = not ray.is_initialized()
    if is_ours:
        try:
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
        except ConnectionError as error:
            raise PlanRejected(
                f"--cluster: no cluster answers at {address!r}: {error}. Start one with `ray start --head`."
            ) from error
    try:
        machines, findings = _asked([node for node in ray.nodes() if node["Alive"]])
    finally:
        if is_ours:
            ray.shutdown()
    findings += [finding for machine in machines for finding in _differences(machine, _dists())]
    return ClusterDiagnosis(machines=tuple(vars(machine) for machine in machines), findings=tuple(findings))


class Probe:
    """Runs on a machine."""

    def __init__(self) -> None:
        self._listener: socket.socket | None = None

    def facts(self) -> dict[str, Any]:
        try:
            import torch

            devices = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
        except ImportError:
            devices = []
        return {"python": platform.python_version(), "dists": _dists(), "devices": tuple(devices)}

    def listen(self, host: str) -> int:
        """Bind a free port of this machine."""
        self._listener = socket.create_server((host, 0))
        return self._listener.getsockname()[1]

    def reach(self, host: str, port: int) -> str:
        """Connect to another machine; returns the error, empty on success."""
        try:
            with closing(socket.create_connection((host, port), timeout=CONNECT_S)):
                return ""
        except OSError as error:
            return str(error)


def _asked(nodes: Sequence[Mapping[str, Any]]) -> tuple[list[Machine], list[Finding]]:
    import ray
    from ray.exceptions import RayError
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    decorate: Any = ray.remote
    remote: Any = decorate(Probe)
    probes: list[Any] = [
        remote.options(
            num_cpus=0,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False),
            runtime_env={"env_vars": SETTINGS},
        ).remote()
        for node in nodes
    ]
    findings: list[Finding] = []
    machines: list[Machine] = []
    reached: list[tuple[Any, Machine]] = []
    try:
        for node, probe in zip(nodes, probes, strict=True):
            name, address = f"{node['NodeManagerHostname']!r} (node {node['NodeID'][:8]})", node["NodeManagerAddress"]
            try:
                facts: dict[str, Any] = ray.get(probe.facts.remote(), timeout=WITHIN_S)
                port: int = ray.get(probe.listen.remote(address), timeout=WITHIN_S)
            except (RayError, OSError) as error:
                text = f"machine {name} at {address} does not answer: {' '.join(str(error).split())}"
                findings.append(Finding(check="machine", text=text))
                continue
            there = cast("Mapping[str, float]", node["Resources"])
            machine = Machine(
                name=name,
                address=address,
                cpus=there.get("CPU", 0.0),
                gpus=there.get("GPU", 0.0),
                port=port,
                **facts,
            )
            machines.append(machine)
            reached.append((probe, machine))
        for probe, source in reached:
            for _, target in reached:
                problem = ray.get(probe.reach.remote(target.address, target.port), timeout=WITHIN_S)
                if problem:
                    where = f"{target.address}:{target.port}"
                    text = (
                        f"machine {source.name} cannot reach {target.name} at {where}: {problem}. "
                        "Ranks connect over arbitrary free ports; open them in the firewall between these machines."
                    )
                    findings.append(Finding(check="port", text=text))
    finally:
        for probe in probes:
            ray.kill(probe, no_restart=True)
    return machines, findings


def _differences(machine: Machine, here: Mapping[str, str]) -> Iterator[Finding]:
    """Differences between a machine and this one that would get a worker refused or change its results."""
    if machine.python != platform.python_version():
        text = f"machine {machine.name} runs Python {machine.python}; this one runs {platform.python_version()}."
        yield Finding(check="version", text=text)
    for name in sorted({*here, *machine.dists}):
        expected, result = here.get(name, "nothing"), machine.dists.get(name, "nothing")
        if expected != result:
            way = f"pip install {name}=={expected}" if name in here else f"pip uninstall {name}"
            text = f"machine {machine.name}: {name} {expected} is installed here, {result} there. There: `{way}`."
            yield Finding(check="version", text=text)
    if machine.gpus and not machine.devices:
        text = f"machine {machine.name} offers {machine.gpus:g} GPUs to Ray; torch finds no CUDA device there."
        yield Finding(check="device", text=text)


def _dists() -> dict[str, str]:
    """Installed versions of the packages that affect a run's results."""
    names = {str(dist.metadata["Name"]) for dist in distributions() if dist.metadata}
    result: dict[str, str] = {}
    for name in sorted({*KEY_DISTS, *(name for name in names if name.startswith("unirl-"))}):
        try:
            result[name] = version(name)
        except PackageNotFoundError:
            continue
    return result
