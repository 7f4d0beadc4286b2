"""Roles: what the parts of a run do for each other. A plugin's `build` returns an object that fits its role.

The loop calls nothing else. A model is plain torch and knows nothing of engines or trainers; an engine turns a request
into a rollout; a backend owns what trains; an algorithm returns loss terms and never runs backward itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from .array import Array, Module

if TYPE_CHECKING:
    from .catalog import Catalog
    from .config import LatentSamplingConfig
    from .data import MediaRef
    from .events import Event
    from .parts import Parts
    from .plan import Plan
    from .request import LatentRequest, Request
    from .rollout import Rollout
    from .spec import ModelSpec
    from .track import Track

__all__ = [
    "Algorithm",
    "Backend",
    "DiffusionModel",
    "Engine",
    "Launcher",
    "LossTermLike",
    "Losses",
    "Metric",
    "PieceLike",
    "Policy",
    "RemoteRowsLike",
    "Replay",
    "ReplayedLike",
    "Reward",
    "RunInfo",
    "ScoreInput",
    "Scores",
    "Tracker",
    "TrainReport",
    "Transport",
    "TransportCounts",
    "TransportPlace",
    "WeightReceipt",
    "WeightUpdate",
]

Policy = Literal["live", "reference", "ema", "lagged"]
"""Which weights a forward uses: those that train, the initial ones, their average, or the lagged policy."""


class DiffusionModel(Protocol):
    """A denoiser with its encoders and decoder. Build: `build(config, *, device) -> DiffusionModel`."""

    spec: ModelSpec
    device: Any

    @property
    def trainable(self) -> Module:
        """The module that trains. A backend may wrap its blocks in place, never replace it."""
        ...

    def encode(
        self,
        prompts: Sequence[str],
        *,
        sampling: LatentSamplingConfig,
        media: Sequence[Sequence[MediaRef]] | None = None,
    ) -> Mapping[str, Array]:
        """Conditions of each prompt: name -> [len(prompts), ...]. No gradient."""
        ...

    def velocity(self, x: Array, sigma: Array, conditions: Mapping[str, Array]) -> Array:
        """Velocity x1 - x0 at noise level sigma.

        x: [B, ...] fp32.  sigma: [B] in [0, 1].  conditions: name -> [B, ...].  Returns [B, ...] fp32.
        """
        ...

    def schedule(self, sampling: LatentSamplingConfig) -> Array:
        """Sigmas [T+1], fp32, falling, ending in 0."""
        ...

    def latent_shape(self, sampling: LatentSamplingConfig) -> tuple[int, ...]:
        """Shape of one sample's latent."""
        ...

    def decode(self, latents: Array) -> Array:
        """Media of latents [N, ...]: images [N, 3, H, W] or videos [N, F, 3, H, W], fp32 in [0, 1]."""
        ...


@dataclass(frozen=True, kw_only=True)
class WeightUpdate:
    """Named tensors for an engine."""

    version: int
    tensors: Mapping[str, Array]
    """`full`, `merged`: by the parameter names of the plain module. `lora`: `<layer>.lora_A.weight` [rank, in] and
    `<layer>.lora_B.weight` [out, rank] of every adapted layer, by the layer's name in the plain module."""
    kind: Literal["full", "lora", "merged"]
    """`full` when all weights train; `lora`, or `merged` (folded into the base), when adapters do."""
    adapter: str = "default"
    """Name of the adapter, for LoRA."""
    adapter_scale: float = 1.0
    """alpha / rank of the adapter: the factor of B A in the weights, for LoRA."""
    checksum: str = ""
    """`unirl.core.weights.checksum` of the tensors."""


@dataclass(frozen=True, kw_only=True)
class WeightReceipt:
    """What an engine holds after an update."""

    version: int
    checksum: str
    num_tensors: int
    size_bytes: int


class Engine(Protocol):
    """Generates rollouts. Build: `build(config, *, model: DiffusionModel, device) -> Engine`.

    Runs under `no_grad` and restores the training mode of what it shares.
    """

    version: int

    def generate(self, request: Request) -> Rollout:
        """Generate every sample of the request, in its order."""
        ...

    def load_weights(self, update: WeightUpdate) -> WeightReceipt: ...
    def sleep(self) -> None: ...
    def wake(self) -> None: ...
    def close(self) -> None: ...


class ReplayedLike(Protocol):
    """What a replay gives back. See `unirl.numerics.replay.Replayed`."""

    @property
    def log_probs(self) -> Array: ...
    @property
    def means(self) -> Array: ...
    @property
    def std(self) -> Array: ...
    @property
    def g(self) -> Array: ...
    @property
    def valid(self) -> Array: ...


class Replay(Protocol):
    """Recomputes a track's transitions with the weights of a policy; with gradient for `live`, unless in no_grad."""

    def __call__(self, track: Track, *, policy: Policy = "live") -> ReplayedLike: ...


