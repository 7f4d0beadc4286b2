"""Facts of saved samples as plain data, for JSON and for the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from math import isnan
from typing import TYPE_CHECKING, Any, cast

from unirl.core.types.track import LatentSegment, TextSegment, Track
from unirl.loop.requests import sample_seed

from .pieces import TokenTexts
from .saved_run import SavedRun, SavedSample, StepSamples

if TYPE_CHECKING:
    from unirl.core.types.array import Array

__all__ = ["Facts", "sample_facts", "short_facts", "sort_value", "spread"]

Facts = dict[str, Any]
PER_TOKEN = ("log_probs", "engine_log_probs", "reference_log_probs", "values", "returns", "advantages")
PER_STEP = ("log_probs", "values", "returns", "advantages")


def sample_facts(run: SavedRun, samples: StepSamples, sample: SavedSample) -> Facts:
    """A sample with its ancestors, the first stage's first, and the names of the samples made from it."""
    line = samples.lineage(sample)
    root = line[0]
    inputs = root.track.inputs
    return {
        "run": run.name,
        "folder": str(run.folder),
        "step": samples.step,
        "sample": sample.name,
        "prompt": {
            "text": inputs.prompts[root.row],
            "media": _media(inputs.media[root.row]),
            "metadata": dict(root.track.metadata[root.row]),
        },
        "lineage": [_facts(run, samples, each) for each in line],
        "children": [
            {"sample": child.name, "reward": _number(child.track.rewards, child.row)}
            for child in samples.children(sample)
        ],
    }


def sort_value(sample: SavedSample, key: str) -> float | None:
    """`reward`, `advantage`, `length`, or one of the track's `reward_parts`. None where the sample has none.

    Raises KeyError for a key that is none of these.
    """
    track, row = sample.track, sample.row
    if key == "reward":
        return _number(track.rewards, row)
    if key == "advantage":
        return _number(track.advantages, row)
    if key == "length":
        return float(track.segment.lengths[row]) if isinstance(track.segment, TextSegment) else None
    return _number(track.reward_parts[key], row)


def _facts(run: SavedRun, samples: StepSamples, sample: SavedSample) -> Facts:
    track, row = sample.track, sample.row
    stage = run.stages.get(track.name)
    algorithm = stage.optional_text("algorithm") if stage else None
    inputs, segment = track.inputs, track.segment
    result: Facts = {
        "stage": track.name,
        "sample": sample.name,
        "model": stage.text("model") if stage else None,
        "engine": stage.text("engine") if stage else None,
        "algorithm": algorithm,
        "group": track.group_ids[row],
        "unit": None if track.unit_ids is None else track.unit_ids[row],
        "parent": None if track.parent_ids is None or track.parent_track is None else track.parent_ids[row],
        "inputs": {
            "text": inputs.texts[row],
            "media": _media(inputs.media[row]),
            "turns": None
            if inputs.turns is None
            else [
                {"stage": turn.stage, "text": turn.text, "num_tokens": len(turn.tokens), "media": _media(turn.media)}
                for turn in inputs.turns[row]
            ],
        },
        "status": track.status[row].name.lower(),
        "policy_version": track.policy_version[row],
        "weight": _number(track.sample_weights, row),
        "is_left_out": sample.is_left_out,
        "reward": _number(track.rewards, row),
        "rewards": _rewards(run, track, row),
        "group_rewards": _group(samples, sample),
        "advantage": _number(track.advantages, row),
        "no_advantage": _why_none(run, samples, sample, algorithm),
    }
    if isinstance(segment, TextSegment):
        texts = TokenTexts.of(run, track.name)
        result |= {
            "text": track.media.texts[row] if track.media is not None and track.media.kind == "text" else None,
            "turns": None
            if track.turns is None
            else [{"by": turn.stage, "text": turn.text} for turn in track.turns[row]],
            "seed": sample_seed(seed=_seed(run), rollout=samples.step, sample_id=sample.name),
            "temperature": segment.temperature,
            "num_prompt_tokens": len(segment.prompt_tokens[row]),
            "tokens": _tokens(segment, row, texts),
            "no_token_texts": texts.problem,
        }
    elif isinstance(segment, LatentSegment):
        result |= {"latents": _latents(run, samples, sample, segment), "media": run.media.get(sample.name)}
    return result


def _tokens(segment: TextSegment, row: int, texts: TokenTexts) -> list[Facts]:
    ids = cast("list[int]", cast(Any, segment.tokens[row]).tolist())
    mask = None if segment.mask is None else cast("list[bool]", cast(Any, segment.mask[row]).tolist())
    columns = {
        name: cast("list[float]", cast(Any, values[row]).tolist())
        for name in PER_TOKEN
        if (values := cast("tuple[Array, ...] | None", getattr(segment, name))) is not None
    }
    return [
        {
            "token": token,
            "text": texts(token),
            "is_trained": mask is None or mask[place],
            **{_singular(name): values[place] for name, values in columns.items()},
        }
        for place, token in enumerate(ids)
    ]


