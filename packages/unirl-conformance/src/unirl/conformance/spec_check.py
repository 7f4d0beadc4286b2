"""Checks a spec against its implementation. Resolves every string in it, so it imports the part's dependencies."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields, is_dataclass
from typing import Any, Literal, TypeAlias, cast, get_args, get_origin, get_type_hints

from unirl.core.errors import PluginBroken
from unirl.core.names import did_you_mean
from unirl.core.specs.capability import Cap, Needs
from unirl.core.specs.part_config import CONFIG_BASES, PartConfig
from unirl.core.specs.spec import (
    RESERVED_PARTS,
    AlgorithmSpec,
    EngineSpec,
    EnvironmentSpec,
    LauncherSpec,
    ModelSpec,
    RewardSpec,
    Spec,
)

__all__ = ["check_spec"]

Resolve: TypeAlias = Callable[[str], Any]
"""Returns the object that `"module:attribute"` names, or raises PluginBroken: `Catalog.resolve`."""

BUILD_KEYWORDS: dict[str, tuple[str, ...]] = {
    "model": ("device",),
    "engine": ("model", "device"),
    "backend": ("model", "train", "steps", "seed"),
    "algorithm": ("advantage", "reward_weights", "train", "seed"),
    "reward": ("device",),
    "environment": (),
    "tracker": (),
    "launcher": (),
    "transport": ("place",),
}
"""Keyword arguments of `build(config, ...)`, by kind of part."""


SUMMARY_LENGTH = 120
"""Characters of a summary: a line of a terminal and of the reference."""
SOURCE = re.compile(r"arXiv:? ?\d{4}\.\d{4,5}|10\.\d{4,}/\S+|https?://\S+\.\S+")
"""An arXiv number, a DOI or a link."""


def check_spec(spec: Spec, resolve: Resolve) -> list[str]:
    """Problems of a spec, one sentence each; empty if it agrees with its implementation."""
    return [
        *_summary(spec),
        *_capabilities(spec),
        *_build(spec, resolve),
        *_config(spec, resolve),
        *_by_kind(spec, resolve),
    ]


def _summary(spec: Spec) -> Iterator[str]:
    if len(spec.summary.split()) < 3 or len(spec.summary) > SUMMARY_LENGTH or "\n" in spec.summary:
        yield f"summary: got {spec.summary!r}, expected one line of 3 words to {SUMMARY_LENGTH} characters."


def _capabilities(spec: Spec) -> Iterator[str]:
    for cap in cast(Iterable[object], spec.capabilities):
        if not isinstance(cap, Cap):
            yield f"capabilities: {cap!r} is not a Cap{did_you_mean(str(cap), [str(c) for c in Cap])}."
        elif spec.kind not in cap.kinds:
            yield f"capabilities.{cap}: a {spec.kind} has no such capability."


def _build(spec: Spec, resolve: Resolve) -> Iterator[str]:
    keywords = BUILD_KEYWORDS.get(spec.kind)
    if keywords is None:
        return
    if isinstance(spec, AlgorithmSpec) and spec.needs.reward == "differentiable":
        keywords = (*keywords, "score")
    call = f"build(config{''.join(f', {name}=' for name in keywords)})"
    yield from _function("build", spec.build, resolve, call, None, **dict.fromkeys(keywords))


def _config(spec: Spec, resolve: Resolve) -> Iterator[str]:
    try:
        config = resolve(spec.config)
    except PluginBroken as error:
        yield f"config: {error}"
        return
    base = CONFIG_BASES.get(spec.kind, PartConfig)
    if not (isinstance(config, type) and is_dataclass(config) and issubclass(config, base)):
        yield f"config: {spec.config!r} is not a dataclass that inherits unirl.core.specs.part_config.{base.__name__}."
        return
    keys = [item.name for item in fields(config)]
    for what, key in _keys(spec):
        if key not in keys:
            yield f"{what}: {spec.config!r} has no key {key!r}{did_you_mean(key, keys)}."
    try:
        config()
    except Exception as error:  # noqa: BLE001 - this is the report
        yield f"config: {spec.config!r} cannot be created from its defaults: {type(error).__name__}: {error}."


def _keys(spec: Spec) -> Iterator[tuple[str, str]]:
    """Keys of its config that a spec names."""
    if isinstance(spec, AlgorithmSpec):
        yield from (("when", key) for key in spec.when)
        yield from (("stateful", key) for key in spec.stateful)
        if spec.clip_key:
            yield "clip_key", spec.clip_key
    if isinstance(spec, ModelSpec) and spec.tiny is not None:
        yield "path_key", spec.path_key
    if isinstance(spec, LauncherSpec):
        yield from (("separates", key) for key in spec.separates or ())
        yield from (("holds_reference", key) for key in spec.holds_reference or ())
    settings = {"trial": spec.trial, **{f"enabled_by[{cap}]": value for cap, value in spec.enabled_by.items()}}
    for what, values in settings.items():
        yield from ((what, key.partition(".")[0]) for key in values)


def _by_kind(spec: Spec, resolve: Resolve) -> Iterator[str]:
    if isinstance(spec, ModelSpec):
        yield from _model(spec, resolve)
    if isinstance(spec, EngineSpec) and not spec.reads_weights and Cap.WEIGHTS_SHARED in spec.capabilities:
        yield "reads_weights: False, but the capability weights-shared says that it samples with the trained module."
    if isinstance(spec, AlgorithmSpec):
        yield from _needs("needs", spec.needs)
        for key, further in spec.when.items():
            yield from _needs(f"when[{key!r}]", spec.needs.merged(further))
        if not SOURCE.search(spec.paper) and len(spec.paper.split()) < 5:
            yield f"paper: got {spec.paper!r}, expected an arXiv number, a DOI, a link or a sentence of reasons."
        if spec.reference:
            yield from _function("reference", spec.reference, resolve, "reference(config, inputs)", None, None)
    if isinstance(spec, RewardSpec):
        yield from _reward(spec, resolve)
    if isinstance(spec, EnvironmentSpec):
        yield from _environment(spec)


def _environment(spec: EnvironmentSpec) -> Iterator[str]:
    if not spec.examples:
        yield "examples: none; give an episode that the environment can run."
    for number, example in enumerate(spec.examples):
        if not example.answers:
            yield f"examples[{number}].answers: none; give those of an episode, the last of which ends it."
        for key in spec.metadata:
            if key not in example.metadata:
                yield f"examples[{number}].metadata: {key!r} is missing, which `metadata` says every prompt has."


def _reward(spec: RewardSpec, resolve: Resolve) -> Iterator[str]:
    if spec.tiny:
        yield from _function("tiny", spec.tiny, resolve, "write(folder, seed=)", None, seed=0)
    if len(spec.scale.split()) < 3:
        yield f"scale: got {spec.scale!r}, expected the meaning of the score in three words or more."
    if not spec.range[0] < spec.range[1]:
        yield f"range: {spec.range} is empty; give the smallest and the largest score."
    if all(map(math.isinf, spec.range)) and "unbounded" not in spec.scale:
        yield f'range: {spec.range} has no bound; give one, or say "unbounded" in `scale`.'
    for part in set(spec.parts) & set(RESERVED_PARTS):
        yield f"parts: {part!r} is a reserved name; call the component something else."
    if not spec.examples:
        yield "examples: none; give one that the reward can score."
    for number, example in enumerate(spec.examples):
        if example.draw:
            call = "draw(height=, width=, seed=)"
            yield from _function(f"examples[{number}].draw", example.draw, resolve, call, height=0, width=0, seed=0)
        for key in spec.metadata:
            if key not in example.metadata:
                yield f"examples[{number}].metadata: {key!r} is missing, which `metadata` says every prompt has."


def _model(spec: ModelSpec, resolve: Resolve) -> Iterator[str]:
    kinds = set(spec.tracks.values())
    for cap, kind in ((Cap.LATENT_STAGE, "latent"), (Cap.TEXT_STAGE, "text")):
        if (kind in kinds) != (cap in spec.capabilities):
            has = f"has {kind} tracks" if kind in kinds else f"has no {kind} track"
            states = "does not state" if kind in kinds else "states"
            yield f"tracks: the model {has}, and {states} the capability {cap}."
    for field, tracks in (("token_options", spec.token_options), ("restricts", spec.restricts)):
        for track in sorted(tracks):
            if spec.tracks.get(track) != "text":
                yield f"{field}: {track!r} is not a text track of the model."
            elif field == "token_options" and track not in spec.options:
                yield f"{field}: track {track!r} has no `options` that its logits could depend on."
    for engine in sorted(spec.bridged_options):
        if engine not in spec.bridges:
            yield f"bridged_options: the model has no bridge to {engine!r}."
        elif not any(spec.tracks.get(track) == "latent" for track in spec.options):
            yield f"bridged_options: got {engine!r}, but no latent track has `options`."
    for engine in sorted(spec.bridged_texts):
        if engine not in spec.bridges:
            yield f"bridged_texts: the model has no bridge to {engine!r}."
        elif "text" not in kinds:
            yield f"bridged_texts: got {engine!r}, but the model has no text track."
    if Cap.LORA in spec.capabilities and not spec.lora_targets:
        yield f"lora_targets: empty, but the capability {Cap.LORA} is claimed."
    for field, fact in (("lora_targets", spec.lora_targets), ("wrap_blocks", spec.wrap_blocks)):
        if isinstance(fact, str):
            yield from _function(field, fact, resolve, "function(module)", None)
    if spec.tiny is not None:
        yield from _function("tiny.write", spec.tiny.write, resolve, "write(folder, seed=)", None, seed=0)
        if not spec.tiny.media and spec.needs_media:
            yield "tiny.media: empty, but the model needs media."
        if spec.tiny.media:
            yield from _function("tiny.media", spec.tiny.media, resolve, "media(folder, number=)", None, number=0)
        for name in spec.tiny.idle_layers:
            targets = spec.lora_targets
            if isinstance(targets, tuple) and not f".{name}".endswith(tuple(f".{target}" for target in targets)):
                yield f"tiny.idle_layers: {name!r} is not a layer that `lora_targets` match."
    for field, targets in (("bridges", spec.bridges), ("adapter_layouts", spec.adapter_layouts)):
        for name, target in targets.items():
            try:
                resolve(target)
            except PluginBroken as error:
                yield f"{field}[{name!r}]: {error}"
    if spec.parity:
        given = "inputs" if spec.needs_media else "prompts"
        call = f"parity(folder, {given}=, sampling=, initial=)"
        keywords = dict.fromkeys((given, "sampling", "initial"))
        yield from _function("parity", spec.parity, resolve, call, None, **keywords)
    if spec.text_parity:
        call = "text_parity(folder, inputs=, sampling=)"
        keywords = dict.fromkeys(("inputs", "sampling"))
        yield from _function("text_parity", spec.text_parity, resolve, call, None, **keywords)


def _needs(where: str, needs: Needs) -> Iterator[str]:
    hints = get_type_hints(Needs)
    for item in fields(needs):
        value, allowed = getattr(needs, item.name), hints[item.name]
        options = get_args(allowed) if get_origin(allowed) is Literal else (True, False)
        if value not in options:
            yield f"{where}.{item.name}: {value!r} is not one of {', '.join(map(str, options))}."
    if needs.log_probs != "none" and needs.trajectory == "none" and needs.track == "latent":
        yield f"{where}: log-probs of a latent track need its trajectory; trajectory is none."
    if (needs.log_probs, needs.track) in (("gaussian", "text"), ("token", "latent")):
        yield f"{where}: got {needs.log_probs} log-probs for a {needs.track} track."
    if needs.log_probs == "gaussian" and not needs.stochastic:
        yield f"{where}: gaussian log-probs only exist for stochastic steps; stochastic is False."


def _function(
    what: str, target: str, resolve: Resolve, call: str, *arguments: object, **keywords: object
) -> Iterator[str]:
    """Problems of a string that must name a function with this call."""
    try:
        function = resolve(target)
    except PluginBroken as error:
        yield f"{what}: {error}"
        return
    if not callable(function):
        yield f"{what}: {target!r} is not a function but of type {type(function).__name__}."
        return
    try:
        inspect.signature(function).bind(*arguments, **keywords)
    except TypeError as error:
        yield f"{what}: {target!r} is called as {call}, which its signature does not accept: {error}."
    except ValueError:
        # A builtin or extension function has no signature to inspect.
        return
