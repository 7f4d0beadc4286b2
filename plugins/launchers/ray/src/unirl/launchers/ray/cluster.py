"""The Ray cluster of a run: start or join it, run workers as actors, and name the worker that failed."""

from __future__ import annotations

import os
import secrets
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor
from unirl.core.errors import PlanRejected, ProcessLost, RunFailed, UniRLError
from unirl.core.roles import Transport, TransportPlace
from unirl.core.specs.plan import Plan
from unirl.numerics.batch_invariant import VARIABLES
from unirl.transfer.remote_rows import RemoteRows
from unirl.transfer.wire import packed, unpacked

from .actors import Actor, Call, WorkerDied, explained, has_died
from .address import check_answers
from .config import RayConfig
from .placement import Node, WorkerPlace
from .ray_worker import CAUSE_WITHIN_S, SETTINGS, actor_class, actor_name
from .traffic import Traffic
from .transports import make_transport

__all__ = ["Cluster", "Restart"]

Restart = Callable[[Actor], None]
"""Restores the state of a replacement process beyond its set-up, such as the weights of this step."""

SIGN_WITHIN_S = 5.0
"""Health-check timeout. A live process answers in milliseconds, even while busy; a slower one counts as hung."""


class _Late(Exception):
    """A call was not answered in time."""


