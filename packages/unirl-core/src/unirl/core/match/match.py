"""Whether parts and settings are compatible: pure functions for compose, train, conformance and the generated docs.

`match_parts` checks specs alone, `match` a whole plan. Neither imports an implementation, so both take microseconds.
Every refusal says in a sentence or two what it got, what it expected and what to do.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeVar

from ..limits import Reason, broken_limits
from ..plugins.bridges import bridged_models, lacks_bridge
from ..plugins.loading import describe_failure
from ..specs.capability import Cap, Needs, Support
from ..specs.config import PartConfig
from ..specs.eval_sampling import evaluation_base
from ..specs.spec import AlgorithmSpec, BackendSpec, EngineSpec, ModelSpec, RewardSpec, Spec
from ..types.sampling import LatentSamplingConfig, TextSamplingConfig
from .asynchrony import asynchrony

if TYPE_CHECKING:
    from ..plugins.catalog import Catalog
    from ..specs.plan import Choice, Plan
    from ..types.sampling import SamplingConfig

__all__ = [
    "DETERMINISTIC_KERNELS",
    "Reason",
    "Verdict",
    "match",
    "match_pair",
    "match_parts",
    "medium_of",
    "objections",
]

DETERMINISTIC_KERNELS = ("euler", "dpm2")
"""Kernels without noise: they have no log-prob, so no algorithm that takes ratios can train on them."""

DEVICE = re.compile(r"auto|cpu|cuda(:\d+)?")

S = TypeVar("S", bound="SamplingConfig")

ECHOED = (Cap.SIGMAS, Cap.INITIAL_NOISE, Cap.STEP_NOISE, Cap.SDE_STEPS)
"""Inputs that an engine must take from the request for its trajectories to be trained on."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    reasons: tuple[Reason, ...]

    @property
    def accepted(self) -> bool:
        return not self.reasons


def match(plan: Plan, *, catalog: Catalog | None = None) -> Verdict:
    """Whether a plan can run. With a catalog, plugins may add reasons through `unirl_check_plan`."""
    out_of_limits = _limits(plan)
    reasons = [*out_of_limits, *_chosen_parts(plan, catalog)]
    if not out_of_limits:
        # Combinations of values are only checked once each value is within its limits.
        reasons += _sections(plan)
        reasons += objections(plan, catalog=catalog)
    return Verdict(reasons=tuple(reasons))


def objections(plan: Plan, *, catalog: Catalog | None = None) -> list[Reason]:
    """Reasons from the plan's parts about their own settings, and from plugins about the whole plan."""
    own = [reason for choice in plan.choices for reason in _problems(choice, plan)]
    return own + (catalog.check_plan(plan) if catalog is not None else [])


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
    offered = [cap for cap in both if backend is None or backend.support(cap) is Support.NATIVE]
    fitting = [cap for cap in offered if cap is Cap.TRAIN_FULL or model.support(Cap.LORA) is Support.NATIVE]
    trains = fitting or offered or both
    result = _parts(model, engine, algorithm, backend, rewards or {}, needs=algorithm.needs, trains=trains)
    return Verdict(reasons=tuple(result))


def match_pair(*, model: ModelSpec, engine: EngineSpec) -> Verdict:
    """Whether an engine can run a model, whatever the algorithm and the backend."""
    return Verdict(reasons=tuple(_pair(model, engine)))


def _pair(model: ModelSpec, engine: EngineSpec, *, bridged: Collection[str] = ()) -> Iterator[Reason]:
    result: list[Reason] = []
    for kind in sorted(set(model.tracks.values())):
        stage, rollout = (
            (Cap.LATENT_STAGE, Cap.LATENT_ROLLOUT) if kind == "latent" else (Cap.TEXT_STAGE, Cap.TEXT_ROLLOUT)
        )
        result += _lacks("model", model, stage, asks=f"a {kind} track")
        result += _lacks("engine", engine, rollout, asks=f"the {kind} track of model {model.name!r}")
    if any("needs" in roles.values() for roles in model.inputs.values()):
        result += _lacks("engine", engine, Cap.MEDIA_REFS, asks=f"model {model.name!r}, which needs media,")
    yield from result
    if not result and model.name in engine.refuses:
        text = f"engine {engine.name!r} does not run model {model.name!r}, because {engine.refuses[model.name]}."
        yield Reason(key="engine", text=f"{text} Choose another engine, or another model.")
    if not result and (why := lacks_bridge(model, engine, bridged=bridged)):
        yield Reason(key="engine", text=why)