def _latents(run: SavedRun, samples: StepSamples, sample: SavedSample, segment: LatentSegment) -> Facts:
    row = sample.row
    scored = [int(step) for step in segment.scored_steps[row]]
    columns = {
        name: values[row] for name in PER_STEP if (values := cast("Array | None", getattr(segment, name))) is not None
    }
    keys = segment.step_noise_ids
    noise = None if segment.initial_noise is None else segment.initial_noise[row]
    same = [
        each
        for each in samples.of(sample.track.name)
        if isinstance(each.track.segment, LatentSegment)
        and each.track.segment.initial_noise is not None
        and each.track.segment.initial_noise[each.row] == noise
    ]
    sampler = segment.sampler
    return {
        "kernel": sampler.kernel,
        "eta": sampler.eta,
        "options": dict(sampler.options),
        "guidance_scale": sampler.guidance_scale,
        "guidance_mode": sampler.guidance_mode,
        "guidance_options": dict(sampler.guidance_options),
        "sigmas": cast("list[float]", cast(Any, segment.sigmas).tolist()),
        "sde_steps": [step for step in map(int, segment.sde_steps[row]) if step >= 0],
        "seed": _seed(run),
        "rollout": samples.step,
        "initial_noise": noise,
        "num_same_initial_noise": len(same) if noise else None,
        "draws": None if segment.draws is None else list(segment.draws),
        "steps": [
            {
                "step": step,
                "noise": sample.name if keys is None else keys[row][step],
                **{_singular(name): float(values[place]) for name, values in columns.items()},
            }
            for place, step in enumerate(scored)
            if step >= 0
        ],
    }


def _rewards(run: SavedRun, track: Track, row: int) -> list[Facts]:
    """Each reward and each child's credit, with its components."""
    children = {name for name, stage in run.stages.items() if stage.optional_text("parent") == track.name}
    return [
        {
            "name": name,
            "kind": "credit" if name in children else "reward",
            "value": _number(values, row),
            "weight": 1.0 if name in children else track.reward_weights.get(name),
            "parts": {
                part.removeprefix(f"{name}/"): _number(inner, row)
                for part, inner in track.reward_parts.items()
                if part.startswith(f"{name}/")
            },
        }
        for name, values in track.reward_parts.items()
        if "/" not in name
    ]


def _group(samples: StepSamples, sample: SavedSample) -> Facts:
    """Rewards of the sample's group: of those that have one and a weight, or were left out later."""
    group = sample.track.group_ids[sample.row]
    members = [each for each in samples.of(sample.track.name) if each.track.group_ids[each.row] == group]
    counted = [each for each in members if each.is_left_out or float(each.track.sample_weights[each.row])]
    rewards = [value for each in counted if (value := _number(each.track.rewards, each.row)) is not None]
    own = _number(sample.track.rewards, sample.row)
    rank = None if own is None else 1 + sum(value > own for value in rewards)
    return {**spread(rewards), "size": len(members), "rank": rank}


def spread(values: Sequence[float]) -> Facts:
    """Count, mean, population standard deviation and bounds of rewards."""
    if not values:
        return {"num_scored": 0, "mean": None, "std": None, "least": None, "most": None}
    mean = sum(values) / len(values)
    std = (sum((value - mean) ** 2 for value in values) / len(values)) ** 0.5
    return {"num_scored": len(values), "mean": mean, "std": std, "least": min(values), "most": max(values)}


def _why_none(run: SavedRun, samples: StepSamples, sample: SavedSample, algorithm: str | None) -> str | None:
    """Why the sample has no advantage of its own; None if it has one."""
    track = sample.track
    if sample.is_left_out:
        return f"{algorithm} left this sample out of training"
    if track.advantages is not None:
        return None
    if algorithm is None:
        return "the stage does not train"
    prefix = f"{track.name}/" if len(run.stages) > 1 else ""
    if run.metrics.get(samples.step, {}).get(f"{prefix}steps_skipped"):
        return "all samples of the step got one reward, so it made no update"
    return f"{algorithm} gave none before training"


def short_facts(sample: SavedSample) -> Facts:
    """Facts of a sample for a list."""
    track, row = sample.track, sample.row
    return {
        "sample": sample.name,
        "reward": _number(track.rewards, row),
        "advantage": _number(track.advantages, row),
        "weight": _number(track.sample_weights, row),
        "is_left_out": sample.is_left_out,
        "status": track.status[row].name.lower(),
        "num_tokens": track.segment.lengths[row] if isinstance(track.segment, TextSegment) else None,
        "input": track.inputs.texts[row],
        "text": track.media.texts[row] if track.media is not None and track.media.kind == "text" else None,
    }


def _media(refs: Sequence[Any]) -> list[Facts]:
    return [{"modality": ref.modality, "role": ref.role, "uri": ref.uri} for ref in refs]


def _number(values: Array | None, row: int) -> float | None:
    """One of [N]; None where there are none, or it is NaN, which marks a sample without a score."""
    if values is None:
        return None
    value = float(values[row])
    return None if isnan(value) else value


def _seed(run: SavedRun) -> int:
    return run.resolved.section("run").count("seed")


def _singular(name: str) -> str:
    return name.removesuffix("s")
