"""Parts for tests of the loop: weights are one number, images show it, and each call can be made to wait or to fail."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from plans import one_stage
from unirl.core.observe.events import EventStream
from unirl.core.observe.tracking import Trackers
from unirl.core.roles import (
    Algorithm,
    Forward,
    Job,
    Losses,
    ScoreInput,
    Scores,
    TrainReport,
    WeightReceipt,
    WeightUpdate,
)
from unirl.core.specs.capability import Cap, Needs
from unirl.core.specs.config import DataConfig, RunConfig, TrainConfig
from unirl.core.specs.part_config import BackendConfig, PartConfig, RewardConfig
from unirl.core.specs.plan import Choice, Plan
from unirl.core.specs.spec import AlgorithmSpec, BackendSpec, EngineSpec, ModelSpec, RewardSpec
from unirl.core.types.data import Prompt
from unirl.core.types.event import Event
from unirl.core.types.media import Media
from unirl.core.types.request import Request
from unirl.core.types.sampling import LatentSamplingConfig
from unirl.core.types.track import LatentSegment, Status, Track
from unirl.core.types.weights import checksum
from unirl.loop.checked_reward import CheckedReward
from unirl.loop.parts import Parts
from unirl.loop.step import run_loop
from unirl.numerics.noise import INITIAL, noise, noise_digest

PARTS = {"summary": "toy", "build": "toy:build", "config": "toy:Config"}
LIMIT_S = 30
"""Longest wait of a test for another thread: far above what any machine needs, below the limit of a test."""
MODEL = ModelSpec(name="toy", tracks={"image": "latent"}, trainable="net", **PARTS)


def prompts(count: int) -> list[Prompt]:
    return [Prompt(prompt_id=f"p{n}", text=f"prompt {n}", metadata={}) for n in range(count)]


def plan(*, groups: int = 4, samples: int = 2, run: Mapping[str, Any] | None = None, updates: int = 1) -> Plan:
    def choice(key: str, spec: Any, config: PartConfig) -> Any:
        return Choice(key=key, spec=spec, config=config, dist="toy", version="1")

    engine = EngineSpec(name="own", capabilities={Cap.WEIGHTS_FULL}, **PARTS)
    return one_stage(
        model=choice("model", MODEL, PartConfig()),
        engine=choice("engine", engine, PartConfig()),
        backend=choice("backend", BackendSpec(name="plain", **PARTS), BackendConfig(trains="full")),
        algorithm=choice("algorithm", AlgorithmSpec(name="toy", needs=Needs(), **PARTS), PartConfig()),
        rewards={
            "light": choice("reward.light", RewardSpec(name="light", scale="", media="image", **PARTS), RewardConfig())
        },
        track="image",
        sampling=LatentSamplingConfig(num_inference_steps=1),
        run=RunConfig(**{"max_steps": 3, "media_every": 0, **(run or {})}),
        data=DataConfig(prompts_per_step=groups, samples_per_prompt=samples, shuffle=False),
        train=TrainConfig(updates_per_step=updates),
    )


def nothing(number: int) -> None:
    """Do nothing, the default during a call. number: of the call, from 0."""


class ToyModel:
    spec = MODEL

    def schedule(self, sampling: LatentSamplingConfig) -> torch.Tensor:
        return torch.tensor([1.0, 0.0])

    def latent_shape(self, sampling: LatentSamplingConfig) -> tuple[int, ...]:
        return (1,)


class ToyAlgorithm(Algorithm):
    """Advantages alone: the toy backend computes no loss."""

    def advantages(self, track: Track) -> tuple[Track, Mapping[str, float]]:
        assert track.rewards is not None
        rewards = track.rewards
        # Rounding of the mean must not make an advantage of equal rewards.
        advantages = (rewards - rewards.mean()) * (rewards.max() > rewards.min())
        return dataclasses.replace(track, advantages=advantages), {}

    def with_old_log_probs(self, track: Track, forward: Forward) -> Track:
        return track

    def loss_weights(self, track: Track) -> Mapping[str, torch.Tensor]:
        return {}

    def loss(self, track: Track, forward: Forward, *, progress: float) -> Losses:
        return Losses(terms=())


@dataclass
class ToyEngine:
    """Paints brightness (position of the sample in the order of its id) + the weight that it holds."""

    during: Callable[[int], None] = nothing
    version: int = -1
    weight: float = float("nan")
    requests: list[Request] = field(default_factory=list)
    is_generating: bool = False
    overlaps: int = 0
    """Times that weights came during generation."""

    def generate(self, request: Request) -> Track:
        self.requests.append(request)
        self.is_generating = True
        try:
            self.during(len(self.requests) - 1)
            return self._track(request)
        finally:
            self.is_generating = False

    def _track(self, request: Request) -> Track:
        rows, expected = request.num_rows, request.latent
        light = torch.tensor([sum(map(ord, sample)) / 1000 + self.weight for sample in request.sample_ids])
        return Track(
            name=request.track,
            sample_ids=request.sample_ids,
            group_ids=request.group_ids,
            inputs=request.inputs,
            metadata=request.metadata,
            segment=LatentSegment(
                latents=light.view(rows, 1, 1).repeat(1, 2, 1),
                positions=torch.tensor([[0, 1]] * rows),
                sde_steps=expected.sde_steps,
                train_steps=expected.train_steps,
                sigmas=expected.sigmas,
                sampler=expected.sampler,
                initial_noise=noise_digest(
                    noise(
                        seed=request.seed,
                        rollout=request.rollout,
                        ids=expected.noise_ids,
                        step=INITIAL,
                        shape=(1,),
                    )
                ),
            ),
            media=Media(kind="image", values=light.view(rows, 1, 1, 1).expand(rows, 3, 1, 1)),
            sample_weights=torch.ones(rows),
            status=(Status.COMPLETED,) * rows,
            policy_version=(self.version,) * rows,
        )

    def load_weights(self, update: WeightUpdate) -> WeightReceipt:
        self.overlaps += self.is_generating
        self.version, self.weight = update.version, float(update.tensors["weight"])
        held = {"weight": torch.tensor(self.weight)}
        return WeightReceipt(version=self.version, checksum=checksum(held), num_tensors=1, size_bytes=4)

    def sleep(self) -> None: ...
    def wake(self) -> None: ...
    def close(self) -> None: ...


@dataclass
class ToyBackend:
    """Training adds the mean reward to the weight; `jump` optimizer steps a call."""

    during: Callable[[int], None] = nothing
    jump: int = 1
    version: int = 0
    weight: float = 0.0
    trained: list[Track] = field(default_factory=list)

    def train(self, jobs: Sequence[Job], *, progress: float) -> TrainReport:
        track = jobs[0].track
        self.during(len(self.trained))
        assert track.rewards is not None
        self.trained.append(track)
        self.weight += float(track.rewards.mean())
        self.version += self.jump
        return TrainReport(metrics={job.name: {} for job in jobs}, num_updates=self.jump)

    def export_weights(self, *, policy: str = "live", kind: str, dtypes: Any = None) -> WeightUpdate:
        tensors = {"weight": torch.tensor(self.weight)}
        return WeightUpdate(version=self.version, tensors=tensors, kind="full", checksum=checksum(tensors))

    def version_of(self, policy: str = "live") -> int:
        return self.version

    def policy(self, which: str = "live") -> nullcontext[None]:
        return nullcontext()

    def end_rollout(self) -> None: ...


@dataclass
class Light:
    """The brightness of each image; the group's mean as a component, which is wrong on anything but whole groups."""

    during: Callable[[int], None] = nothing
    calls: int = 0
    done: int = 0
    parts = ("group",)

    def score(self, samples: ScoreInput) -> Scores:
        self.calls += 1
        self.during(self.calls - 1)
        values = samples.of("image", reward="light").stacked[:, 0, 0, 0].clone()
        means = torch.tensor([float(values[rows_of(samples, group)].mean()) for group in samples.group_ids])
        self.done += 1
        return Scores(values=values, parts={"group": means})

    def close(self) -> None: ...


