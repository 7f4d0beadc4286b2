"""The parts of a plan as the loop sees them, when they live with workers. Each fits its role."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

import torch
from torch import Tensor
from unirl.core.algorithm_state import algorithm_state
from unirl.core.balance import balance
from unirl.core.config import LatentSamplingConfig, TextSamplingConfig
from unirl.core.data import MediaRef
from unirl.core.errors import UniRLError
from unirl.core.request import Request
from unirl.core.roles import Algorithm, Policy, ScoreInput, Scores, TrainReport, WeightReceipt, WeightUpdate
from unirl.core.rollout import Rollout
from unirl.core.spec import ModelSpec
from unirl.core.track import Conditions, TextSegment, Track

from .actors import Actor, Call
from .cluster import Cluster
from .remote_rows import RemoteRows
from .samples import Named, Samples
from .turns import Turns

__all__ = ["RemoteBackend", "RemoteEngine", "RemoteModel", "RemoteReward", "shares"]

T = TypeVar("T")

SETTLE_S = 10.0
"""Time for every rank to end what it does when one of them has failed."""


def shares(group_ids: Sequence[str], workers: int, *, costs: Sequence[int] | None = None) -> list[list[int]]:
    """Rows of each worker: whole groups, in order, as even in rows as that allows; rows where groups are too few.

    costs: of each row; the groups are then dealt so that all workers have about as much to do, and as many of them.
    Whole groups keep the mini-batches of an update those of one rank (see `unirl.numerics.stack.mini_batches`), and the
    embeddings of a prompt with one worker.
    """
    groups: dict[str, list[int]] = {}
    for row, group in enumerate(group_ids):
        groups.setdefault(group, []).append(row)
    units = list(groups.values()) if len(groups) >= workers else [[row] for row in range(len(group_ids))]
    if costs is not None:
        parts = balance([sum(costs[row] for row in rows) for rows in units], workers, equal_counts=True)
        return [[row for unit in part for row in units[unit]] for part in parts]
    dealt: list[list[int]] = []
    left, start = len(group_ids), 0
    for worker in range(workers):
        wanted, rows = left / (workers - worker), list[int]()
        # The last units go to the workers that have none yet.
        while start < len(units) - (workers - worker - 1) and (
            not rows or abs(len(rows) + len(units[start]) - wanted) <= abs(len(rows) - wanted)
        ):
            rows += units[start]
            start += 1
        dealt.append(rows)
        left -= len(rows)
    return dealt


class RemoteModel:
    """What the driver asks of a model: sizes and schedules. The rest of the role belongs to the workers."""

    def __init__(self, spec: ModelSpec, cluster: Cluster, actor: Actor) -> None:
        self.spec = spec
        self.device = torch.device("cpu")
        self._cluster, self._actor = cluster, actor
        self._schedules: dict[str, Tensor] = {}
        self._stop_tokens: tuple[int, ...] | None = None

    @property
    def trainable(self) -> Any:
        raise RuntimeError("the module that trains lives with the workers; the driver holds none")

    def encode(self, prompts: Sequence[str], **_: Any) -> Mapping[str, Any]:
        raise RuntimeError("prompts are encoded by the workers")

    def velocity(self, x: Any, sigma: Any, conditions: Any) -> Any:
        raise RuntimeError("the denoiser lives with the workers")

    def decode(self, latents: Any) -> Any:
        raise RuntimeError("latents are decoded by the workers")

    def schedule(self, sampling: LatentSamplingConfig) -> Tensor:
        key = repr(sampling)
        if key not in self._schedules:
            (self._schedules[key],) = self._cluster.call([self._actor], "schedule", sampling, phase="request")
        return self._schedules[key]

    def latent_shape(self, sampling: LatentSamplingConfig) -> tuple[int, ...]:
        (shape,) = self._cluster.call([self._actor], "latent_shape", sampling, phase="request")
        return shape

    def prompt_tokens(
        self,
        prompts: Sequence[str],
        *,
        sampling: TextSamplingConfig,
        media: Sequence[Sequence[MediaRef]] | None = None,
    ) -> list[Tensor]:
        (tokens,) = self._cluster.call([self._actor], "prompt_tokens", prompts, sampling, media, phase="request")
        return tokens

    @property
    def stop_tokens(self) -> tuple[int, ...]:
        found = self._stop_tokens
        if found is None:
            (found,) = self._cluster.call([self._actor], "stop_tokens", phase="request")
            self._stop_tokens = found
        return found


class RemoteEngine:
    """Rollouts by several workers, each its share of the request."""

    def __init__(
        self,
        cluster: Cluster,
        actors: Sequence[Actor],
        *,
        lockstep: bool,
        copies: int,
        turns: Turns,
        samples: Samples,
    ) -> None:
        """lockstep: workers whose forwards are collective; each gets equally many rows, the missing ones as padding.

        copies: neighbouring workers that generate the same rows together; the first of them answers for all.
        samples: knows what was made, for those who need it.
        """
        self._cluster, self._actors, self._lockstep, self._copies = cluster, list(actors), lockstep, copies
        self._turns, self._samples = turns, samples
        self._version = 0

    @property
    def version(self) -> int:
        return self._version

    @version.setter
    def version(self, value: int) -> None:
        if value != self._version:
            self._cluster.call(self._actors, "set_version", value, phase="sync")
        self._version = value

    def note_version(self, value: int) -> None:
        """The workers have it already, with the weights that came."""
        self._version = value

    def generate(self, request: Request) -> Rollout:
        self._turns.rollout()
        dealt = shares(request.group_ids, len(self._actors) // self._copies)
        rows = max(map(len, dealt))
        calls: list[Call] = []
        for number, actor in enumerate(self._actors):
            mine = dealt[number // self._copies]
            if mine or self._lockstep:
                share = _padded(request, mine, to=rows) if self._lockstep else request.select(mine)
                calls.append(Call(actor=actor, method="generate", args=(share,)))
        self._samples.begin(request.rollout)
        found = self._cluster.run(calls, phase="generate", restart=self._samples.restart)
        self._samples.note(calls, found)
        answers = found[:: self._copies]
        self._cluster.traffic.made(request.num_rows)
        counts = [len(mine) for mine in dealt if mine or self._lockstep]
        kept = [(answer, count) for answer, count in zip(answers, counts, strict=True) if count]
        order = [row for mine in dealt for row in mine]
        back = sorted(range(len(order)), key=order.__getitem__)
        tracks: dict[str, Track] = {}
        for name in request.tracks:
            joined = Track.concat([answer.tracks[name].select(range(count)) for answer, count in kept]).select(back)
            if isinstance(joined.images, RemoteRows):
                joined = dataclasses.replace(joined, images=joined.images.with_fetch(self._fetch))
            tracks[name] = joined
        return Rollout(tracks=tracks)

    def _fetch(self, rows: Sequence[RemoteRows]) -> list[Tensor]:
        return self._samples.needed(lambda named: self._cluster.fetch([named(each) for each in rows]))

    def load_weights(self, update: WeightUpdate) -> WeightReceipt:
        raise RuntimeError("weights go from worker to worker, not through the driver")

    def sleep(self) -> None:
        pass

    def wake(self) -> None:
        pass

    def close(self) -> None:
        pass


class RemoteBackend:
    """The train ranks as one backend."""

    def __init__(
        self,
        cluster: Cluster,
        actors: Sequence[Actor],
        *,
        copies: int,
        turns: Turns,
        references: Sequence[Actor] = (),
    ) -> None:
        """copies: neighbouring ranks that split the layers among them, and so train on the same rows.

        references: workers that hold the reference policy; none where the train ranks answer for it.
        """
        self._references = list(references)
        self._cluster, self._actors, self._copies, self._turns = cluster, list(actors), copies, turns
        self.version: int = self._call("version", phase="build")[0]
        self.lend: Callable[[Policy], AbstractContextManager[None]] | None = None
        """Gives engines that hold weights of their own those of another policy for a while."""
        self.samples: Samples | None = None
        """Knows what the rollout workers made; set before anything is trained on."""

    @contextmanager
    def policy(self, which: Policy = "live") -> Iterator[None]:
        if self.lend is not None:
            with self.lend(which):
                yield
            return
        self._call("enter_policy", which, phase="policy")
        try:
            yield
        finally:
            self._call("leave_policy", phase="policy")

    def train(self, track: Track, algorithm: Algorithm, *, progress: float) -> TrainReport:
        """Each rank trains on its share with the algorithm that it built, in the state of `algorithm`, which made
        requests and advantages."""
        if self._references:
            track = self.with_reference(track)
        lengths = track.segment.total_lengths if isinstance(track.segment, TextSegment) else None
        dealt = shares(track.group_ids, len(self._actors) // self._copies, costs=lengths)

        def bring(named: Named) -> None:
            self._turns.train()
            calls: list[Call] = []
            for number, actor in enumerate(self._actors):
                rows = dealt[number // self._copies]
                share = named(_for_training(track.select(rows) if rows else _empty(track)))
                calls.append(Call(actor=actor, method="bring", args=(share,)))
            self._cluster.run(calls, phase="fetch")

        try:
            self._needing(bring)
            state = algorithm_state(algorithm)
            found = self._call("train", progress=progress, state=state, phase="train")
            answers = cast("list[tuple[TrainReport, int]]", found)
        except BaseException:
            self.version = self._version_after_failure()
            raise
        report, self.version = answers[0]
        return report

    def with_reference(self, track: Track, *, policy: Policy = "reference") -> Track:
        """Asks the workers that hold the reference policy. What they say of latents stays with them."""
        lengths = track.segment.total_lengths if isinstance(track.segment, TextSegment) else None
        dealt = [rows for rows in shares(track.group_ids, len(self._references), costs=lengths) if rows]

        def ask(named: Named) -> list[Track]:
            calls = [
                Call(actor=actor, method="reference", args=(named(_for_training(track.select(rows))),))
                for actor, rows in zip(self._references, dealt, strict=False)
            ]
            return self._cluster.run(calls, phase="reference", restart=lambda actor: None)

        answers = self._needing(ask)
        order = [row for rows in dealt for row in rows]
        said = Track.concat(answers).select(sorted(range(len(order)), key=order.__getitem__))
        return dataclasses.replace(track, segment=said.segment)

    def weights(self, *, policy: Policy = "live", kind: Literal["full", "lora", "merged"]) -> WeightUpdate:
        """Brings them to the driver, to look at them: those for engines go from worker to worker."""
        return self._call("weights", policy=policy, kind=kind, phase="weights")[0]

    def adopt(self, update: WeightUpdate) -> None:
        self._call("adopt", update, phase="adopt")
        self.version = update.version

    def save(self, folder: Path) -> None:
        self._call("save", folder.resolve(), phase="checkpoint")

    def load(self, folder: Path) -> None:
        self.version = self._call("load", folder.resolve(), phase="resume")[0]

    def end_rollout(self) -> None:
        self._call("end_rollout", phase="train")

    def offload(self) -> None:
        pass

    def onload(self) -> None:
        pass

    def close(self) -> None:
        pass

    def _call(self, method: str, *args: Any, phase: str, **named: Any) -> list[Any]:
        self._turns.train()
        return self._cluster.call(self._actors, method, *args, phase=phase, **named)

    def _needing(self, call: Callable[[Named], T]) -> T:
        assert self.samples is not None, "nobody knows where the samples are"
        return self.samples.needed(call)

    def _version_after_failure(self) -> int:
        """Where the ranks are, when all of them say the same; else -1, for what they hold is no step's weights."""
        try:
            found: list[int] = self._cluster.call(self._actors, "version", phase="train", timeout_s=SETTLE_S)
        except UniRLError:
            return -1
        return found[0] if len(set(found)) == 1 else -1


