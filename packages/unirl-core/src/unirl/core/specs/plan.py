"""Plans: a recipe with every part chosen, every value set, and where each came from."""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import reduce
from pathlib import Path
from typing import Any, Generic, TypeAlias, TypeVar, cast

from ..errors import PluginBroken, UniRLError
from ..types.media import MediaKind
from ..types.sampling import LatentSamplingConfig, SamplingConfig
from .capability import Cap, Needs
from .config import AdvantageConfig, DataConfig, EvalConfig, RunConfig, StageConfig, TrainConfig
from .leaves import leaves
from .part_config import BackendConfig, EnvironmentConfig, PartConfig, RewardConfig
from .spec import (
    AlgorithmSpec,
    BackendSpec,
    EngineSpec,
    EnvironmentSpec,
    LauncherSpec,
    ModelSpec,
    RewardSpec,
    Spec,
    TrackerSpec,
    TransportSpec,
)

__all__ = [
    "PER_STAGE",
    "Choice",
    "Learner",
    "LeftOut",
    "Origin",
    "Plan",
    "RewardChoices",
    "Stage",
    "medium_of",
]

S = TypeVar("S", bound=Spec, covariant=True)
C = TypeVar("C", bound=PartConfig, covariant=True)
RewardChoices: TypeAlias = "Mapping[str, Choice[RewardSpec, RewardConfig]]"
"""The rewards of a plan, by key."""

NOT_HASHED = (
    "run.name",
    "run.dir",
    "run.max_steps",
    "run.stop_at",
    "run.restarts",
    "run.save_every",
    "run.save_async",
    "run.export_every",
    "run.export_best",
    "run.keep",
    "run.media_every",
    "run.on_collapse",
    "run.on_hacking",
    "run.peak_tflops",
    "run.threads",
    "run.batch_invariant",
    "data.cache",
    "advantage.constant_reward",
    "train.logp_mismatch_max",
    "train.logp_mismatch_mean",
    "train.micro_batch_size",
    "train.micro_batch_tokens",
    "train.packing",
    "train.replay",
    "tracker",
    "launcher",
    "transport",
)
"""Keys that change results by rounding at most, as `PartConfig.rounding_only` does, or that only end a run; a resumed
run may change them."""


AS_WITHOUT_KEY = (
    ("environment", None),
    ("data.scouts.samples_per_prompt", 0),
    ("data.scouts.num_inference_steps", 0),
)
"""Leaves with values that switch them off; such a plan has the hash of one from before the key existed."""

PER_STAGE = ("model", "backend", "engine", "environment", "algorithm")
"""Kinds of part that each stage has one of, in the order in which they are built."""


@dataclass(frozen=True, kw_only=True)
class Choice(Generic[S, C]):
    """One part of a plan."""

    key: str
    """Its key in the recipe: `model`, `reward.shapes`."""
    spec: S
    config: C
    """An instance of the spec's config dataclass, filled in."""
    dist: str
    version: str

    @property
    def name(self) -> str:
        return self.spec.name

    def has(self, cap: Cap) -> bool:
        """Whether the part provides a capability with these settings, where some must switch it on."""
        needed = self.spec.enabled_by.get(cap, {})
        return cap in self.spec.capabilities and all(
            reduce(getattr, key.split("."), cast("Any", self.config)) == value for key, value in needed.items()
        )

    @contextmanager
    def attributed(self) -> Generator[None]:
        """Calls of the config's methods inside: an error that is not the user's becomes PluginBroken, in the name of
        the part."""
        try:
            yield
        except UniRLError:
            raise
        except Exception as error:
            raise PluginBroken(
                f"{self.key}: {self.spec.kind} {self.name!r} of {self.dist} {self.version} failed on its own settings: "
                f"{type(error).__name__}: {error}"
            ) from error


@dataclass(frozen=True, kw_only=True)
class Origin:
    """Where a value came from."""

    source: str
    """`default`, `proposal`, `recipe` or `command line`."""
    detail: str
    """The dataclass, algorithm, file or override it comes from."""

    def __str__(self) -> str:
        return f"proposed by {self.detail}" if self.source == "proposal" else f"{self.source}: {self.detail}"


@dataclass(frozen=True, kw_only=True)
class LeftOut:
    """A value of a recipe that its part has no key for, or that gave way to the proposal of another algorithm."""

    path: str
    value: Any
    file: str
    """Config path of the recipe file that gives it; empty for a proposal of the algorithm."""
    part: str
    """`engine 'sglang'`."""
    why: str = "has no such key"

    def __str__(self) -> str:
        giver = f"of {self.file}.yaml" if self.file else "of the algorithm's proposals"
        return f"{self.path}={self.value} {giver} is left out: {self.part} {self.why}."