def rows_of(samples: ScoreInput, group: str) -> list[int]:
    return [row for row, other in enumerate(samples.group_ids) if other == group]


def parts(
    *, engine: Any = None, backend: Any = None, algorithm: Any = None, rewards: Mapping[str, Any] | None = None
) -> Parts:
    """Parts of a run; the objects given, and toys for the others."""
    result = rewards if rewards is not None else {"light": Light()}
    made: dict[str, Any] = {
        "models": {"": ToyModel()},
        "backends": {"": backend or ToyBackend()},
        "engines": {"image": engine or ToyEngine()},
        "algorithms": {"image": algorithm or ToyAlgorithm()},
    }
    checked = {name: checked_reward(name, reward) for name, reward in result.items()}
    return Parts(rewards=checked, reward_weights=dict.fromkeys(result, 1.0), **made)


def checked_reward(name: str, reward: Any) -> CheckedReward:
    """The reward as a run holds it. Its `parts`, if it has them, are its components."""
    parts: tuple[str, ...] = getattr(reward, "parts", ())
    spec = RewardSpec(name=name, scale="", media="image", parts=parts, **PARTS)
    return CheckedReward(f"reward.{name}", reward, spec=spec)


class Ran:
    """Record of a run."""

    def __init__(self) -> None:
        self.steps: list[Event] = []
        self.events: list[Event] = []
        self.saved: list[int] = []
        self.result: tuple[int, str] | None = None

    def note(self, event: Event) -> None:
        self.events.append(event)
        if event.kind == "step":
            self.steps.append(event)


def run(
    made_of: Parts,
    toy: Plan,
    *,
    start: int = 0,
    held_out: Sequence[Prompt] = (),
    should_stop: Callable[[], bool] = lambda: False,
    interrupting: Callable[[], AbstractContextManager[None]] = nullcontext,
    was_evaluated: Callable[[int], bool] = lambda step: True,
    into: Ran | None = None,
) -> Ran:
    ran = into or Ran()
    events = EventStream()
    events.listen(ran.note)
    ran.result = run_loop(
        made_of,
        toy,
        prompts=prompts(6),
        held_out=held_out,
        start=start,
        events=events,
        trackers=Trackers({}, events),
        save=ran.saved.append,
        should_stop=should_stop,
        interrupting=interrupting,
        was_evaluated=was_evaluated,
    )
    return ran


def met(barrier: threading.Barrier) -> None:
    """Wait for the other thread at this point; fails the test when it never comes."""
    barrier.wait(timeout=LIMIT_S)


def passed(event: threading.Event) -> None:
    assert event.wait(timeout=LIMIT_S), "the other thread did not get there"


def at(number: int, action: Callable[[], Any]) -> Callable[[int], None]:
    """An action in one of the calls."""
    return lambda call: action() if call == number else None


def threads(prefix: str) -> Sequence[str]:
    """Names of the threads that live and begin so."""
    return [thread.name for thread in threading.enumerate() if thread.name.startswith(prefix)]
