"""The first events of a run: the parts being loaded, the plan, and the predicted cost of a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from unirl.core.observe.events import EventStream
from unirl.core.observe.stages import evaluation_facts, stage_facts
from unirl.core.roles import diffusion_model
from unirl.core.specs.plan import Plan
from unirl.core.types.data import Prompt
from unirl.core.types.event import Event
from unirl.core.types.request import LatentRequest, Request
from unirl.numerics.cpu import describe_cpu

from .checkpoints import Checkpoint
from .costs import latent_step_cost
from .parts import Parts
from .requests import step_requests
from .scouts import scout_requests
from .step_rewards import expectation_requests

__all__ = ["announce", "loading", "predicted_costs"]


def loading(plan: Plan, *, step: int) -> Event:
    """The parts that take time to load, with the size of the checkpoint if it is a local folder."""
    models: list[str] = []
    for learner in plan.learners.values():
        path = Path(str(getattr(learner.model.config, "path", ""))).expanduser()
        size = ""
        if path.is_dir():
            total = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
            size = f" ({total / 2**30:.1f} GiB)" if total >= 2**30 else f" ({total / 2**20:.1f} MiB)"
        models.append(f"model {learner.model.name} from {path}{size}")
    engines = ", ".join(dict.fromkeys(f"engine {stage.engine.name}" for stage in plan.stages))
    rewards = ", ".join(choice.name for choice in plan.rewards.values())
    text = f"{', '.join(models)}, {engines}, rewards {rewards}"
    return Event(kind="loading", step=step, data={"text": text})


def predicted_costs(
    plan: Plan, parts: Parts, prompts: Sequence[Prompt], checkpoint: Checkpoint | None
) -> dict[str, Mapping[str, float]]:
    """Stage -> the cost of the first step, for stages made from prompts. The model may refuse its request, such as one
    for images of a size that it cannot generate."""
    first = checkpoint.step if checkpoint else 0
    given = prompts[: plan.data.prompts_per_step]
    requests = step_requests(parts, plan, given, step=first)
    further: list[Mapping[str, Request]] = []
    if plan.data.scouts.samples_per_prompt:
        further.append(scout_requests(parts, plan, given, step=first))
    if any(stage.needs.step_rewards for stage in plan.stages):
        further.append(expectation_requests(requests))
    predicted: dict[str, Mapping[str, float]] = {}
    for name, request in requests.items():
        if not isinstance(request.params, LatentRequest):
            continue  # Completion lengths are not known in advance.
        stage = plan.stage(name)
        if stage.needs.log_probs == "none":
            continue  # Which points such a loss evaluates is its own affair.
        model = diffusion_model(parts.models[stage.learner.name])
        cost = latent_step_cost(
            request.params,
            latent_shape=model.latent_shape(request.params.sampling),
            replayed_share=stage.train.replayed_share(critic=stage.needs.critic),
            further=[each[name].latent for each in further if name in each],
        )
        predicted[name] = {**vars(cost), "generate_share": cost.generate_share}
    return predicted


def announce(
    events: EventStream, plan: Plan, checkpoint: Checkpoint | None, *, predicted: Mapping[str, Mapping[str, float]]
) -> None:
    events.emit(
        "run_resumed" if checkpoint else "run_started",
        step=checkpoint.step if checkpoint else 0,
        name=plan.run.name or plan.recipe,
        recipe=plan.recipe,
        plan_hash=plan.hash,
        resolved=plan.resolved,
        steps=plan.run.max_steps,
        stages=stage_facts(plan),
        evaluation=evaluation_facts(plan),
        predicted=predicted,
        batch_invariant=plan.run.batch_invariant,
        cpu=str(describe_cpu(with_torch=True)),
        versions={choice.dist: choice.version for choice in plan.choices},
    )
    for value in plan.left_out:
        events.finding(str(value), step=checkpoint.step if checkpoint else 0)
    if checkpoint and checkpoint.state["steps"] != plan.run.max_steps:
        before = checkpoint.state["steps"]
        text = f"run.max_steps was {before}, is {plan.run.max_steps}: schedules over progress continue from there."
        events.finding(text, step=checkpoint.step)
