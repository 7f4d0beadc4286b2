"""May these parts work together? One pure function for compose, train, conformance and the generated docs.

`match_parts` looks at specs alone, `match` at a whole plan. Neither imports an implementation, so both are a matter of
microseconds. Every refusal is one sentence that says what was asked, what was found and what to do.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING

from .asynchrony import asynchrony
from .bridges import bridged_models, lacks_bridge
from .capability import Cap, Needs, Support
from .config import BackendConfig, LatentSamplingConfig, TextSamplingConfig
from .eval_sampling import evaluation_base
from .hosted import hosted_settings
from .pipeline_config import pipeline_settings
from .sde_match import sde_range
from .spec import AlgorithmSpec, BackendSpec, EngineSpec, ModelSpec, RewardSpec, Spec
from .text_match import critic_without_text, text_sampling

if TYPE_CHECKING:
    from .catalog import Catalog
    from .config import SamplingConfig
    from .plan import Plan

__all__ = ["DETERMINISTIC_KERNELS", "Reason", "Verdict", "match", "match_pair", "match_parts", "needs_of"]

DETERMINISTIC_KERNELS = ("euler", "dpm2")
"""Kernels without noise: they have no log-prob, so nothing that takes a ratio can train on them."""

ECHOED = (Cap.SIGMAS, Cap.INITIAL_NOISE, Cap.STEP_NOISE, Cap.SDE_STEPS)
"""What an engine must take from the request before its trajectories can be trained on."""


@dataclass(frozen=True, kw_only=True)
class Reason:
    """Why a combination is refused."""

    key: str
    """Key path that decides it."""
    text: str

    def __str__(self) -> str:
        return f"{self.key}: {self.text}"


@dataclass(frozen=True, kw_only=True)
class Verdict:
    reasons: tuple[Reason, ...]

    @property
    def accepted(self) -> bool:
        return not self.reasons


def match(plan: Plan, *, catalog: Catalog | None = None) -> Verdict:
    """Whether a plan can run. With a catalog, plugins may add reasons through `unirl_check_plan`."""
    algorithm, needs = plan.algorithm.spec, needs_of(plan)
    trains = _trains(plan)
    reasons = [
        *_parts(
            plan.model.spec,
            plan.engine.spec,
            algorithm,
            plan.backend.spec,
            {key: choice.spec for key, choice in plan.rewards.items()},
            needs=needs,
            trains=(trains,),
            bridged=bridged_models(plan.engine.spec, catalog),
        ),
        *_geometry(plan, needs),
        *_rewards(plan),
        *_old_log_probs(plan),
        *(
            Reason(key=key, text=text)
            for key, text in (
                *pipeline_settings(plan.model.config),
                *hosted_settings(plan.engine.config, name=plan.engine.name, releases=plan.engine.spec.releases),
                *asynchrony(plan, needs),
            )
        ),
    ]
    for track, sampling in plan.sampling.items():
        key = "sampling" if len(plan.sampling) == 1 else f"sampling.{track}"
        if isinstance(sampling, TextSamplingConfig):
            reasons += [Reason(key=where, text=text) for where, text in text_sampling(key, sampling, plan, needs)]
        else:
            reasons += _sampling(key, sampling, plan, needs)
    if catalog is not None:
        reasons += [Reason(key=owner, text=text) for owner, text in catalog.check_plan(plan)]
    return Verdict(reasons=tuple(reasons))


def needs_of(plan: Plan) -> Needs:
    """What the algorithm of a plan needs with its settings."""
    needs = plan.algorithm.spec.needs
    for key, further in plan.algorithm.spec.when.items():
        if getattr(plan.algorithm.config, key):
            needs = needs.merged(further)
    return needs


def match_parts(
    *,
    model: ModelSpec,
    engine: EngineSpec,
    algorithm: AlgorithmSpec,
    backend: BackendSpec | None = None,
    rewards: Mapping[str, RewardSpec] | None = None,
) -> Verdict:
    """Whether parts fit by their specs, whatever their settings. Used for the matrix and the docs."""
    both = (Cap.TRAIN_LORA, Cap.TRAIN_FULL)
    offered = [cap for cap in both if backend is None or backend.support(cap) is Support.NATIVE]
    fitting = [cap for cap in offered if cap is Cap.TRAIN_FULL or model.support(Cap.LORA) is Support.NATIVE]
    trains = fitting or offered or both
    found = _parts(model, engine, algorithm, backend, rewards or {}, needs=algorithm.needs, trains=trains)
    return Verdict(reasons=tuple(found))


def match_pair(*, model: ModelSpec, engine: EngineSpec) -> Verdict:
    """Whether an engine generates what a model has, whatever trains on it."""
    return Verdict(reasons=tuple(_pair(model, engine)))


def _pair(model: ModelSpec, engine: EngineSpec, *, bridged: Collection[str] = ()) -> Iterator[Reason]:
    found: list[Reason] = []
    for kind in sorted(set(model.tracks.values())):
        stage, rollout = (
            (Cap.LATENT_STAGE, Cap.LATENT_ROLLOUT) if kind == "latent" else (Cap.TEXT_STAGE, Cap.TEXT_ROLLOUT)
        )
        found += _lacks("model", model, stage, asks=f"a {kind} track")
        found += _lacks("engine", engine, rollout, asks=f"the {kind} track of model {model.name!r}")
    yield from found
    if not found and model.name in engine.refuses:
        text = f"engine {engine.name!r} does not run model {model.name!r}, because {engine.refuses[model.name]}."
        yield Reason(key="engine", text=f"{text} Choose another engine, or another model.")
    if not found and (why := lacks_bridge(model, engine, bridged=bridged)):
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
    if needs.critic and "text" not in kinds:
        yield Reason(key="algorithm", text=critic_without_text(asks, model.name))
    if backend is not None:
        yield from _backend(model, engine, algorithm, backend, needs=needs, trains=trains)
    wanted = {"group": Cap.REWARD_GROUP, "differentiable": Cap.REWARD_DIFFERENTIABLE}.get(needs.reward)
    for key, reward in rewards.items():
        if wanted is not None:
            yield from _lacks(f"reward.{key}", reward, wanted, asks=asks)
        if ("text" if reward.media == "text" else "latent") not in kinds:
            found = f"model {model.name!r} generates {_names(kinds)} tracks"
            yield Reason(key=f"reward.{key}", text=f"reward {reward.name!r} scores {reward.media}; {found}.")


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
        yield Reason(key="backend", text=f"{_names(trains)} was asked for; backend {backend.name!r} cannot.")
    if tuple(trains) == (Cap.TRAIN_LORA,):
        yield from _lacks("model", model, Cap.LORA, asks="training LoRA adapters")
    if engine.support(Cap.WEIGHTS_SHARED) is not Support.NATIVE:
        carriers = {Cap.TRAIN_LORA: (Cap.WEIGHTS_LORA, Cap.WEIGHTS_FULL), Cap.TRAIN_FULL: (Cap.WEIGHTS_FULL,)}
        if not any(engine.support(c) is Support.NATIVE for cap in trains for c in carriers[cap]):
            yield Reason(
                key="engine",
                text=f"engine {engine.name!r} neither shares the weights that train nor takes them ({_names(trains)}); "
                "its rollouts would come from the initial policy for ever.",
            )
    if needs.reference == "policy":
        ways = [Cap.REFERENCE_ADAPTER_OFF if cap is Cap.TRAIN_LORA else Cap.REFERENCE_COPY for cap in trains]
        if not any(backend.support(cap) is Support.NATIVE for cap in ways):
            yield from _lacks("backend", backend, ways[0], asks=f"{asks} with a KL to the reference policy")
    if needs.old_policy == "ema":
        yield from _lacks("backend", backend, Cap.LAGGED_POLICY, asks=asks)
    if needs.critic:
        yield from _lacks("backend", backend, Cap.CRITIC, asks=asks)
    if needs.gradient == "through-sampler":
        yield from _lacks("backend", backend, Cap.THROUGH_SAMPLER, asks=asks)


def _lacks(key: str, spec: Spec, cap: Cap, *, asks: str) -> Iterator[Reason]:
    found = spec.support(cap)
    if found is not Support.NATIVE:
        says = "does not state it" if found is Support.UNKNOWN else f"states {found.value!r}"
        yield Reason(key=key, text=f"{asks} needs {cap.value!r}; {spec.kind} {spec.name!r} {says}.")


def _trains(plan: Plan) -> Cap:
    config = plan.backend.config
    assert isinstance(config, BackendConfig)
    return Cap.TRAIN_LORA if config.trains == "lora" else Cap.TRAIN_FULL


def _geometry(plan: Plan, needs: Needs) -> Iterator[Reason]:
    data, train = plan.data, plan.train
    samples = data.prompts_per_step * data.samples_per_prompt
    for key, value, least in (
        ("run.steps", plan.run.steps, 0),
        ("data.prompts_per_step", data.prompts_per_step, 1),
        ("data.samples_per_prompt", data.samples_per_prompt, 1),
        ("data.refill_rounds", data.refill_rounds, 0),
        ("train.updates_per_step", train.updates_per_step, 1),
        ("train.micro_batch", train.micro_batch, 0),
        ("train.micro_batch_tokens", train.micro_batch_tokens, 0),
        ("eval.every", plan.eval.every, 0),
        ("eval.num_prompts", plan.eval.num_prompts, 0),
        ("eval.samples_per_prompt", plan.eval.samples_per_prompt, 1),
        ("run.save_every", plan.run.save_every, 0),
        ("run.keep", plan.run.keep, 0),
    ):
        if value < least:
            yield Reason(key=key, text=f"{value} was asked for; it must be {least} or more.")
    if train.updates_per_step > samples:
        yield Reason(
            key="train.updates_per_step",
            text=f"{train.updates_per_step} updates cannot be made of {samples} samples "
            f"(data.prompts_per_step {data.prompts_per_step} x data.samples_per_prompt {data.samples_per_prompt}); "
            f"use {samples} or fewer.",
        )
    if train.updates_per_step > 1 and not needs.multi_update:
        yield Reason(
            key="train.updates_per_step",
            text=f"{train.updates_per_step} updates were asked for; algorithm {plan.algorithm.name!r} is valid for one "
            "on each rollout.",
        )
    if data.samples_per_prompt < 2 and plan.advantage.center == "group" and needs.compares_groups:
        yield Reason(
            key="data.samples_per_prompt",
            text="a group of 1 has no spread, so all advantages would be 0; use 2 or more, or advantage.center=global.",
        )
    if data.refill_rounds > 0 and data.samples_per_prompt < 2:
        yield Reason(
            key="data.refill_rounds",
            text="groups without spread were to be left out, and a group of 1 never has any; use "
            "data.samples_per_prompt of 2 or more, or 0 rounds.",
        )
    if data.refill_rounds > 0 and len(plan.sampling) > 1:
        yield Reason(
            key="data.refill_rounds",
            text=f"{data.refill_rounds} was asked for; the groups of {len(plan.sampling)} tracks "
            f"({_names(plan.sampling)}) would have to be left out together. Use 0.",
        )
    for key, value, allowed in (
        ("advantage.scope", plan.advantage.scope, ("group", "global")),
        ("advantage.center", plan.advantage.center, ("group", "global")),
        ("advantage.ddof", plan.advantage.ddof, (0, 1)),
        ("advantage.combine", plan.advantage.combine, ("sum-then-normalize", "normalize-then-sum")),
        ("advantage.constant_reward", plan.advantage.constant_reward, ("fail", "skip")),
        ("train.replay", train.replay, ("stacked", "serial")),
        ("train.old_log_probs", train.old_log_probs, ("replay", "engine")),
    ):
        if value not in allowed:
            yield Reason(key=key, text=f"{value!r} was asked for; it is one of {_names(map(str, allowed))}.")


def _rewards(plan: Plan) -> Iterator[Reason]:
    if not plan.rewards:
        yield Reason(key="reward", text="no reward was chosen; add one, such as `+reward@reward.shapes=shapes`.")
    for key, choice in plan.rewards.items():
        media = choice.spec.media
        kinds = {_media(kind, plan.sampling.get(track)) for track, kind in plan.model.spec.tracks.items()}
        # Of a latent model, the number of frames decides between images and videos.
        if media in ("image", "video") and media not in kinds and kinds & {"image", "video"}:
            yield Reason(
                key=f"reward.{key}",
                text=f"reward {choice.name!r} scores {media}; model {plan.model.name!r} gives {_names(kinds)} here.",
            )
    weights = [getattr(choice.config, "weight") for choice in plan.rewards.values()]  # noqa: B009
    if weights and not any(weights):
        yield Reason(key="reward", text="every reward has weight 0, so there is nothing to learn; raise one.")


def _media(kind: str, sampling: SamplingConfig | None) -> str:
    if kind == "text":
        return "text"
    return "video" if isinstance(sampling, LatentSamplingConfig) and sampling.frames > 1 else "image"


def _old_log_probs(plan: Plan) -> Iterator[Reason]:
    if plan.train.old_log_probs == "engine":
        for kind in sorted(set(plan.model.spec.tracks.values())):
            cap = Cap.LOG_PROBS_GAUSSIAN if kind == "latent" else Cap.LOG_PROBS_TOKEN
            yield from _lacks("engine", plan.engine.spec, cap, asks="train.old_log_probs=engine")


def _sampling(key: str, sampling: LatentSamplingConfig, plan: Plan, needs: Needs) -> Iterator[Reason]:
    own = list(_latents(key, sampling, plan))
    yield from own
    known = {item.name for item in fields(sampling)}
    changed = {name: value for name, value in plan.eval.sampling.items() if name in known}
    evaluated = replace(evaluation_base(sampling), **changed)
    said = {reason.text for reason in own}
    yield from (reason for reason in _latents("eval.sampling", evaluated, plan) if reason.text not in said)
    if sampling.steps < 1:
        return
    if sampling.sde.per_group:
        yield from _lacks("engine", plan.engine.spec, Cap.SDE_STEPS_PER_GROUP, asks=f"{key}.sde.per_group")
    if needs.stochastic:
        yield from _stochastic(key, sampling, plan)
    yield from (Reason(key=where, text=text) for where, text in sde_range(key, sampling))


def _latents(key: str, sampling: LatentSamplingConfig, plan: Plan) -> Iterator[Reason]:
    """Of training or of evaluation. key: of the settings."""
    engine, allowed = plan.engine.spec, ("batched", "two-pass", "norm-corrected")
    if sampling.steps < 1:
        yield Reason(key=f"{key}.steps", text=f"{sampling.steps} was asked for; it must be 1 or more.")
    if sampling.guidance_mode not in allowed:
        yield Reason(key=f"{key}.guidance_mode", text=f"{sampling.guidance_mode!r} is not one of {_names(allowed)}.")
    if sampling.kernel not in engine.kernels:
        yield Reason(
            key=f"{key}.kernel",
            text=f"{sampling.kernel!r} was asked for; engine {engine.name!r} runs {_names(engine.kernels)}.",
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
            text=f"{asks}, and at eta {sampling.eta} the steps are deterministic; use eta above 0, such as 0.7.",
        )
    if sampling.sde.mode == "none":
        yield Reason(key=f"{key}.sde.mode", text=f"{asks}, and mode 'none' makes no step stochastic.")


def _names(values: Iterable[str]) -> str:
    return ", ".join(sorted(str(value) for value in values)) or "nothing"
