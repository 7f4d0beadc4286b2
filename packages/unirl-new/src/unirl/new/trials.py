"""Trials of a miniature before a plugin is written for it: guidance, layers without a gradient, its own code."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from unirl.core.types.data import MediaRef
from unirl.core.types.sampling import LatentSamplingConfig, TextSamplingConfig
from unirl.new.names import Names
from unirl.new.transformer_call import inputs_of
from unirl.numerics.diffusion.denoise import denoise
from unirl.numerics.diffusion.guidance import make_guidance
from unirl.numerics.diffusion.kernels import make_kernel
from unirl.numerics.tokens.batches import pad_batch

__all__ = ["Guidance", "found_guidance", "idle_layers", "idle_text_layers", "same_numbers", "tells_prompts_apart"]

_BOUND = 1e-5
"""Relative to the largest latent, velocity or pixel, in fp32: sums in another order give 1e-6, another guidance gives
differences of the order of the latents."""
_STEPS, _SCALE = 3, 4.5
_PROMPTS, _NEGATIVE = ("a red ring", "two blue squares"), "a blur"


@dataclass(frozen=True, kw_only=True)
class Guidance:
    """A pipeline's own guidance."""

    argument: str
    """Argument of the pipeline's call; empty where it has none."""
    offset: float
    """Its scale less ours: 0, or -1 of those that add the scaled difference to the positive prediction."""
    mode: str
    """Ours that equals it, empty where none does."""


def found_guidance(model: Any, folder: Path, *, sampling: LatentSamplingConfig, media: Sequence[MediaRef]) -> Guidance:
    """The pipeline's argument that is its guidance, by runs of the pipeline beside ours.

    Raises RuntimeError where no way of calling the pipeline without guidance ends where the model does.
    """
    names = [name for name in ("true_cfg_scale", "guidance_scale") if name in model.session.parameters]
    if model.session.has_embedded_guidance:
        names = [name for name in names if name != "guidance_scale"]
    ways = [(name, offset) for name in names for offset in (0.0, -1.0)] or [("", 0.0)]
    plain = [
        way for way in [*ways, ("", 0.0)] if _ends_alike(model, folder, sampling, media, way, "two-pass", scale=1.0)
    ]
    if not plain:
        raise RuntimeError("without guidance, the pipeline's own run does not end where the model does")
    guided = [] if model.session.has_embedded_guidance else [way for way in plain if way[0]]
    for way in guided:
        for mode in ("two-pass", "norm-corrected"):
            if _ends_alike(model, folder, sampling, media, way, mode, scale=_SCALE):
                return Guidance(argument=way[0], offset=way[1], mode=mode)
    return Guidance(argument=plain[0][0], offset=plain[0][1], mode="")


@torch.no_grad()
def _ends_alike(
    model: Any,
    folder: Path,
    sampling: LatentSamplingConfig,
    media: Sequence[MediaRef],
    way: tuple[str, float],
    mode: str,
    *,
    scale: float,
) -> bool:
    from unirl.conformance.pipeline_parity import run

    sampling = replace(
        sampling,
        num_inference_steps=_STEPS,
        guidance_scale=scale,
        negative_prompt=_NEGATIVE if scale != 1.0 else "",
    )
    shape = model.latent_shape(sampling)
    x = torch.randn((len(_PROMPTS), *shape), generator=torch.Generator().manual_seed(0)).to(model.device)
    layout = "tokens" if model.grid.is_packed else "channels-last" if model.grid.is_channels_last else "places"
    own: dict[str, Any] = {way[0]: scale + way[1]} if way[0] else {}
    if scale != 1.0:
        own["negative_prompt"] = [_NEGATIVE] * (1 if media else len(_PROMPTS))
    try:
        expected = run(
            folder, prompts=_PROMPTS, sampling=sampling, initial=x, layout=layout, arguments=own,
            media=[tuple(media)] * len(_PROMPTS) if media else (),
        )  # fmt: skip
    except (ValueError, TypeError, RuntimeError, AttributeError):
        # A pipeline that does not take these arguments together.
        return False
    guidance = make_guidance(mode, scale=scale)
    prompts = {"positive": _PROMPTS, "negative": (_NEGATIVE,) * len(_PROMPTS)}
    result = denoise(
        model.velocity,
        x,
        sigmas=1 - expected.sigmas if model.facts.is_inverted else expected.sigmas,
        kernel=make_kernel("euler", eta=0.0),
        sde_steps=torch.zeros((len(x), 0), dtype=torch.int64),
        conditions={
            branch: model.encode(
                replace(inputs_of(media, prompts[branch]), ids=_PROMPTS), sampling=replace(sampling, guidance_scale=1.0)
            )
            for branch in guidance.branches
        },
        guidance=guidance,
    )
    return _gap(result.x, expected.final) <= _BOUND


