"""Whether the parts and settings of a plan are compatible, without importing an implementation.

Every refusal says in a sentence or two what it got, what it expected and what to do.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

from ..limits import Reason, broken_limits
from ..plugins.loading import describe_failure
from ..specs.capability import Cap
from ..specs.part_config import PartConfig
from ..specs.spec import ModelSpec, RewardSpec, Spec
from .acceleration import acceleration_problems
from .asynchrony import asynchrony
from .composition import composition, without_rewards
from .episodes import episodes
from .lineage import lineage
from .named_code import not_allowed
from .parts import Verdict, pair_problems, part_problems
from .sampling import sampling_problems
from .stage_keys import of_stage, placed_key
from .training import training_problems

if TYPE_CHECKING:
    from ..plugins.catalog import Catalog
    from ..specs.plan import Choice, Plan, Stage

__all__ = ["match", "objections"]

DEVICE = re.compile(r"auto|cpu|cuda(:\d+)?")


def match(plan: Plan, *, catalog: Catalog | None = None) -> Verdict:
    """Whether a plan can run. With a catalog, plugins may add reasons through `unirl_check_plan`."""
    if catalog is not None and (foreign := not_allowed(plan, catalog=catalog)):
        # Alone: other checks import the classes that settings name.
        return Verdict(reasons=tuple(foreign))
    out_of_limits = _limits(plan)
    reasons = [*out_of_limits]
    for stage in plan.stages:
        reasons += _chosen_parts(plan, stage, catalog)
    if not out_of_limits:
        # Combinations of values are only checked once each value is within its limits.
        reasons += _sections(plan, catalog)
        reasons += objections(plan, catalog=catalog)
    return Verdict(reasons=tuple(dict.fromkeys(reasons)))


def objections(plan: Plan, *, catalog: Catalog | None = None) -> list[Reason]:
    """Reasons from the plan's parts about their own settings, and from plugins about the whole plan."""
    own: list[Reason] = []
    for choice in plan.choices:
        for stage in plan.stages:
            serves = choice in stage.parts.values() or any(plan.rewards[key] is choice for key in stage.rewards)
            serves = serves or any(choice is teacher.model for teacher in stage.teachers)
            if choice.spec.kind in ("backend", "algorithm"):
                serves = serves and stage.algorithm is not None and stage.backend is not None
            if serves or choice.spec.kind in ("launcher", "transport", "tracker"):
                own += _problems(choice, plan, stage)
    own = list(dict.fromkeys(own))
    refused = {reason.key for reason in own}
    others = catalog.check_plan(plan) if catalog is not None else []
    return own + [reason for reason in others if reason.key not in refused]


def _limits(plan: Plan) -> list[Reason]:
    """A reason for each value of the plan that is outside its field's limits, at most one per key."""
    sections: dict[str, Any] = {"run": plan.run, "data": plan.data, "eval": plan.eval}
    sections |= {choice.key: choice.config for choice in plan.choices}
    reasons: list[Reason] = []
    for stage in plan.stages:
        at = of_stage(plan, stage)
        settings = {f"stages.{stage.name}": stage.settings}
        sections |= {at("sampling"): stage.sampling, at("advantage"): stage.advantage, at("train"): stage.train}
        sections |= settings if plan.resolved.get("stages") else {}
        result = broken_limits(stage.evaluation, key=f"eval.{at('sampling')}")
        # Values inherited from the training settings are refused there.
        depth = at("sampling").count(".") + 2
        reasons += [reason for reason in result if reason.key.split(".")[depth] in stage.eval_sampling]
    for key, config in sections.items():
        reasons += broken_limits(config, key=key)
    return list({reason.key: reason for reason in reasons}.values())


def _chosen_parts(plan: Plan, stage: Stage, catalog: Catalog | None) -> Iterator[Reason]:
    """Compatibility of the parts chosen for a stage, with their settings."""
    rewards = {key: plan.rewards[key].spec for key in stage.rewards}
    model, engine, backend = stage.model.spec, stage.engine.spec, stage.backend
    models = () if catalog is None else cast("list[ModelSpec]", catalog.specs("model"))
    # A model's own objection to the engine replaces the general one.
    objects = any(reason.key == stage.engine.key for reason in _problems(stage.model, plan, stage))
    bridged = None if objects else [spec.name for spec in models if engine.name in spec.bridges]
    if stage.algorithm is None:
        reasons = [*pair_problems(model, engine, bridged=bridged, kind=stage.kind), *_media_of(stage, rewards)]
    elif backend is None:
        reasons = [
            *pair_problems(model, engine, bridged=bridged, kind=stage.kind),
            Reason(
                key="algorithm",
                text=f"got {stage.algorithm.name!r}, but model {model.name!r} is frozen: no backend trains it. Add "
                f"`/backend@backend.{stage.learner.name}: NAME`, or leave the algorithm out.",
            ),
        ]
    else:
        reasons = part_problems(
            model,
            engine,
            stage.algorithm.spec,
            backend.spec,
            rewards,
            needs=stage.needs,
            trains=(Cap.TRAIN_LORA if backend.config.trains == "lora" else Cap.TRAIN_FULL,),
            bridged=bridged,
            kind=stage.kind,
            observed=[key for key in rewards if not plan.rewards[key].config.weight],
            has_teacher=bool(stage.teachers),
            installed=() if catalog is None else cast("list[RewardSpec]", catalog.specs("reward")),
        )
    for reason in reasons:
        part, dot, rest = reason.key.partition(".")
        choice = stage.parts.get(part)
        yield replace(reason, key=f"{choice.key}{dot}{rest}") if choice is not None else reason


