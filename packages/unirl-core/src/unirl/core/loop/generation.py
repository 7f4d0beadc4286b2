"""Generating a rollout stage by stage: children go on from what their parents generated."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import BatchError
from ..types.rollout import Rollout
from .parts import Parts, generate, sampled_policy
from .requests import child_request

if TYPE_CHECKING:
    from ..roles import Policy
    from ..specs.plan import Plan, Stage
    from ..types.data import MediaRef
    from ..types.request import Request
    from ..types.track import Track

__all__ = ["generate_stages", "kept_images"]

IMAGES = "parent_images"
"""Folder of a run with the images that stages are made from."""
MEDIA = "unirl.numerics.media"
"""Module whose `save_images` writes them; core has no images of its own."""


def generate_stages(
    parts: Parts,
    plan: Plan,
    requests: Mapping[str, Request],
    *,
    versions: Mapping[str, int],
    during: Callable[[Stage], AbstractContextManager[None]],
    evaluated: Policy | None = None,
) -> Rollout:
    """The tracks of all stages, parents first, their echoes verified.

    requests: of the stages made from prompts.  versions: of the weights that each stage samples with.
    during: entered around each call of an engine.  evaluated: generate for an evaluation of this policy.
    """
    tracks: dict[str, Track] = {}
    prompt_of: dict[str, dict[str, str]] = {}
    """Stage -> group of the root sample behind each of its samples."""
    like = next(iter(requests.values()))
    for stage in plan.stages:
        with during(stage):
            if stage.parent is None:
                request = requests[stage.name]
                roots = request.group_ids
            else:
                parent = tracks[stage.parent]
                known = prompt_of[stage.parent]
                images = None
                if plan.stage(stage.parent).kind == "latent":
                    rollout = "eval" if evaluated is not None else str(like.rollout)
                    images = _images(parent, plan, stage, rollout)
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
    return Rollout(tracks=tracks)


@contextmanager
def kept_images(plan: Plan, rollout: str = "") -> Generator[None]:
    """Images that stages are made from stay in the run folder to the end of the block.

    rollout: number of theirs, or `eval`; empty for those of all.
    """
    try:
        yield
    finally:
        if plan.run.dir:
            shutil.rmtree(Path(plan.run.dir, IMAGES, rollout), ignore_errors=True)


def _images(parent: Track, plan: Plan, stage: Stage, rollout: str) -> Sequence[tuple[MediaRef, ...]]:
    """The image of each sample of a stage's parent, as files of 8 bits."""
    if parent.media is None or parent.media.kind != "image":
        raise BatchError(f"stage {stage.name!r}: its parent {parent.name!r} gave no images to go on from.")
    assert plan.run.dir, "with_run_folder() names it"
    return import_module(MEDIA).save_images(parent.media, Path(plan.run.dir, IMAGES, rollout), role=stage.parent_role)