def _parts(
    model: ModelSpec,
    engine: EngineSpec,
    algorithm: AlgorithmSpec,
    backend: BackendSpec | None,
    rewards: Mapping[str, RewardSpec],
    *,
    needs: Needs,
    trains: Collection[Cap],
    bridged: Collection[str] = (),
) -> Iterator[Reason]:
    asks = f"algorithm {algorithm.name!r}"
    kinds = set(model.tracks.values())
    if needs.track != "any" and needs.track not in kinds:
        yield Reason(
            key="algorithm",
            text=f"{asks} trains {needs.track} tracks; model {model.name!r} generates {_names(kinds)}. "
            f"Choose a model with a {needs.track} track.",
        )
    yield from _pair(model, engine, bridged=bridged)
    if needs.trajectory != "none":
        for cap in ECHOED:
            yield from _lacks("engine", engine, cap, asks=f"{asks}, which trains on trajectories,")
        window = engine.support(Cap.TRAJECTORY_WINDOW) is Support.NATIVE
        full = engine.support(Cap.TRAJECTORY_FULL) is Support.NATIVE
        if not full and (needs.trajectory == "full" or not window):
            cap = Cap.TRAJECTORY_FULL if needs.trajectory == "full" else Cap.TRAJECTORY_WINDOW
            yield from _lacks("engine", engine, cap, asks=asks)
    if needs.sampler != "live" and needs.log_probs != "none":
        yield Reason(
            key="algorithm",
            text=f"{asks} takes log-probs of samples from the {needs.sampler} policy; they can only be checked against "
            "the live policy so far. Choose another algorithm.",
        )
    if needs.critic and "text" not in kinds:
        yield Reason(
            key="algorithm",
            text=f"{asks} trains a critic, which reads tokens; model {model.name!r} has no text track. Choose a model "
            "with one.",
        )
    if backend is not None:
        yield from _backend(model, engine, algorithm, backend, needs=needs, trains=trains)
    expected = {"group": Cap.REWARD_GROUP, "differentiable": Cap.REWARD_DIFFERENTIABLE}.get(needs.reward)
    for key, reward in rewards.items():
        if expected is not None:
            yield from _lacks(f"reward.{key}", reward, expected, asks=asks)
        if reward.media != "any" and ("text" if reward.media == "text" else "latent") not in kinds:
            result = f"model {model.name!r} generates {_names(kinds)} tracks"
            yield Reason(key=f"reward.{key}", text=f"reward {reward.name!r} scores {reward.media}; {result}.")


def _backend(
    model: ModelSpec,
    engine: EngineSpec,
    algorithm: AlgorithmSpec,
    backend: BackendSpec,
    *,
    needs: Needs,
    trains: Collection[Cap],
) -> Iterator[Reason]:
    asks = f"algorithm {algorithm.name!r}"
    if not any(backend.support(cap) is Support.NATIVE for cap in trains):
        yield Reason(key="backend", text=f"backend {backend.name!r} does not support {_names(trains)}.")
    if tuple(trains) == (Cap.TRAIN_LORA,):
        yield from _lacks("model", model, Cap.LORA, asks="training LoRA adapters")
    if engine.support(Cap.WEIGHTS_SHARED) is not Support.NATIVE:
        carriers = {Cap.TRAIN_LORA: (Cap.WEIGHTS_LORA, Cap.WEIGHTS_FULL), Cap.TRAIN_FULL: (Cap.WEIGHTS_FULL,)}
        if not any(engine.support(c) is Support.NATIVE for cap in trains for c in carriers[cap]):
            yield Reason(
                key="engine",
                text=f"engine {engine.name!r} neither shares the training weights nor accepts weight updates "
                f"({_names(trains)}); its rollouts would always come from the initial policy.",
            )
    if needs.reference == "policy":
        ways = [Cap.REFERENCE_ADAPTER_OFF if cap is Cap.TRAIN_LORA else Cap.REFERENCE_COPY for cap in trains]
        if not any(backend.support(cap) is Support.NATIVE for cap in ways):
            yield from _lacks("backend", backend, ways[0], asks=f"{asks} with a KL penalty to the reference policy")
    if needs.critic:
        yield from _lacks("backend", backend, Cap.CRITIC, asks=asks)
    if needs.sampler != "live":
        cap = Cap.LAGGED_POLICY if needs.sampler == "lagged" else Cap.EMA
        yield from _lacks(
            "backend", backend, cap, asks=f"{asks}, which trains on samples from the {needs.sampler} policy,"
        )
    if needs.reward == "differentiable":
        yield from _lacks("backend", backend, Cap.THROUGH_SAMPLER, asks=asks)


