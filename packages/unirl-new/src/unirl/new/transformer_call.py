"""How a pipeline calls its transformer and its encoder, seen in one velocity of the generic model."""

from __future__ import annotations

import dataclasses
import inspect
import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from unirl.core.types.data import MediaRef
from unirl.core.types.inputs import Inputs
from unirl.core.types.sampling import LatentSamplingConfig

__all__ = ["Call", "argument_table", "inputs_of", "recorded_call"]

_PROMPTS = ("a red ring", "two blue squares")
_SIGMA = 0.625
"""Exact in binary, and another number than one less it."""
_TIMES = {
    "sigma.float() * 1000.0": _SIGMA * 1000,
    "sigma.float()": _SIGMA,
    "1.0 - sigma.float()": 1 - _SIGMA,
    "(1.0 - sigma.float()) * 1000.0": (1 - _SIGMA) * 1000,
}
"""Functions of sigma that pipelines pass as the timestep: code -> value."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Call:
    """Both calls as code: name of each argument -> expression."""

    transformer: Mapping[str, str]
    encoder: Mapping[str, str]
    conditions: Mapping[str, int]
    """Name of each condition -> its place in what `encode_prompt` returns."""
    floats: frozenset[str]
    """Conditions in the dtype of the transformer; the others are masks and ids."""
    sign: str
    """"" or "-", of the prediction."""


class _NotPlain(Exception):
    """The pipeline does more than a plain call; the message says what."""


def inputs_of(media: Sequence[MediaRef], prompts: Sequence[str] = _PROMPTS) -> Inputs:
    """Prompts, each with these media."""
    return dataclasses.replace(Inputs.of_texts(prompts), ids=tuple(prompts), media=(tuple(media),) * len(prompts))


def recorded_call(
    model: Any, *, sampling: LatentSamplingConfig, media: Sequence[MediaRef] = ()
) -> tuple[Call | None, str]:
    """The calls of a pipeline that passes x, sigma and its encoder's results on as they are; else None and the reason.

    model: as model=diffusers builds it.
    """
    try:
        return _call(model, sampling, media), ""
    except _NotPlain as reason:
        return None, str(reason)


def argument_table(model: Any, *, sampling: LatentSamplingConfig, media: Sequence[MediaRef] = ()) -> dict[str, str]:
    """Name of each argument of the transformer -> what it is, in words, for two prompts."""
    conditions = model.encode(inputs_of(media), sampling=sampling)
    x = torch.randn((2, *model.latent_shape(sampling)), generator=torch.Generator().manual_seed(0)).to(model.device)
    calls, _ = _watched(model, x, conditions)
    args, kwargs, _ = calls[0]
    named = {f"{place}. without a name": value for place, value in enumerate(args, 1)} | kwargs
    return {name: _in_words(value, x=model.grid.state(x), conditions=conditions) for name, value in named.items()}


def _in_words(value: Any, *, x: Tensor, conditions: Mapping[str, Any]) -> str:
    if not isinstance(value, Tensor):
        is_short = value is None or isinstance(value, (bool, int, float, str)) or value in ({}, [], ())
        return f"`{value!r}`" if is_short else f"a {type(value).__name__} that the pipeline makes"
    shape = f"{list(value.shape)} {str(value.dtype).removeprefix('torch.')}"
    if value.shape == x.shape and torch.equal(value.float(), x.float()):
        return f"x as the pipeline steps through it, {shape}"
    if value.numel() <= 2:
        for code, time in _TIMES.items():
            if torch.allclose(value.float().cpu(), torch.tensor(time)):
                return f"`{code}`, {shape}"
    for name, own in conditions.items():
        if _same(value, own):
            return f"condition `{name}`, {shape}"
    return f"{shape}, which the pipeline's code makes"


def _call(model: Any, sampling: LatentSamplingConfig, media: Sequence[MediaRef]) -> Call:
    layout = next(iter(model.facts.layouts.values()))
    for is_so, reason in (
        (media or model.session.image_name is not None, "it reads images"),
        (model.grid.is_packed, "it packs latents into tokens, whose positions its code makes"),
        (model.grid.is_channels_last, "its latents have the channels last"),
        (model.facts.has_whole_timesteps, f"{type(model.pipeline.scheduler).__name__} rounds timesteps to whole ones"),
        (model.facts.is_inverted, "its sigmas rise"),
        (model.session.has_embedded_guidance, "its transformer reads the scale of the guidance"),
        (bool(layout.ragged) or bool(layout.unshared) or layout.is_single, "its prompts keep their lengths"),
        (not layout.takes_row_sigmas, "the rows of a batch share a timestep"),
    ):
        if is_so:
            raise _NotPlain(reason)
    encoder, conditions = _encoded(model, sampling)
    x = torch.randn((2, *model.latent_shape(sampling)), generator=torch.Generator().manual_seed(0))
    calls, velocity = _watched(model, x.to(model.device), conditions)
    if len(calls) != 1:
        raise _NotPlain(f"it calls its transformer {len(calls)} times for two prompts")
    args, kwargs, result = calls[0]
    if args:
        raise _NotPlain(f"it calls its transformer with {len(args)} arguments without names")
    arguments: dict[str, str] = {}
    used: dict[str, int] = {}
    floats: set[str] = set()
    for name, value in kwargs.items():
        if not isinstance(value, Tensor):
            code = _constant(value, of=f"the transformer's argument {name!r}")
            if value is not None:
                arguments[name] = code
        elif value.shape == x.shape and torch.equal(value.float(), x.to(value.device)):
            arguments[name] = "x.to(dtype)"
        elif value.numel() == len(x) and (
            times := [c for c, t in _TIMES.items() if torch.allclose(value.float(), torch.tensor(t).to(value.device))]
        ):
            arguments[name] = times[0]
        else:
            place = next((i for key, i, own in conditions_of(conditions) if _same(value, own)), None)
            if place is None:
                raise _NotPlain(f"it makes the transformer's argument {name!r}, {list(value.shape)}, by itself")
            used[name] = place
            floats |= {name} if value.is_floating_point() else set()
            arguments[name] = f'conditions["{name}"]' + (".to(dtype)" if value.is_floating_point() else "")
    if "x.to(dtype)" not in arguments.values() or not any(code in _TIMES for code in arguments.values()):
        raise _NotPlain("its transformer does not take x and a multiple of sigma as they are")
    if not isinstance(result, tuple) or not isinstance(result[0], Tensor) or result[0].shape != velocity.shape:
        raise _NotPlain("its transformer does not return a velocity of the shape of x")
    signs = [sign for sign, factor in (("", 1.0), ("-", -1.0)) if torch.equal(factor * result[0].float(), velocity)]
    if not signs:
        raise _NotPlain("it computes something with what its transformer returns")
    return Call(transformer=arguments, encoder=encoder, conditions=used, floats=frozenset(floats), sign=signs[0])


def _encoded(model: Any, sampling: LatentSamplingConfig) -> tuple[dict[str, str], Mapping[str, Any]]:
    """Arguments of `encode_prompt` as code, and the conditions."""
    pipeline, seen = model.pipeline, list[Any]()
    own = pipeline.encode_prompt if hasattr(pipeline, "encode_prompt") else None
    if own is None:
        raise _NotPlain("it has no encode_prompt")

    def spy(*args: Any, **kwargs: Any) -> Any:
        seen.append((args, kwargs))
        return own(*args, **kwargs)

    pipeline.encode_prompt = spy
    try:
        conditions = model.encode(inputs_of(()), sampling=sampling)
    finally:
        del pipeline.encode_prompt
    methods = {name.rpartition(".")[0].rpartition(".")[0] for name in conditions if name.count(".") == 2}
    if methods != {"encode_prompt"} or not seen:
        raise _NotPlain(
            f"it encodes prompts with {', '.join(sorted(methods)) or 'nothing'}, expected encode_prompt alone"
        )
    args, kwargs = seen[0]
    code: dict[str, str] = {}
    signature = inspect.signature(own)
    for name, value in signature.bind(*args, **kwargs).arguments.items():
        if value in (_PROMPTS[0], [_PROMPTS[0]]):
            code[name] = "list(texts)"
        elif isinstance(value, torch.device):
            code[name] = "self.device"
        elif name == "max_sequence_length":
            code[name] = "sampling.max_sequence_length"
        elif value is not signature.parameters[name].default:
            code[name] = _constant(value, of=f"encode_prompt's argument {name!r}")
    return code, conditions


def conditions_of(conditions: Mapping[str, Any]) -> list[tuple[str, int, Any]]:
    """Name, place in what `encode_prompt` returned, and value, of conditions such as `encode_prompt.0.1`."""
    return [
        (name, int(name.rpartition(".")[2]), value)
        for name, value in conditions.items()
        if name.startswith("encode_prompt.") and name.rpartition(".")[2].isdigit()
    ]


@torch.no_grad()
def _watched(
    model: Any, x: Tensor, conditions: Mapping[str, Any]
) -> tuple[list[tuple[Any, dict[str, Any], Any]], Tensor]:
    seen: list[Any] = []
    handle = model.transformer.register_forward_hook(
        lambda _module, args, kwargs, result: seen.append((args, kwargs, result)), with_kwargs=True
    )
    try:
        velocity = model.velocity(x, torch.full((len(x),), _SIGMA, device=x.device), conditions)
    finally:
        handle.remove()
    return seen, velocity


def _constant(value: Any, *, of: str) -> str:
    if value is None or isinstance(value, (bool, int, float)):
        return repr(value)
    if isinstance(value, str):
        return json.dumps(value)
    if value in ({}, [], ()):
        return repr(value)
    raise _NotPlain(f"{of} is a {type(value).__name__}")


def _same(value: Tensor, own: Any) -> bool:
    """own: rows [n, 1, ...] of one prompt each, which a run puts after each other."""
    if not isinstance(own, Tensor):
        return False
    rows = own.flatten(0, 1) if own.ndim == value.ndim + 1 and own.shape[1] == 1 else own
    return value.shape == rows.shape and torch.equal(value.float(), rows.to(value.device).float())
