"""Specs: the description of each part that a plugin provides, read before anything heavy is imported.

A spec names its implementation and its config by string (`"package.module:attribute"`), so that listing, matching and
composing import no torch. Specs are plain data; everything here can be printed, hashed and compared.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, TypeAlias, get_args

from ..types.data import MediaRef
from ..types.media import MediaKind
from ..types.sampling import PLAIN_GUIDANCE
from .capability import Cap, Needs

__all__ = [
    "KINDS",
    "MODEL_PARTS",
    "RESERVED_PARTS",
    "AdapterLayout",
    "AdapterNames",
    "AlgorithmSpec",
    "BackendSpec",
    "EngineSpec",
    "EnvironmentExample",
    "EnvironmentSpec",
    "Gap",
    "Kind",
    "LauncherSpec",
    "MediaRole",
    "Miniature",
    "ModelPart",
    "ModelSpec",
    "NamesInModule",
    "RewardExample",
    "RewardSpec",
    "Spec",
    "TrackerSpec",
    "TransportSpec",
]

MediaRole = Literal["source", "first_frame", "condition", "target", "preferred", "rejected"]
"""Role of a prompt's image, video or sound: edit source, first frame, or context. The last three are stored samples,
see `EngineSpec.samples`."""
MediaUses: TypeAlias = Mapping[MediaRole, Literal["takes", "needs", "needs one"]]
ModelPart = Literal["encode", "decode"]
"""A part of a model besides `trainable`, by the method that uses it: its encoders, its decoder."""
MODEL_PARTS: frozenset[ModelPart] = frozenset(get_args(ModelPart))
NamesInModule: TypeAlias = tuple[str, ...] | str
"""Names, or `"module:function"` of a function that finds them in the trainable module, as a checkpoint has it. Read it
through `unirl.core.specs.facts.names_in`."""
AdapterLayout = Literal["comfy", "kohya", "original"]
"""A layout of LoRA adapters besides diffusers' and peft's, see `ModelSpec.adapter_layouts`."""
AdapterNames: TypeAlias = Mapping[str, tuple[str, ...]]
"""Layer of a layout -> the module's layers that it consists of, in the order of its rows; mostly one.

`{}` in a name stands for any text, such as the number of a block: those of the module's names are filled in, in their
order, in that of the layout. The first entry that fits a layer counts."""
Kind = Literal["model", "engine", "backend", "algorithm", "reward", "environment", "tracker", "launcher", "transport"]
KINDS: tuple[Kind, ...] = get_args(Kind)


@dataclass(frozen=True, kw_only=True)
class Gap:
    """A conformance claim that a part is known not to meet, with the reason and where it is followed up.

    Strict: once the claim passes, conformance fails until the gap is taken out.
    """

    claim: str
    """Name of the claim, as `unirl conformance --claims` lists it."""
    reason: str
    """Why the part does not meet it, in a sentence."""
    link: str = ""
    """Where it is followed up."""
    only_with: tuple[str, ...] = ()
    """Names of other parts: the gap holds where one of them is tried along; empty is everywhere."""


@dataclass(frozen=True, kw_only=True)
class Spec:
    """Fields of every spec."""

    kind: ClassVar[Kind]

    name: str
    """Short name in recipes, lower case with dashes."""
    summary: str
    """One sentence for lists and docs."""
    build: str
    """`"module:function"` that makes the part from its config. See `unirl.core.roles` for each kind's signature."""
    config: str
    """`"module:Class"` of its config dataclass, a subclass of `unirl.core.specs.part_config.PartConfig`."""
    capabilities: AbstractSet[Cap] = frozenset()
    """The capabilities of its kind that it provides. A plan that needs another one is refused."""
    enabled_by: Mapping[Cap, Mapping[str, Any]] = field(default_factory=lambda: dict[Cap, Mapping[str, Any]]())
    """Settings that switch a capability on, by dotted config key, where the defaults leave it off.

    Those of `Cap.EMA` and `Cap.LAGGED_POLICY` give an average with a constant decay of 0.75, a = 0.75 a + 0.25 live,
    that starts at the initial weights and moves after every optimizer step (EMA) or at the end of every rollout (lagged
    policy): conformance computes it again. Those of `Cap.CRITIC` and `Cap.FAKE_SCORE` give one that trains with a rate
    of 0.001 from its first step, once beside each update of the policy, and no bound on its gradient.
    """
    trial: Mapping[str, Any] = field(default_factory=lambda: dict[str, Any]())
    """Settings for conformance, by dotted config key, where the defaults do not suit a miniature."""
    gaps: tuple[Gap, ...] = ()
    """Claims that it is known not to meet."""


