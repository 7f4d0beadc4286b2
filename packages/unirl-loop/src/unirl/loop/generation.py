"""Generating a rollout stage by stage: children continue from the samples of their parents."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Generator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from unirl.numerics.media import save_images

from .parts import Parts, generate, sampled_policy
from .requests import child_request, sampling_errors

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
    tracks: dict[str, Track] = {}
    prompt_of: dict[str, dict[str, str]] = {}
    """Stage -> group of the root sample behind each of its samples."""
    like = next(iter(requests.values()))
    for stage in plan.stages:
        with during(stage), sampling_errors(plan, stage, evaluates=evaluated is not None):
            if stage.parent is None:
                request = requests[stage.name]
                roots = request.group_ids
            else:
                parent = tracks[stage.parent]
                known = prompt_of[stage.parent]
                images = None
                if plan.stage(stage.parent).kind == "latent":
                    folder = _folder(plan, "eval" if evaluated else like.rollout)
                    images = save_images(parent.media, folder, role=stage.parent_role)
                request = child_request(
                    parent,
                    stage=stage,
                    prompt_ids=[known[name] for name in parent.sample_ids],
                    images=images,
                    model=parts.models[stage.learner.name],
                    like=like,
                    policy_version=versions[stage.name],
                    evaluates=evaluated is not None,
                )
                roots = tuple(known[name] for name in request.inputs.ids)
            with sampled_policy(parts, stage, evaluated):
                tracks[stage.name] = generate(parts.engines[stage.name], request, parent=stage.parent)
        prompt_of[stage.name] = dict(zip(request.sample_ids, roots, strict=True))
    return tracks


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