def _lacks(key: str, spec: Spec, cap: Cap, *, asks: str) -> Iterator[Reason]:
    result = spec.support(cap)
    if result is not Support.NATIVE:
        says = "does not state it" if result is Support.UNKNOWN else f"states {result.value!r}"
        yield Reason(key=key, text=f"{asks} needs {cap.value!r}; {spec.kind} {spec.name!r} {says}.")


def _limits(plan: Plan) -> list[Reason]:
    """A reason for each value of the plan that is outside its field's limits, at most one per key."""
    reasons: list[Reason] = []
    sections = {"run": plan.run, "data": plan.data, "advantage": plan.advantage, "train": plan.train, "eval": plan.eval}
    for key, config in (sections | _sampling_sections(plan) | {c.key: c.config for c in plan.choices}).items():
        reasons += broken_limits(config, key=key)
    for sampling in plan.sampling.values():
        result = broken_limits(_evaluation(sampling, plan), key="eval.sampling")
        # Values inherited from the training settings are refused there.
        reasons += [reason for reason in result if reason.key.split(".")[2] in plan.eval.sampling]
    return list({reason.key: reason for reason in reasons}.values())


def _chosen_parts(plan: Plan, catalog: Catalog | None) -> Iterator[Reason]:
    """Compatibility of the chosen parts, with their settings."""
    return _parts(
        plan.model.spec,
        plan.engine.spec,
        plan.algorithm.spec,
        plan.backend.spec,
        {key: choice.spec for key, choice in plan.rewards.items()},
        needs=plan.needs,
        trains=(Cap.TRAIN_LORA if plan.backend.config.trains == "lora" else Cap.TRAIN_FULL,),
        bridged=bridged_models(plan.engine.spec, catalog),
    )


def _problems(choice: Choice[Spec, PartConfig], plan: Plan) -> list[Reason]:
    """A part's check of its own settings."""
    try:
        return [reason.under(choice.key) for reason in choice.config.problems(plan)]
    except Exception as error:  # noqa: BLE001 - refuses the plan, in the name of the part
        text = f"{choice.spec.kind} {choice.name!r} of {choice.dist} {choice.version} could not check its settings: "
        return [Reason(key=choice.key, text=text + describe_failure(error))]


def _sections(plan: Plan) -> Iterator[Reason]:
    """Checks of the sections that belong to no part, against each other and the parts."""
    if not DEVICE.fullmatch(plan.run.device):
        yield Reason(key="run.device", text=f"got {plan.run.device!r}, expected `auto`, `cpu`, `cuda` or `cuda:N`.")
    needs = plan.needs
    yield from _geometry(plan, needs)
    yield from _rewards(plan)
    yield from _old_log_probs(plan)
    yield from asynchrony(plan, needs)
    for key, sampling in _sampling_sections(plan).items():
        if isinstance(sampling, TextSamplingConfig):
            yield from _text_sampling(key, sampling, plan, needs)
        else:
            yield from _latent_sampling(key, sampling, plan, needs)


def _sampling_sections(plan: Plan) -> dict[str, SamplingConfig]:
    """Key path -> how that track is sampled."""
    is_only = len(plan.sampling) == 1
    return {"sampling" if is_only else f"sampling.{track}": sampling for track, sampling in plan.sampling.items()}


def _evaluation(sampling: S, plan: Plan) -> S:
    """How evaluation samples a track."""
    base = evaluation_base(sampling)
    return replace(base, **{name: value for name, value in plan.eval.sampling.items() if name in vars(base)})