@dataclass(frozen=True, kw_only=True)
class Miniature:
    """A checkpoint of random weights in the model's ordinary layout, small enough to run in a second on a CPU."""

    write: str
    """`"module:function"` that writes it: `write(folder, *, seed) -> None`; same seed, same bytes."""
    media: str = ""
    """`"module:function"` that writes what sample `number` is generated from: `media(folder, *, number) ->
    tuple[MediaRef, ...]`, other media for every number; empty where the model's `inputs` are."""
    sampling: Mapping[str, Any] = field(default_factory=lambda: dict[str, Any]())
    """Sampling settings that it takes, by dotted key, such as `{"height": 64, "width": 64}`."""
    lora_layers: int = 0
    """Layers of it that the model's `lora_targets` match: one more or one less is a failure."""
    idle_layers: tuple[str, ...] = ()
    """Full names of those whose output the model drops, so that no gradient reaches them."""
    wrap_blocks: int = 0
    """Blocks of it that the model's `wrap_blocks` match."""


@dataclass(frozen=True, kw_only=True)
class ModelSpec(Spec):
    kind: ClassVar[Kind] = "model"

    tracks: Mapping[str, Literal["latent", "text"]]
    """Name of each track that the model generates, with its kind."""
    media: Mapping[str, MediaKind] = field(default_factory=lambda: dict[str, MediaKind]())
    """Name of a track -> what its samples become, where that does not follow from its kind: texts of a text track,
    images or videos, by `sampling.frames`, of a latent one."""
    inputs: Mapping[str, MediaUses] = field(default_factory=lambda: dict[str, MediaUses]())
    """Name of a track -> roles of the media that it is generated from besides the text, and whether some may be there,
    some must be, or one. Prompt files are checked before anything is built."""
    continues: frozenset[str] = frozenset()
    """Tracks that a later stage of a sample can go on with in one sequence: they are generated from the prompt and all
    `unirl.core.types.inputs.Turn` before them. Other tracks below a parent get its text, or its image, alone."""
    reads: tuple[Literal["image", "video", "audio"], ...] = ("image",)
    """Modalities that those media may have."""
    options: Mapping[str, str] = field(default_factory=lambda: dict[str, str]())
    """Name of a track -> `"module:Class"` of a dataclass with the fields of `sampling.options`, which are checked when
    a recipe is composed. The model reads them in `encode` and `schedule`; what `velocity` needs of them, `encode` puts
    into the conditions. Engines with a bridge take none, but for those in `bridged_options`."""
    bridged_options: frozenset[str] = frozenset()
    """Engines whose bridge of this model reads the `options` of a latent track."""
    bridged_texts: frozenset[str] = frozenset()
    """Engines whose bridge of this model serves its text tracks, too; the others serve latent tracks alone."""
    token_options: frozenset[str] = frozenset()
    """Text tracks whose `options` change logits, or what `allowed` says, such as guidance of image tokens. They are
    handed to `next_logits`, echoed with the completions, and part of every `TokenBatch`. Options of other text tracks
    act in `prompt_tokens` and `conditions` alone, whose results are replayed."""
    restricts: frozenset[str] = frozenset()
    """Text tracks whose next token may be restricted to some, or forced: `TextModel.allowed` is then asked."""
    fps: float = 0.0
    """Frames per second of its videos where `sampling.fps` is 0; 0 for a model of images."""
    trainable: str
    """Attribute of the model that holds the trained module, such as `transformer`."""
    lora_targets: NamesInModule = ()
    """Endings of the module names that LoRA adapts by default."""
    adapter_layouts: Mapping[AdapterLayout, str] = field(default_factory=lambda: dict[AdapterLayout, str]())
    """Layout that `unirl export` can write this model's adapters in -> `"module:attribute"` of its `AdapterNames`."""
    wrap_blocks: NamesInModule = ()
    """Class names of the blocks that are sharded and checkpointed one by one."""
    tensor_parallel: Mapping[str, Literal["colwise", "rowwise"]] = field(
        default_factory=lambda: dict[str, Literal["colwise", "rowwise"]]()
    )
    """Linear layers that may be split over ranks, by name below `trainable`, `*` standing for one component: `colwise`
    splits the outputs of the first of a pair, `rowwise` the inputs of the second."""
    splits_sequence: bool = False
    """Whether it implements `split_sequence`: the ranks of a group may share the tokens of each sample."""
    verifies_values: bool = False
    """Whether it implements `verify`: it compares itself with a reference for each checkpoint."""
    optional_parts: tuple[ModelPart, ...] = ()
    """Parts that its `build` leaves out on request, see `unirl.core.roles.Model`."""
    path_key: str = "path"
    """Config key that takes the folder of a checkpoint."""
    tiny: Miniature | None = None
    """Checkpoint that conformance runs it on."""
    bridges: Mapping[str, str] = field(default_factory=lambda: dict[str, str]())
    """Name of an engine that needs one -> `"module:attribute"` of the bridge to it, see
    `unirl.core.plugins.bridges`."""
    text_alone: Mapping[str, str] = field(default_factory=lambda: dict[str, str]())
    """Name of an engine with a bridge that is given no media of this model -> why not, for messages."""
    reference: str = ""
    """The pipeline that this model is verified against."""
    parity: str = ""
    """`"module:function"` that runs the reference pipeline, see `unirl.conformance.reference.RunReference`, or
    `RunMediaReference` of a model that needs media."""
    text_parity: str = ""
    """The same for text: `"module:function"`, see `unirl.conformance.reference.RunTextReference`."""

    @property
    def needs_media(self) -> bool:
        """Whether it generates nothing from text alone."""
        return any(use != "takes" for roles in self.inputs.values() for use in roles.values())

    def media_of_kinds(self, kinds: Collection[str]) -> set[MediaKind]:
        """The media that its tracks of these kinds may generate."""
        usual: dict[str, set[MediaKind]] = {"text": {"text"}, "latent": {"image", "video"}}
        result: set[MediaKind] = set()
        for track, kind in self.tracks.items():
            if kind in kinds:
                result |= {self.media[track]} if track in self.media else usual[kind]
        return result

    def lacks_media(self, engine: EngineSpec) -> str:
        """Why the engine is given no media of this model's prompts; empty if it is."""
        if Cap.MEDIA_REFS not in engine.capabilities:
            return f"engine {engine.name!r} takes none"
        if why := self.text_alone.get(engine.name):
            return f"engine {engine.name!r} is given none of model {self.name!r}: {why}"
        return ""

    def reads_media(self, kind: Literal["latent", "text"]) -> bool:
        """Whether a track of this kind is generated from media besides the text."""
        return any(self.tracks[track] == kind for track, roles in self.inputs.items() if roles)