class Cluster:
    """The Ray cluster of a run, started or joined, and the workers it started there. Thread-safe."""

    def __init__(self, config: RayConfig) -> None:
        import ray

        self._config = config
        self._run = f"unirl-{secrets.token_hex(6)}"
        self._actors: list[Actor] = []
        self._plan = b""
        self._plugin_files: list[Path] = []
        self._variables: dict[str, str] = {}
        """Environment variables of the workers, read by their libraries at import."""
        self._lost: dict[str, UniRLError] = {}
        """Workers that died or hung for good, with the error reported then."""
        self._restarting = threading.Lock()
        self._transport: Transport | None = None
        self._group: Any = None
        self.build_timeout_s = config.start_timeout_s
        """Of building a worker's parts, once the plan is known."""
        self.traffic = Traffic()
        self.findings: list[str] = []
        """Warnings not yet shown to the user."""
        for key, value in SETTINGS.items():
            os.environ.setdefault(key, value)
        # Zero-copy tensors are read-only; code that modifies one copies it first.
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable", category=UserWarning)
        # A Ray session already running in this process (a notebook, a test) is reused and left running.
        self._owns = not ray.is_initialized()
        if self._owns:
            self._start()

    def _start(self) -> None:
        import ray

        config = self._config
        options: dict[str, Any] = {"include_dashboard": False, "log_to_driver": False, "logging_level": "ERROR"}
        address = config.address or os.environ.get("RAY_ADDRESS", "")
        # "local" is explicit: without an address Ray joins any cluster that it finds on this machine.
        options["address"] = address or "local"
        if not address or address == "local":
            options["object_store_memory"] = config.object_store_mb * 2**20
            options["num_cpus"] = config.num_cpus or None
        try:
            check_answers(options["address"])
            ray.init(namespace=self._run, **options)
        except ConnectionError as error:
            key = "launcher.address" if config.address else "RAY_ADDRESS"
            raise PlanRejected(
                f"{key}: no cluster answers at {address!r}: {error}. Start one with `ray start --head`, or remove the "
                "address to run on this machine."
            ) from error
        except Exception as error:
            # Ray raises bare exceptions for every failure here.
            raise RunFailed(
                f"launcher: Ray did not start: {error} If it timed out, the machine is too busy or its shared "
                "memory is full; try again."
            ) from error

    def nodes(self) -> list[Node]:
        """The live machines with their resources."""
        import ray

        return [
            Node(
                name=str(node["NodeManagerHostname"]),
                cpus=float(node["Resources"].get("CPU", 0)),
                gpus=float(node["Resources"].get("GPU", 0)),
            )
            for node in ray.nodes()
            if node["Alive"]
        ]

    def start(self, places: Sequence[WorkerPlace], plan: Plan) -> list[Actor]:
        """Start the workers. Raises PlanRejected for an incompatible machine, RunFailed if a worker fails to start."""
        place = TransportPlace(run=self._run, process="driver", device="cpu", ask=self._ask)
        self._transport = make_transport(plan, place=place)
        self._plan, self._plugin_files = packed(plan), plan.plugin_files
        modes = VARIABLES if plan.run.batch_invariant else {}
        self._variables = {**SETTINGS, **modes, **self._config.environment}
        starts = [float(vars(stage.engine.config).get("start_timeout_s", 0.0)) for stage in plan.stages]
        # An external engine has its own limit, and starts after the model was read.
        self.build_timeout_s = self._config.start_timeout_s + max(starts)
        self._actors = [Actor(place=place) for place in places]
        self._share_devices(places)
        for actor in self._actors:
            self._spawn(actor)
        self._open(self._actors)
        return self._actors

    def _share_devices(self, places: Sequence[WorkerPlace]) -> None:
        """Reserve a device for each pair that shares one: Ray would put two train ranks on the first."""
        import ray
        from ray.util.placement_group import placement_group

        bundles: dict[int, dict[str, float]] = {}
        for place in places:
            if place.device is not None:
                bundle = bundles.setdefault(place.device, {"CPU": 0.0, "GPU": 0.0})
                bundle["CPU"] += place.cpus
                bundle["GPU"] += place.gpus
        if not bundles:
            return
        asked = [{name: amount for name, amount in bundles[n].items() if amount} for n in range(len(bundles))]
        self._group = placement_group(asked, strategy="PACK")
        ready, _ = ray.wait([self._group.ready()], timeout=self._config.start_timeout_s)
        if not ready:
            raise RunFailed(
                f"launcher: {len(asked)} devices to share, {asked[0]} each, were not free within "
                f"{self._config.start_timeout_s:g} s; another run is using them."
            )

    def prepare(self, actors: Sequence[Actor], method: str, *args: Any, **named: Any) -> list[Any]:
        """A set-up call, repeated on any process that later replaces one of these workers."""
        result = self.call(actors, method, *args, phase="build", timeout_s=self.build_timeout_s, **named)
        for actor in actors:
            actor.setup.append((method, args, named))
        return result

    def call(
        self, actors: Sequence[Actor], method: str, *args: Any, phase: str, timeout_s: float | None = None, **named: Any
    ) -> list[Any]:
        """The same call on all workers concurrently; answers in worker order."""
        calls = [Call(actor=actor, method=method, args=args, named=named) for actor in actors]
        return self.run(calls, phase=phase, timeout_s=timeout_s)

    def meet(
        self, actors: Sequence[Actor], opens: str, joins: str, *, phase: str, timeout_s: float, within_s: float
    ) -> None:
        """Form a process group of these workers, ranked in order. opens: rank 0's method.  joins: every rank's method.

        timeout_s: for the group's later collectives.  within_s: for the rendezvous.
        """
        world = len(actors)
        (address,) = self.call(actors[:1], opens, world, within_s=within_s, phase=phase, timeout_s=within_s)
        named = {"world": world, "timeout_s": timeout_s, "within_s": within_s}
        calls = [
            Call(actor=actor, method=joins, args=(address,), named={**named, "rank": rank})
            for rank, actor in enumerate(actors)
        ]
        self.run(calls, phase=phase, timeout_s=within_s)

    def run(
        self, calls: Sequence[Call], *, phase: str, timeout_s: float | None = None, restart: Restart | None = None
    ) -> list[Any]:
        """The answers, in order. The first failure is raised at once, even while other calls are pending.

        restart: the calls may be repeated; a dead or hung worker is replaced up to `launcher.retries` times.
        Re-raises a worker's user-facing errors with a note naming it; RunFailed for everything else.
        """
        import ray

        def limit() -> float:
            return self._config.call_timeout_s if timeout_s is None else timeout_s

        for call in calls:
            if call.actor.name in self._lost:
                raise self._lost[call.actor.name]
        sent = {self._sent(call): (number, call.actor.handle) for number, call in enumerate(calls)}
        result: dict[int, Any] = {}
        left = [self._config.retries if restart else 0] * len(calls)
        end = time.monotonic() + limit()
        while sent:
            ready, late = ray.wait(list(sent), num_returns=1, timeout=max(0.0, end - time.monotonic()))
            hanging = [] if ready else self._hanging([calls[n].actor for n, _ in sent.values()], phase, limit())
            for ref in ready or [ref for ref in late if calls[sent[ref][0]].actor in hanging]:
                number, handle = sent.pop(ref)
                actor = calls[number].actor
                try:
                    if not ready:
                        raise _Late(f"{', '.join(map(str, hanging))} did not answer in {limit():g} s")
                    result[number] = unpacked(self.traffic.received(ray.get(ref)))
                except Exception as error:
                    failure = self._failure(error, actor, phase, [calls[n].actor for n, _ in sent.values()], list(sent))
                    ended = has_died(error) or not ready
                    if not (ended and left[number] and restart):
                        for lost in hanging or ([actor] if ended else []):
                            self._lost[lost.name] = failure
                        raise failure from error
                    left[number] -= 1
                    self.replace(actor, handle, failure)
                    restart(actor)
                    sent[self._sent(calls[number])] = (number, actor.handle)
                    end = time.monotonic() + limit()
        return [result[number] for number in range(len(calls))]

    def aside(self, actors: Sequence[Actor], method: str) -> list[Actor]:
        """A call that bypasses the workers' queues; returns the workers that do not respond (hung or dead)."""
        import ray
        from ray.exceptions import RayActorError, RayTaskError

        asked = {actor.handle.aside.remote(method): actor for actor in actors}
        answered, _ = ray.wait(list(asked), num_returns=len(asked), timeout=SIGN_WITHIN_S)
        silent = [actor for ref, actor in asked.items() if ref not in answered]
        for ref in answered:
            try:
                ray.get(ref)
            except RayTaskError:
                pass  # Alive but not initialised yet.
            except RayActorError:
                silent.append(asked[ref])
        return silent

    def fetch(self, rows: Sequence[RemoteRows]) -> list[Tensor]:
        """Fetch rows from the workers that hold them to the driver."""
        assert self._transport is not None, "no worker was started"
        result = self._transport.fetch(rows)
        self.traffic.media(result)
        return result

    def close(self) -> None:
        """Stop the workers and, if this run started it, the cluster. Idempotent."""
        import ray

        actors, self._actors = self._actors, []
        transport, self._transport = self._transport, None
        is_up = ray.is_initialized()
        try:
            for actor in actors if is_up else ():
                if actor.handle is not None:
                    ray.kill(actor.handle, no_restart=True)
            if is_up and self._group is not None:
                ray.util.remove_placement_group(self._group)
            if transport is not None:
                transport.close()
        finally:
            if self._owns and is_up:
                self._owns = False
                ray.shutdown()

    def _spawn(self, actor: Actor) -> None:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        place = actor.place
        options: dict[str, Any] = {
            "name": actor_name(self._run, place.name),
            "namespace": self._run,
            "num_cpus": place.cpus,
            "num_gpus": place.gpus,
            "max_restarts": 0,
            "runtime_env": {"env_vars": {**self._variables, **place.variables}},
        }
        if place.device is not None:
            options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(
                self._group, placement_group_bundle_index=place.device
            )
        actor.handle = actor_class().options(**options).remote(self._run, place.name)

    def _open(self, actors: Sequence[Actor]) -> None:
        """Wait for the processes, and have each check its machine."""
        import ray

        assert self._transport is not None
        opened = {
            actor.handle.open.remote(
                self._plan, self._transport.address, self._plugin_files, has_gpu=actor.place.gpus > 0
            ): actor
            for actor in actors
        }
        end = time.monotonic() + self._config.start_timeout_s
        waiting = list(opened)
        while waiting:
            ready, waiting = ray.wait(waiting, num_returns=1, timeout=max(0.0, end - time.monotonic()))
            if not ready:
                late = ", ".join(str(opened[ref]) for ref in waiting)
                raise RunFailed(
                    f"launcher: {late} did not start within {self._config.start_timeout_s:g} s: the cluster has no "
                    "free resources for it, or launcher.start_timeout_s is too short."
                )
            for ref in ready:
                try:
                    opened[ref].facts = ray.get(ref)
                except Exception as error:
                    raise explained(error, opened[ref], "start", others=self._actors) from error

    def _sent(self, call: Call) -> Any:
        data = self.traffic.sent(packed((call.args, dict(call.named))))
        try:
            handle = call.actor.handle
            return (handle.background if call.is_background else handle.call).remote(call.method, data)
        except Exception as error:
            # Large arguments go into the object store first, which may be full.
            raise explained(error, call.actor, call.method, others=self._actors) from error

    def _failure(
        self, error: Exception, actor: Actor, phase: str, others: Sequence[Actor], waiting: Sequence[Any]
    ) -> UniRLError:
        """The error to raise. When a worker fails because a peer died, report the peer."""
        import ray

        if isinstance(error, _Late):
            return ProcessLost(
                f"launcher: {error} in phase {phase!r}. It is hung, or launcher.call_timeout_s is too short."
            )
        failure = explained(error, actor, phase, others=self._actors)
        if waiting and not has_died(error) and type(failure) is RunFailed:
            end = time.monotonic() + CAUSE_WITHIN_S
            for ref, other in zip(waiting, others, strict=True):
                try:
                    ray.get(ref, timeout=max(0.0, end - time.monotonic()))
                except Exception as cause:  # noqa: BLE001 - only a death matters here; the original failure is raised
                    if has_died(cause):
                        self._lost[other.name] = explained(cause, other, phase, others=self._actors)
                        return self._lost[other.name]
        return failure

    def _hanging(self, late: list[Actor], phase: str, limit: float) -> list[Actor]:
        """The late workers that are hung: those that fail the health check, or all of them when every one passes.

        Raises WorkerDied when another worker fails the health check: the late ones are waiting for it.
        """
        silent = self.aside(self._actors, "facts")
        hanging = [actor for actor in late if actor in silent]
        if silent and not hanging:
            failure = WorkerDied(
                f"launcher: {silent[0]} does not respond to a health check; {', '.join(map(str, late))} waited "
                f"{limit:g} s for it in phase {phase!r}.",
                worker=silent[0].name,
            )
            self._lost[silent[0].name] = failure
            raise failure
        return hanging or late

    def replace(self, actor: Actor, old: Any, failure: UniRLError) -> None:
        """Replace a worker's process and repeat its set-up. old: handle of the failed process."""
        import ray

        with self._restarting:
            if actor.handle is not old:
                return  # Another thread hit the same failure and has replaced it.
            was = str(actor)
            self._lost.pop(actor.name, None)
            ray.kill(old, no_restart=True)
            end = time.monotonic() + self._config.start_timeout_s
            while True:
                try:
                    self._spawn(actor)
                    break
                except ValueError:
                    # Ray frees the name once the old process has ended.
                    if time.monotonic() > end:
                        raise
                    time.sleep(0.1)
            self._open([actor])
            for method, args, named in actor.setup:
                self.call([actor], method, *args, phase="restart", timeout_s=self.build_timeout_s, **named)
            self.findings.append(f"{failure} {actor} replaces {was} and repeats its work.")

    def _ask(self, owner: str, question: Any) -> Any:
        import ray

        actor = next(actor for actor in self._actors if actor.name == owner)
        try:
            return ray.get(actor.handle.answer.remote(question), timeout=self._config.call_timeout_s)
        except Exception as error:
            raise explained(error, actor, "answer", others=self._actors) from error