def _geometry(plan: Plan, needs: Needs) -> Iterator[Reason]:
    data, train = plan.data, plan.train
    samples = data.prompts_per_step * data.samples_per_prompt
    if train.updates_per_step > samples:
        yield Reason(
            key="train.updates_per_step",
            text=f"got {train.updates_per_step}, expected at most {samples}, the samples of a rollout "
            f"(data.prompts_per_step {data.prompts_per_step} x data.samples_per_prompt {data.samples_per_prompt}).",
        )
    if train.updates_per_step > 1 and not needs.multi_update:
        yield Reason(
            key="train.updates_per_step",
            text=f"got {train.updates_per_step}, expected 1: algorithm {plan.algorithm.name!r} is valid for one update "
            "per rollout.",
        )
    if data.samples_per_prompt < 2 and plan.advantage.center == "group" and needs.compares_groups:
        yield Reason(
            key="data.samples_per_prompt",
            text="got 1, so every group has zero variance and all advantages would be 0; use 2 or more, or "
            "advantage.center=global.",
        )
    if data.dynamic_sampling_rounds > 0 and data.samples_per_prompt < 2:
        yield Reason(
            key="data.dynamic_sampling_rounds",
            text=f"got {data.dynamic_sampling_rounds}, which drops zero-variance groups; a group of 1 always is one. "
            "Use data.samples_per_prompt of 2 or more, or 0 rounds.",
        )
    if data.dynamic_sampling_rounds > 0 and len(plan.sampling) > 1:
        yield Reason(
            key="data.dynamic_sampling_rounds",
            text=f"got {data.dynamic_sampling_rounds}, expected 0: dynamic sampling does not support models with "
            f"several tracks ({_names(plan.sampling)}).",
        )


def _rewards(plan: Plan) -> Iterator[Reason]:
    if not plan.rewards and plan.needs.reward == "none":
        yield from _without_rewards(plan)
    elif not plan.rewards:
        yield Reason(key="reward", text="no reward was chosen; add one, such as `+reward@reward.shapes=shapes`.")
    for key, choice in plan.rewards.items():
        media = choice.spec.media
        given = {track: _media(kind, plan.sampling.get(track)) for track, kind in plan.model.spec.tracks.items()}
        kinds = set(given.values())
        # Of a latent model, the number of frames decides between images and videos.
        if media == "any" and len(kinds) > 1:
            yield Reason(
                key=f"reward.{key}",
                text=f"reward {choice.name!r} scores any one medium; model {plan.model.name!r} generates several, "
                f"{_names(kinds)}. Choose a reward for one of them.",
            )
        if media in ("image", "video") and media not in kinds and kinds & {"image", "video"}:
            yield Reason(
                key=f"reward.{key}",
                text=f"reward {choice.name!r} scores {media}; model {plan.model.name!r} generates {_names(kinds)}.",
            )
        others = sorted(track for track, other in given.items() if other != media)
        if media in kinds and others:
            yield Reason(
                key=f"reward.{key}",
                text=f"reward {choice.name!r} scores {media}, and every reward scores every track; track {others[0]!r} "
                f"of model {plan.model.name!r} is {given[others[0]]}. Choose a model whose tracks are all {media}.",
            )
    if plan.rewards and not any(choice.config.weight for choice in plan.rewards.values()):
        yield Reason(key="reward", text="every reward has weight 0, so there is no training signal; raise one.")


def _without_rewards(plan: Plan) -> Iterator[Reason]:
    """Settings about scores, in a plan in which nothing scores."""
    asking = {
        "run.reward_overlap_groups": plan.run.reward_overlap_groups,
        "data.dynamic_sampling_rounds": plan.data.dynamic_sampling_rounds,
        "eval.threshold": plan.eval.threshold,
    }
    for key, value in asking.items():
        if value:
            yield Reason(key=key, text=f"got {value}, but the plan has no reward; leave it out, or add a reward.")


def medium_of(plan: Plan) -> str:
    """What the first track of a plan becomes: `image`, `video` or `text`."""
    track, kind = next(iter(plan.model.spec.tracks.items()))
    return _media(kind, plan.sampling.get(track))


