"""A worker: a process that runs some parts of a plan, driven remotely.

Large tensors are created, kept and used here. The driver gets batches that reference them, scalars and small tensors.
"""

from __future__ import annotations

import dataclasses
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from unirl.core.plugins.catalog import Catalog
from unirl.core.roles import (
    Backend,
    Engine,
    Policy,
    ScoreInput,
    Scores,
    TrainReport,
    TransportPlace,
    WeightUpdate,
)
from unirl.core.specs.capability import Cap
from unirl.core.specs.plan import Plan
from unirl.core.types.request import Request
from unirl.core.types.track import LatentSegment, TextSegment, Track
from unirl.loop.build import build_parts, build_rewards
from unirl.loop.config import OffloadingConfig
from unirl.loop.idle_offload import taking_turns
from unirl.loop.parts import Parts, stage_job
from unirl.numerics.batch_invariant import batch_invariant
from unirl.transfer.remote_rows import dehydrated, hydrated
from unirl.transfer.weights.group import Address, interface_of, listen, reach

from .kept_rows import padded, superseded
from .machine_code import check_versions
from .transports import make_transport
from .weight_ends import Tell, WeightEnds
from .worker_plan import WorkerRole, plan_of_worker

__all__ = ["Worker", "WorkerFacts"]

LOOK_EVERY_S = 0.5


@dataclasses.dataclass(frozen=True, kw_only=True)
class WorkerFacts:
    """Identity of a worker, for messages."""

    host: str
    pid: int
    device: str
    gpu: str = ""
    """Machine-wide id of its GPU; empty on the CPU."""
    device_name: str = ""
    """Product name of its GPU; empty on the CPU."""


