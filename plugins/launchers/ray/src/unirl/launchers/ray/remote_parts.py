"""Driver-side proxies for the parts of a plan that run on workers. Each implements its role."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor
from unirl.core.errors import UniRLError
from unirl.core.roles import Backend, Job, Model, Policy, ScoreInput, Scores, TrainReport, WeightReceipt, WeightUpdate
from unirl.core.specs.plan import Stage
from unirl.core.specs.spec import ModelSpec
from unirl.core.types.batch import inverse
from unirl.core.types.inputs import Inputs
from unirl.core.types.media import FramesRead
from unirl.core.types.request import Request
from unirl.core.types.sampling import LatentSamplingConfig, TextSamplingConfig
from unirl.core.types.track import Track
from unirl.loop.algorithm_state import algorithm_state
from unirl.transfer.remote_rows import RemoteRows, fetchable

from .actors import Actor, Call
from .cluster import Cluster
from .samples import Named, Samples
from .session import Session
from .shares import padded, share_of, shares, track_shares

__all__ = ["RemoteBackend", "RemoteEngine", "RemoteModel", "RemoteReward"]

T = TypeVar("T")

SETTLE_S = 10.0
"""Timeout for the other ranks to finish their call after one has failed."""


class RemoteModel(Model):
    """The driver's view of a model: sizes and schedules. Everything else runs on the workers."""

    def __init__(self, spec: ModelSpec, cluster: Cluster, actor: Actor, *, learner: str) -> None:
        self.spec = spec
        self._learner = learner
        self.device = torch.device("cpu")
        self._cluster, self._actor = cluster, actor
        self._schedules: dict[str, Tensor] = {}
        self._stop_tokens: tuple[int, ...] | None = None

    @property
    def trainable(self) -> Any:
        raise RuntimeError("the trainable module is on the workers; the driver has none")

    def encode(self, inputs: Inputs, **_: Any) -> Mapping[str, Any]:
        raise RuntimeError("inputs are encoded on the workers")

    def velocity(self, x: Any, sigma: Any, conditions: Any) -> Any:
        raise RuntimeError("the denoiser runs on the workers")

    def decode(self, latents: Any) -> Any:
        raise RuntimeError("latents are decoded on the workers")

    def schedule(self, sampling: LatentSamplingConfig) -> Tensor:
        key = repr(sampling)
        if key not in self._schedules:
            self._schedules[key] = self._ask("schedule", sampling)
        return self._schedules[key]

    def latent_shape(self, sampling: LatentSamplingConfig) -> tuple[int, ...]:
        return self._ask("latent_shape", sampling)

    def num_cut(self, texts: Sequence[str], *, sampling: LatentSamplingConfig) -> int | None:
        return self._ask("num_cut", tuple(texts), sampling=sampling)

    def prompt_tokens(self, inputs: Inputs, *, sampling: TextSamplingConfig) -> list[Tensor]:
        return self._ask("prompt_tokens", inputs, sampling=sampling)

    def observation_tokens(
        self, texts: Sequence[str], *, after: Sequence[Tensor], role: str, sampling: TextSamplingConfig
    ) -> list[Tensor]:
        return self._ask("observation_tokens", texts, after=after, role=role, sampling=sampling)

    def texts(self, tokens: Sequence[Tensor]) -> list[str]:
        return self._ask("texts", tokens)

    def completion_length(self, *, sampling: TextSamplingConfig) -> int | None:
        return self._ask("completion_length", sampling=sampling)

    @property
    def stop_tokens(self) -> tuple[int, ...]:
        if self._stop_tokens is None:
            self._stop_tokens = self._ask("stop_tokens")
        assert self._stop_tokens is not None
        return self._stop_tokens

    def _ask(self, name: str, *args: Any, **named: Any) -> Any:
        (answer,) = self._cluster.call([self._actor], "ask_model", self._learner, name, *args, phase="request", **named)
        return answer


