"""A reward from a single Python function, called as TRL calls its reward functions.

The function is passed those of these keyword arguments that it names, or all of them with `**metadata`:

prompts: list of N strings.
images, videos or completions: what the recipe generates. An image is a PIL image (RGB), a video a list of them, as
    diffusers' pipelines return both; a completion is a string.
any other name: a metadata key of the prompt file, a list of N values. A parameter without a default needs the key in
    every prompt; elsewhere a prompt without it gives None.

It returns N finite numbers in a list, an array or a tensor.
Source: `reward_funcs` of TRL's GRPOTrainer, release 1.16.
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from PIL import Image
from unirl.core.errors import RecipeError, RewardFailed
from unirl.core.names import did_you_mean
from unirl.core.plugins.files import module_of_file
from unirl.core.roles import ScoreInput, Scores

from .config import FunctionConfig
from .function_target import MEDIA, Target
from .image_input import images_of, video_frames_of

__all__ = ["FunctionReward", "build", "mean_motion", "mean_red"]

_NAME = "function"


def mean_red(images: Sequence[Image.Image]) -> list[float]:
    """Mean red of each image, 0 to 1: an example, used by the conformance suite."""
    return [float(np.asarray(image)[..., 0].mean()) / 255 for image in images]


def mean_motion(videos: Sequence[Sequence[Image.Image]]) -> list[float]:
    """Mean difference between neighbouring frames of each video, 0 to 1; 0 for a single frame: an example."""
    pixels = [np.stack([np.asarray(frame, dtype=np.float32) for frame in frames]) / 255 for frames in videos]
    return [float(np.abs(np.diff(frames, axis=0)).mean()) if len(frames) > 1 else 0.0 for frames in pixels]


def build(config: FunctionConfig, *, device: Any) -> FunctionReward:
    """Raises RecipeError for a target that cannot be loaded, or does not take keyword arguments."""
    return FunctionReward(config)


class FunctionReward:
    """Calls the function on a whole batch, without gradients."""

    def __init__(self, config: FunctionConfig) -> None:
        try:
            target = Target.of(config.target)
        except ValueError as error:
            raise RecipeError(f"reward.{_NAME}.target: {error}") from error
        self._function = _load(target)
        self._called = f"{target.name} ({_place(self._function, target)})"
        self._parameters = self._signature()

    def score(self, samples: ScoreInput) -> Scores:
        """Raises RewardFailed, with the function and its location, for every failure."""
        arguments = self._arguments(samples)
        try:
            with torch.no_grad():
                result: object = self._function(**arguments)
        except (Exception, SystemExit) as error:
            text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
            raise self._failed(f"raised {text}{self._line(error)}.") from error
        return Scores(values=torch.tensor(self._numbers(result, samples), dtype=torch.float32))

    def close(self) -> None:
        """Nothing to release."""

    def _signature(self) -> Mapping[str, inspect.Parameter]:
        try:
            parameters = inspect.signature(self._function).parameters
        except (TypeError, ValueError) as error:
            raise RecipeError(f"reward.{_NAME}.target: the parameters of {self._called} cannot be read.") from error
        if inspect.iscoroutinefunction(self._function):
            raise RecipeError(f"reward.{_NAME}.target: {self._called} is async; expected a plain function.")
        if any(p.kind is p.POSITIONAL_ONLY for p in parameters.values()):
            raise RecipeError(
                f"reward.{_NAME}.target: {self._called} has positional-only parameters; every argument is passed by "
                "its name."
            )
        return parameters

    def _arguments(self, samples: ScoreInput) -> dict[str, Any]:
        medium, values = _media(samples)
        own: dict[str, Any] = {"prompts": list(samples.inputs.prompts), medium: values}
        keys = dict.fromkeys(key for row in samples.metadata for key in row)
        arguments: dict[str, Any] = {}
        if any(p.kind is p.VAR_KEYWORD for p in self._parameters.values()):
            arguments = {key: [row.get(key) for row in samples.metadata] for key in keys} | own
        for name, parameter in self._parameters.items():
            if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
                continue
            is_optional = parameter.default is not parameter.empty
            if name in own:
                arguments[name] = own[name]
            elif name in keys and (is_optional or all(name in row for row in samples.metadata)):
                arguments[name] = [row.get(name) for row in samples.metadata]
            elif not is_optional:
                row = next(n for n, result in enumerate(samples.metadata) if name not in result)
                known = [*own, *samples.metadata[row]]
                raise self._failed(
                    f"takes {name!r}, which {_named(samples, row)} does not have; it has {', '.join(known)}"
                    f"{did_you_mean(name, known) or '.'} Add it to the prompt file, or give the parameter a default."
                )
        return arguments

    def _numbers(self, result: object, samples: ScoreInput) -> list[float]:
        expected = f"expected a list of {len(samples.sample_ids)} numbers, one per sample, in their order."
        if isinstance(result, torch.Tensor | np.ndarray):
            if result.ndim != 1:
                raise self._failed(f"returned {_described(result)}; {expected}")
            result = result.tolist()
        if not isinstance(result, list | tuple) or len(result) != len(samples.sample_ids):
            raise self._failed(f"returned {_described(result)}; {expected}")
        numbers: list[float] = []
        for row, value in enumerate(result):
            if isinstance(value, np.generic | np.ndarray | torch.Tensor) and value.ndim == 0:
                value = value.item()
            if value is None:
                raise self._failed(
                    f"returned None for {_named(samples, row)}; expected a number. For a sample that this reward does "
                    "not apply to, return 0.0: it then adds nothing to the weighted sum of rewards."
                )
            if not isinstance(value, Real):
                raise self._failed(
                    f"returned {_described(value)} for sample {samples.sample_ids[row]!r}; expected a number."
                )
            numbers.append(float(value))
        return numbers

    def _failed(self, text: str) -> RewardFailed:
        return RewardFailed(f"reward.{_NAME}: {self._called} {text}")

    def _line(self, error: BaseException) -> str:
        """The innermost line of the function's own file."""
        file = getattr(getattr(inspect.unwrap(self._function), "__code__", None), "co_filename", None)
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
        return f" ({file}:{lines[-1]})" if lines else ""


