"""A worker: one process with some parts of a plan, driven from afar.

Everything large is made, kept and used here. What goes back to the driver are batches whose large tensors stayed
behind, numbers and small tensors.
"""

from __future__ import annotations

import dataclasses
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from datetime import timedelta
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
from torch import Tensor
from unirl.core.capability import Cap, Support
from unirl.core.catalog import Catalog
from unirl.core.config import LatentSamplingConfig, TextSamplingConfig
from unirl.core.data import MediaRef
from unirl.core.errors import PlanRejected
from unirl.core.parts import Parts
from unirl.core.plan import Plan
from unirl.core.request import Request
from unirl.core.roles import (
    DiffusionModel,
    Policy,
    ScoreInput,
    Scores,
    StatefulAlgorithm,
    TextModel,
    TrainReport,
    TransportCounts,
    TransportPlace,
    WeightUpdate,
)
from unirl.core.rollout import Rollout
from unirl.core.run import build_parts, build_rewards
from unirl.core.track import LatentSegment, TextSegment, Track

from .remote_rows import RemoteRows, dehydrated, hydrated
from .transports import make_transport
from .weight_ends import Tell, WeightEnds
from .weights.group import Address, listen, reach

__all__ = ["Worker", "WorkerFacts"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class WorkerFacts:
    """Who a worker is, for messages."""

    host: str
    pid: int
    device: str
    gpu: str = ""
    """Which one it is, by the name that all processes of its machine know it by; empty on the CPU."""


class Worker(WeightEnds):
    """Not tied to Ray: whatever starts it gives it a way to reach the transports of the others."""

    def __init__(
        self,
        name: str,
        plan: Plan,
        *,
        run: str,
        ask: Callable[[str, Any], Any],
        tell: Tell,
        machine: str,
        address: Any = None,
    ) -> None:
        """run, ask, address: see `unirl.core.roles.TransportPlace`.

        machine: what to call this machine in messages.
        """
        super().__init__()
        os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
        _check_versions(plan, machine)
        self._name = name
        self._tell = tell
        self._plan = plan
        self._parts: Parts | None = None
        self._rewards: Mapping[str, Any] = {}
        self._policy: ExitStack | None = None
        self._brought: Track | None = None
        self._kept: dict[int, list[Any]] = {}
        """Number of a rollout -> names of its tensors that are kept here."""
        self._said: list[Any] = []
        """Names of what the reference policy said last."""
        wanted = plan.run.device
        is_cuda = torch.cuda.is_available() and wanted != "cpu"
        self._device = torch.device("cuda" if is_cuda else "cpu")
        if plan.run.threads:
            torch.set_num_threads(plan.run.threads)
        place = TransportPlace(run=run, process=name, device=self._device, ask=ask, address=address)
        self.transport = make_transport(plan, place=place)

    def facts(self) -> WorkerFacts:
        gpu = str(torch.cuda.get_device_properties(self._device).uuid) if self._device.type == "cuda" else ""
        return WorkerFacts(host=socket.gethostname(), pid=os.getpid(), device=str(self._device), gpu=gpu)

    # The process group of the train ranks.

    def open_group(self, world: int, *, within_s: float) -> Address:
        """Rank 0: listen for the others on a port that is free, and say where."""
        self._group_store, address = listen(world, timeout_s=within_s)
        return address

    def join_group(self, address: Address, *, rank: int, world: int, timeout_s: float, within_s: float) -> None:
        """timeout_s: of a collective call.  within_s: for the others to come."""
        if rank:
            self._group_store = reach(address, world, timeout_s=within_s)
        backend = "gloo" if self._device.type == "cpu" else "cpu:gloo,cuda:nccl"
        timeout = timedelta(seconds=timeout_s)
        dist.init_process_group(backend, store=self._group_store, rank=rank, world_size=world, timeout=timeout)

    # Building.

    def build(self, role: Literal["train", "rollout", "reference", "reward"], *, with_engine: bool = True) -> None:
        """Build this worker's parts: the rewards, or everything else; the engine where this worker generates."""
        catalog = Catalog.of({})
        plan = dataclasses.replace(
            self._plan,
            run=dataclasses.replace(self._plan.run, device=str(self._device), threads=self._plan.run.threads),
        )
        if role in ("rollout", "reference"):
            plan = _alone(plan)
        if role == "reward":
            self._rewards = build_rewards(plan, catalog=catalog)
        else:
            self._parts = build_parts(plan, catalog=catalog, with_rewards=False, with_engine=with_engine)

    @property
    def parts(self) -> Parts:
        assert self._parts is not None, f"worker {self._name!r} was not built"
        return self._parts

    # Model.

    def schedule(self, sampling: LatentSamplingConfig) -> Tensor:
        return cast("DiffusionModel", self.parts.model).schedule(sampling)

    def latent_shape(self, sampling: LatentSamplingConfig) -> tuple[int, ...]:
        return cast("DiffusionModel", self.parts.model).latent_shape(sampling)

    def prompt_tokens(
        self, prompts: Sequence[str], sampling: TextSamplingConfig, media: Sequence[Sequence[MediaRef]] | None
    ) -> list[Tensor]:
        return cast("TextModel", self.parts.model).prompt_tokens(prompts, sampling=sampling, media=media)

    def stop_tokens(self) -> tuple[int, ...]:
        return cast("TextModel", self.parts.model).stop_tokens

    # Engine.

    def generate(self, request: Request) -> Rollout:
        """Generate this worker's share. Its tensors stay here until no step needs them."""
        self._drop_before(request.rollout)
        rollout = self.parts.engine.generate(request)

        def keep(tensors: Sequence[Tensor]) -> list[Any]:
            names = self.transport.keep(tensors)
            self._kept.setdefault(request.rollout, []).extend(names)
            return names

        even = {name: _even(track, request) for name, track in rollout.tracks.items()}
        return Rollout(tracks={name: dehydrated(track, keep) for name, track in even.items()})

    def _drop_before(self, rollout: int) -> None:
        """Forget what no step needs: streamed, a rollout comes in pieces; ahead, the one before it still trains."""
        run = self._plan.run
        if run.rollout_ahead:
            over = [number for number in self._kept if number < rollout - run.rollout_ahead]
        else:
            over = [number for number in self._kept if number != rollout or not run.stream_groups]
        if over:
            self.transport.drop([name for number in over for name in self._kept.pop(number)])

    def set_version(self, version: int) -> None:
        self.parts.engine.version = version

    def sleep(self) -> None:
        """Free the device for those who train on it."""
        self.parts.engine.sleep()
        if self._samples_with_module:
            self.parts.backend.offload()

    def wake(self) -> None:
        if self._samples_with_module:
            self.parts.backend.onload()
        self.parts.engine.wake()

    @property
    def _samples_with_module(self) -> bool:
        """Whether the engine samples with the module of this worker, and has no weights of its own."""
        return self._plan.engine.spec.support(Cap.WEIGHTS_SHARED) is Support.NATIVE

    # Backend.

    def offload(self) -> None:
        self.parts.backend.offload()

    def onload(self) -> None:
        self.parts.backend.onload()

    def bring(self, track: Track) -> None:
        """Fetch this rank's rows of the next `train` from whoever made them. Nothing moves, so it may be repeated."""
        self._brought = hydrated(track, self.transport.fetch)

    def train(self, *, progress: float, state: Mapping[str, Any]) -> tuple[TrainReport, int]:
        """Train on the rows that were brought; returns the report and the new version. Collective.

        state: of the driver's algorithm, which decides it for all ranks; empty where it keeps none.
        """
        here, self._brought = self._brought, None
        assert here is not None, f"worker {self._name!r} was brought no rows"
        algorithm = self.parts.algorithm
        if state:
            assert isinstance(algorithm, StatefulAlgorithm), "the driver's algorithm keeps a state, this one does not"
            algorithm.load_state(state)
        report = self.parts.backend.train(here, algorithm, progress=progress)
        return report, self.parts.backend.version

    def reference(self, track: Track) -> Track:
        """The track with what the reference policy says of it, which stays here until the next one is asked for."""
        if self._said:
            self.transport.drop(self._said)
            self._said = []
        here = self.parts.backend.with_reference(hydrated(track, self.transport.fetch), policy="live").segment
        if isinstance(here, TextSegment):
            assert isinstance(track.segment, TextSegment)
            segment = dataclasses.replace(track.segment, reference_log_probs=here.reference_log_probs)
        else:
            assert isinstance(here, LatentSegment)
            segment = dataclasses.replace(track.latent, reference_means=here.reference_means)

        def keep(tensors: Sequence[Tensor]) -> list[Any]:
            self._said = self.transport.keep(tensors)
            return self._said

        return dehydrated(dataclasses.replace(track, segment=segment), keep)

    def enter_policy(self, which: Policy) -> None:
        stack = ExitStack()
        stack.enter_context(self.parts.backend.policy(which))
        self._policy = stack

    def leave_policy(self) -> None:
        if self._policy is not None:
            self._policy.close()
            self._policy = None

    def end_rollout(self) -> None:
        self.parts.backend.end_rollout()

    def save(self, folder: Path) -> None:
        self.parts.backend.save(folder)

    def load(self, folder: Path) -> int:
        self.parts.backend.load(folder)
        return self.parts.backend.version

    def version(self) -> int:
        return self.parts.backend.version

    # Weights.

    def weights(self, *, policy: Policy, kind: Literal["full", "lora", "merged"]) -> WeightUpdate | None:
        """The weights, which all ranks gather together, from rank 0 alone."""
        update = self.parts.backend.weights(policy=policy, kind=kind)
        is_first = not dist.is_initialized() or dist.get_rank() == 0
        return update if is_first else None

    def adopt(self, update: WeightUpdate) -> None:
        self.parts.backend.adopt(update)

    # Rewards.

    def score(self, name: str, samples: ScoreInput) -> Scores:
        """Score samples, whose media are fetched from whoever made them."""
        remote = [value for value in (samples.images, *(samples.videos or ())) if isinstance(value, RemoteRows)]
        here = dict(zip(map(id, remote), self.transport.fetch(remote), strict=True)) if remote else {}
        local = dataclasses.replace(
            samples,
            images=here.get(id(samples.images), samples.images),
            videos=None if samples.videos is None else tuple(here.get(id(v), v) for v in samples.videos),
        )
        scores: Scores = self._rewards[name].score(local)
        return Scores(
            values=scores.values.detach().cpu(), parts={key: part.detach().cpu() for key, part in scores.parts.items()}
        )

    # Data.

    def answer(self, question: Any) -> Any:
        return self.transport.answer(question)

    def data_counts(self) -> TransportCounts:
        return self.transport.counts()

    def close(self) -> None:
        self.leave_policy()
        self.leave_weight_group()
        if self._parts is not None:
            self._parts.engine.close()
            self._parts.backend.close()
        for reward in self._rewards.values():
            reward.close()
        self.transport.close()
        if dist.is_initialized():
            dist.destroy_process_group()


def _even(track: Track, request: Request) -> Track:
    """The track with as many stored positions as any share of the request may have: rows that lie with workers are
    joined as they are. Groups with SDE steps of their own store more or fewer of them."""
    segment = track.segment
    if not isinstance(segment, LatentSegment) or not request.latent(track.name).sampling.sde.per_group:
        return track
    # Around each of S steps lie two positions, and the end is kept as well.
    most = min(2 * int(segment.sde_steps.shape[1]) + 1, segment.num_steps + 1)
    return dataclasses.replace(track, segment=segment.with_slots(most))


def _alone(plan: Plan) -> Plan:
    """The plan of a process that holds whole weights of its own and trains none: the mesh of the train ranks is none of
    its, nor is their critic."""
    config: Any = plan.backend.config
    names = {item.name for item in dataclasses.fields(config)} & {"mesh", "critic"}
    own = {name: type(getattr(config, name))() for name in names}
    return dataclasses.replace(
        plan, backend=dataclasses.replace(plan.backend, config=dataclasses.replace(config, **own))
    )


def _check_versions(plan: Plan, machine: str) -> None:
    """Every machine must run the code that the plan was made with."""
    wrong: list[str] = []
    for dist_name, wanted in {choice.dist: choice.version for choice in plan.choices}.items():
        try:
            found = version(dist_name)
        except PackageNotFoundError:
            found = "nothing"
        if found != wanted:
            wrong.append(f"{dist_name} {wanted} is wanted, {found} is installed")
    if wrong:
        raise PlanRejected(f"launcher: machine {machine} does not fit the driver: {'; '.join(wrong)}.")
