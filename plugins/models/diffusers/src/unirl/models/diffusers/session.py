"""Runs of a diffusers pipeline whose loop is stopped, handed a state, or watched. Nothing of the pipeline is declared.

Each run calls the pipeline's own `__call__` with three things replaced: the scheduler, by one of the same class whose
`step` is ours; the transformer, by a gate that answers some calls itself; and the methods `encode_*`, and those
`prepare_*` whose results depend on an image, which are recorded, or replayed. So packing, position ids, the scale of
the timestep and the sign of the velocity are the pipeline's.
"""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn

from .calls import blank, cast, shapes, tensors

__all__ = ["Done", "Record", "Run", "Session", "Size"]

Record = list[tuple[str, Any]]
"""Name and result of each recorded call in one run, in order."""


class Done(BaseException):
    """Ends a run. Not an Exception, so that no pipeline swallows it."""


@dataclass(frozen=True)
class Size:
    """Size that a pipeline is called for, in pixels, frames and tokens."""

    height: int
    width: int
    frames: int
    max_sequence_length: int


@dataclass(kw_only=True)
class Run:
    """Behaviour of one call of the pipeline, and the values observed in it."""

    transformer: nn.Module
    on_step: Callable[[int, Tensor, Tensor], Tensor | None]
    """on_step(index, prediction, sample) -> the next sample; None lets the scheduler step; may raise Done."""
    on_encode: Callable[[str, Callable[[], Any]], Any]
    """on_encode(name, own) -> the result of a recorded method; `own()` computes it."""
    real_from: int = 0
    """Index of the first step whose calls of the transformer are real; those before get zeros."""
    at: Any = None
    """Timestep of every step, in place of the scheduler's."""
    level: Tensor | None = None
    """[1] what the scheduler says its sigmas are then."""
    taken: int = 0
    """Steps that are done."""
    rows: int = 0
    """Rows that the transformer was called for."""
    sigmas: Tensor = field(default_factory=lambda: torch.empty(0))
    """[T + 1] the scheduler's own."""
    timesteps: Tensor = field(default_factory=lambda: torch.empty(0))
    """[T] the scheduler's own."""


class _Scheduler:
    """Mixed into the class of the checkpoint's scheduler."""

    run: Run

    def step(
        self, model_output: Tensor, timestep: Any, sample: Tensor, *args: Any, return_dict: bool = True, **kw: Any
    ):
        index = self.run.taken
        following = self.run.on_step(index, model_output, sample)
        self.run.taken += 1
        if following is None:
            return super().step(model_output, timestep, sample, *args, return_dict=return_dict, **kw)  # pyright: ignore
        return _Step((following,)) if return_dict else (following,)

    def scale_model_input(self, sample: Tensor, *_: Any, **__: Any) -> Tensor:
        return sample


class _Step(tuple[Tensor]):
    prev_sample = property(lambda self: self[0])


class _Gate:
    """Stands in for the transformer, whose attributes it has."""

    def __init__(self, module: nn.Module, answer: Callable[..., Any]) -> None:
        self._module, self._answer = module, answer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._answer(*args, **kwargs)


