"""Whether the stages of a plan fit together: who feeds whom, and who is trained on what."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from ..limits import Reason
from ..specs.capability import Cap
from ..types.sampling import LatentSamplingConfig
from .scouts import scouts
from .step_rewards import step_rewards
from .wording import lacks, listed

if TYPE_CHECKING:
    from ..specs.plan import Learner, Plan, Stage
    from ..specs.spec import ModelSpec

__all__ = ["lineage"]


def lineage(plan: Plan) -> Iterator[Reason]:
    """Yields a reason for each stage that the others leave without input, without a signal, or unused."""
    if not plan.trained:
        yield Reason(
            key="algorithm", text="no stage is trained on: every model is frozen or has no algorithm. Add a backend."
        )
    for learner in plan.learners.values():
        stages = [stage for stage in plan.trained if stage.learner.name == learner.name]
        is_used = any(stage.learner.name == learner.name for stage in plan.stages)
        if learner.backend is not None and not stages and is_used:
            yield Reason(
                key=learner.backend.key,
                text=f"got {learner.backend.name!r}, but no stage of this model has an algorithm, so it never trains. "
                "Remove the backend, or give a stage an algorithm.",
            )
        yield from _same_updates(stages)
    for stage in plan.stages:
        if stage.settings.credit != "none" and stage.name in plan.rewards:
            yield Reason(
                key=f"reward.{stage.name}",
                text=f"stage {stage.name!r} gives credit under its own name; name the reward otherwise.",
            )
        yield from _inputs(plan, stage)
        yield from _signal(plan, stage)
        for teacher in stage.teachers:
            yield from _teacher(plan, stage, teacher)
        if stage.settings.reference_guidance is not None:
            yield from _guided_reference(plan, stage)
    yield from _dynamic_sampling(plan)
    yield from scouts(plan)
    yield from step_rewards(plan)


def _dynamic_sampling(plan: Plan) -> Iterator[Reason]:
    rounds = plan.data.dynamic_sampling_rounds
    if rounds <= 0 or not plan.trained:
        return
    if all(plan.rows_compared(stage) < 2 for stage in plan.trained):
        yield Reason(
            key="data.dynamic_sampling_rounds",
            text=f"got {rounds}, which drops zero-variance groups; a group of 1 always is one. "
            "Use data.samples_per_prompt of 2 or more, or 0 rounds.",
        )
    if plan.rewards and not any(_has_rewards(plan, stage) for stage in plan.trained):
        yield Reason(
            key="data.dynamic_sampling_rounds",
            text=f"got {rounds}, which drops prompts by the rewards of stages that train, and no such stage has any. "
            "Use 0.",
        )


def _same_updates(stages: list[Stage]) -> Iterator[Reason]:
    """Stages of one model are trained together, in the same optimizer steps and by the same forward."""
    for key in ("updates_per_step", "replay", "detach_negative", "packing"):
        values = {stage.name: getattr(stage.train, key) for stage in stages}
        if len(set(values.values())) > 1:
            yield Reason(
                key=f"train.{key}",
                text=f"got {values} for stages of one model, expected one value: each optimizer step takes a share of "
                "all of them.",
            )
    if len(stages) > 1 and any(stage.needs.critic or stage.needs.fake_score for stage in stages):
        yield Reason(
            key="algorithm",
            text=f"stages {', '.join(stage.name for stage in stages)} train one model together, and an algorithm of "
            "theirs trains a critic or a fake score, which works for a model with one stage. Choose others.",
        )


def _inputs(plan: Plan, stage: Stage) -> Iterator[Reason]:
    settings, at = stage.settings, f"stages.{stage.name}"
    is_alone = stage.parent is None or (plan.stage(stage.parent).medium == "text" and not stage.continues)
    if settings.instruction and is_alone:
        text = f"got {settings.instruction!r}; expected none, as no image comes from a parent. Leave it out."
        yield Reason(key=f"{at}.instruction", text=text)
    is_of_text = stage.parent is not None and plan.stage(stage.parent).medium == "text"
    if settings.marker and (stage.continues or not is_of_text):
        why = "it continues from all of each text" if stage.continues else "it is made from no text of a parent"
        yield Reason(key=f"{at}.marker", text=f"got {settings.marker!r}; expected none, as {why}. Leave it out.")
    if settings.shows:
        yield from _shown(plan, stage)
    if stage.parent is None:
        if settings.credit != "none":
            yield Reason(
                key=f"{at}.credit", text=f"got {settings.credit!r}, but there is no parent stage to give credit to."
            )
        return
    parent = plan.stage(stage.parent)
    yield from _unfinished(stage, parent)
    if stage.continues:
        yield from lacks(stage.engine.key, stage.engine.spec, Cap.TURNS, asks=f"{at}, which continues from others,")
    else:
        yield from _of_own_texts(plan, stage)
    if parent.medium != "text":
        yield from _of_images(stage, parent)
    if settings.credit != "none" and parent.algorithm is None:
        text = f"got {settings.credit!r}, but stage {parent.name!r} is not trained on. Use none, or train it."
        yield Reason(key=f"{at}.credit", text=text)
    if settings.credit != "none" and not _has_rewards(plan, stage):
        yield Reason(
            key=f"{at}.credit",
            text=f"got {settings.credit!r}, but nothing scores stage {stage.name!r}, so there is no reward to pass on. "
            f"Add a reward for {stage.medium}, or use none.",
        )


def _of_images(stage: Stage, parent: Stage) -> Iterator[Reason]:
    """A stage that cannot take the images of its parent."""
    key, spec = f"stages.{stage.name}.parent", stage.model.spec
    refused = _refusals(key, f"got {parent.name!r}, which generates {parent.medium}")
    roles = spec.inputs.get(stage.track)
    takes_image = "image" in spec.reads and (stage.continues or bool(stage.parent_role))
    if parent.medium != "image" or not takes_image:
        takes = f"{listed(spec.reads)} as {listed(roles)}" if roles else "text alone"
        yield refused(
            f"; model {spec.name!r} takes {takes}. Expected a parent of text, or of images for a model that takes them "
            "in one role."
        )
    elif not _is_decoded(parent):
        yield refused(f", but is not decoded. Set sampling.{parent.name}.decode=true.")
    elif not stage.continues:
        yield from lacks(stage.engine.key, stage.engine.spec, Cap.MEDIA_REFS, asks=f"{key}={parent.name}")
    elif why := spec.text_alone.get(stage.engine.name):
        yield Reason(
            key=stage.engine.key,
            text=f"got {stage.engine.name!r} below stage {parent.name!r}, which generates images; it is given none of "
            f"model {spec.name!r}: {why}. Use trainside.",
        )


def _is_decoded(stage: Stage) -> bool:
    # Images made of tokens always are.
    samplings = [each for each in (stage.sampling, stage.evaluation) if isinstance(each, LatentSamplingConfig)]
    return all(each.decode for each in samplings)


def _of_own_texts(plan: Plan, stage: Stage) -> Iterator[Reason]:
    """A track of a model that would go on from what the same model wrote before, and gets the last text alone."""
    above = plan.ancestors(stage)
    own = [other for other in above if other.medium == "text" and other.learner.name == stage.learner.name]
    if own and (stage.medium == "text" or len(above) > 1):
        yield Reason(
            key=f"stages.{stage.name}.parent",
            text=f"got {stage.parent!r}: track {stage.track!r} of model {stage.model.name!r} cannot continue from what "
            f"the model wrote in stage {own[-1].name!r}; it would read the text of its parent alone. Use a model whose "
            "spec has the track in `continues`, or another model for one of the stages.",
        )


def _unfinished(stage: Stage, parent: Stage) -> Iterator[Reason]:
    settings, at = stage.settings, f"stages.{stage.name}"
    if settings.unfinished != "continue" and parent.medium != "text":
        text = f"got {settings.unfinished!r}, but stage {parent.name!r} makes no texts. Use continue."
        yield Reason(key=f"{at}.unfinished", text=text)
    needed = {"unfinished": "leave-out", "credit": "mean"}
    lacking = settings.unfinished != "leave-out" or settings.credit == "none"
    if settings.unfinished_credit is not None and lacking:
        asked = " and ".join(f"{at}.{key}={value}" for key, value in needed.items())
        text = (
            f"got {settings.unfinished_credit}, which is the credit of texts that are left out. Set {asked}, or null."
        )
        yield Reason(key=f"{at}.unfinished_credit", text=text)


def _shown(plan: Plan, stage: Stage) -> Iterator[Reason]:
    """Images that a stage asks for and cannot be given."""
    key, names = f"stages.{stage.name}.shows", [other.name for other in plan.ancestors(stage)[:-1]]
    images = [name for name in names if plan.stage(name).medium == "image"]
    refused = _refusals(key, f"got {stage.settings.shows}")
    if stage.continues:
        yield refused(", but this stage continues from all stages above it. Leave it out.")
    elif other := [name for name in stage.settings.shows if name not in images]:
        expected = (
            f"image stages above its parent: {', '.join(images)}" if images else "none: no stage above makes images"
        )
        yield refused(f"; {other[0]!r} cannot be shown. Expected {expected}.")
    elif not stage.parent_role or "image" not in stage.model.spec.reads:
        yield refused(f"; model {stage.model.name!r} takes no images in one role. Leave it out.")
    elif hidden := [name for name in stage.settings.shows if not _is_decoded(plan.stage(name))]:
        yield refused(f", but {hidden[0]!r} is not decoded. Set sampling.{hidden[0]}.decode=true.")
    else:
        yield from lacks(stage.engine.key, stage.engine.spec, Cap.MEDIA_REFS, asks=key)


def _teacher(plan: Plan, stage: Stage, teacher: Learner) -> Iterator[Reason]:
    """Reasons that a model cannot be the reference policy of a stage. Vocabularies and latent shapes are compared when
    it is loaded, by `unirl.loop.teachers`."""
    key = "reference" if stage.settings.reference else "teachers"
    refused = _refusals(f"stages.{stage.name}.{key}", f"got {teacher.name!r}")
    own, other = stage.model.spec, teacher.model.spec
    if stage.needs.reference == "none":
        yield refused(_without_reference(stage))
    if teacher.backend is not None:
        yield refused(f", which a backend trains; expected a frozen model. Remove {teacher.backend.key}.")
    if stage.track not in other.tracks and stage.kind not in other.tracks.values():
        made = listed(set(other.tracks.values()))
        yield refused(f", which generates {made} tracks; expected a model of {stage.kind} tracks, as this one.")
    elif stage.kind == "latent" and own.name != other.name:
        yield refused(
            f", a model {other.name!r}; expected a model {own.name!r}, whose latents, conditions and prediction are "
            "those of this stage."
        )
    elif own.name != other.name and _rules(own) | _rules(other):
        yield refused(
            f", a model {other.name!r}; expected a model {own.name!r}: options or restrictions of tokens are rules of "
            "each model alone."
        )
    elif own.inputs != other.inputs:
        yield refused(f", a model {other.name!r}, which reads other media than {own.name!r}; use one that does.")
    if plan.has_reference_workers:
        yield refused(
            f", but reference workers hold the initial weights of {stage.learner.name!r} alone; a teacher runs on the "
            "train ranks. Use launcher.reference=trainside."
        )


def _rules(model: ModelSpec) -> frozenset[str]:
    return model.token_options | model.restricts


def _guided_reference(plan: Plan, stage: Stage) -> Iterator[Reason]:
    """A guidance of the reference policy that nothing asks for, or that lacks conditions."""
    scale, sampling, key = stage.settings.reference_guidance, stage.sampling, f"stages.{stage.name}.reference_guidance"
    refused = _refusals(key, f"got {scale}")
    if not isinstance(sampling, LatentSamplingConfig):
        yield refused(f", but a {stage.kind} track has no guidance. Leave it out.")
        return
    if stage.needs.reference == "none":
        yield refused(_without_reference(stage))
        return
    yield from lacks(stage.model.key, stage.model.spec, Cap.GUIDANCE, asks=f"{key} {scale}")
    if scale != 1.0 and not sampling.is_guided:
        yield refused(
            ", but without guidance the samples have no negative conditions. Set sampling.guidance_mode to one that "
            "encodes them, such as that of docs/how-to/several-models.md, or sample with guidance."
        )
    if plan.has_reference_workers:
        yield refused(", but reference workers follow the student's guidance. Use launcher.reference=trainside.")


def _refusals(key: str, got: str) -> Callable[[str], Reason]:
    """Makes reasons of one key that begin alike, of the rest of their texts."""
    return lambda rest: Reason(key=key, text=f"{got}{rest}")


def _without_reference(stage: Stage) -> str:
    algorithm = stage.algorithm
    asked = f"algorithm {algorithm.name!r} uses no reference policy" if algorithm else "it is not trained"
    return f", but {asked} as configured. Leave it out, or enable a KL penalty."


def _signal(plan: Plan, stage: Stage) -> Iterator[Reason]:
    scores = plan.rewards or any(other.environment is not None for other in plan.stages)
    if stage.algorithm is None or stage.needs.reward == "none" or not scores:
        return
    if not _has_rewards(plan, stage):
        children = ", ".join(f"stages.{child.name}.credit=mean" for child in plan.children(stage.name))
        advice = f"Set {children}, or add a reward" if children else "Add a reward"
        yield Reason(
            key=stage.algorithm.key,
            text=f"stage {stage.name!r} trains, and neither a reward nor credit of another stage gives it a signal. "
            f"{advice} that scores {stage.medium}.",
        )
    elif stage.needs.reward == "differentiable" and not any(plan.rewards[key].config.weight for key in stage.rewards):
        yield Reason(
            key=stage.algorithm.key,
            text=f"stage {stage.name!r} is trained by the gradient of its own rewards; credit has none. Add a "
            f"differentiable reward that scores {stage.medium}.",
        )


def _has_rewards(plan: Plan, stage: Stage) -> bool:
    """Whether samples of a stage get a reward: their own, or credit."""
    credited = (child for child in plan.children(stage.name) if child.settings.credit != "none")
    return bool(stage.rewards) or stage.environment is not None or any(_has_rewards(plan, child) for child in credited)