class RemoteReward:
    """One reward, its samples shared over the reward workers."""

    def __init__(self, name: str, cluster: Cluster, actors: Sequence[Actor], samples: Samples) -> None:
        self._name, self._cluster, self._actors, self._samples = name, cluster, list(actors), samples

    def score(self, samples: ScoreInput) -> Scores:
        dealt = shares(samples.group_ids, len(self._actors))
        used = [(actor, rows) for actor, rows in zip(self._actors, dealt, strict=True) if rows]

        def ask(named: Named) -> list[Scores]:
            calls: list[Call] = []
            for actor, rows in used:
                share = _rows_of(samples, rows)
                share = dataclasses.replace(share, images=named(share.images), videos=named(share.videos))
                calls.append(Call(actor=actor, method="score", args=(self._name, share)))
            return self._cluster.run(calls, phase=f"score {self._name}", restart=lambda actor: None)

        answers = self._samples.needed(ask)
        order = [row for _, rows in used for row in rows]
        back = torch.tensor(sorted(range(len(order)), key=order.__getitem__))
        return Scores(
            values=torch.cat([answer.values for answer in answers])[back],
            parts={key: torch.cat([answer.parts[key] for answer in answers])[back] for key in answers[0].parts},
        )

    def close(self) -> None:
        pass


