"""A model, an engine, an algorithm and a backend together: what claims about whole rounds of training need."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any, Literal, TypeVar, cast

import torch
from torch import Tensor
from unirl.core.capability import Cap, Support
from unirl.core.catalog import Found
from unirl.core.config import (
    AdvantageConfig,
    DataConfig,
    EvalConfig,
    PartConfig,
    RewardConfig,
    RunConfig,
    SamplingConfig,
    TrainConfig,
)
from unirl.core.data import Prompt
from unirl.core.events import Event, EventStream
from unirl.core.loop import run_step
from unirl.core.match import DETERMINISTIC_KERNELS, match
from unirl.core.parts import Parts, sync_weights
from unirl.core.plan import Choice, Plan
from unirl.core.request import Request
from unirl.core.requests import build_request
from unirl.core.roles import Algorithm, ScoreInput, Scores
from unirl.core.rollout import verify_echo
from unirl.core.scoring import score
from unirl.core.spec import AlgorithmSpec, BackendSpec, EngineSpec, ModelSpec, RewardSpec, Spec
from unirl.core.track import Track
from unirl.core.tracking import Trackers

from ..verdicts import NotApplicable
from ..workbench.requests import PROMPTS, numbered
from .algorithm import TEXT_TOKENS
from .base import Bench

__all__ = ["LINEAR", "Cell", "CellBench", "Judge", "Training"]

Training = Literal["lora", "full"]
S = TypeVar("S", bound=Spec)

LINEAR: Mapping[str, Any] = {"lr": 1.0, "eps": 1.0, "max_grad_norm": None}
"""AdamW's step is then nearly linear in its gradient: by default it divides the size of a gradient away, and so blows
up the rounding of those elements where it nearly cancels."""

_TRAINS: Mapping[Training, Cap] = {"lora": Cap.TRAIN_LORA, "full": Cap.TRAIN_FULL}
_REFERENCE: Mapping[Training, Cap] = {"lora": Cap.REFERENCE_ADAPTER_OFF, "full": Cap.REFERENCE_COPY}
_SEED = 17
_DIST = "unirl-conformance"


class Judge:
    """Whatever a sample is like, others score otherwise: a fixed random weight for each pixel, or a hash of a text."""

    def score(self, samples: ScoreInput) -> Scores:
        if samples.texts is not None:
            digests = [hashlib.blake2b(text.encode(), digest_size=2).digest() for text in samples.texts]
            return Scores(values=torch.tensor([int.from_bytes(digest, "big") / 2**16 for digest in digests]))
        media = samples.images if samples.images is not None else torch.stack(list(samples.videos or ()))
        pixels = media.flatten(1).double().cpu()
        weights = torch.randn(pixels.shape[1], generator=torch.Generator().manual_seed(5), dtype=torch.float64)
        return Scores(values=(10.0 * pixels @ weights / weights.norm()).float())

    def close(self) -> None:
        """Nothing is held."""


def build_reward(config: RewardConfig, *, device: Any) -> Judge:
    return Judge()


_REWARD = RewardSpec(
    name="judge",
    summary="A fixed random weight for each pixel, or a hash of a text",
    build=f"{__name__}:build_reward",
    config="unirl.core.config:RewardConfig",
    capabilities={Cap.REWARD_SAMPLE: Support.NATIVE},
    scale="a weighted sum of pixels or a hash; higher is nothing but higher",
    media="image",
)


@dataclass(frozen=True, kw_only=True)
class Cell:
    """The parts of a run, built and ready, with the pieces of its loop one by one."""

    plan: Plan
    parts: Parts
    training: Training
    track: str
    prompts: Sequence[Prompt]

    def request(self, step: int) -> Request:
        """What a run asks for at this step, of the policy as it is now."""
        return build_request(
            self.prompts,
            samples_per_prompt=self.plan.data.samples_per_prompt,
            sampling=self.plan.sampling,
            model=self.parts.model,
            algorithm=self.parts.algorithm,
            seed=self.plan.run.seed,
            rollout=step,
            policy_version=self.parts.backend.version,
        )

    def rollout(self, step: int) -> Track:
        """One rollout of the policy as it is now, its echo verified."""
        sync_weights(self.parts, self.plan)
        request = self.request(step)
        rollout = self.parts.engine.generate(request)
        verify_echo(request, rollout)
        return rollout.tracks[self.track]

    def judged(self, track: Track) -> Track:
        """The track with rewards and advantages."""
        track = score(track, self.parts.rewards, self.parts.reward_weights)
        return self.parts.algorithm.advantages(track)[0]

    def run(self, step: int) -> Mapping[str, float]:
        """One whole round of the loop, and the numbers that it reports."""
        found: list[Event] = []
        events = EventStream()
        events.listen(found.append)
        run_step(self.parts, self.plan, self.prompts, step=step, events=events, trackers=Trackers({}, events))
        return next(event for event in found if event.kind == "step").data["metrics"]

    def weights(self) -> dict[str, Tensor]:
        """Copies of what trains."""
        update = self.parts.backend.weights(kind="lora" if self.training == "lora" else "full")
        return {name: value.detach().clone() for name, value in update.tensors.items()}


@dataclass(frozen=True, kw_only=True)
class CellBench(Bench):
    def found(self, kind: Literal["model", "engine", "algorithm", "backend"]) -> Found:
        return self.subject.found(kind)

    @property
    def algorithm(self) -> AlgorithmSpec:
        return cast(AlgorithmSpec, self.found("algorithm").spec)

    @property
    def is_text(self) -> bool:
        """Whether it is tried on text, as the algorithm trains on nothing else."""
        return self.algorithm.needs.track == "text"

    @property
    def shares_weights(self) -> bool:
        return self.found("engine").spec.support(Cap.WEIGHTS_SHARED) is Support.NATIVE

    @property
    def is_in_process(self) -> bool:
        """Whether the engine runs in this process, and not as a program of its own."""
        return not cast(EngineSpec, self.found("engine").spec).environment

    @property
    def training(self) -> Training:
        """The way of training that is tried where either will do: the first that these parts offer together."""
        reasons: dict[Training, str] = {training: self._refused(self.plan(training)) for training in _TRAINS}
        fitting: list[Training] = [training for training, reason in reasons.items() if not reason]
        if not fitting:
            raise NotApplicable(" ".join(reasons.values()))
        return fitting[0]

    def options_with_policies(self) -> list[dict[str, Any]]:
        """Settings of the algorithm that need a policy besides the live one, each switched on alone."""
        config = self.workshop.config(self.found("algorithm"))
        asking = [
            key
            for key, further in self.algorithm.when.items()
            if further.reference == "policy" or further.old_policy == "ema"
        ]
        return [{key: True if isinstance(getattr(config, key), bool) else 1} for key in asking]

    def plan(
        self,
        training: Training,
        *,
        train: TrainConfig | None = None,
        options: Mapping[str, Any] | None = None,
        **settings: Any,
    ) -> Plan:
        """A plan of two steps with 2 groups of 3 samples.

        options: of the algorithm's config, settings: of the backend's, both by dotted key.
        """
        model, backend = self.found("model"), self.found("backend")
        algorithm = self._choice(AlgorithmSpec, self.found("algorithm"), options or {})
        kind: Literal["latent", "text"] = "text" if self.is_text else "latent"
        tracks = [name for name, of in cast(ModelSpec, model.spec).tracks.items() if of == kind]
        sampling, media = self._sampling()
        reward = Found(spec=dataclasses.replace(_REWARD, media=media), dist=_DIST, version=version(_DIST))
        path = {cast(ModelSpec, model.spec).path_key: str(self.workshop.checkpoint(model))}
        plan = Plan(
            recipe="conformance",
            model=self._choice(ModelSpec, model, path),
            engine=self._choice(EngineSpec, self.found("engine"), {}),
            backend=self._choice(BackendSpec, backend, {**self._switched_on(training, algorithm.config), **settings}),
            algorithm=algorithm,
            rewards={"judge": self._choice(RewardSpec, reward, {})},
            trackers={},
            sampling=dict.fromkeys(tracks, sampling),
            run=RunConfig(steps=2, seed=_SEED, media_every=0),
            data=DataConfig(train="", prompts_per_step=2, samples_per_prompt=3),
            advantage=AdvantageConfig(),
            train=train or TrainConfig(),
            eval=EvalConfig(sampling={}),
            resolved={},
            origins={},
            hash="",
        )
        key = f"advantage of {self.found('algorithm').dist} {self.algorithm.name}"
        return dataclasses.replace(plan, advantage=self.workshop.shared(key, lambda: self._advantage(plan)))

    @contextmanager
    def cell(
        self,
        training: Training | None = None,
        *,
        train: TrainConfig | None = None,
        options: Mapping[str, Any] | None = None,
        watch: Callable[[Algorithm], Algorithm] | None = None,
        **settings: Any,
    ) -> Iterator[Cell]:
        """Fresh parts of a plan, closed at the end; the same every time.

        The gap of log-probs stops nothing here: a claim of its own is about it. watch: what to put around the
        algorithm. Raises NotApplicable, with the reason, where these parts do not train in this way.
        """
        training = training or self.training
        plan = self.plan(training, train=train, options=options, **settings)
        reason = self._refused(plan)
        if reason:
            raise NotApplicable(reason)
        device = torch.device(self.device)
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            torch.manual_seed(_SEED)
            with self._parts(plan, watch) as parts:
                yield Cell(
                    plan=plan,
                    parts=parts,
                    training=training,
                    track=next(iter(plan.sampling)),
                    prompts=numbered(PROMPTS[:2]),
                )

    @contextmanager
    def _parts(self, plan: Plan, watch: Callable[[Algorithm], Algorithm] | None) -> Iterator[Parts]:
        """In the order of `unirl.core.run.build_parts`, and ended in that of a run's end."""
        make, found = self.workshop.build, self.found
        model = make(found("model"), plan.model.config, device=self.device)
        backend = make(
            found("backend"), plan.backend.config, model=model, train=plan.train, steps=plan.run.steps, seed=_SEED
        )
        engine = self.workshop.engine(
            found("engine"),
            plan.engine.config,
            of=found("model"),
            model=model,
            device=self.device,
            record=self.record,
            own=self.own_engine,
        )
        with closing(backend), engine as there:
            algorithm = make(
                found("algorithm"),
                plan.algorithm.config,
                advantage=plan.advantage,
                reward_weights={"judge": 1.0},
                train=plan.train,
            )
            yield Parts(
                model=model,
                backend=backend,
                engine=there,
                algorithm=watch(algorithm) if watch else algorithm,
                rewards={"judge": Judge()},
                reward_weights={"judge": 1.0},
            )

    def _choice(self, kind: type[S], found: Found, settings: Mapping[str, Any]) -> Choice[S]:
        assert isinstance(found.spec, kind)
        config = self.workshop.config(found, settings)
        return Choice(key=kind.kind, spec=found.spec, config=config, dist=found.dist, version=found.version)

    def _switched_on(self, training: Training, algorithm: PartConfig) -> dict[str, Any]:
        """Backend settings that train in this way and give the policies that the algorithm needs as it is set."""
        needs = self.algorithm.needs
        for key, further in self.algorithm.when.items():
            needs = needs.merged(further) if getattr(algorithm, key) else needs
        caps = [_TRAINS[training]]
        caps += [_REFERENCE[training]] if needs.reference == "policy" else []
        caps += [Cap.LAGGED_POLICY] if needs.old_policy == "ema" else []
        caps += [Cap.CRITIC] if needs.critic else []
        laid: dict[str, Any] = {"trains": training}
        for cap in caps:
            laid |= self.found("backend").spec.enabled_by.get(cap, {})
        return laid

    def _sampling(self) -> tuple[SamplingConfig, Literal["image", "video", "text"]]:
        """What the track is sampled with, and what rewards see of it."""
        model = self.found("model")
        if self.is_text:
            # A quarter of the tokens end a text, so that lengths differ and rounds are short.
            settings = {"max_new_tokens": TEXT_TOKENS, "temperature": 0.9, "stop_token_ids": list(range(64, 128))}
            return self.workshop.text_sampling(model, **settings), "text"
        sampling = self.workshop.sampling(model, kernel=self._kernel(), eta=0.7)
        return sampling, "video" if sampling.frames > 1 else "image"

    def _advantage(self, plan: Plan) -> AdvantageConfig:
        """The first settings of advantages that the algorithm takes: the defaults, unless its name says otherwise."""

        def is_taken(advantage: AdvantageConfig) -> bool:
            reasons = match(dataclasses.replace(plan, advantage=advantage), catalog=self.workshop.catalog).reasons
            return not any("advantage." in str(reason) for reason in reasons)

        ways = itertools.product(("group", "global"), ("group", "global"), (True, False), (False, True))
        found = (
            AdvantageConfig(center=center, scope=scope, normalize=normalize, leave_one_out=leave_one_out)
            for center, scope, normalize, leave_one_out in ways
        )
        taken = next((advantage for advantage in found if is_taken(advantage)), None)
        assert taken is not None, f"algorithm {self.algorithm.name!r} takes no settings of `advantage`"
        return taken

    def _kernel(self) -> str:
        """An SDE kernel that the engine runs, or one without noise where it has no other and none is needed."""
        kernels = cast(EngineSpec, self.found("engine").spec).kernels
        noisy = [kernel for kernel in kernels if kernel not in DETERMINISTIC_KERNELS]
        if noisy:
            return noisy[0]
        if self.algorithm.needs.stochastic or not kernels:
            name = self.found("engine").spec.name
            raise NotApplicable(f"engine {name!r} runs no kernel with noise, which {self.algorithm.name!r} trains on")
        return kernels[0]

    def _refused(self, plan: Plan) -> str:
        """Why these parts do not train in this way, or an empty string. Fails for a refusal of anything else."""
        reasons = match(plan, catalog=self.workshop.catalog).reasons
        of_parts = ("model", "engine", "algorithm", "backend", "reward.judge")
        settings = [str(reason) for reason in reasons if reason.key not in of_parts]
        assert not settings, f"a plan by the specs of these parts is refused: {' '.join(settings)}"
        return " ".join(str(reason) for reason in reasons)