@dataclass(frozen=True, kw_only=True)
class Learner:
    """A model of a plan, and its backend."""

    name: str
    """The key of its model under `model`; "" in a recipe with one model section."""
    model: Choice[ModelSpec, PartConfig]
    backend: Choice[BackendSpec, BackendConfig] | None
    """None: the model is frozen."""


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One track of a plan: the model and engine that generate it, and the algorithm that trains on it."""

    name: str
    """Name of its track in every rollout."""
    learner: Learner
    track: str
    """Which of the model's tracks it is, a key of `ModelSpec.tracks`."""
    engine: Choice[EngineSpec, PartConfig]
    algorithm: Choice[AlgorithmSpec, PartConfig] | None
    """None: it is generated and not trained on."""
    sampling: SamplingConfig
    advantage: AdvantageConfig
    train: TrainConfig
    samples: int
    """Samples per row of the parent stage, or per prompt."""
    settings: StageConfig = field(default_factory=StageConfig)
    """As the recipe gives them."""
    rewards: tuple[str, ...] = ()
    """Keys of the rewards that score it."""
    environment: Choice[EnvironmentSpec, EnvironmentConfig] | None = None
    """What answers its texts, turn by turn."""
    teachers: tuple[Learner, ...] = ()
    """The models that are the reference policy of its algorithm, of several each for the samples whose metadata
    `teacher` has its name; none are the initial weights."""
    eval_sampling: Mapping[str, Any] = field(default_factory=lambda: dict[str, Any]())
    """Values that replace those of `sampling` in evaluation."""

    @property
    def model(self) -> Choice[ModelSpec, PartConfig]:
        return self.learner.model

    @property
    def backend(self) -> Choice[BackendSpec, BackendConfig] | None:
        return self.learner.backend

    @property
    def parent(self) -> str | None:
        """Stage whose samples it continues from; None for the prompts."""
        return self.settings.parent or None

    @property
    def parent_role(self) -> str:
        """Role in which its model takes the image of a parent; "" where it takes none, or the role is ambiguous."""
        roles = self.model.spec.inputs.get(self.track, {})
        names = [role for role, use in roles.items() if use != "takes"] or list(roles)
        return names[0] if len(names) == 1 else ""

    @property
    def continues(self) -> bool:
        """Whether it is generated from the turns of the stages above it."""
        return self.parent is not None and self.track in self.model.spec.continues

    @property
    def stored(self) -> frozenset[str]:
        """Roles of the media of a prompt that its engine reads as samples."""
        return frozenset(role for roles in self.engine.spec.samples for role in roles)

    @property
    def takes(self) -> frozenset[str]:
        """Roles of the media of a prompt that it is generated from, or that its engine reads as samples."""
        return self.stored | self.model.spec.inputs.get(self.track, {}).keys()

    @property
    def kind(self) -> str:
        """`latent` or `text`."""
        return self.model.spec.tracks[self.track]

    @property
    def medium(self) -> MediaKind:
        """Medium of its samples."""
        return medium_of(self.model.spec, self.track, self.sampling)

    @property
    def needs(self) -> Needs:
        """Requirements of the algorithm with its settings."""
        if self.algorithm is None:
            return Needs(reward="none")
        needs = self.algorithm.spec.needs
        for key, further in self.algorithm.spec.when.items():
            if getattr(self.algorithm.config, key):
                needs = needs.merged(further)
        return needs

    @property
    def evaluation(self) -> SamplingConfig:
        """The sampling of evaluation: that of training with `eval.sampling` laid over it, and nothing to train on.

        Latent tracks are sampled without noise, by `euler`, and text tracks greedily, unless `eval.sampling` says
        otherwise.
        """
        return replace(self.sampling.for_evaluation(self.eval_sampling), **self.eval_sampling)

    def shares_engine(self, other: Stage) -> bool:
        """Whether one engine generates both: that of one model and one policy, with the same settings."""
        asks, others = (
            (stage.learner.name, stage.needs.sampler, stage.engine.name, stage.engine.config) for stage in (self, other)
        )
        return asks == others

    @property
    def parts(self) -> dict[str, Choice[Spec, PartConfig]]:
        """Kind -> the part of this stage, in the order in which they are built."""
        parts = {kind: getattr(self, kind) for kind in PER_STAGE}
        return {kind: choice for kind, choice in parts.items() if choice is not None}