def _media_of(stage: Stage, rewards: Mapping[str, RewardSpec]) -> Iterator[Reason]:
    for key, reward in rewards.items():
        if reward.media not in ("any", stage.medium):
            yield Reason(
                key=f"reward.{key}",
                text=f"reward {reward.name!r} scores {reward.media}; stage {stage.name!r} of model "
                f"{stage.model.name!r} generates {stage.medium}.",
            )


def _problems(choice: Choice[Spec, PartConfig], plan: Plan, stage: Stage) -> list[Reason]:
    """A part's check of its own settings."""
    try:
        reasons = [reason.under(choice.key) for reason in choice.config.problems(plan, stage)]
        return [replace(reason, key=placed_key(reason.key, plan, stage)) for reason in reasons]
    except Exception as error:  # noqa: BLE001 - refuses the plan, in the name of the part
        text = f"{choice.spec.kind} {choice.name!r} of {choice.dist} {choice.version} could not check its settings: "
        return [Reason(key=choice.key, text=text + describe_failure(error))]


def _sections(plan: Plan, catalog: Catalog | None) -> Iterator[Reason]:
    """Checks of the sections that belong to no part, against each other and the parts."""
    if not DEVICE.fullmatch(plan.run.device):
        yield Reason(key="run.device", text=f"got {plan.run.device!r}, expected `auto`, `cpu`, `cuda` or `cuda:N`.")
    precision = plan.run.matmul_precision
    if plan.run.batch_invariant and precision != "highest":
        yield Reason(
            key="run.matmul_precision", text=f"got {precision!r} with run.batch_invariant, expected 'highest'."
        )
    yield from _restarts(plan)
    yield from _exports(plan, catalog)
    yield from lineage(plan)
    yield from episodes(plan)
    yield from _rewards(plan)
    yield from asynchrony(plan)
    for stage in plan.stages:
        at = of_stage(plan, stage)
        if stage.algorithm is not None:
            yield from training_problems(plan, stage, at)
            yield from acceleration_problems(stage)
        yield from sampling_problems(plan, stage, key=at("sampling"), catalog=catalog)


def _restarts(plan: Plan) -> Iterator[Reason]:
    if plan.run.restarts and not plan.run.save_every:
        yield Reason(
            key="run.restarts",
            text=f"got {plan.run.restarts} with run.save_every=0, so a restart would begin at the first step. Set "
            "run.save_every, or leave it out.",
        )


def _exports(plan: Plan, catalog: Catalog | None) -> Iterator[Reason]:
    """Why adapters cannot be exported while the run trains."""
    run = plan.run
    asked = [
        name for name, value in {"export_every": run.export_every, "export_best": run.export_best}.items() if value
    ]
    if not asked:
        return
    key, value = f"run.{asked[0]}", vars(run)[asked[0]]
    backends = [one.backend for one in plan.learners.values() if one.backend is not None]
    if full := [backend.key for backend in backends if backend.config.trains != "lora"]:
        yield Reason(
            key=key,
            text=f"got {value} with {full[0]}.trains=full, which trains no adapters. Leave it out: `run.keep=0` keeps "
            "every checkpoint, and `unirl export` writes a complete model from each.",
        )
    if catalog is not None and not catalog.writes_adapters:
        yield Reason(key=key, text=f"got {value}; exports need `pip install unirl-tools`.")
    if run.export_best and not plan.data.eval:
        yield Reason(key="run.export_best", text="got true without held-out prompts; set data.eval, or leave it out.")


def _rewards(plan: Plan) -> Iterator[Reason]:
    if not plan.rewards and all(stage.needs.reward == "none" for stage in plan.stages):
        yield from without_rewards(plan)
    elif not plan.rewards and all(stage.environment is None for stage in plan.stages):
        yield Reason(key="reward", text="no reward was chosen; add one, such as `+reward@reward.shapes=shapes`.")
    scored = {key for stage in plan.stages for key in stage.rewards}
    for key, choice in plan.rewards.items():
        if key not in scored:
            made = ", ".join(f"{stage.name} ({stage.medium})" for stage in plan.stages)
            yield Reason(
                key=f"reward.{key}",
                text=f"reward {choice.name!r} scores {choice.spec.media}, which no stage generates; there is {made}.",
            )
    for stage in plan.stages:
        specs = {key: plan.rewards[key].spec for key in stage.rewards}
        # That a reward fits no track of this kind is said of the parts, whatever their settings.
        possible = stage.model.spec.media_of_kinds({stage.kind})
        yield from _media_of(stage, {key: spec for key, spec in specs.items() if spec.media in possible})
    yield from composition(plan)
