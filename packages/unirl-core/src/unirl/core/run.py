"""Running a plan: build its parts, keep its folder, go through the loop, and leave it resumable whatever happens."""

from __future__ import annotations

import dataclasses
import json
import signal
import time
import traceback
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Literal, cast

from .algorithm_state import algorithm_state, resume_algorithm
from .checkpoints import Checkpoint, Checkpoints
from .config import TrainConfig
from .costs import latent_step_cost
from .data import Prompt
from .errors import CheckpointError, DataError, PlanRejected, RunFailed, UniRLError
from .events import Event, EventStream
from .gap_bounds import gap_bounds
from .hosted_text import with_run_folder
from .loop import run_loop
from .match import match
from .parts import NoEngine, Parts
from .plan import Choice, Plan, numeric_leaves
from .prompts import read_prompts
from .request import LatentRequest
from .requests import build_request
from .roles import Algorithm, DiffusionModel, Launcher, Reward, RunInfo
from .tracking import Trackers

if TYPE_CHECKING:
    from .catalog import Catalog
    from .spec import Spec

__all__ = ["RunResult", "build_algorithm", "build_parts", "build_rewards", "reward_weights", "train"]

RECIPE_FILE = "recipe.json"
EVENTS_FILE = "events.jsonl"
CHECKPOINTS = "checkpoints"
TRACEBACK_FILE = "traceback.txt"


@dataclass(frozen=True, kw_only=True)
class RunResult:
    folder: Path
    status: Literal["done", "stopped"]
    step: int
    """Steps completed."""
    resume_command: str
    """What goes on from here."""


def train(
    plan: Plan,
    *,
    catalog: Catalog,
    resume: Path | None = None,
    overrides: Sequence[str] = (),
    listeners: Sequence[Callable[[Event], None]] = (),
) -> RunResult:
    """Run a plan, or go on with one from its run folder or from one checkpoint folder of it.

    Raises PlanRejected before anything is built, DataError for prompts that cannot be used, CheckpointError when the
    checkpoint is broken or belongs to another plan. Whatever is raised later, completed steps are checkpointed.
    """
    verdict = match(plan, catalog=catalog)
    if not verdict.accepted:
        raise PlanRejected("\n".join(str(reason) for reason in verdict.reasons))
    prompts, held_out = _prompts(plan)
    folder = _run_folder(plan, resume)
    plan = with_run_folder(plan, folder)
    checkpoints = Checkpoints(folder / CHECKPOINTS, keep=plan.run.keep)
    checkpoint = _checkpoint(plan, checkpoints, resume)
    launcher: Launcher | None = _build(plan.launcher, catalog) if plan.launcher else None
    try:
        parts = launcher.launch(plan, catalog=catalog) if launcher else build_parts(plan, catalog=catalog)
        if checkpoint is not None:
            resume_algorithm(parts.algorithm, checkpoint.state.get("algorithm", {}), folder=checkpoint.folder)
            parts.backend.load(checkpoint.backend_folder)
        built = {key: _build(choice, catalog) for key, choice in plan.trackers.items()}
    except BaseException:
        if launcher is not None:
            launcher.close()
        raise
    # Whatever can be refused has been by now, so that a refusal leaves no folder behind.
    folder.mkdir(parents=True, exist_ok=True)
    _write_recipe(folder, plan, overrides)

    step = start = checkpoint.step if checkpoint else 0

    def follow(event: Event) -> None:
        nonlocal step
        step = max(step, event.step)

    events = EventStream(folder / EVENTS_FILE)
    for listener in (follow, *listeners, catalog.emit):
        events.listen(listener)
    trackers = Trackers(built, events)
    resume_command = f"unirl train --resume {folder}"

    def save(step: int) -> None:
        began = time.perf_counter()
        state = {
            "plan_hash": plan.hash,
            "numbers": numeric_leaves(plan.resolved),
            "steps": plan.run.steps,
            "algorithm": algorithm_state(parts.algorithm),
        }
        path = checkpoints.save(step, write=parts.backend.save, state=state)
        size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
        seconds = time.perf_counter() - began
        events.emit("checkpoint_saved", step=step, folder=path.name, size_bytes=size, seconds=seconds)

    began, status, problem = time.perf_counter(), "failed", ""
    try:
        trackers.start(
            RunInfo(
                name=plan.run.name or plan.recipe,
                folder=folder,
                plan_hash=plan.hash,
                config=plan.resolved,
                resumed_at=start if checkpoint else None,
            )
        )
        _announce(events, plan, parts, prompts, checkpoint)
        with _stop_on_signal() as stop:
            step, status = run_loop(
                parts,
                plan,
                prompts=prompts,
                held_out=held_out,
                start=start,
                events=events,
                trackers=trackers,
                save=save,
                should_stop=lambda: stop.is_set,
            )
        return RunResult(folder=folder, status=status, step=step, resume_command=resume_command)
    except Exception as error:
        problem = f"{error}" if isinstance(error, UniRLError) else f"{type(error).__name__}: {error}"
        if not isinstance(error, UniRLError) or error.__cause__ is not None:
            (folder / TRACEBACK_FILE).write_text("".join(traceback.format_exception(error)), encoding="utf-8")
            error.add_note(f"The traceback is in {folder / TRACEBACK_FILE}.")
        if checkpoints.any():
            error.add_note(f"Completed steps are saved; go on with `{resume_command}`.")
        raise
    finally:
        for failure in catalog.failures:
            events.finding(f"plugin {failure.plugin!r}: {failure.hook} failed: {failure.error}", step=step)
        wall_s = time.perf_counter() - began
        events.emit("run_finished", step=step, status=status, wall_s=wall_s, folder=str(folder), error=problem)
        trackers.finish(status, step=step)
        events.close()
        try:
            for part in (parts.engine, *parts.rewards.values(), parts.backend):
                part.close()
        finally:
            if launcher is not None:
                launcher.close()


