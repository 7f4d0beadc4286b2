"""Checks of what a stage trains on: its updates, the groups that samples are compared in, and their log-probs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, cast

from ..limits import Reason
from ..names import did_you_mean
from ..specs.capability import Cap
from ..types.sampling import LatentSamplingConfig
from .composition import counted_range
from .wording import lacks

if TYPE_CHECKING:
    from ..specs.part_config import LauncherConfig
    from ..specs.plan import Plan, Stage

__all__ = ["training_problems", "units_of_a_rank"]


def units_of_a_rank(plan: Plan, stage: Stage, *, of_group: int) -> tuple[int, str]:
    """Number of samples, or of units, on the train rank that gets the fewest in a step, and a phrase that says where.

    of_group: samples of a group that are trained on; or its units, several samples each, that are never split.
    """
    groups = plan.data.prompts_per_step * plan.rows_per_prompt(stage) // plan.rows_compared(stage)
    ranks = 1 if plan.launcher is None else cast("LauncherConfig", plan.launcher.config).processes.train
    ranks = ranks // stage.backend.config.copies if stage.backend is not None else ranks
    if ranks <= 1:
        return groups * of_group, "of a rollout"
    # Groups stay whole where there are enough of them; a rank without any trains on padding.
    least = groups // ranks * of_group if groups >= ranks else groups * of_group // ranks
    return max(least, 1), f"of a rollout on one of {ranks} train ranks"


def training_problems(plan: Plan, stage: Stage, at: Callable[[str], str]) -> Iterator[Reason]:
    """Invalid training settings of a stage with an algorithm. at: section -> its key for this stage."""
    yield from _geometry(plan, stage, at)
    yield from _comparison(plan, stage, at)
    yield from _old_log_probs(stage)
    yield from _detached(stage, at)


def _geometry(plan: Plan, stage: Stage, at: Callable[[str], str]) -> Iterator[Reason]:
    assert stage.algorithm is not None
    train, compared = stage.train, plan.rows_compared(stage)
    updates, kept = train.updates_per_step, stage.advantage.keep_best + stage.advantage.keep_worst
    of_group = min(kept or compared, compared)
    samples, where = units_of_a_rank(plan, stage, of_group=of_group)
    if updates > samples:
        each = plan.rows_per_prompt(stage) // compared * of_group
        yield Reason(
            key=f"{at('train')}.updates_per_step",
            text=f"got {updates}, expected at most {samples}, the samples {where} (data.prompts_per_step "
            f"{plan.data.prompts_per_step} x {each} samples of each).",
        )
    if train.micro_batch_tokens and stage.kind != "text":
        yield Reason(
            key=f"{at('train')}.micro_batch_tokens",
            text=f"got {train.micro_batch_tokens}, but stage {stage.name!r} has no tokens to count. Set it to 0, and "
            "micro_batch_size instead.",
        )
    if updates > 1 and not stage.needs.multi_update:
        yield Reason(
            key=f"{at('train')}.updates_per_step",
            text=f"got {updates}, expected 1: algorithm {stage.algorithm.name!r} is valid for one update per rollout.",
        )


def _comparison(plan: Plan, stage: Stage, at: Callable[[str], str]) -> Iterator[Reason]:
    own, compared, compares = stage.advantage, plan.rows_compared(stage), stage.needs.compares_groups
    samples = "data.samples_per_prompt"
    if stage.parent is not None or stage.settings.samples:
        samples = f"stages.{stage.name}.samples"
    if compared < 2 and own.center == "group" and compares:
        yield Reason(
            key=samples,
            text=f"got {stage.samples}, so every group has zero variance and all advantages would be 0; use 2 or more, "
            f"or {at('advantage')}.center=global with {at('advantage')}.scope=global.",
        )
    if own.center == "global" and own.scope == "group" and own.normalize and compares:
        yield Reason(
            key=f"{at('advantage')}.center",
            text=f"got 'global' with {at('advantage')}.scope=group: a group of equal rewards would be divided by eps "
            f"alone. Set {at('advantage')}.scope=global, or {at('advantage')}.normalize=false.",
        )
    if own.combine == "normalize-sum-normalize" and not own.normalize:
        yield Reason(
            key=f"{at('advantage')}.combine",
            text=f"got 'normalize-sum-normalize', but {at('advantage')}.normalize is false. Set it to true, or use "
            "normalize-then-sum, which then adds centred rewards.",
        )
    for name in ("values", "keep_best", "keep_worst", "spread_penalty", "positive_factor"):
        value = getattr(own, name)
        if value not in ("scores", 0, "") and not compares:
            assert stage.algorithm is not None
            yield Reason(
                key=f"{at('advantage')}.{name}",
                text=f"got {value}, but algorithm {stage.algorithm.name!r} does not compare the samples of a group; "
                "leave it out.",
            )
    # With credit, rewards are those of later stages.
    if own.spread_penalty and compares and stage.settings.credit == "none":
        count = sum(bool(plan.rewards[name].config.weight) for name in stage.rewards)
        count += stage.environment is not None and bool(stage.environment.config.weight)
        if count < 2:
            yield Reason(
                key=f"{at('advantage')}.spread_penalty",
                text=f"got {own.spread_penalty:g}, which takes two rewards with a weight, and there is "
                f"{count or 'none'}. Add another, or leave it out.",
            )
    if own.positive_factor and compares:
        yield from _factor(plan, stage, f"{at('advantage')}.positive_factor")
    if own.keep_best + own.keep_worst > compared:
        names = [name for name in ("keep_best", "keep_worst") if getattr(own, name)]
        yield Reason(
            key=f"{at('advantage')}.{names[0]}",
            text=f"got {' + '.join(f'{name} {getattr(own, name)}' for name in names)}, expected at most {compared}, "
            f"the samples of a group. Use fewer, or raise {samples}.",
        )


def _factor(plan: Plan, stage: Stage, key: str) -> Iterator[Reason]:
    name = stage.advantage.positive_factor
    if name not in stage.rewards:
        known = ", ".join(stage.rewards) or "none"
        text = f"got {name!r}; the rewards of stage {stage.name!r} are {known}{did_you_mean(name, stage.rewards)}"
        yield Reason(key=key, text=text)
    elif (lowest := counted_range(plan.rewards[name])[0]) < 0:
        yield Reason(
            key=key,
            text=f"got {name!r}, whose scores can be negative (lowest {lowest:g}), which would flip the sign of "
            f"advantages; expected a reward with scores of 0 or more, such as a distance. Use another one, or set "
            f"reward.{name}.clip.",
        )


def _old_log_probs(stage: Stage) -> Iterator[Reason]:
    if stage.train.old_log_probs == "detached" and stage.needs.critic:
        assert stage.algorithm is not None
        yield Reason(
            key="train.old_log_probs",
            text=f"got 'detached', but returns of algorithm {stage.algorithm.name!r} are computed before the first "
            "update, and may depend on old log-probs. Use auto, replay or engine.",
        )
    if stage.train.old_log_probs == "engine":
        cap = Cap.LOG_PROBS_GAUSSIAN if stage.kind == "latent" else Cap.LOG_PROBS_TOKEN
        yield from lacks(stage.engine.key, stage.engine.spec, cap, asks="train.old_log_probs=engine")


def _detached(stage: Stage, at: Callable[[str], str]) -> Iterator[Reason]:
    if not stage.train.detach_negative:
        return
    assert stage.algorithm is not None
    sampling = stage.sampling
    if not isinstance(sampling, LatentSamplingConfig):
        why = f"track {stage.track!r} is text, which has no negative branch"
    elif stage.needs.log_probs != "gaussian":
        why = f"algorithm {stage.algorithm.name!r} replays no guided steps"
    elif not sampling.is_guided:
        why = f"{at('sampling')}.guidance_scale is 1, so there is no negative branch"
    else:
        return
    yield Reason(key=f"{at('train')}.detach_negative", text=f"got true, but {why}. Leave it out.")