class Worker:
    """Independent of Ray: its launcher passes in the means to reach the other workers' transports."""

    def __init__(
        self,
        name: str,
        plan: Plan,
        *,
        run: str,
        ask: Callable[[str, Any], Any],
        tell: Tell,
        machine: str,
        host: str,
        address: Any = None,
        has_gpu: bool,
    ) -> None:
        """run, ask, address: see `unirl.core.roles.TransportPlace`.

        machine: name of this machine in messages.  host: its IP address, by which other machines reach it.  has_gpu:
        whether the launcher gave it a GPU; without one it computes on the CPU.
        """
        os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
        check_versions(plan, machine)
        self._name, self._host = name, host
        # Gloo looks up the machine's own name, which may lead to an address that no other machine reaches.
        if interface := interface_of(host):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        self._tell = tell
        self._plan = plan
        self._parts: Parts | None = None
        self._weights: WeightEnds | None = None
        self._rewards: Mapping[str, Any] = {}
        self._policy: ExitStack | None = None
        self._brought: list[Track] | None = None
        self._snapshots: dict[str, Callable[[Path], None]] = {}
        """Learner -> the function that writes its latest snapshot."""
        self._kept: dict[tuple[int, str], list[Any]] = {}
        """Rollout number and track -> handles of its tensors stored here."""
        self._said: dict[str, list[Any]] = {}
        """Track -> handles of its latest reference-policy outputs."""
        expected = plan.run.device
        is_cuda = has_gpu and expected != "cpu" and torch.cuda.is_available()
        self._device = torch.device("cuda" if is_cuda else "cpu")
        self._numerics = ExitStack()
        if plan.run.batch_invariant:
            # Lives as long as the process; nothing closes it.
            self._numerics.enter_context(batch_invariant(on_cuda=is_cuda))
        if plan.run.threads:
            torch.set_num_threads(plan.run.threads)
        torch.set_float32_matmul_precision(plan.run.matmul_precision)
        place = TransportPlace(run=run, process=name, device=self._device, ask=ask, address=address)
        self.transport = make_transport(plan, place=place)

    def facts(self) -> WorkerFacts:
        facts = WorkerFacts(host=socket.gethostname(), pid=os.getpid(), device=str(self._device))
        if self._device.type != "cuda":
            return facts
        properties: Any = torch.cuda.get_device_properties(self._device)
        return dataclasses.replace(facts, gpu=str(properties.uuid), device_name=str(properties.name))

    def text_of(self, file: Path, *, within_s: float) -> str:
        """Text of a file that was just written on another machine, empty if there is none. NFS may show it late."""
        end = time.monotonic() + within_s
        while True:
            try:
                return file.read_text(encoding="utf-8")
            except OSError:
                if time.monotonic() > end:
                    return ""
                time.sleep(LOOK_EVERY_S)

    # The process group of the train ranks.

    def open_group(self, world: int, *, within_s: float) -> Address:
        """Rank 0: listen on a free port; returns its address."""
        self._group_store, address = listen(self._host, world, timeout_s=within_s)
        return address

    def join_group(self, address: Address, *, rank: int, world: int, timeout_s: float, within_s: float) -> None:
        """timeout_s: of a collective call.  within_s: for the rendezvous."""
        if rank:
            self._group_store = reach(address, world, timeout_s=within_s)
        backend = "gloo" if self._device.type == "cpu" else "cpu:gloo,cuda:nccl"
        timeout = timedelta(seconds=timeout_s)
        dist.init_process_group(backend, store=self._group_store, rank=rank, world_size=world, timeout=timeout)

    # Building.

    def build(self, role: WorkerRole, *, with_engine: bool = True, serves: Sequence[str] = ()) -> None:
        """Build this worker's parts: rewards, or everything else, with the engine if this worker generates. Rewards
        that a loss backpropagates are also built where it trains.

        serves: the rewards that it scores, or the stages that it generates, whose models it builds; empty is all.
        """
        catalog = Catalog.of({})
        plan = plan_of_worker(self._plan, role=role, device=str(self._device), serves=serves)
        if role == "reward":
            self._rewards = build_rewards(plan, catalog=catalog, keys=serves or None)
        else:
            is_sharded = role == "train" and dist.is_initialized() and dist.get_world_size() > 1
            config = None if plan.launcher is None else plan.launcher.config
            offloads = isinstance(config, OffloadingConfig) and config.offload_idle
            parts = build_parts(
                plan,
                catalog=catalog,
                rewards="backpropagated" if role == "train" else "none",
                with_engine=with_engine,
                lazy=is_sharded,
                offload=offloads,
            )
            self._parts = taking_turns(parts, plan) if offloads else parts
            self._weights = WeightEnds(
                self._name,
                parts=self._parts,
                plan=plan,
                tell=self._tell,
                device=self._device,
                host=self._host,
            )

    @property
    def parts(self) -> Parts:
        assert self._parts is not None, f"worker {self._name!r} was not built"
        return self._parts

    @property
    def weights(self) -> WeightEnds:
        """Its end of weight transfers."""
        assert self._weights is not None, f"worker {self._name!r} was not built"
        return self._weights

    # Model.

    def ask_model(self, learner: str, name: str, *args: Any, **named: Any) -> Any:
        """The answer of a model's method, or one of its properties."""
        answer = getattr(self.parts.models[learner], name)
        return answer(*args, **named) if callable(answer) else answer

    # Engine.

    def generate(self, request: Request) -> Track:
        """Generate this worker's share. The tensors stay here until no step needs them."""
        key = (request.rollout, request.track)
        if over := superseded(self._kept, by=key, run=self._plan.run, data=self._plan.data):
            self.transport.drop([name for old in over for name in self._kept.pop(old)])
        track = self.parts.engines[request.track].generate(request)

        def keep(tensors: Sequence[Tensor]) -> list[Any]:
            names = self.transport.keep(tensors)
            self._kept.setdefault(key, []).extend(names)
            return names

        return dehydrated(padded(track, request), keep)

    def set_version(self, stage: str, version: int) -> None:
        self.parts.engines[stage].version = version

    def sleep(self) -> None:
        """Free the device for training."""
        for engine in self._engines:
            engine.sleep()
        for backend in self._sampled_modules:
            backend.offload()
        self._return_memory()

    def wake(self) -> None:
        for backend in self._sampled_modules:
            backend.onload()
        for engine in self._engines:
            engine.wake()

    @property
    def _engines(self) -> list[Engine]:
        return list({id(engine): engine for engine in self.parts.engines.values()}.values())

    @property
    def _sampled_modules(self) -> list[Backend]:
        """Backends whose module an engine of this worker samples with, having no separate weights."""
        sampled = {
            stage.learner.name for stage in self._plan.stages if Cap.WEIGHTS_SHARED in stage.engine.spec.capabilities
        }
        return [backend for name, backend in self.parts.backends.items() if name in sampled]

    # Backends.

    def offload(self) -> None:
        """Free the device for rollouts."""
        for backend in self.parts.backends.values():
            backend.offload()
        self._return_memory()

    def _return_memory(self) -> None:
        """Return what torch's allocator keeps: the next user of this device is another process."""
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def onload(self) -> None:
        for backend in self.parts.backends.values():
            backend.onload()

    def bring(self, tracks: Sequence[Track]) -> None:
        """Fetch this rank's rows for the next `train`. Has no side effects elsewhere, so it may be repeated."""
        self._brought = [hydrated(track, self.transport.fetch) for track in tracks]

    def train(self, learner: str, states: Sequence[Mapping[str, Any]], *, progress: float) -> tuple[TrainReport, int]:
        """Train on the fetched rows; returns the report and the new version. Collective.

        states: of the driver's algorithms, one for each track that was fetched; they override the workers' own.
        """
        tracks, self._brought = self._brought, None
        assert tracks is not None, f"worker {self._name!r} has no fetched rows"
        for track, state in zip(tracks, states, strict=True):
            algorithm = self.parts.algorithms[track.name]
            if state:
                algorithm.load_state(state)
        backend = self.parts.backends[learner]
        jobs = [stage_job(self.parts, self._plan, track) for track in tracks]
        return backend.train(jobs, progress=progress), backend.version

    def reference(self, learner: str, track: Track) -> Track:
        """The track with the reference policy's outputs, which stay here until the next call for it."""
        if said := self._said.pop(track.name, []):
            self.transport.drop(said)
        here = self.parts.backends[learner].with_reference(hydrated(track, self.transport.fetch), policy="live").segment
        if isinstance(here, TextSegment):
            assert isinstance(track.segment, TextSegment)
            segment = dataclasses.replace(track.segment, reference_log_probs=here.reference_log_probs)
        else:
            assert isinstance(here, LatentSegment)
            segment = dataclasses.replace(track.latent, reference_means=here.reference_means)

        def keep(tensors: Sequence[Tensor]) -> list[Any]:
            names = self.transport.keep(tensors)
            self._said[track.name] = list(names)
            return names

        return dehydrated(dataclasses.replace(track, segment=segment), keep)

    def enter_policy(self, learner: str, which: Policy) -> None:
        stack = ExitStack()
        stack.enter_context(self.parts.backends[learner].policy(which))
        self._policy = stack

    def leave_policy(self) -> None:
        if self._policy is not None:
            self._policy.close()
            self._policy = None

    def end_rollout(self, learner: str) -> None:
        self.parts.backends[learner].end_rollout()

    def save(self, learner: str, folder: Path) -> None:
        self.parts.backends[learner].save(folder)

    def snapshot(self, learner: str) -> bool:
        """Take a snapshot for `write_snapshot`; returns whether the backend makes one."""
        write = self.parts.backends[learner].snapshot()
        if write is not None:
            self._snapshots[learner] = write
        return write is not None

    def write_snapshot(self, learner: str, folder: Path) -> None:
        """Collective, beside other calls."""
        self._snapshots.pop(learner)(folder)

    def load(self, learner: str, folder: Path) -> int:
        self.parts.backends[learner].load(folder)
        return self.parts.backends[learner].version

    def versions(self) -> dict[str, int]:
        return self.parts.versions

    def version_of(self, learner: str, policy: Policy) -> int:
        return self.parts.backends[learner].version_of(policy)

    # Weights.

    def export_weights(
        self,
        learner: str,
        *,
        policy: Policy,
        kind: Literal["full", "lora", "merged"],
        dtypes: Mapping[str, str] | None,
    ) -> WeightUpdate | None:
        """Collective. Rank 0 returns the gathered weights, other ranks None."""
        update = self.parts.backends[learner].export_weights(policy=policy, kind=kind, dtypes=dtypes)
        if not dist.is_initialized() or dist.get_rank() == 0:
            return dataclasses.replace(update, tensors=dict(update.tensors))
        for _ in update.tensors.values():
            pass  # its part in the gathers
        return None

    def adopt(self, learner: str, update: WeightUpdate) -> None:
        self.parts.backends[learner].adopt(update)

    # Rewards.

    def score(self, name: str, samples: ScoreInput) -> Scores:
        """Score samples; fetches their media from the workers that generated them."""
        scores: Scores = self._rewards[name].score(hydrated(samples, self.transport.fetch))
        return Scores(
            values=scores.values.detach().cpu(),
            parts={key: part.detach().cpu() for key, part in scores.parts.items()},
            scored=None if scores.scored is None else scores.scored.cpu(),
        )

    # Data.

    def answer(self, question: Any) -> Any:
        return self.transport.answer(question)

    def close(self) -> None:
        self.leave_policy()
        if self._weights is not None:
            self._weights.leave_group()
        if self._parts is not None:
            for engine in self._engines:
                engine.close()
            for backend in self._parts.backends.values():
                backend.close()
            for reward in self._parts.rewards.values():
                reward.close()
        for reward in self._rewards.values():
            reward.close()
        self.transport.close()
        if dist.is_initialized():
            dist.destroy_process_group()