def build_parts(plan: Plan, *, catalog: Catalog, with_rewards: bool = True, with_engine: bool = True) -> Parts:
    """The objects of a plan in this process, in the order model, backend, engine, algorithm, rewards.

    with_rewards, with_engine: False for a process whose rewards or rollouts are elsewhere.
    """
    import torch

    if plan.run.threads:
        torch.set_num_threads(plan.run.threads)
    # Adapters are initialised from torch's global generator; everything after that is counter-based.
    torch.manual_seed(plan.run.seed)  # pyright: ignore[reportUnknownMemberType]
    device = _device(plan.run.device)
    model = _build(plan.model, catalog, device=device)
    backend = _build(
        plan.backend, catalog, model=model, train=_train_settings(plan), steps=plan.run.steps, seed=plan.run.seed
    )
    engine = _build(plan.engine, catalog, model=model, device=device) if with_engine else NoEngine()
    algorithm = build_algorithm(plan, catalog=catalog)
    rewards = build_rewards(plan, catalog=catalog) if with_rewards else {}
    return Parts(
        model=model,
        backend=backend,
        engine=engine,
        algorithm=algorithm,
        rewards=rewards,
        reward_weights=reward_weights(plan),
    )


def build_rewards(plan: Plan, *, catalog: Catalog) -> dict[str, Reward]:
    """The rewards of a plan alone, by their keys."""
    device = _device(plan.run.device)
    return {key: _build(choice, catalog, device=device) for key, choice in plan.rewards.items()}


def reward_weights(plan: Plan) -> dict[str, float]:
    """Factor of each reward in the combined one."""
    return {key: float(getattr(choice.config, "weight")) for key, choice in plan.rewards.items()}  # noqa: B009


def build_algorithm(plan: Plan, *, catalog: Catalog) -> Algorithm:
    """The algorithm of a plan alone: what plans requests and turns rewards into advantages."""
    weights, train = reward_weights(plan), _train_settings(plan)
    return _build(plan.algorithm, catalog, advantage=plan.advantage, reward_weights=weights, train=train)


def _train_settings(plan: Plan) -> TrainConfig:
    """`train` of the plan, with bounds in place of what stands for the usual ones."""
    bounds = gap_bounds(plan)
    return dataclasses.replace(plan.train, logp_gap_max=bounds.largest, logp_gap_mean=bounds.mean)


def _build(choice: Choice[Spec], catalog: Catalog, **context: Any) -> Any:
    build = catalog.resolve(choice.spec.build)
    try:
        return build(choice.config, **context)
    except UniRLError:
        raise
    except Exception as error:
        raise RunFailed(
            f"{choice.key}: {choice.spec.kind} {choice.name!r} could not be built: {type(error).__name__}: {error}"
        ) from error


def _device(asked: str) -> Any:
    import torch

    if asked == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(asked)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise PlanRejected(f"run.device: {asked!r} was asked for; torch {torch.__version__} finds no CUDA device here.")
    return device


def _prompts(plan: Plan) -> tuple[Sequence[Prompt], Sequence[Prompt]]:
    prompts = read_prompts(Path(plan.data.train), prompt_key=plan.data.prompt_key)
    held_out = read_prompts(Path(plan.data.eval), prompt_key=plan.data.prompt_key) if plan.data.eval else ()
    if len(prompts) < plan.data.prompts_per_step:
        raise DataError(
            f"data.prompts_per_step: {plan.data.prompts_per_step} were asked for; {plan.data.train} has {len(prompts)}."
        )
    for file, rows in ((plan.data.train, prompts), (plan.data.eval, held_out)):
        for key, choice in plan.rewards.items():
            for row in rows:
                missing = [name for name in choice.spec.metadata if name not in row.metadata]
                if missing:
                    raise DataError(
                        f"{file}: prompt {row.prompt_id!r} has no metadata {missing[0]!r}, which reward.{key} reads; "
                        f"it has {sorted(row.metadata) or 'none'}."
                    )
    return prompts, held_out