def _load(target: Target) -> Callable[..., Any]:
    try:
        module = _run_file(Path(target.module)) if target.is_file else importlib.import_module(target.module)
    except (Exception, SystemExit) as error:
        frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename == target.module]
        line = f":{frames[-1].lineno}" if frames else ""
        hint = ""
        if not target.is_file and isinstance(error, ModuleNotFoundError):
            hint = " A file is named with its ending: `my_file.py:function`."
        raise RecipeError(
            f"reward.{_NAME}.target: importing {target.module}{line} raised {type(error).__name__}: {error}.{hint}"
        ) from error
    function = getattr(module, target.name, None)
    if function is None:
        names = [name for name, value in vars(module).items() if inspect.isfunction(value)]
        hint = did_you_mean(target.name, names) or "."
        raise RecipeError(f"reward.{_NAME}.target: {target.module} has no function {target.name!r}{hint}")
    if not callable(function):
        raise RecipeError(f"reward.{_NAME}.target: {target} is {_described(function)}; expected a function.")
    return function


def _run_file(file: Path) -> ModuleType:
    """The module of a file, run once for each content that it has. It can import what lies beside it."""
    digest = hashlib.sha256(str(file).encode() + b"\0" + file.read_bytes()).hexdigest()[:12]
    if str(file.parent) not in sys.path:
        # Last on the path, so that a file beside it cannot shadow an installed package.
        sys.path.append(str(file.parent))
    return module_of_file(file, name=f"unirl_reward_{digest}")


def _media(samples: ScoreInput) -> tuple[str, list[Any]]:
    """The keyword and the values of the generated media or completions."""
    kind = None if samples.media is None else samples.media.kind
    if kind == "text":
        return MEDIA["text"], list(samples.of("text", reward=_NAME).texts)
    if kind == "video":
        return MEDIA["video"], [_pil(frames) for frames in video_frames_of(samples, reward=_NAME)]
    return MEDIA["image"], _pil(images_of(samples, reward=_NAME))


def _pil(images: torch.Tensor) -> list[Image.Image]:
    """images: [N, 3, H, W] in [0, 1]."""
    pixels = (images.detach().clamp(0, 1) * 255).round().to(torch.uint8).permute(0, 2, 3, 1).cpu().numpy()
    return [Image.fromarray(image) for image in pixels]


def _place(function: Callable[..., Any], target: Target) -> str:
    code = getattr(inspect.unwrap(function), "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if code is not None else target.module


def _named(samples: ScoreInput, row: int) -> str:
    return f"sample {samples.sample_ids[row]!r} (prompt {samples.inputs.prompts[row]!r})"


def _described(value: object) -> str:
    if isinstance(value, torch.Tensor | np.ndarray):
        return f"{type(value).__name__} of shape {list(value.shape)}"
    if isinstance(value, list | tuple):
        return f"{type(value).__name__} of {len(value)}"
    text = "None" if value is None else f"{type(value).__name__} {value!r}"
    return text if len(text) <= 80 else text[:77] + "..."