@dataclass(frozen=True, kw_only=True)
class EngineSpec(Spec):
    kind: ClassVar[Kind] = "engine"

    kernels: tuple[str, ...] = ()
    """SDE kernels that it runs, by their short names in `unirl.numerics.diffusion.kernels`; those of plugins are
    `Cap.PLUGIN_SAMPLERS`."""
    guidances: tuple[str, ...] = PLAIN_GUIDANCE
    """Guidances that it computes, by their short names in `unirl.numerics.diffusion.guidance`."""
    needs_bridge: bool = False
    """Runs only models that bring a bridge for it, see `unirl.core.plugins.bridges`."""
    environment: str = ""
    """`"module:attribute"` of the separate Python environment that an external engine runs in, an `EngineEnvironment`
    of `unirl.engine_host.environment`; empty runs it in this one."""
    releases: tuple[str, ...] = ()
    """Releases of the engine that this environment has locks for besides the newest: values of `engine.release`."""
    model_parts: tuple[ModelPart, ...] = ("encode", "decode")
    """Optional parts of the model that it uses in its own process, besides `trainable`; the others are not loaded."""
    samples: tuple[tuple[MediaRole, ...], ...] = ()
    """For an engine that reads stored samples in place of generating any: the roles of a prompt's media that are its
    samples, in their order, of which every prompt has one set. One role alone gives all samples of its prompt. Only
    algorithms that do not depend on who sampled (`Needs.staleness`) train on them."""
    reads_weights: bool = True
    """Whether it reads the weights of `trainable` in its own process. False for an external engine, which takes names,
    dtypes and shapes from the model and loads the checkpoint itself: a process that only generates then holds none."""

    def parts_of(self, model: ModelSpec) -> tuple[ModelPart, ...]:
        """`model_parts`, and the VAE of a diffusion model whose prompts have media: it encodes them."""
        reads = any(kind == "latent" and model.inputs.get(track) for track, kind in model.tracks.items())
        return ("encode", "decode") if reads and "encode" in self.model_parts else self.model_parts