def _run_folder(plan: Plan, resume: Path | None) -> Path:
    if resume is not None:
        folder = resume.parent.parent if resume.parent.name == CHECKPOINTS else resume
        if not folder.is_dir():
            raise CheckpointError(f"{resume}: no such run folder; `--resume` takes the folder that a run printed.")
        return folder
    if plan.run.dir:
        folder = Path(plan.run.dir)
        if (folder / EVENTS_FILE).exists():
            raise CheckpointError(
                f"run.dir: {folder} holds a run already. Go on with it by `--resume {folder}`, or name another folder."
            )
    else:
        name = (plan.run.name or plan.recipe).replace("/", "-")
        folder = _fresh(Path("runs"), f"{name}-{datetime.now():%Y%m%d-%H%M%S}")
    return folder


def _fresh(parent: Path, name: str) -> Path:
    """A name in `parent` that no run has yet; two runs may start within one second."""
    number, folder = 1, parent / name
    while folder.exists():
        number += 1
        folder = parent / f"{name}-{number}"
    return folder


def _checkpoint(plan: Plan, checkpoints: Checkpoints, resume: Path | None) -> Checkpoint | None:
    if resume is None:
        return None
    checkpoint = checkpoints.load(resume if resume.parent.name == CHECKPOINTS else None)
    if checkpoint.state["plan_hash"] != plan.hash:
        then, now = checkpoint.state["numbers"], json.loads(json.dumps(numeric_leaves(plan.resolved)))
        changed = [key for key in sorted({*then, *now}) if then.get(key, "absent") != now.get(key, "absent")]
        lines = "; ".join(
            f"{key} was {then.get(key, 'absent')!r}, is {now.get(key, 'absent')!r}" for key in changed[:8]
        )
        raise CheckpointError(
            f"{checkpoint.folder}: this checkpoint belongs to another recipe: {lines}. "
            "Resume with the recipe it was made with, or start a new run."
        )
    return checkpoint


def _write_recipe(folder: Path, plan: Plan, overrides: Sequence[str]) -> None:
    recipe = {
        "recipe": plan.recipe,
        "overrides": list(overrides),
        "hash": plan.hash,
        "dists": {choice.dist: choice.version for choice in plan.choices},
        "resolved": plan.resolved,
        "origins": {key: [origin.source, origin.detail] for key, origin in plan.origins.items()},
    }
    (folder / RECIPE_FILE).write_text(json.dumps(recipe, indent=1), encoding="utf-8")


def _announce(
    events: EventStream, plan: Plan, parts: Parts, prompts: Sequence[Prompt], checkpoint: Checkpoint | None
) -> None:
    request = build_request(
        prompts[: plan.data.prompts_per_step],
        samples_per_prompt=plan.data.samples_per_prompt,
        sampling=plan.sampling,
        model=parts.model,
        algorithm=parts.algorithm,
        seed=plan.run.seed,
        rollout=checkpoint.step if checkpoint else 0,
        policy_version=parts.backend.version,
    )
    predicted: dict[str, Mapping[str, float]] = {}
    for name, track in request.tracks.items():
        if not isinstance(track, LatentRequest):
            continue  # Nobody knows how long the texts will be.
        cost = latent_step_cost(
            track,
            latent_shape=cast("DiffusionModel", parts.model).latent_shape(track.sampling),
            anchors=plan.train.old_log_probs == "replay",
            trains=plan.algorithm.spec.needs.trajectory != "none",
        )
        predicted[name] = {**vars(cost), "generate_share": cost.generate_share}
    events.emit(
        "run_resumed" if checkpoint else "run_started",
        step=checkpoint.step if checkpoint else 0,
        name=plan.run.name or plan.recipe,
        recipe=plan.recipe,
        plan_hash=plan.hash,
        resolved=plan.resolved,
        steps=plan.run.steps,
        predicted=predicted,
        versions={choice.dist: choice.version for choice in plan.choices},
    )
    for value in plan.left_out:
        events.finding(str(value), step=checkpoint.step if checkpoint else 0)
    if checkpoint and checkpoint.state["steps"] != plan.run.steps:
        text = (
            f"run.steps was {checkpoint.state['steps']}, is {plan.run.steps}: schedules over progress go on from there."
        )
        events.finding(text, step=checkpoint.step)


class _Stop:
    is_set = False


@contextmanager
def _stop_on_signal() -> Generator[_Stop]:
    """The first Ctrl-C (or SIGTERM) lets the step finish and the run save; the second stops at once."""
    stop = _Stop()

    def handle(number: int, frame: FrameType | None) -> None:
        if stop.is_set:
            raise KeyboardInterrupt
        stop.is_set = True

    before: dict[int, Any] = {}
    try:
        for number in (signal.SIGINT, signal.SIGTERM):
            before[number] = signal.signal(number, handle)
    except ValueError:
        # Only the main thread may set handlers; a run in another thread is stopped by its owner.
        before.clear()
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