@dataclass(frozen=True, kw_only=True)
class Plan:
    recipe: str
    """Name of the recipe."""
    stages: tuple[Stage, ...]
    """Parents before their children."""
    rewards: RewardChoices
    trackers: Mapping[str, Choice[TrackerSpec, PartConfig]]
    run: RunConfig
    data: DataConfig
    eval: EvalConfig
    resolved: Mapping[str, Any]
    """The whole recipe as plain data, every interpolation resolved."""
    origins: Mapping[str, Origin]
    """Key path of every leaf -> where it came from."""
    hash: str
    """Hash of everything in `resolved` that changes the numbers, see `plan_hash`."""
    launcher: Choice[LauncherSpec, PartConfig] | None = None
    """Where the parts run; None is this process."""
    transport: Choice[TransportSpec, PartConfig] | None = None
    """How tensors go from worker to worker; None is the launcher's own way."""
    left_out: tuple[LeftOut, ...] = ()
    """Values of the recipe for a part that was replaced by another."""
    sampler_dists: tuple[str, ...] = ()
    """Dists, or files, of the plugins whose kernels and guidances it names."""

    @property
    def learners(self) -> dict[str, Learner]:
        """Every model of the plan by name, in the order of their first stages; after them, teachers."""
        teachers = [teacher for stage in self.stages for teacher in stage.teachers]
        return {learner.name: learner for learner in (*(stage.learner for stage in self.stages), *teachers)}

    def numeric_leaves(self, resolved: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Leaves that change the numbers of a run. resolved: in place of the plan's own, as a checkpoint records it."""
        own = [f"{choice.key}.{name}" for choice in self.choices for name in choice.config.rounding_only]
        keys = "|".join(map(re.escape, (*NOT_HASHED, *own)))
        left_out = re.compile(rf"(stages\.[^.]+\.(?=train\.|advantage\.))?({keys})(\.|$)")
        values = leaves(self.resolved if resolved is None else resolved)
        # A section whose overrides are all left out counts as empty.
        values = {path: value for path, value in values.items() if value != {} and not left_out.match(path)}
        return {path: value for path, value in values.items() if (path, value) not in AS_WITHOUT_KEY}

    @property
    def trained(self) -> list[Stage]:
        """The stages that are trained on."""
        return [stage for stage in self.stages if stage.algorithm is not None]

    def stage(self, name: str) -> Stage:
        """The stage of this name."""
        return next(stage for stage in self.stages if stage.name == name)

    @property
    def only(self) -> Stage:
        """The stage of a plan that has one."""
        (stage,) = self.stages
        return stage

    def children(self, name: str) -> list[Stage]:
        """The stages that continue from this one."""
        return [stage for stage in self.stages if stage.parent == name]

    def ancestors(self, stage: Stage) -> list[Stage]:
        """The stages above this one, the one made from prompts first."""
        if stage.parent is None:
            return []
        parent = self.stage(stage.parent)
        return [*self.ancestors(parent), parent]

    def rows_per_prompt(self, stage: Stage) -> int:
        """Samples that a stage generates of each prompt."""
        return stage.samples * (self.rows_per_prompt(self.stage(stage.parent)) if stage.parent else 1)

    def rows_compared(self, stage: Stage) -> int:
        """Samples of a group, within which a stage's advantages compare."""
        return self.rows_per_prompt(stage) if stage.settings.group == "prompt" else stage.samples

    def prefix(self, stage: Stage) -> str:
        """Prefix of a stage's metrics; empty in a plan with one stage."""
        return f"{stage.name}/" if len(self.stages) > 1 else ""

    def with_stages(self, change: Callable[[Stage], Stage]) -> Plan:
        """The plan with every stage changed."""
        return replace(self, stages=tuple(change(stage) for stage in self.stages))

    @property
    def has_reference_workers(self) -> bool:
        """Separate workers compute the reference policy; the backend keeps none."""
        launcher = self.launcher
        if launcher is None or launcher.spec.holds_reference is None:
            return False
        return all(getattr(launcher.config, key) == value for key, value in launcher.spec.holds_reference.items())

    @property
    def plugin_files(self) -> list[Path]:
        """Plugins of its parts, kernels and guidances that are single files, see `unirl.core.plugins.files`."""
        dists = [*(choice.dist for choice in self.choices), *self.sampler_dists]
        return sorted({Path(dist) for dist in dists if dist.endswith(".py")})

    @property
    def choices(self) -> list[Choice[Spec, PartConfig]]:
        """Every part once, in the order in which they are built."""
        parts = [stage.parts for stage in self.stages]
        chosen: list[Choice[Spec, PartConfig]] = [
            *(part[kind] for kind in PER_STAGE for part in parts if kind in part),
            *(teacher.model for stage in self.stages for teacher in stage.teachers),
            *self.rewards.values(),
            *self.trackers.values(),
            *([self.launcher] if self.launcher else []),
            *([self.transport] if self.transport else []),
        ]
        return list({choice.key: choice for choice in chosen}.values())


def medium_of(model: ModelSpec, track: str, sampling: SamplingConfig) -> MediaKind:
    """Medium of the samples of a model's track."""
    if track in model.media:
        return model.media[track]
    if model.tracks[track] == "text":
        return "text"
    # The number of frames decides between images and videos.
    return "video" if isinstance(sampling, LatentSamplingConfig) and sampling.frames > 1 else "image"