@dataclass(frozen=True, kw_only=True)
class BackendSpec(Spec):
    kind: ClassVar[Kind] = "backend"


@dataclass(frozen=True, kw_only=True)
class AlgorithmSpec(Spec):
    kind: ClassVar[Kind] = "algorithm"

    needs: Needs
    """Requirements on the rest of a plan, whatever its settings."""
    when: Mapping[str, Needs] = field(default_factory=lambda: dict[str, Needs]())
    """Further needs while a config key is set to something true, such as `{"kl_coef": Needs(reference="policy")}`."""
    stateful: Mapping[str, Any] = field(default_factory=lambda: dict[str, Any]())
    """Settings, by config key, with which it keeps a state from step to step that an update changes, see
    `unirl.core.roles.Algorithm`; empty where it never does. Conformance resumes it with them."""
    clip_key: str = ""
    """Config key of the clip range, which bounds the log-prob mismatch that a run over latents tolerates."""
    correction_key: str = ""
    """Config key of the weights that correct for an engine whose policy is off the one that trains, such as `tis`;
    its value `none` turns them off."""
    paper: str = ""
    """Where the loss comes from, such as `arXiv 2505.05470`; or a sentence that says why there is none."""
    proposes: Mapping[str, Any] = field(default_factory=lambda: dict[str, Any]())
    """Settings of `sampling`, `train`, `backend` and `advantage` that suit it, by dotted key: above the defaults, below
    what a recipe sets for this algorithm. A mapping replaces a whole section, `{"sampling.sde": {"mode": "none"}}`;
    a `unirl.core.specs.overrides.ValueIf` depends on other settings."""
    reference: str = ""
    """`"module:function"` that gives the loss again in NumPy, see `unirl.conformance.reference.LossInNumpy`."""