class LossTermLike(Protocol):
    """One term of a loss: per-element values, their weights, a scale. See `unirl.numerics.reduction.LossTerm`."""

    @property
    def name(self) -> str: ...
    @property
    def values(self) -> Array: ...
    @property
    def weights(self) -> Array: ...
    @property
    def scale(self) -> float: ...


@dataclass(frozen=True, kw_only=True)
class Metric:
    """A number that adds up over micro-batches and ranks."""

    total: float
    weight: float = 1.0
    reduce: Literal["mean", "max", "sum"] = "mean"


@dataclass(frozen=True, kw_only=True)
class Losses:
    """What an algorithm returns for one micro-batch."""

    terms: Sequence[LossTermLike]
    metrics: Mapping[str, Metric] = field(default_factory=lambda: dict[str, Metric]())


class Algorithm(Protocol):
    """What is asked of a rollout, and loss terms over it.

    Build: `build(config, *, advantage: AdvantageConfig, reward_weights: Mapping[str, float], train: TrainConfig)`.
    """

    def latent_request(
        self,
        sampling: LatentSamplingConfig,
        *,
        sigmas: Array,
        latent_shape: tuple[int, ...],
        seed: int,
        rollout: int,
        sample_ids: Sequence[str],
        group_ids: Sequence[str],
    ) -> LatentRequest:
        """How a latent track is to be sampled so that this algorithm can train on it: noise ids and SDE steps."""
        ...

    def advantages(self, track: Track) -> tuple[Track, Mapping[str, float]]:
        """The track with its advantages, and numbers for the log. Reads `rewards` and `reward_parts`."""
        ...

    def anchor(self, track: Track, replay: Replay) -> Track:
        """Freeze what the updates compare with (old log-probs, old means), before the first update.

        Called once per micro-batch, at the very geometry of the updates, without gradient.
        """
        ...

    def weights(self, track: Track) -> Mapping[str, Array]:
        """Weights of each term for these rows, without any forward: name -> [n, ...].

        The stack sums them over all micro-batches and ranks before the first backward; a term is divided by its sum.
        """
        ...

    def loss(self, track: Track, replay: Replay, *, progress: float) -> Losses:
        """Loss terms of one micro-batch. `progress` rises from 0 to 1 over the run."""
        ...


@dataclass(frozen=True, kw_only=True)
class TrainReport:
    """What one call of `Backend.train` did."""

    metrics: Mapping[str, float]
    num_updates: int
    num_skipped: int = 0
    """Optimizer steps left out because a gradient was not finite."""


class Backend(Protocol):
    """Owns the weights that train.

    Build: `build(config, *, model, train: TrainConfig, steps: int, seed: int) -> Backend`; config: a `BackendConfig`.
    Dropout is off while it trains. A policy that is not kept is refused with a RecipeError.
    """

    version: int
    """Policy version: optimizer steps taken."""

    def policy(self, which: Policy = "live") -> AbstractContextManager[None]:
        """Use these weights inside the block; restores the live ones after it, also on an error."""
        ...

    def train(self, track: Track, algorithm: Algorithm, *, progress: float) -> TrainReport: ...
    def weights(self, *, policy: Policy = "live", kind: Literal["full", "lora", "merged"]) -> WeightUpdate: ...
    def adopt(self, update: WeightUpdate) -> None:
        """Take weights that another backend of the same recipe exported, and its version. `full` or `lora`.

        A module that then samples gives the very numbers of the one that trains. Raises EchoMismatch, before anything
        changes, for names, shapes or dtypes that are not those of `weights`.
        """
        ...

    def save(self, folder: Path) -> None:
        """Write everything that training needs to go on exactly: weights, optimizer, scheduler, averages, counters."""
        ...

    def load(self, folder: Path) -> None:
        """Go on from what `save` wrote. Raises CheckpointError, before anything changes, when that cannot be done."""
        ...

    def end_rollout(self) -> None:
        """One rollout's updates are done: averages and lagged policies that follow rollouts move now."""
        ...

    def offload(self) -> None: ...
    def onload(self) -> None: ...
    def close(self) -> None:
        """Let go of what it holds. May be called twice."""
        ...


@dataclass(frozen=True, kw_only=True)
class ScoreInput:
    """Samples to score, all of one track. Rows of a group may stand anywhere."""

    sample_ids: tuple[str, ...]
    group_ids: tuple[str, ...]
    prompts: tuple[str, ...]
    metadata: tuple[Mapping[str, Any], ...]
    images: Array | None = None
    """[N, 3, H, W] fp32 in [0, 1]."""
    videos: Sequence[Array] | None = None
    """Each [F, 3, H, W] fp32 in [0, 1]."""
    texts: tuple[str, ...] | None = None
    media_refs: tuple[tuple[MediaRef, ...], ...] | None = None


