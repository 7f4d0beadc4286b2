"""Whether parts are compatible by their specs alone, whatever their settings."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from ..limits import Reason
from ..plugins.bridges import lacks_bridge
from ..specs.capability import Cap, Needs
from ..specs.spec import AlgorithmSpec, BackendSpec, EngineSpec, ModelSpec, RewardSpec
from .wording import lacks, lacks_token_rules, listed

__all__ = ["Verdict", "match_pair", "match_parts", "pair_problems", "part_problems", "served_kinds"]

ECHOED = (Cap.SIGMAS, Cap.INITIAL_NOISE, Cap.STEP_NOISE, Cap.SDE_STEPS)
"""Inputs that an engine must take from the request for its trajectories to be trained on."""


_ROLLOUTS = {"latent": Cap.LATENT_ROLLOUT, "text": Cap.TEXT_ROLLOUT}
"""Kind of a track -> the capability of engines that generate it."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    reasons: tuple[Reason, ...]

    @property
    def accepted(self) -> bool:
        return not self.reasons


def match_parts(
    *,
    model: ModelSpec,
    engine: EngineSpec,
    algorithm: AlgorithmSpec,
    backend: BackendSpec | None = None,
    rewards: Mapping[str, RewardSpec] | None = None,
) -> Verdict:
    """Whether parts are compatible by their specs, whatever their settings. Used for the matrix and the docs."""
    both = (Cap.TRAIN_LORA, Cap.TRAIN_FULL)
    offered = [cap for cap in both if backend is None or cap in backend.capabilities]
    fitting = [cap for cap in offered if cap is Cap.TRAIN_FULL or Cap.LORA in model.capabilities]
    trains = fitting or offered or both
    result = part_problems(model, engine, algorithm, backend, rewards or {}, needs=algorithm.needs, trains=trains)
    return Verdict(reasons=tuple(result))


def match_pair(*, model: ModelSpec, engine: EngineSpec) -> Verdict:
    """Whether an engine can run a model, whatever the algorithm and the backend: of a model with tracks of both kinds
    and a bridge to the engine, those that the engine generates."""
    return Verdict(reasons=tuple(pair_problems(model, engine)))


def pair_problems(
    model: ModelSpec, engine: EngineSpec, *, bridged: Collection[str] | None = (), kind: str | None = None
) -> Iterator[Reason]:
    """bridged: models with a bridge; None leaves it out.  kind: of the track; None is every kind that the model has, or
    that its bridge serves."""
    result: list[Reason] = []
    kinds = served_kinds(model, engine) if kind is None else {kind}
    for each in sorted(kinds):
        stage = Cap.LATENT_STAGE if each == "latent" else Cap.TEXT_STAGE
        result += lacks("model", model, stage, asks=f"a {each} track")
        result += lacks("engine", engine, _ROLLOUTS[each], asks=f"the {each} track of model {model.name!r}")
    if kind is None and (not engine.needs_bridge or engine.name in model.bridges):
        # What is lacking without a bridge is the bridge.
        tracks = sorted(track for track, of in model.tracks.items() if of in kinds)
        result += lacks_token_rules("engine", engine, model, tracks)
    if model.needs_media:
        result += lacks("engine", engine, Cap.MEDIA_REFS, asks=f"model {model.name!r}, which needs media,")
    yield from result
    if not result and bridged is not None and (why := lacks_bridge(model, engine, bridged=bridged, kinds=kinds)):
        yield Reason(key="engine", text=why)


def served_kinds(model: ModelSpec, engine: EngineSpec) -> set[str]:
    """Kinds of the model's tracks; of a model with a bridge to the engine, those that both serve."""
    kinds: set[str] = set(model.tracks.values())
    served = {kind for kind in kinds if _ROLLOUTS[kind] in engine.capabilities}
    if engine.needs_bridge and engine.name not in model.bridged_texts:
        served.discard("text")
    return served if served and engine.name in model.bridges else kinds