def tells_prompts_apart(model: Any, *, sampling: LatentSamplingConfig, media: Sequence[MediaRef]) -> bool:
    """Whether two prompts get different conditions."""
    conditions = model.encode(inputs_of(media, _PROMPTS), sampling=sampling)
    rows = [[value[row] for value in conditions.values()] for row in range(len(_PROMPTS))]
    return any(one.shape != two.shape or not torch.equal(one, two) for one, two in zip(*rows, strict=True))


def idle_layers(
    model: Any, adapted: Sequence[str], *, sampling: LatentSamplingConfig, media: Sequence[MediaRef]
) -> list[str]:
    """Layers among these that no gradient of the velocity reaches, of a model of latents."""
    conditions = model.encode(inputs_of(media), sampling=sampling)
    x = torch.randn((2, *model.latent_shape(sampling)), generator=torch.Generator().manual_seed(0)).to(model.device)
    with _all_trained(model.trainable):
        velocity = model.velocity(x, torch.tensor([0.8, 0.4], device=x.device), conditions)
        (velocity * x.flip(-1)).sum().backward()
        return _without_gradient(model.trainable, adapted)


def idle_text_layers(model: Any, find: Any, *, chat: bool, media: Sequence[MediaRef]) -> list[str]:
    """The same of a language model, of the layers that `find` gives while all weights train."""
    inputs, sampling = inputs_of(media), TextSamplingConfig(chat=chat)
    answers = [torch.tensor(model.tokenizer(text)["input_ids"]) for text in ("132", "red, and it is so.")]
    prompts = model.prompt_tokens(inputs, sampling=sampling)
    conditions = {"conditions": model.conditions(inputs, sampling=sampling)} if media else {}
    batch = pad_batch(prompts, answers, pad_token=model.pad_token, **conditions)
    with _all_trained(model.trainable):
        model.score(batch, temperature=1.0)[0].sum().backward()
        ends: tuple[str, ...] = find(model.trainable)
        linear = [name for name, part in model.trainable.named_modules() if isinstance(part, nn.Linear)]
        adapted = [name for name in linear if any(name == end or name.endswith(f".{end}") for end in ends)]
        return _without_gradient(model.trainable, adapted)


def same_numbers(generic: Any, folder: Path, source: Path, names: Names, *, sampling: LatentSamplingConfig) -> None:
    """Build the plugin in `source` on the checkpoint in `folder` and compare it with the generic model.

    Raises ValueError with the difference, and whatever the plugin raises.
    """
    with _importable(source, names.package):
        module = importlib.import_module(f"{names.package}.model")
        config = getattr(importlib.import_module(f"{names.package}.config"), f"{names.class_name}Config")
        model = module.build(config(path=str(folder)), device="cpu")
        other = replace(sampling, height=2 * sampling.height, num_inference_steps=7)
        for asked in (replace(sampling, num_inference_steps=4), other):
            _check("schedule", model.schedule(asked), generic.schedule(asked))
            x = torch.randn((2, *generic.latent_shape(asked)), generator=torch.Generator().manual_seed(1))
            if tuple(model.latent_shape(asked)) != tuple(generic.latent_shape(asked)):
                raise ValueError(f"latents are {model.latent_shape(asked)}, expected {generic.latent_shape(asked)}")
            sigma = torch.tensor([0.8, 0.3])
            with torch.no_grad():
                own, expected = (
                    each.velocity(x, sigma, each.encode(inputs_of(()), sampling=asked)) for each in (model, generic)
                )
                _check("velocity", own, expected)
                _check("decoded media", model.decode(x), generic.decode(x))


def _check(what: str, result: Tensor, expected: Tensor) -> None:
    gap = _gap(result, expected) if result.shape == expected.shape else float("inf")
    if not gap <= _BOUND:
        raise ValueError(f"its {what} differs by {gap:.2g} of the largest, expected at most {_BOUND:.0e}")


def _gap(result: Tensor, expected: Any) -> float:
    largest = max(1.0, float(expected.abs().max()))
    return float((result.double().cpu() - expected.double().cpu()).abs().nan_to_num(nan=torch.inf).max()) / largest


@contextmanager
def _all_trained(module: nn.Module) -> Iterator[None]:
    before = {name: parameter.requires_grad for name, parameter in module.named_parameters()}
    for parameter in module.parameters():
        parameter.requires_grad_(parameter.is_floating_point())
    try:
        yield
    finally:
        for name, parameter in module.named_parameters():
            parameter.requires_grad_(before[name])
            parameter.grad = None


def _without_gradient(module: nn.Module, names: Sequence[str]) -> list[str]:
    result: list[str] = []
    for name in names:
        grads = [parameter.grad for parameter in module.get_submodule(name).parameters()]
        if not any(grad is not None and bool(grad.any()) for grad in grads):
            result.append(name)
    return sorted(result)


@contextmanager
def _importable(source: Path, package: str) -> Iterator[None]:
    sys.path.insert(0, str(source))
    importlib.invalidate_caches()
    try:
        yield
    finally:
        sys.path.remove(str(source))
        for name in [name for name in sys.modules if name == package or name.startswith(f"{package}.")]:
            del sys.modules[name]