@dataclass(frozen=True, kw_only=True)
class RewardExample:
    """A sample that a reward can score, for conformance; images and videos of this size are made of random pixels."""

    prompt: str = ""
    """The prompt that the sample is scored against."""
    metadata: Mapping[str, Any] = field(default_factory=lambda: dict[str, Any]())
    """Metadata of the prompt that the reward reads: every key of the spec's `metadata`."""
    text: str = ""
    """The generated text, for rewards of text."""
    media: tuple[MediaRef, ...] = ()
    """Inputs of the sample besides the prompt, such as the source image of an edit."""
    height: int = 64
    """Pixels."""
    width: int = 64
    """Pixels."""
    frames: int = 8
    """Frames of a video."""
    draw: str = ""
    """`"module:function"` that draws an image or a frame where random pixels say nothing, as to a reward that reads
    text: `draw(*, height, width, seed) -> [3, height, width]` in [0, 1]. Other seeds give other images, which the
    reward scores differently."""


RESERVED_PARTS = ("agreement", "original", "unscored")
"""Names under which a run logs more about a reward, beside its components."""


@dataclass(frozen=True, kw_only=True)
class RewardSpec(Spec):
    kind: ClassVar[Kind] = "reward"

    scale: str
    """Meaning and range of the number, the same wherever it is computed."""
    range: tuple[float, float] = (-math.inf, math.inf)
    """Smallest and largest score."""
    examples: tuple[RewardExample, ...] = (RewardExample(),)
    """Samples that it can score; each has the metadata that it reads."""
    media: Literal["image", "video", "text", "audio", "any"]
    """Media that it scores; `any` takes whatever the model of the plan generates."""
    metadata: tuple[str, ...] = ()
    """Metadata keys that every prompt must have."""
    metadata_kinds: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: dict[str, tuple[str, ...]]())
    """Kinds of value that a metadata key may have: `text`, `a number`, `a boolean`, `a list`, `an object`, `null`. A
    key that is not named may have any. Prompt files are checked before anything is built."""
    parts: tuple[str, ...] = ()
    """Names of the components it reports besides the score; not those of `RESERVED_PARTS`."""
    tiny: str = ""
    """`"module:function"` that writes a checkpoint of random weights for conformance, `write(folder, *, seed) ->
    Mapping[str, Any]`, and returns the settings that load it, by dotted config key. Empty for a reward without
    weights."""


@dataclass(frozen=True, kw_only=True)
class EnvironmentExample:
    """An episode that an environment can run, for conformance."""

    prompt: str = ""
    """Prompt of the episode."""
    metadata: Mapping[str, Any] = field(default_factory=lambda: dict[str, Any]())
    """Metadata of the prompt: every key of the spec's `metadata`."""
    answers: tuple[str, ...]
    """Answers of the model, one a turn. The last one ends the episode, none before it does."""


@dataclass(frozen=True, kw_only=True)
class EnvironmentSpec(Spec):
    kind: ClassVar[Kind] = "environment"

    examples: tuple[EnvironmentExample, ...]
    """Episodes that it can run."""
    metadata: tuple[str, ...] = ()
    """Metadata keys that every prompt must have."""


@dataclass(frozen=True, kw_only=True)
class TrackerSpec(Spec):
    kind: ClassVar[Kind] = "tracker"


@dataclass(frozen=True, kw_only=True)
class LauncherSpec(Spec):
    kind: ClassVar[Kind] = "launcher"

    separates: Mapping[str, Any] | None = None
    """Settings, by config key, under which rollouts come from workers with their own weights, such as
    `{"placement": "separate"}`. None says that it builds every part in this process."""
    holds_reference: Mapping[str, Any] | None = None
    """Settings, by config key, under which separate workers compute the reference policy, so that the backend keeps
    none. None says that the backend always computes it."""
    look: str = ""
    """`module:function` for `unirl doctor --cluster`: takes the address of a cluster and returns a
    `unirl.core.specs.diagnosis.ClusterDiagnosis` of its machines. Empty for a launcher that knows none."""


@dataclass(frozen=True, kw_only=True)
class TransportSpec(Spec):
    kind: ClassVar[Kind] = "transport"
