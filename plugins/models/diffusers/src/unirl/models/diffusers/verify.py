"""What a pipeline must get right before anything is trained with it: it is compared with its own run."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from unirl.core.errors import RecipeError

from diffusers.utils import logging

from .latents import Grid
from .records import Layout
from .session import Done, Run, Size

if TYPE_CHECKING:
    from .model import DiffusersModel

__all__ = ["verify"]

_SIZE = Size(height=128, width=192, frames=25, max_sequence_length=256)
"""25 - 1 is a multiple of 4, 6 and 8, the frame steps of today's VAEs."""
_PROMPTS = ("a red ring", "two blue squares on the left of a small green disc")
_STEPS = 3


@torch.no_grad()
def verify(model: DiffusersModel) -> None:
    """Find the layout of latents and conditions, and compare velocities with the predictions in a run of the pipeline's
    own, those in a batch with those of each row, and those of other sigmas and prompts with each other.

    Raises RecipeError, key `model.path`, with the difference, and for a pipeline whose runs do not follow diffusers'
    usual loop.
    """
    name = type(model.pipeline).__name__
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        _verify(model)
    except (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise RecipeError(
            f"model.path: {name} cannot be used as a model: {error}. Choose another checkpoint, or write a model "
            "plugin."
        ) from error
    finally:
        logging.set_verbosity(verbosity)


def _verify(model: DiffusersModel) -> None:
    session, size = model.session, _SIZE
    length = session.parameters.get("max_sequence_length")
    if length is not None and isinstance(length.default, int):
        size = dataclasses.replace(size, max_sequence_length=length.default)
    if not session.makes_videos:
        size = dataclasses.replace(size, frames=1)
    short, long = _PROMPTS

    def record(*prompts: str, num_steps: int = 2) -> Any:
        return session.record(prompts, size=size, transformer=model.transformer, num_steps=num_steps)

    samples, predictions, sigmas = _unguided_run(model, size, short)
    one, run = record(short)
    model.layout = Layout.found(one, record(short, short)[0], [record(long)[0], record("")[0]])
    model.is_inverted = bool(run.sigmas[-1] > run.sigmas[0])
    model.has_whole_timesteps = not run.timesteps.is_floating_point()
    _check_timesteps(model, run)
    if model.is_inverted:
        sigmas = 1 - sigmas
    model.blank = _with_size(model.layout.conditions([one]), size)
    model.channels, model.grid = _grid(model, size, samples[0].shape[1:])
    shape = model.grid.latent_shape(model.channels, size)

    both = _with_size(model.layout.conditions([record(prompt)[0] for prompt in _PROMPTS]), size)
    x = [model.grid.latents(sample, shape).float() for sample in samples]
    velocities = [model.velocity(at, s[None], _rows(both, [0])) for at, s in zip(x, sigmas, strict=True)]
    sign = -1 if model.is_inverted else 1
    own = [sign * model.grid.latents(prediction, shape).float() for prediction in predictions]
    bound = _bound(model)
    _check("three steps of its own run", torch.cat(velocities), torch.cat(own), bound=bound)
    _check_sensitivity(model, x[0], both)
    _check_batches(model, x[0], both, bound=bound)


def _unguided_run(model: DiffusersModel, size: Size, prompt: str) -> tuple[list[Tensor], list[Tensor], Tensor]:
    """States, predictions and sigmas [T] of the first steps of its own run, with its guidance off."""
    rows = 0
    for scale in (1.0, 0.0):
        model.session.set_guidance(scale)
        samples: list[Tensor] = []
        predictions: list[Tensor] = []
        run = Run(
            transformer=model.transformer,
            on_step=partial(_watch, samples, predictions),
            on_encode=lambda _name, own: own(),
        )
        model.session.run(run, prompts=[prompt], size=size, num_steps=_STEPS)
        if len(samples) != _STEPS:
            raise ValueError(f"{_STEPS} steps called the scheduler {len(samples)} times")
        if run.rows == _STEPS:
            return samples, predictions, run.sigmas[:_STEPS].to(model.device)
        rows = run.rows
    raise ValueError(
        f"its transformer is run for {rows} rows in {_STEPS} steps of one prompt, with guidance off; its own guidance "
        "cannot be separated"
    )


def _watch(samples: list[Tensor], predictions: list[Tensor], _index: int, prediction: Tensor, sample: Tensor) -> None:
    # Schedulers may step in place.
    samples.append(sample.clone())
    predictions.append(prediction.clone())
    if len(samples) == _STEPS:
        raise Done


def _check_timesteps(model: DiffusersModel, run: Run) -> None:
    expected = run.sigmas[: len(run.timesteps)] * model.num_train_timesteps
    gap = float((run.timesteps.to(expected) - expected).abs().max())
    bound = 1.0 if model.has_whole_timesteps else 1e-2
    if not gap <= bound:
        raise ValueError(f"its timesteps differ from {model.num_train_timesteps:g} sigma by {gap:.3g}")


def _grid(model: DiffusersModel, size: Size, shape: torch.Size) -> tuple[int, Grid]:
    def state_shape(asked: Size) -> tuple[int, ...] | None:
        shapes: list[tuple[int, ...]] = []

        def seen(index: int, prediction: Tensor, sample: Tensor) -> Tensor:
            shapes.append(tuple(sample.shape[1:]))
            raise Done

        rows = {**_rows(model.blank, [0]), "call": [torch.tensor(dataclasses.astuple(asked))]}
        try:
            model._run(seen, rows, real_from=1)  # pyright: ignore[reportPrivateUsage]
        except (ValueError, RuntimeError):
            return None
        return shapes[0]

    grid = Grid.found(state_shape, size, makes_videos=model.session.makes_videos)
    return shape[-1] if grid.is_packed else shape[0], grid


def _check_sensitivity(model: DiffusersModel, x: Tensor, both: dict[str, Any]) -> None:
    at: Callable[[float], Tensor] = lambda level: torch.full((1,), level, device=model.device)  # noqa: E731
    plain = model.velocity(x, at(0.7), _rows(both, [0]))
    for what, other in (
        ("sigma", model.velocity(x, at(0.3), _rows(both, [0]))),
        ("the prompt", model.velocity(x, at(0.7), _rows(both, [1]))),
    ):
        if torch.equal(plain, other):
            raise ValueError(f"its velocity does not depend on {what}")


def _check_batches(model: DiffusersModel, x: Tensor, both: dict[str, Any], *, bound: float) -> None:
    """Three rows at once, of two prompts where those go together, against each row alone."""
    rows = [0, 0, 0] if model.layout.ragged else [0, 1, 0]
    xs = torch.cat([x, x.flip(-1), x.flip(-2)])
    sigmas = torch.tensor([0.8, 0.5, 0.3], device=model.device)
    alone = [model.forward(xs[n : n + 1], sigmas[n : n + 1], _rows(both, [rows[n]])) for n in range(3)]
    try:
        together = model.forward(xs, sigmas, _rows(both, rows))
    except (AttributeError, IndexError, RuntimeError, TypeError, ValueError):
        # What the pipeline does with its timestep is not row by row.
        model.takes_row_sigmas = False
    else:
        _check("a batch of rows with their own sigmas", together, torch.cat(alone), bound=bound)
        return
    same = sigmas[:1].expand(3)
    alone = [model.forward(xs[n : n + 1], same[:1], _rows(both, [rows[n]])) for n in range(3)]
    _check("a batch of rows", model.forward(xs, same, _rows(both, rows)), torch.cat(alone), bound=bound)


def _check(what: str, result: Tensor, expected: Tensor, *, bound: float) -> None:
    gap = float((result - expected).abs().nan_to_num(nan=torch.inf).max() / expected.abs().max())
    if not gap <= bound:
        raise ValueError(f"{what} and its velocities differ by {gap:.2g} of the largest, expected at most {bound:.1g}")


def _bound(model: DiffusersModel) -> float:
    """Some ten layers of sums in another order; a wrong sigma, sign or place is of the order of the velocity."""
    dtype = model.session.compute_dtype
    return 1e-4 if dtype is torch.float32 else 0.1


def _rows(conditions: dict[str, Any] | Any, rows: list[int]) -> dict[str, Any]:
    return {name: [value[row] for row in rows] for name, value in conditions.items()}


def _with_size(conditions: dict[str, Any], size: Size) -> dict[str, Any]:
    rows = len(next(iter(conditions.values())))
    return {**conditions, "call": torch.tensor([dataclasses.astuple(size)] * rows)}