class Session:
    """A pipeline and the arguments that all its calls have."""

    def __init__(
        self,
        pipeline: Any,
        *,
        device: torch.device,
        call: Mapping[str, Any],
        dtype: torch.dtype,
        autocast: torch.dtype | None,
    ) -> None:
        """device: of the inputs; the transformer may be on the meta device.  call: further arguments,
        `DiffusersConfig.call`.  dtype: of the transformer's weights, and so of its inputs but the timestep."""
        self.pipeline = pipeline
        self.device = device
        self._call = inspect.unwrap(type(pipeline).__call__)
        self.parameters = inspect.signature(self._call).parameters
        self.has_embedded_guidance = bool(pipeline.transformer.config.get("guidance_embeds"))
        self._given = call
        self._records: dict[Any, tuple[Record, Run]] | None = None
        self.set_guidance(1.0)
        self._dtype, self._autocast = dtype, autocast
        self.compute_dtype = autocast or dtype
        self.casts_timestep = False
        """The transformer takes its timestep in the dtype of its weights alone, and so rounded."""
        self.takes_lists = True
        """Of prompts; a pipeline that does not has one prompt in a run."""
        self._scheduler = _handed(pipeline.scheduler)
        self.image_name = next((name for name in ("image", "control_image") if name in self.parameters), None)
        """The argument for source images, if the pipeline has one."""
        names = _names(self._call)
        self._encoders = [name for name in names if re.match(r"_?encode_", name)]
        self._prepares = [name for name in names if re.match(r"_?prepare_", name) and hasattr(pipeline, name)]
        self._preparing = self._prepares
        self._encoding: list[str] = []
        """Those of `prepare_*` that encode although there is no image, such as a blank video."""
        self._form: tuple[Any, Any, dict[str, str | bool]] | None = None

    @property
    def other_inputs(self) -> list[str]:
        """Arguments for media that no run gives, such as `mask_image`."""
        media = re.compile(
            r"(?!ip_adapter|negative|prompt)(\w+_)?(images?|videos?|masks?|audio)|controls|conditions|strength"
        )
        return [name for name in self.parameters if media.fullmatch(name) and name != self.image_name]

    @property
    def makes_videos(self) -> bool:
        return bool({"num_frames", "frames"} & set(self.parameters))

    def set_guidance(self, scale: float) -> None:
        """The scale of the pipeline's own guidance: pipelines turn it off at 1, or at 0."""
        scales = ["true_cfg_scale", *([] if self.has_embedded_guidance else ["guidance_scale"])]
        known = [name for name in scales if name in self.parameters and self.parameters[name].default is not None]
        # A forward is a run of its own: nothing of an earlier step may be left for it.
        caches = [name for name in self.parameters if re.fullmatch(r"use_\w*cache", name)]
        off = dict.fromkeys(("use_resolution_binning", *caches), False)
        self._arguments = {**dict.fromkeys(known, scale), **off, **self._given}
        self._records = self._records and {}

    @contextmanager
    def remembering(self) -> Generator[None]:
        """Within the block, equal calls of `record` encode once. Images must outlive it."""
        self._records = {}
        try:
            yield
        finally:
            self._records = None

    def run(
        self,
        run: Run,
        *,
        prompts: Sequence[str],
        size: Size,
        images: Sequence[Image.Image] = (),
        num_steps: int = 2,
        output_type: str = "latent",
    ) -> Any:
        """The pipeline's result, None where the run was ended. Under the caller's grad mode.

        images: of each prompt, the same for all.
        """
        pipeline, scheduler = copy.copy(self.pipeline), copy.copy(self._scheduler)
        scheduler.run = run
        gate = _Gate(run.transformer, lambda *args, **kwargs: self._transformer(run, args, kwargs))
        guider = {"guider": _disabled(pipeline.guider)} if hasattr(pipeline, "guider") else {}
        names = [*self._encoders, *(self._preparing if images else self._encoding)]
        methods = {name: _around(name, getattr(pipeline, name), run) for name in names}
        pipeline.__dict__.update(scheduler=scheduler, transformer=gate, **guider, **methods)
        arguments = {
            "prompt": list(prompts) if self.takes_lists or len(prompts) > 1 else prompts[0],
            "height": size.height,
            "width": size.width,
            "num_frames": size.frames,
            "frames": size.frames,
            "max_sequence_length": size.max_sequence_length,
            "num_inference_steps": num_steps,
            # What the pipeline draws is dropped, or must be the same in every run; no global generator is used.
            "generator": torch.Generator(self.device).manual_seed(0),
            "output_type": output_type,
            "return_dict": False,
            # FLUX.1 Kontext scales what it generates to this many pixels.
            "max_area": size.height * size.width,
            **self._arguments,
        }
        if images:
            assert self.image_name is not None
            arguments[self.image_name] = images[0] if len(images) == 1 else list(images)
        try:
            result = self._call(pipeline, **{k: v for k, v in arguments.items() if k in self.parameters})
        except Done:
            return None
        return result[0]

    def record(
        self,
        prompts: Sequence[str],
        *,
        size: Size,
        transformer: nn.Module,
        images: Sequence[Image.Image] = (),
        num_steps: int = 2,
    ) -> tuple[Record, Run]:
        """Encoder outputs for these prompts and images, and the scheduler's schedule. The transformer does not run.
        The encoders' random draws are the same each time."""
        key = (tuple(prompts), size, tuple(map(id, images)), num_steps)
        if self._records and key in self._records:
            return self._records[key]
        record: Record = []
        depth = 0

        def keep(name: str, own: Callable[[], Any]) -> Any:
            # A replayed method calls no other.
            nonlocal depth
            depth += 1
            value = own()
            depth -= 1
            if not depth:
                record.append((name, value))
            return value

        run = Run(transformer=transformer, on_step=_never, on_encode=keep, real_from=-1)
        with torch.no_grad():
            self.run(run, prompts=prompts, size=size, images=images, num_steps=num_steps)
        if self._records is not None:
            self._records[key] = record, run
        return record, run

    def find_form_of_prompts(self, prompt: str, **settings: Any) -> None:
        """Whether the pipeline takes lists of prompts: VACE takes none. settings: of `record`."""
        self.takes_lists = True
        try:
            self.record([prompt], **settings)
        except (AttributeError, TypeError, ValueError):
            self.takes_lists = False
            try:
                self.record([prompt], **settings)
            except (AttributeError, TypeError, ValueError):
                # What is wrong with it then is said by the checks that follow.
                self.takes_lists = True

    def keep_encoding(self, prompt: str, *, size: Size, transformer: nn.Module) -> bool:
        """Record, for prompts without images, those of the methods `prepare_*` that run the VAE's encoder. Returns
        whether there are any."""
        calls: list[str] = []
        found: dict[str, None] = {}

        def watch(name: str, own: Callable[[], Any]) -> Any:
            before = len(calls)
            value = own()
            if len(calls) > before and name in self._prepares:
                found[name] = None
            return value

        self._encoding = self._prepares
        encoder: nn.Module = getattr(self.pipeline.vae, "encoder", None) or nn.Identity()
        handle = encoder.register_forward_pre_hook(lambda *_: calls.append(""))
        try:
            with torch.no_grad():
                run = Run(transformer=transformer, on_step=_never, on_encode=watch, real_from=-1)
                self.run(run, prompts=[prompt], size=size)
        finally:
            handle.remove()
            self._encoding = list(found)
        self._records = self._records and {}
        return bool(found)

    def _timestep(self, value: Any) -> Any:
        is_cast = self.casts_timestep and isinstance(value, Tensor) and value.is_floating_point()
        return value.to(self._dtype) if is_cast else value

    def keep_preparing(self, names: Collection[str]) -> None:
        """Record, of the methods `prepare_*`, these alone. All are, until then."""
        self._preparing = [name for name in self._preparing if name in names]
        self._records = self._records and {}

    def _transformer(self, run: Run, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if run.real_from < 0:
            raise Done
        first = next(tensors((args, kwargs)))
        rows = len(args[0]) if args and isinstance(args[0], list) else len(first)
        modes = {name: value for name, value in kwargs.items() if isinstance(value, (str, bool))}
        if self._form is not None and (changed := modes.items() - self._form[2].items()):
            name, value = min(changed)
            raise ValueError(
                f"its transformer is called with {name}={self._form[2].get(name)!r} in some steps and {value!r} in "
                "others: it keeps a state from step to step, and every step here is a run of its own"
            )
        if run.taken < run.real_from and self._form is not None:
            shape, result, _ = self._form
            return blank(result, seen=shape, given=first, rows=rows)
        run.rows += rows
        args, kwargs = (
            cast(args, self._dtype),
            {k: self._timestep(v) if "timestep" in k else cast(v, self._dtype) for k, v in kwargs.items()},
        )
        with torch.autocast(self.device.type, dtype=self._autocast) if self._autocast else nullcontext():
            result = run.transformer(*args, **kwargs)
        self._form = self._form or (first.shape, shapes(result), modes)
        return result


def _never(index: int, prediction: Tensor, sample: Tensor) -> Tensor:
    raise AssertionError("the transformer comes first")


def _handed(scheduler: Any) -> Any:
    own = type(scheduler)

    def set_timesteps(self: Any, *args: Any, **kwargs: Any) -> None:
        own.set_timesteps(self, *args, **kwargs)
        run: Run = self.run
        run.sigmas, run.timesteps = self.sigmas.clone(), self.timesteps.clone()
        if run.at is not None:
            assert run.level is not None
            self.timesteps, self.num_inference_steps = run.at, len(run.at)
            self.sigmas = run.level.expand(len(run.at) + 1)

    # Pipelines look at what it takes.
    set_timesteps.__signature__ = inspect.signature(own.set_timesteps)  # pyright: ignore[reportFunctionMemberAccess]
    result = copy.copy(scheduler)
    result.__class__ = type(own.__name__, (_Scheduler, own), {"set_timesteps": set_timesteps})
    return result


def _disabled(guider: Any) -> Any:
    result = copy.copy(guider)
    result.disable()
    return result


def _around(name: str, method: Callable[..., Any], run: Run) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        return run.on_encode(name, lambda: method(*args, **kwargs))

    return call


def _names(function: Any) -> list[str]:
    """Names that a function uses, inner functions included."""
    code = function.__code__
    inner = [name for part in code.co_consts if inspect.iscode(part) for name in part.co_names]
    return list(dict.fromkeys((*code.co_names, *inner)))
