"""Turning prompts, and samples of a parent stage, into requests: groups, ids, noise keys, SDE steps.

Pure functions of the step.
"""

from __future__ import annotations

import dataclasses
import hashlib
import re
import struct
from collections.abc import Collection, Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal, cast

from unirl.core.errors import DataError, RecipeError
from unirl.core.match.stage_keys import placed_key
from unirl.core.roles import diffusion_model, text_model
from unirl.core.specs.model_options import with_defaults
from unirl.core.types.data import Prompt
from unirl.core.types.inputs import Inputs, distinct
from unirl.core.types.request import LatentRequest, Request, TextRequest
from unirl.core.types.sampling import SamplingConfig, TextSamplingConfig
from unirl.numerics.diffusion.request import plan_latents

if TYPE_CHECKING:
    from unirl.core.roles import Model, Policy, TextModel
    from unirl.core.specs.plan import Plan, Stage
    from unirl.core.types.media import MediaKind
    from unirl.core.types.track import Track

    from .parts import Parts

__all__ = [
    "build_request",
    "child_request",
    "evaluation_requests",
    "sample_seed",
    "sampling_errors",
    "step_requests",
    "with_inputs",
]


def step_requests(
    parts: Parts,
    plan: Plan,
    prompts: Sequence[Prompt],
    *,
    step: int,
    versions: Mapping[str, int] | None = None,
    chosen: Collection[str] | None = None,
) -> dict[str, Request]:
    """Stage -> its request of a step to the engine, for stages made from prompts.

    versions: of the weights that each stage samples with; None takes those that train now.
    chosen: ids of the samples to draw, of those of all scouts; None draws the first ones of each prompt.
    """
    requests: dict[str, Request] = {}
    for stage in plan.stages:
        if stage.parent is None:
            with sampling_errors(plan, stage):
                requests[stage.name] = build_request(
                    prompts,
                    track=stage.name,
                    sampling=stage.sampling,
                    samples_per_prompt=stage.samples if chosen is None else plan.data.scouts.samples_per_prompt,
                    chosen=chosen,
                    model=parts.models[stage.learner.name],
                    model_track=stage.track,
                    takes=stage.takes,
                    medium=stage.medium,
                    trajectory=stage.needs.trajectory,
                    seed=plan.run.seed,
                    rollout=step,
                    policy_version=parts.version(stage) if versions is None else versions[stage.name],
                )
    return requests


def evaluation_requests(parts: Parts, plan: Plan, prompts: Sequence[Prompt]) -> dict[str, Request]:
    """Stage -> its request of an evaluation to the engine, for stages made from prompts, the current weights of
    `eval.policy` and the same noise every time.

    prompts: the held-out ones, of which the first `eval.num_prompts` are taken.
    """
    policy = cast("Policy", plan.eval.policy)
    requests: dict[str, Request] = {}
    for stage in plan.stages:
        if stage.parent is None:
            with sampling_errors(plan, stage, evaluates=True):
                requests[stage.name] = build_request(
                    prompts[: plan.eval.num_prompts or len(prompts)],
                    track=stage.name,
                    sampling=stage.evaluation,
                    samples_per_prompt=plan.eval.samples_per_prompt,
                    model=parts.models[stage.learner.name],
                    model_track=stage.track,
                    takes=stage.takes,
                    medium=stage.medium,
                    trajectory="none",
                    seed=plan.eval.seed,
                    rollout=0,
                    policy_version=parts.version(stage, policy),
                )
    return requests


@contextmanager
def sampling_errors(plan: Plan, stage: Stage, *, evaluates: bool = False) -> Generator[None]:
    """Errors inside about `sampling` name the key that the recipe has: `sampling.image.height` for one of several
    stages, `eval.sampling.height` for a setting that evaluation overrides."""
    try:
        yield
    except RecipeError as error:
        text = str(error)
        if setting := re.match(r"sampling\.(\w+)", text):
            lead = "eval." if evaluates and setting[1] in stage.eval_sampling else ""
            error.args = (placed_key(lead + text, plan, stage),)
        raise