@dataclass(frozen=True, kw_only=True)
class Scores:
    """What a reward gives back, in the order of its input."""

    values: Array
    """[N] fp32, finite."""
    parts: Mapping[str, Array] = field(default_factory=lambda: dict[str, Array]())
    """Components for the logs: name -> [N]."""


class Reward(Protocol):
    """Scores samples. Build: `build(config, *, device) -> Reward`. A sample that cannot be scored raises."""

    def score(self, samples: ScoreInput) -> Scores: ...
    def close(self) -> None: ...


class Launcher(Protocol):
    """Makes the parts of a plan where they are to run. Build: `build(config) -> Launcher`.

    The parts that it gives fit the same roles as those of one process; the loop does not see the difference.
    """

    def launch(self, plan: Plan, *, catalog: Catalog) -> Parts:
        """Start whatever is needed and build every part.

        Raises PlanRejected, before anything starts, when it cannot fit. Called once. What was started before an error
        is stopped again.
        """
        ...

    def close(self) -> None:
        """Stop everything that was started. No process is left, whatever happened before. May be called twice."""
        ...


class PieceLike(Protocol):
    """Neighbouring rows of one kept tensor. See `unirl.runtime.remote_rows.Piece`."""

    @property
    def blob(self) -> Any:
        """What `Transport.keep` called the tensor."""
        ...

    @property
    def start(self) -> int: ...
    @property
    def count(self) -> int: ...


class RemoteRowsLike(Protocol):
    """[N, ...] rows that lie elsewhere, in pieces. See `unirl.runtime.remote_rows.RemoteRows`."""

    @property
    def pieces(self) -> Sequence[PieceLike]: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> Any: ...


@dataclass(frozen=True, kw_only=True)
class TransportPlace:
    """The process of a run that a transport works in."""

    run: str
    """A name that no other run on these machines has."""
    process: str
    """`driver`, or the name of the worker."""
    device: Any
    """Where fetched tensors are to be."""
    ask: Callable[[str, Any], Any]
    """ask(process, question): the `answer` of the transport in another worker."""
    address: Any = None
    """In a worker: the `address` of the driver's transport."""


@dataclass(frozen=True, kw_only=True)
class TransportCounts:
    """What went through the transport of one process so far."""

    bytes_sent: int
    """Bytes of rows that left this process."""
    bytes_fetched: int
    """Bytes of rows that came into it."""
    bytes_held: int
    """Bytes of tensors that it kept and has not dropped, wherever they are held."""


class Transport(Protocol):
    """Brings tensors from the process that made them to those that need them; the driver passes on their names alone.

    Build: `build(config, *, place: TransportPlace) -> Transport`, in the driver first, where it may start what all
    processes need, then in each worker. One thread at a time calls it; `answer` and `counts` come from any thread.
    """

    @property
    def address(self) -> Any:
        """What the transports of the workers join by; picklable. Asked of the driver's alone."""
        ...

    def keep(self, tensors: Sequence[Array]) -> list[Any]:
        """A name for each tensor [N, ...], N > 0: hashable, below 1 KiB pickled, never given again.

        The tensors are not written to afterwards; their rows can be fetched until `drop`.
        """
        ...

    def fetch(self, wanted: Sequence[RemoteRowsLike]) -> list[Array]:
        """The rows, bit for bit, on the device of this process. Raises RunFailed for a tensor that was dropped."""
        ...

    def drop(self, names: Sequence[Any] | None = None) -> None:
        """Forget the tensors of these names, which this process kept; None forgets all that it kept.

        Their rows are gone once all that was kept in the same call is dropped, or earlier.
        """
        ...

    def answer(self, question: Any) -> Any:
        """What `ask` brings to the process that asked; for transports whose processes talk to each other."""
        ...

    def counts(self) -> TransportCounts: ...
    def close(self) -> None:
        """Forget everything and stop what this one started, in the driver what all use. May be called twice."""
        ...


@dataclass(frozen=True, kw_only=True)
class RunInfo:
    """What a tracker is told at the start."""

    name: str
    folder: Path
    plan_hash: str
    config: Mapping[str, Any]
    resumed_at: int | None = None


class Tracker(Protocol):
    """Shows a run somewhere. Build: `build(config) -> Tracker`. Driven by the events of the run."""

    def start(self, run: RunInfo) -> None: ...
    def log(self, metrics: Mapping[str, float], *, step: int) -> None: ...
    def images(self, key: str, images: Array, captions: Sequence[str], *, step: int) -> None:
        """images: [N, 3, H, W] fp32 in [0, 1]."""
        ...

    def event(self, event: Event) -> None:
        """Every event of the run, for those that show more than numbers."""
        ...

    def finish(self, status: Literal["done", "stopped", "failed"]) -> None: ...