def _padded(request: Request, rows: Sequence[int], *, to: int) -> Request:
    """The rows, and the last one again until there are `to`; with ids of their own, for ids must not repeat."""
    own = list(rows) or [0]
    missing = to - len(rows)
    share = request.select([*rows, *[own[-1]] * missing])
    ids = tuple(share.sample_ids[: len(rows)]) + tuple(f"{share.sample_ids[-1]}/padding-{n}" for n in range(missing))
    return dataclasses.replace(share, sample_ids=ids)


def _empty(track: Track) -> Track:
    """One row of weight 0, for a rank that has none: all ranks run the same forwards."""
    return track.select([0]).padded(2).select([1])


def _for_training(track: Track) -> Track:
    """Without what no loss reads: media stay where they are, and prompts that no row uses."""
    conditions: dict[str, Conditions] = {name: value.compact() for name, value in track.conditions.items()}
    return dataclasses.replace(track, images=None, videos=None, conditions=conditions)


def _rows_of(samples: ScoreInput, rows: Sequence[int]) -> ScoreInput:
    def take(values: Any) -> Any:
        if values is None:
            return None
        if isinstance(values, Sequence):
            return tuple(cast("Sequence[Any]", values)[row] for row in rows)
        return values.index_select(0, torch.tensor(list(rows)))

    return ScoreInput(**{item.name: take(getattr(samples, item.name)) for item in dataclasses.fields(samples)})
