"""Pre-flight check of the machines of a cluster: versions, devices, clocks, shared memory, a group over all of them."""

from __future__ import annotations

import logging
import platform
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

from unirl.core.errors import PlanRejected
from unirl.core.specs.diagnosis import ClusterDiagnosis, Finding

from .address import check_answers
from .machine_probe import Machine, Probe, installed_dists
from .ray_worker import SETTINGS

__all__ = ["clock_offset", "differences", "look", "odd_drivers"]

WITHIN_S = 120.0
"""Timeout for a machine to start a process and answer; importing torch from a cold disk takes a minute."""
GROUP_WITHIN_S = 60.0
"""Timeout for all machines to form a group. NCCL takes some seconds for its first communicator."""
CLOCK_S = 2.0
"""Clocks that are kept by NTP differ by milliseconds."""
SMALL_SHARED_MEMORY = 2**30
"""Containers have 64 MiB by default, less than the 512 MiB of `launcher.object_store_mb`; NCCL and carriers of weights
need room beside it."""


def look(address: str) -> ClusterDiagnosis:
    """Probe every machine of the cluster at `address` (`auto` or `host:port`) and compare it with this one.

    Raises PlanRejected when no cluster answers there.
    """
    import ray

    is_ours = not ray.is_initialized()
    if is_ours:
        try:
            check_answers(address)
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
    findings += [finding for machine in machines for finding in differences(machine, installed_dists())]
    findings += odd_drivers(machines)
    return ClusterDiagnosis(machines=tuple(vars(machine) for machine in machines), findings=tuple(findings))


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
    reached: list[tuple[Any, Machine]] = []
    try:
        for node, probe in zip(nodes, probes, strict=True):
            name, address = f"{node['NodeManagerHostname']!r} (node {node['NodeID'][:8]})", node["NodeManagerAddress"]
            try:
                facts: dict[str, Any] = ray.get(probe.facts.remote(), timeout=WITHIN_S)
                port: int = ray.get(probe.listen.remote(address), timeout=WITHIN_S)
                before = time.time()
                there: float = ray.get(probe.clock.remote(), timeout=WITHIN_S)
                after = time.time()
            except (RayError, OSError) as error:
                text = f"machine {name} at {address} does not answer: {' '.join(str(error).split())}"
                findings.append(Finding(check="machine", text=text))
                continue
            resources = cast("Mapping[str, float]", node["Resources"])
            machine = Machine(
                name=name,
                address=address,
                cpus=resources.get("CPU", 0.0),
                gpus=resources.get("GPU", 0.0),
                clock_offset_s=clock_offset(there, before=before, after=after),
                port=port,
                **facts,
            )
            reached.append((probe, machine))
        findings += _unreachable(reached) or _group_problems(reached)
    finally:
        for probe in probes:
            ray.kill(probe, no_restart=True)
    return [machine for _, machine in reached], findings


def _unreachable(reached: Sequence[tuple[Any, Machine]]) -> list[Finding]:
    """Pairs of machines of which one cannot connect to the other."""
    import ray

    findings: list[Finding] = []
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
    return findings


def _group_problems(reached: Sequence[tuple[Any, Machine]]) -> list[Finding]:
    """What keeps the machines from the group that a run forms: one process on each, NCCL if all have GPUs."""
    import ray
    from ray.exceptions import RayError

    if len(reached) < 2:
        return []
    on_gpu, world = all(machine.devices for _, machine in reached), len(reached)
    (first, head), library = reached[0], "NCCL" if on_gpu else "gloo"
    try:
        rendezvous = ray.get(first.open_group.remote(head.address, world, GROUP_WITHIN_S), timeout=WITHIN_S)
        answers = [
            probe.join.remote(
                machine.address, rendezvous, rank=rank, world=world, on_gpu=on_gpu, within_s=GROUP_WITHIN_S
            )
            for rank, (probe, machine) in enumerate(reached)
        ]
        # A group that does not form ends by its own limit, and a broadcast after it by as much.
        problems: list[str] = ray.get(answers, timeout=2 * GROUP_WITHIN_S + WITHIN_S)
        failed = [
            f"{machine.name}: {problem}" for (_, machine), problem in zip(reached, problems, strict=True) if problem
        ]
    except RayError as error:
        failed = [" ".join(str(error).split())]
    if not failed:
        return []
    text = (
        f"a group of the {world} machines by {library} did not work: {'; '.join(failed)}. Name the network interface "
        f"between them in {library.upper()}_SOCKET_IFNAME, in `launcher.environment` or where Ray is started."
    )
    return [Finding(check="group", text=text)]


def clock_offset(there: float, *, before: float, after: float) -> float:
    """Least difference of a clock that showed `there` at some moment between `before` and `after` of this one."""
    return max(0.0, there - after) or min(0.0, there - before)


def differences(machine: Machine, here: Mapping[str, str]) -> Iterator[Finding]:
    """Differences between a machine and this one that would get a worker refused or change its results, and what it
    lacks."""
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
    if abs(machine.clock_offset_s) > CLOCK_S:
        side = "ahead of" if machine.clock_offset_s > 0 else "behind"
        text = (
            f"machine {machine.name}: its clock is {abs(machine.clock_offset_s):.0f} s {side} this one's, so times in "
            "logs and on a shared file system are wrong. Synchronise them (NTP)."
        )
        yield Finding(check="clock", text=text)
    if machine.shared_memory_bytes < SMALL_SHARED_MEMORY:
        text = (
            f"machine {machine.name}: /dev/shm has {machine.shared_memory_bytes / 2**20:.0f} MiB, which Ray, NCCL and "
            "the shared-memory carrier fill. Start its container with `--shm-size=16g` or `--ipc=host`; in Kubernetes, "
            "mount an emptyDir with `medium: Memory` at /dev/shm."
        )
        yield Finding(check="memory", text=text)


def odd_drivers(machines: Sequence[Machine]) -> Iterator[Finding]:
    """Machines whose NVIDIA driver is not that of most of them."""
    drivers = Counter(machine.driver for machine in machines if machine.driver)
    if len(drivers) > 1:
        usual = drivers.most_common(1)[0][0]
        for machine in machines:
            if machine.driver not in ("", usual):
                text = f"machine {machine.name} has NVIDIA driver {machine.driver}, most have {usual}; install that."
                yield Finding(check="device", text=text)