class RemoteEngine:
    """Tracks from several workers, each generating a share of the request."""

    def __init__(self, session: Session, samples: Samples, stage: Stage) -> None:
        """samples: records the generated samples, so that lost ones can be regenerated."""
        self._session, self._cluster, self._samples = session, session.cluster, samples
        self._stage = stage.name
        self._actors = session.generating(stage.name)
        # Ranks that hold shards of one module run collective forwards: each gets equally many rows, padded where
        # needed. Of neighbours that generate the same rows together, the first one's answer counts.
        self._lockstep = not session.rollout and len(session.train) > 1 and stage.backend is not None
        self._copies = 1 if session.rollout else session.copies[stage.learner.name]

    @property
    def version(self) -> int:
        return self._session.versions.sampled[self._stage]

    @version.setter
    def version(self, value: int) -> None:
        if value != self.version:
            self._cluster.call(self._actors, "set_version", self._stage, value, phase="sync")
        self._session.versions.sampled[self._stage] = value

    def generate(self, request: Request) -> Track:
        self._session.turns.rollout()
        partition = shares(request.group_ids, len(self._actors) // self._copies)
        rows = max(map(len, partition))
        calls: list[Call] = []
        for number, actor in enumerate(self._actors):
            mine = partition[number // self._copies]
            if mine or self._lockstep:
                share = padded(request, mine, to=rows) if self._lockstep else request.select(mine)
                calls.append(Call(actor=actor, method="generate", args=(share,)))
        self._samples.begin(request.rollout)
        result = self._cluster.run(calls, phase="generate", restart=self._samples.restart)
        self._samples.note(calls, result)
        answers = result[:: self._copies]
        self._cluster.traffic.made(request.num_rows)
        counts = [len(mine) for mine in partition if mine or self._lockstep]
        kept = [(answer, count) for answer, count in zip(answers, counts, strict=True) if count]
        order = [row for mine in partition for row in mine]
        track = Track.concat([answer.select(range(count)) for answer, count in kept]).select(inverse(order))
        # What is shown and saved of a step is fetched by the driver.
        parts = {"segment": track.segment, "media": track.media}
        shown = {name: fetchable(part, self._fetch) for name, part in parts.items() if part is not None}
        return dataclasses.replace(track, **shown)

    def _fetch(self, rows: Sequence[RemoteRows]) -> list[Tensor]:
        return self._samples.needed(
            lambda named: self._cluster.fetch([named(each) for each in rows]), stages=[self._stage]
        )

    def load_weights(self, update: WeightUpdate) -> WeightReceipt:
        raise RuntimeError("weights are sent between workers, not through the driver")

    def sleep(self) -> None:
        pass

    def wake(self) -> None:
        pass

    def close(self) -> None:
        pass


class RemoteBackend(Backend):
    """The train ranks as one backend."""

    def __init__(
        self,
        session: Session,
        samples: Samples,
        *,
        learner: str,
        references: Sequence[Actor],
        lend: Callable[[Policy], AbstractContextManager[None]] | None,
    ) -> None:
        """samples: record of the rollout workers' samples.

        references: workers that hold its reference policy; empty where the train ranks do, or nothing asks for it.

        lend: temporarily loads another policy into rollout workers; None when the train ranks generate.
        """
        self._session, self._cluster, self._samples, self._lend = session, session.cluster, samples, lend
        self._learner, self._actors, self._references = learner, session.train, references
        self._copies = session.copies[learner]

    @property
    def version(self) -> int:
        return self._session.versions.trained[self._learner]

    def version_of(self, policy: Policy = "live") -> int:
        return self._session.version_of(self._learner, policy)

    @contextmanager
    def policy(self, which: Policy = "live") -> Iterator[None]:
        if self._lend is not None:
            with self._lend(which):
                yield
            return
        try:
            # Ranks leave what they entered also where a signal ends the call.
            self._call("enter_policy", which, phase="policy")
            yield
        finally:
            self._cluster.call(self._actors, "leave_policy", phase="policy")

    def train(self, jobs: Sequence[Job], *, progress: float) -> TrainReport:
        """Each rank trains on its share with its own instances of the algorithms, given the states of the driver's,
        which made the advantages."""
        tracks = [self.with_reference(job.track) if self._references else job.track for job in jobs]
        workers = len(self._actors) // self._copies
        partitions = [track_shares(track, workers) for track in tracks]

        def bring(named: Named) -> None:
            self._session.turns.train()
            calls: list[Call] = []
            for number, actor in enumerate(self._actors):
                shares = [
                    named(share_of(track, partition[number // self._copies]))
                    for track, partition in zip(tracks, partitions, strict=True)
                ]
                calls.append(Call(actor=actor, method="bring", args=(shares,)))
            self._cluster.run(calls, phase="fetch")

        try:
            self._samples.needed(bring, stages=[job.track.name for job in jobs])
            states = [algorithm_state(job.algorithm) for job in jobs]
            answers = self._call("train", states, progress=progress, phase="train")
        except BaseException:
            self._session.versions.trained[self._learner] = self._version_after_failure()
            raise
        report: TrainReport
        report, self._session.versions.trained[self._learner] = answers[0]
        return report

    def with_reference(self, track: Track, *, policy: Policy = "reference") -> Track:
        """Runs the reference policy on its workers. Its latent outputs stay there."""
        partition = [rows for rows in track_shares(track, len(self._references)) if rows]

        def ask(named: Named) -> list[Track]:
            calls = [
                Call(actor=actor, method="reference", args=(self._learner, named(share_of(track, rows))))
                for actor, rows in zip(self._references, partition, strict=False)
            ]
            return self._cluster.run(calls, phase="reference", restart=lambda actor: None)

        answers = self._samples.needed(ask, stages=[track.name])
        order = [row for rows in partition for row in rows]
        reply = Track.concat(answers).select(inverse(order))
        return dataclasses.replace(track, segment=reply.segment)

    def export_weights(
        self,
        *,
        policy: Policy = "live",
        kind: Literal["full", "lora", "merged"],
        dtypes: Mapping[str, str] | None = None,
    ) -> WeightUpdate:
        """Exports to the driver, for inspection; engines get their weights directly from the workers."""
        return self._call("export_weights", policy=policy, kind=kind, dtypes=dtypes, phase="weights")[0]

    def adopt(self, update: WeightUpdate) -> None:
        self._call("adopt", update, phase="adopt")
        self._session.versions.trained[self._learner] = update.version

    def save(self, folder: Path) -> None:
        self._call("save", folder.resolve(), phase="checkpoint")

    def snapshot(self) -> Callable[[Path], None] | None:
        return self._write_snapshot if all(self._call("snapshot", phase="checkpoint")) else None

    def _write_snapshot(self, folder: Path) -> None:
        args = (self._learner, folder.resolve())
        calls = [Call(actor=actor, method="write_snapshot", args=args, is_background=True) for actor in self._actors]
        self._cluster.run(calls, phase="checkpoint")

    def load(self, folder: Path) -> None:
        self._session.versions.trained[self._learner] = self._call("load", folder.resolve(), phase="resume")[0]

    def end_rollout(self) -> None:
        self._call("end_rollout", phase="train")

    def offload(self) -> None:
        pass

    def onload(self) -> None:
        pass

    def close(self) -> None:
        pass

    def _call(self, method: str, *args: Any, phase: str, **named: Any) -> list[Any]:
        self._session.turns.train()
        return self._cluster.call(self._actors, method, self._learner, *args, phase=phase, **named)

    def _version_after_failure(self) -> int:
        """The ranks' version if all agree; else -1: their weights are not those of any one step."""
        try:
            versions = self._cluster.call(self._actors, "versions", phase="train", timeout_s=SETTLE_S)
        except UniRLError:
            return -1
        result: list[int] = [version[self._learner] for version in versions]
        return result[0] if len(set(result)) == 1 else -1


class RemoteReward:
    """One reward, its samples partitioned over the workers that score it."""

    def __init__(
        self, name: str, session: Session, samples: Samples, *, scores_groups: bool, frames: FramesRead | None = None
    ) -> None:
        """scores_groups: it compares the samples of a group, so groups are not split between workers.

        frames: that it reads of a video, so that workers fetch no others; None is all.
        """
        self._frames = frames
        self._name, self._cluster, self._samples = name, session.cluster, samples
        self._actors = session.scoring(name)
        self._scores_groups = scores_groups

    def score(self, samples: ScoreInput) -> Scores:
        media = samples.media
        # Videos of several lengths have no common rate with some frames left out; they are sent whole.
        if self._frames is not None and media is not None and not isinstance(media.values, tuple):
            samples = dataclasses.replace(samples, media=media.with_frames(self._frames))
        partition = shares(samples.group_ids, len(self._actors), whole_groups=self._scores_groups)
        used = [(actor, rows) for actor, rows in zip(self._actors, partition, strict=True) if rows]

        def ask(named: Named) -> list[Scores]:
            calls: list[Call] = []
            for actor, rows in used:
                calls.append(Call(actor=actor, method="score", args=(self._name, named(samples.select(rows)))))
            return self._cluster.run(calls, phase=f"score {self._name}", restart=lambda actor: None)

        answers = self._samples.needed(ask)
        order = [row for _, rows in used for row in rows]
        back = torch.tensor(inverse(order))
        return Scores(
            values=torch.cat([answer.values for answer in answers])[back],
            parts={key: torch.cat([answer.parts[key] for answer in answers])[back] for key in answers[0].parts},
            scored=torch.cat([_scored(answer) for answer in answers])[back],
        )

    def close(self) -> None:
        pass


def _scored(scores: Scores) -> Tensor:
    return torch.ones(len(scores.values), dtype=torch.bool) if scores.scored is None else scores.scored