def _media(kind: str, sampling: SamplingConfig | None) -> str:
    if kind == "text":
        return "text"
    return "video" if isinstance(sampling, LatentSamplingConfig) and sampling.frames > 1 else "image"


def _old_log_probs(plan: Plan) -> Iterator[Reason]:
    if plan.train.old_log_probs == "engine":
        for kind in sorted(set(plan.model.spec.tracks.values())):
            cap = Cap.LOG_PROBS_GAUSSIAN if kind == "latent" else Cap.LOG_PROBS_TOKEN
            yield from _lacks("engine", plan.engine.spec, cap, asks="train.old_log_probs=engine")


def _latent_sampling(key: str, sampling: LatentSamplingConfig, plan: Plan, needs: Needs) -> Iterator[Reason]:
    own = list(_rollouts(key, sampling, plan))
    yield from own
    reply = {reason.text for reason in own}
    evaluated = _rollouts("eval.sampling", _evaluation(sampling, plan), plan)
    yield from (reason for reason in evaluated if reason.text not in reply)
    if sampling.sde.per_group:
        yield from _lacks("engine", plan.engine.spec, Cap.SDE_STEPS_PER_GROUP, asks=f"{key}.sde.per_group")
    if needs.stochastic:
        yield from _stochastic(key, sampling, plan)
    yield from (reason.under(f"{key}.sde") for reason in sampling.sde.problems(sampling.num_inference_steps))


def _rollouts(key: str, sampling: LatentSamplingConfig, plan: Plan) -> Iterator[Reason]:
    """Whether the engine supports the latent sampling settings at `key`, of training or of evaluation."""
    engine = plan.engine.spec
    if sampling.kernel not in engine.kernels:
        yield Reason(
            key=f"{key}.kernel",
            text=f"got {sampling.kernel!r}; engine {engine.name!r} supports {_names(engine.kernels)}.",
        )
    if sampling.guidance_scale != 1.0:
        asks = f"guidance_scale {sampling.guidance_scale}"
        yield from _lacks("engine", engine, Cap.GUIDANCE, asks=asks)
        yield from _lacks("model", plan.model.spec, Cap.GUIDANCE, asks=asks)


def _stochastic(key: str, sampling: LatentSamplingConfig, plan: Plan) -> Iterator[Reason]:
    asks = f"algorithm {plan.algorithm.name!r} takes ratios of log-probs"
    if sampling.kernel in DETERMINISTIC_KERNELS:
        yield Reason(
            key=f"{key}.kernel",
            text=f"{asks}, and {sampling.kernel!r} is deterministic; use flow-sde, dance-sde or cps.",
        )
    elif sampling.eta <= 0:
        yield Reason(
            key=f"{key}.eta",
            text=f"{asks}, and with eta {sampling.eta} the steps are deterministic; use eta above 0, such as 0.7.",
        )
    if sampling.sde.mode == "none":
        yield Reason(key=f"{key}.sde.mode", text=f"{asks}, and mode 'none' makes no step stochastic.")


def _text_sampling(key: str, sampling: TextSamplingConfig, plan: Plan, needs: Needs) -> Iterator[Reason]:
    evaluated = _evaluation(sampling, plan)
    for where, settings in ((key, sampling), ("eval.sampling", evaluated)):
        if "" in settings.stop and (where == key or settings.stop != sampling.stop):
            yield Reason(
                key=f"{where}.stop", text="got an empty string, which would stop every completion at once; remove it."
            )
    if needs.log_probs != "token":
        return
    asks = f"algorithm {plan.algorithm.name!r} takes ratios of log-probs"
    if sampling.temperature == 0:
        yield Reason(
            key=f"{key}.temperature",
            text=f"{asks}, and at temperature 0 decoding is greedy; use a temperature above 0, such as 1.",
        )
    for name, value, whole in (("top_p", sampling.top_p, 1.0), ("top_k", sampling.top_k, 0)):
        if value != whole:
            yield Reason(
                key=f"{key}.{name}",
                text=f"got {value}, expected {whole}: {asks} over the whole vocabulary, so training must sample from "
                f"all of it. eval.sampling.{name} may differ.",
            )


def _names(values: Iterable[str]) -> str:
    return ", ".join(sorted(str(value) for value in values)) or "nothing"
