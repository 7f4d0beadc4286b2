"""Generating a rollout stage by stage: children continue from the samples of their parents."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from .episodes import generate_episodes
from .lineage import Lineage
from .parts import Parts, generate, sampled_policy
from .requests import child_request, sampling_errors
from .unfinished import rows_to_continue

if TYPE_CHECKING:
    from unirl.core.roles import Policy
    from unirl.core.specs.plan import Plan, Stage
    from unirl.core.types.request import Request
    from unirl.core.types.track import Track

__all__ = ["generate_stages", "kept_images"]


def generate_stages(
    parts: Parts,
    plan: Plan,
    requests: Mapping[str, Request],
    *,
    versions: Mapping[str, int],
    during: Callable[[Stage], AbstractContextManager[None]],
    evaluated: Policy | None = None,
) -> dict[str, Track]:
    """The tracks of all stages, parents first, their echoes verified.

    requests: of the stages made from prompts.  versions: of the weights that each stage samples with.
    during: entered around each call of an engine.  evaluated: generate for an evaluation of this policy.
    """
    like = next(iter(requests.values()))
    lineage = Lineage(plan, requests, folder=partial(_folder, plan, "eval" if evaluated else like.rollout))
    for stage in plan.stages:
        with during(stage), sampling_errors(plan, stage, evaluates=evaluated is not None):
            rows: Sequence[int] = (0,)
            if stage.parent is None:
                whole = requests[stage.name]
                request = replace(whole, inputs=whole.inputs.with_roles(stage.takes))
            else:
                parent = lineage.tracks[stage.parent]
                rows = rows_to_continue(parent, stage)
                request = child_request(
                    parent,
                    stage=stage,
                    inputs=lineage.inputs(stage),
                    # Tracks have a row at least.
                    rows=rows or [0],
                    prompt_ids=lineage.prompt_ids(stage.parent),
                    model=parts.models[stage.learner.name],
                    like=like,
                    policy_version=versions[stage.name],
                    evaluates=evaluated is not None,
                )
            with sampled_policy(parts, stage, evaluated):
                call = partial(generate, parts.engines[stage.name], parent=stage.parent)
                if stage.environment is None:
                    track = call(request)
                else:
                    model, environment = parts.models[stage.learner.name], parts.environments[stage.name]
                    track = generate_episodes(request, stage=stage, model=model, environment=environment, generate=call)
            if not rows:
                track = replace(track, sample_weights=track.sample_weights * 0)
            lineage.add(stage.name, track)
    return lineage.tracks


@contextmanager
def kept_images(plan: Plan, rollout: int | str = "") -> Generator[None]:
    """To the end of the block, the run folder keeps the images that samples of a rollout, or of all, are made from."""
    try:
        yield
    finally:
        if plan.run.dir:
            shutil.rmtree(_folder(plan, rollout), ignore_errors=True)


def _folder(plan: Plan, rollout: int | str) -> Path:
    assert plan.run.dir, "with_run_folder() names it"
    return Path(plan.run.dir, "parent_images", str(rollout))