def part_problems(
    model: ModelSpec,
    engine: EngineSpec,
    algorithm: AlgorithmSpec,
    backend: BackendSpec | None,
    rewards: Mapping[str, RewardSpec],
    *,
    needs: Needs,
    trains: Collection[Cap],
    bridged: Collection[str] | None = (),
    kind: str | None = None,
    observed: Collection[str] = (),
    has_teacher: bool = False,
    installed: Collection[RewardSpec] = (),
) -> Iterator[Reason]:
    """observed: rewards of weight 0, which only the log shows.  has_teacher: another model is the reference policy.
    installed: rewards to choose from."""
    asks = f"algorithm {algorithm.name!r}"
    kinds = set(model.tracks.values()) if kind is None else {kind}
    if needs.track != "any" and needs.track not in kinds:
        yield Reason(
            key="algorithm",
            text=f"{asks} trains {needs.track} tracks; model {model.name!r} generates {listed(kinds)}. "
            f"Choose a model with a {needs.track} track.",
        )
    # Parts alone: the algorithm says which track it is.
    is_known = kind is None and needs.track in kinds and engine.name in model.bridges
    yield from pair_problems(model, engine, bridged=bridged, kind=needs.track if is_known else kind)
    if engine.samples and needs.staleness != "any":
        yield Reason(
            key="engine",
            text=f"{asks} trains on samples of its own policy; engine {engine.name!r} reads stored ones. Choose an "
            "engine that generates, or an algorithm that does not depend on who sampled, such as sft.",
        )
    if needs.trajectory != "none":
        for cap in ECHOED:
            yield from lacks("engine", engine, cap, asks=f"{asks}, which trains on trajectories,")
        if Cap.TRAJECTORY_FULL not in engine.capabilities:
            cap = Cap.TRAJECTORY_FULL if needs.trajectory == "full" else Cap.TRAJECTORY_WINDOW
            yield from lacks("engine", engine, cap, asks=asks)
    if needs.sampler != "live" and needs.log_probs != "none":
        yield Reason(
            key="algorithm",
            text=f"{asks} takes log-probs of samples from the {needs.sampler} policy; they can only be checked against "
            "the live policy so far. Choose another algorithm.",
        )
    if backend is not None:
        yield from _backend(model, engine, algorithm, backend, needs=needs, trains=trains, has_teacher=has_teacher)
    expected = {"group": Cap.REWARD_GROUP, "differentiable": Cap.REWARD_DIFFERENTIABLE}.get(needs.reward)
    for key, reward in rewards.items():
        if expected is not None and key not in observed:
            media = {"any", reward.media}
            others = [one for one in installed if reward.media == "any" or one.media in media]
            yield from lacks(f"reward.{key}", reward, expected, asks=asks, others=others, at=f"reward@reward.{key}")
        if reward.media != "any" and reward.media not in model.media_of_kinds(kinds):
            others = sorted({medium for track, medium in model.media.items() if model.tracks[track] in kinds})
            result = f"model {model.name!r} generates {listed(others or kinds)} tracks"
            yield Reason(key=f"reward.{key}", text=f"reward {reward.name!r} scores {reward.media}; {result}.")


def _backend(
    model: ModelSpec,
    engine: EngineSpec,
    algorithm: AlgorithmSpec,
    backend: BackendSpec,
    *,
    needs: Needs,
    trains: Collection[Cap],
    has_teacher: bool = False,
) -> Iterator[Reason]:
    asks = f"algorithm {algorithm.name!r}"
    if backend.capabilities.isdisjoint(trains):
        yield Reason(key="backend", text=f"backend {backend.name!r} does not support {listed(trains)}.")
    if tuple(trains) == (Cap.TRAIN_LORA,):
        yield from lacks("model", model, Cap.LORA, asks="training LoRA adapters")
    adapters = {Cap.WEIGHTS_LORA} if Cap.TRAIN_LORA in trains else set[Cap]()
    if engine.capabilities.isdisjoint({Cap.WEIGHTS_SHARED, Cap.WEIGHTS_FULL} | adapters):
        yield Reason(
            key="engine",
            text=f"engine {engine.name!r} neither shares the training weights nor accepts weight updates "
            f"({listed(trains)}); its rollouts would always come from the initial policy.",
        )
    if needs.reference == "policy" and not has_teacher:
        ways = [Cap.REFERENCE_ADAPTER_OFF if cap is Cap.TRAIN_LORA else Cap.REFERENCE_COPY for cap in trains]
        if backend.capabilities.isdisjoint(ways):
            yield from lacks("backend", backend, ways[0], asks=f"{asks} with a KL penalty to the reference policy")
    if needs.critic:
        yield from lacks("backend", backend, Cap.CRITIC, asks=asks)
    if needs.fake_score:
        yield from lacks("backend", backend, Cap.FAKE_SCORE, asks=asks)
    if needs.sampler != "live":
        cap = Cap.LAGGED_POLICY if needs.sampler == "lagged" else Cap.EMA
        yield from lacks(
            "backend", backend, cap, asks=f"{asks}, which trains on samples from the {needs.sampler} policy,"
        )
    if needs.reward == "differentiable":
        yield from lacks("backend", backend, Cap.THROUGH_SAMPLER, asks=asks)