def build_request(
    prompts: Sequence[Prompt],
    *,
    track: str,
    sampling: SamplingConfig,
    samples_per_prompt: int,
    model: Model,
    trajectory: Literal["none", "window", "full"],
    seed: int,
    rollout: int,
    policy_version: int,
    model_track: str = "",
    takes: Collection[str] | None = None,
    medium: MediaKind | None = None,
    chosen: Collection[str] | None = None,
) -> Request:
    """A request for a track of `samples_per_prompt` samples of each prompt, the samples of a prompt forming a group.

    Ids are `r<rollout>/<prompt id>` for groups and `.../<number>` for samples, so they never repeat in a run.
    model_track: the track of the model, where `track`, the stage's name, is another.
    trajectory: the latents of a latent track that come back, see `unirl.core.specs.capability.Needs`.
    takes: roles of media that the track is generated from, see `Stage.takes`; None for all. The request has them all,
    for the stages below.  medium: see `Request`.
    chosen: ids of the samples to generate, under the ids that they have among all; None is all of them.
    Raises RecipeError for invalid sampling settings.
    """
    groups = [(prompt, f"r{rollout}/{prompt.prompt_id}") for prompt in prompts]
    samples = [
        (prompt, group, sample)
        for prompt, group in groups
        for sample in (f"{group}/{number}" for number in range(samples_per_prompt))
        if chosen is None or sample in chosen
    ]
    return _request(
        Inputs.of_prompts([prompt for prompt, _, _ in samples]),
        model_track=model_track or track,
        takes=takes,
        medium=medium,
        metadata=tuple(prompt.metadata for prompt, _, _ in samples),
        track=track,
        sample_ids=tuple(sample for _, _, sample in samples),
        group_ids=tuple(group for _, group, _ in samples),
        sampling=sampling,
        model=model,
        trajectory=trajectory,
        seed=seed,
        rollout=rollout,
        policy_version=policy_version,
    )


def child_request(
    parent: Track,
    *,
    stage: Stage,
    inputs: Inputs,
    rows: Sequence[int],
    prompt_ids: Sequence[str],
    model: Model,
    like: Request,
    policy_version: int,
    evaluates: bool = False,
) -> Request:
    """A request for a stage that is made from its parent's samples.

    Ids are `<parent's sample id>/<stage>-<number>`. inputs: of the stage, a row for each row of the parent.
    rows: of the parent that it goes on from.  prompt_ids: group of the root sample behind each row of the parent.
    like: a request of the same rollout.  evaluates: one sample of each row, with the sampling of evaluation.
    """
    number = 1 if evaluates else stage.samples
    rows = [row for row in rows for _ in range(number)]
    names = tuple(parent.sample_ids[row] for row in rows)
    by_prompt = stage.settings.group == "prompt"
    return _request(
        inputs.select(rows),
        model_track=stage.track,
        medium=stage.medium,
        metadata=tuple(parent.metadata[row] for row in rows),
        track=stage.name,
        sample_ids=tuple(f"{name}/{stage.name}-{place % number}" for place, name in enumerate(names)),
        group_ids=tuple(prompt_ids[row] for row in rows) if by_prompt else names,
        sampling=stage.evaluation if evaluates else stage.sampling,
        model=model,
        trajectory="none" if evaluates else stage.needs.trajectory,
        seed=like.seed,
        rollout=like.rollout,
        policy_version=policy_version,
    )


