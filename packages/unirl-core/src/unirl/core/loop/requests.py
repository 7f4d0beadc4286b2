"""Turning prompts into requests, one per track: groups, ids, noise keys, SDE steps. Pure functions of the step."""

from __future__ import annotations

import dataclasses
import hashlib
import struct
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from ..errors import DataError, PlanRejected, RecipeError
from ..roles import diffusion_model, text_model
from ..specs.eval_sampling import evaluation_base
from ..types.data import Prompt
from ..types.inputs import Inputs, distinct
from ..types.request import LatentRequest, Request, TextRequest
from ..types.sampling import SamplingConfig, TextSamplingConfig

if TYPE_CHECKING:
    from ..roles import Algorithm, LatentAlgorithm, Model, Policy, TextModel
    from ..specs.plan import Plan
    from .parts import Parts

__all__ = ["build_request", "evaluation_requests", "evaluation_sampling", "sample_seed", "step_requests"]


def step_requests(parts: Parts, plan: Plan, prompts: Sequence[Prompt], *, step: int) -> dict[str, Request]:
    """Track name -> its request of a step to the engine, for the current weights of the policy that samples."""
    version = parts.backend.version_of(plan.needs.sampler)
    return {
        name: build_request(
            prompts,
            track=name,
            sampling=sampling,
            samples_per_prompt=plan.data.samples_per_prompt,
            model=parts.model,
            algorithm=parts.algorithm,
            seed=plan.run.seed,
            rollout=step,
            policy_version=version,
        )
        for name, sampling in plan.sampling.items()
    }


def evaluation_requests(parts: Parts, plan: Plan, prompts: Sequence[Prompt]) -> dict[str, Request]:
    """Track name -> its request of an evaluation to the engine, for the current weights of `eval.policy` and the same
    noise every time.

    prompts: the held-out ones, of which the first `eval.num_prompts` are taken.
    """
    version = parts.backend.version_of(cast("Policy", plan.eval.policy))
    return {
        name: build_request(
            prompts[: plan.eval.num_prompts or len(prompts)],
            track=name,
            sampling=sampling,
            samples_per_prompt=plan.eval.samples_per_prompt,
            model=parts.model,
            algorithm=parts.algorithm,
            seed=plan.eval.seed,
            rollout=0,
            policy_version=version,
        )
        for name, sampling in evaluation_sampling(plan).items()
    }


def build_request(
    prompts: Sequence[Prompt],
    *,
    track: str,
    sampling: SamplingConfig,
    samples_per_prompt: int,
    model: Model,
    algorithm: Algorithm,
    seed: int,
    rollout: int,
    policy_version: int,
) -> Request:
    """A request for a track of `samples_per_prompt` samples of each prompt, the samples of a prompt forming a group.

    Ids are `r<rollout>/<prompt id>` for groups and `.../<number>` for samples, so they never repeat in a run.
    Raises RecipeError for sampling settings that cannot be.
    """
    expanded = [(prompt, number) for prompt in prompts for number in range(samples_per_prompt)]
    inputs = Inputs.of_prompts([prompt for prompt, _ in expanded])
    group_ids = tuple(f"r{rollout}/{prompt.prompt_id}" for prompt, _ in expanded)
    sample_ids = tuple(f"{group}/{number}" for group, (_, number) in zip(group_ids, expanded, strict=True))

    def planned() -> LatentRequest | TextRequest:
        if isinstance(sampling, TextSamplingConfig):
            seeds = [sample_seed(seed=seed, rollout=rollout, sample_id=sample) for sample in sample_ids]
            return _text_request(inputs, sampling, model=text_model(model), seeds=seeds)
        latent = diffusion_model(model)
        try:
            return cast("LatentAlgorithm", algorithm).latent_request(
                sampling,
                sigmas=latent.schedule(sampling),
                latent_shape=latent.latent_shape(sampling),
                seed=seed,
                rollout=rollout,
                sample_ids=sample_ids,
                group_ids=group_ids,
            )
        except ValueError as error:
            raise RecipeError(f"sampling of track {track!r}: {error}") from error

    return Request(
        track=track,
        sample_ids=sample_ids,
        group_ids=group_ids,
        inputs=inputs,
        metadata=tuple(prompt.metadata for prompt, _ in expanded),
        params=planned(),
        seed=seed,
        rollout=rollout,
        policy_version=policy_version,
    )


def sample_seed(*, seed: int, rollout: int, sample_id: str) -> int:
    """The seed of a sample, 63 bits: a function of the run's seed, the rollout and the sample alone."""
    digest = hashlib.blake2b(struct.pack("<qq", seed, rollout) + sample_id.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def _text_request(
    inputs: Inputs, settings: TextSamplingConfig, *, model: TextModel, seeds: Sequence[int]
) -> TextRequest:
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
        stop_tokens=tuple(dict.fromkeys([*model.stop_tokens, *settings.stop_token_ids])),
        seeds=tuple(seeds),
    )


def evaluation_sampling(plan: Plan) -> dict[str, SamplingConfig]:
    """The sampling of evaluation: that of training with `eval.sampling` laid over it, and nothing to train on.

    Latent tracks are sampled without noise, by `euler`, and text tracks greedily, unless `eval.sampling` says
    otherwise. Raises PlanRejected for a key that sampling does not have.
    """
    return {name: _evaluated(settings, plan.eval.sampling) for name, settings in plan.sampling.items()}


def _evaluated(settings: SamplingConfig, given: Mapping[str, Any]) -> SamplingConfig:
    allowed = {item.name for item in dataclasses.fields(settings)}
    unknown = sorted(set(given) - allowed)
    if unknown:
        raise PlanRejected(
            f"eval.sampling.{unknown[0]}: sampling of a {settings.kind} track has no such key; it has "
            f"{', '.join(sorted(allowed))}."
        )
    return dataclasses.replace(evaluation_base(settings), **given)