def _request(
    inputs: Inputs,
    *,
    model_track: str,
    takes: Collection[str] | None = None,
    medium: MediaKind | None,
    metadata: tuple[Mapping[str, Any], ...],
    track: str,
    sample_ids: tuple[str, ...],
    group_ids: tuple[str, ...],
    sampling: SamplingConfig,
    model: Model,
    trajectory: Literal["none", "window", "full"],
    seed: int,
    rollout: int,
    policy_version: int,
) -> Request:
    params: LatentRequest | TextRequest
    if isinstance(sampling, TextSamplingConfig):
        seeds = [sample_seed(seed=seed, rollout=rollout, sample_id=sample) for sample in sample_ids]
        read = inputs if takes is None else inputs.with_roles(takes)
        params = _text_request(read, sampling, model=text_model(model), track=model_track, seeds=seeds)
    else:
        latent = diffusion_model(model)
        try:
            params = plan_latents(
                dataclasses.replace(sampling, fps=sampling.fps or latent.spec.fps),
                sigmas=latent.schedule(sampling),
                latent_shape=latent.latent_shape(sampling),
                seed=seed,
                rollout=rollout,
                sample_ids=sample_ids,
                group_ids=group_ids,
                trajectory=trajectory,
            )
        except ValueError as error:
            lead = "" if str(error).startswith("sampling.") else f"sampling of track {track!r}: "
            raise RecipeError(f"{lead}{error}") from error
    return Request(
        track=track,
        sample_ids=sample_ids,
        group_ids=group_ids,
        inputs=inputs,
        metadata=metadata,
        params=params,
        seed=seed,
        rollout=rollout,
        policy_version=policy_version,
        medium=medium,
    )


def sample_seed(*, seed: int, rollout: int, sample_id: str) -> int:
    """The seed of a sample, 63 bits: a function of the run's seed, the rollout and the sample alone."""
    digest = hashlib.blake2b(struct.pack("<qq", seed, rollout) + sample_id.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def with_inputs(request: Request, inputs: Inputs, *, model: TextModel, track: str) -> Request:
    """The request of a text track for other inputs. track: of the model."""
    wanted = request.text
    params = _text_request(inputs, wanted.sampling, model=model, track=track, seeds=wanted.seeds)
    return dataclasses.replace(request, inputs=inputs, params=params)


def _text_request(
    inputs: Inputs, settings: TextSamplingConfig, *, model: TextModel, track: str, seeds: Sequence[int]
) -> TextRequest:
    if track in model.spec.options:
        settings = dataclasses.replace(settings, options=with_defaults(model.spec, track, settings.options))
    fixed = model.completion_length(sampling=settings) if track in model.spec.media else None
    if fixed is not None:
        _check_fixed(fixed, settings, of=f"track {track!r} of model {model.spec.name!r}")
    rows, index = distinct(inputs)
    tokens = model.prompt_tokens(inputs.select(rows), sampling=settings)
    for row, prompt in zip(rows, tokens, strict=True):
        length, longest = int(prompt.shape[0]), settings.max_prompt_tokens
        if longest and length > longest:
            raise DataError(
                f"prompt {inputs.ids[row]!r} has {length} tokens; sampling.max_prompt_tokens is {longest}. Leave it "
                "out of the prompt file, or raise the bound."
            )
    return TextRequest(
        sampling=settings,
        prompt_tokens=tuple(tokens[at] for at in index),
        stop_tokens=() if fixed is not None else tuple(dict.fromkeys([*model.stop_tokens, *settings.stop_token_ids])),
        seeds=tuple(seeds),
        options=tuple(settings.options.items()) if track in model.spec.token_options else (),
        length=fixed,
    )


def _check_fixed(length: int, settings: TextSamplingConfig, *, of: str) -> None:
    """Raise RecipeError for settings that a completion of a fixed number of tokens cannot honour."""
    if settings.max_new_tokens < length:
        raise RecipeError(
            f"sampling.max_new_tokens: got {settings.max_new_tokens}, expected {length} or more, the tokens of each "
            f"sample of {of}."
        )
    for name in ("stop", "stop_token_ids"):
        if value := getattr(settings, name):
            raise RecipeError(f"sampling.{name}: got {value}, but nothing stops a sample of {of}. Leave it out.")
