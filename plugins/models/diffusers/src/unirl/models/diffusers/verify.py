"""Checks of a pipeline before anything is trained with it: it is compared with its own run."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from PIL import Image
from torch import Tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)
from torch.utils._pytree import tree_map_only
from unirl.core.errors import RecipeError
from unirl.model_host.shape_run import shapes_only

from diffusers.utils import logging

from .latents import Grid
from .records import Layout
from .session import Done, Run, Size

if TYPE_CHECKING:
    from .model import DiffusersModel

__all__ = ["find_on_shapes", "verify"]

_SIZE = Size(height=128, width=192, frames=25, max_sequence_length=256)
"""25 - 1 is a multiple of 4, 6 and 8, the frame steps of today's VAEs."""
_PROMPTS = ("a red ring", "two blue squares on the left of a small green disc")
_STEPS = 3
_FAILURES = (
    *(ArithmeticError, AssertionError, AttributeError, LookupError, NameError, RuntimeError, TypeError, ValueError),
)
"""Errors of pipelines that are called in an unsupported way."""
_WITHOUT_VALUES = (
    *(DataDependentOutputException, DynamicOutputShapeException),
    *(UnsupportedFakeTensorException, UnsupportedOperatorException),
)
"""Errors of transformers whose shapes depend on values, run on shapes."""


def verify(model: DiffusersModel) -> None:
    """Find the layout of latents and conditions, and compare velocities with the predictions in the pipeline's own run,
    those in a batch with those of each row, and those of other sigmas and prompts with each other. Where the
    transformer is sharded over ranks, collective: all run it equally often.

    Raises RecipeError, key `model.path`, with the difference, and for a pipeline whose runs do not follow diffusers'
    usual loop.
    """
    try:
        with _refusing(model), _seeing_dtypes(model), model.session.remembering():
            _twice(model, on_shapes=False)
    except BaseException:
        model.facts.is_verified = False
        raise


def find_on_shapes(model: DiffusersModel) -> None:
    """The same for a model without values, except for what depends on them: `verify` compares it when it has them.

    A transformer that shapes alone do not run leaves the layout to `verify` as well.
    """
    transformer = model.transformer
    # Transformers keep tables of positions that they have made, which are shapes here. Buffers are replaced.
    model.transformer = copy.deepcopy(transformer, {id(buffer): buffer for buffer in transformer.buffers()})
    try:
        with _refusing(model), shapes_only([model.transformer]), model.session.remembering():
            _on_cpu(model)
            _twice(model, on_shapes=True)
    except RecipeError as error:
        if not isinstance(error.__cause__, _WITHOUT_VALUES):
            raise
        model.forget()
    finally:
        model.transformer = transformer


def _on_cpu(model: DiffusersModel) -> None:
    """Shapes are computed on the CPU; `shapes_only` restores `forward`."""
    forward = model.transformer.forward

    def called(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = tree_map_only(Tensor, lambda value: value.to("cpu"), (args, kwargs))
        return tree_map_only(Tensor, lambda value: value.to(model.device), forward(*args, **kwargs))

    model.transformer.forward = called


@contextmanager
def _seeing_dtypes(model: DiffusersModel) -> Generator[None]:
    """Notes the dtype of weights in forwards: that in which a backend gathers them, not that in which it keeps them."""

    def seen(part: Any, _args: Any) -> None:
        model.facts.has_16_bits |= part.weight.dtype in (torch.bfloat16, torch.float16)

    layers = [part for part in model.transformer.modules() if isinstance(part, torch.nn.Linear)]
    hooks = [layer.register_forward_pre_hook(seen) for layer in layers]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def _refusing(model: DiffusersModel) -> Generator[None]:
    name = type(model.pipeline).__name__
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        with torch.no_grad():
            yield
    except _FAILURES as error:
        others = ", ".join(map(repr, model.session.other_inputs))
        also = f" It is given prompts and source images alone, and also takes {others}." if others else ""
        raise RecipeError(
            f"model.path: {name} cannot be used as a model: {str(error).rstrip('.')}.{also} Choose another checkpoint, "
            "or write a model plugin."
        ) from error
    finally:
        logging.set_verbosity(verbosity)


def _twice(model: DiffusersModel, *, on_shapes: bool) -> None:
    try:
        _verify(model, on_shapes=on_shapes)
    except _WITHOUT_VALUES:
        raise
    except RuntimeError:
        if model.session.compute_dtype is torch.float32:
            raise
        model.session.casts_timestep = True
        _verify(model, on_shapes=on_shapes)


def _verify(model: DiffusersModel, *, on_shapes: bool) -> None:
    session, size = model.session, _SIZE
    model.forget()
    # Or what follows refuses it.
    model.facts.is_verified = not on_shapes
    length = session.parameters.get("max_sequence_length")
    if length is not None and isinstance(length.default, int):
        size = dataclasses.replace(size, max_sequence_length=length.default)
    if not session.makes_videos:
        size = dataclasses.replace(size, frames=1)
    model.blank_length = size.max_sequence_length
    images = [] if session.image_name is None else [_random_image(0, 160, 112)]
    small = dataclasses.replace(size, height=64, width=96)
    session.find_form_of_prompts(_PROMPTS[0], size=small, images=images, transformer=model.transformer)
    if _takes_text_alone(model, size):
        if session.keep_encoding(_PROMPTS[0], size=small, transformer=model.transformer):
            size = small
        _verify_with(model, size, [(), (), ()], on_shapes=on_shapes)
    if session.image_name is not None:
        if session.makes_videos:
            # Its VAE encodes each of them at the length of the video.
            size = small
        # Of two sizes, none of them that of the result.
        images = [_random_image(seed, *sides) for seed, sides in enumerate(((160, 112), (160, 112), (112, 128)))]
        record = partial(session.record, [_PROMPTS[0]], size=size, transformer=model.transformer)
        first, other = (record(images=[image])[0] for image in images[:2])
        changed = {name for (name, a), (_, b) in zip(first, other, strict=True) if not _same(a, b)}
        session.keep_preparing(changed)
        _verify_with(model, size, [(image,) for image in images], on_shapes=on_shapes)
        model.facts.most_images = 1
        _count_images(model, size, images, on_shapes=on_shapes)
    _check_decoding_of_batches(model, dataclasses.replace(size, height=64, width=96, frames=1))


def _takes_text_alone(model: DiffusersModel, size: Size) -> bool:
    session = model.session
    if session.image_name is None:
        return True
    if session.parameters[session.image_name].default is not None:
        return False
    try:
        session.record([_PROMPTS[0]], size=size, transformer=model.transformer)
    except _FAILURES:
        # Pipelines that need an image say so in as many ways.
        return False
    return True


def _count_images(model: DiffusersModel, size: Size, images: Sequence[Image.Image], *, on_shapes: bool) -> None:
    """Whether several images of a prompt are conditions of it: each changes the velocity. On shapes, whether they can
    be."""
    x = torch.randn(
        (1, *model.grid.latent_shape(model.facts.channels, size)), generator=torch.Generator().manual_seed(0)
    )
    sigma = torch.full((1,), 0.7, device=model.device)
    try:
        both = [
            model.velocity(x.to(model.device), sigma, model.conditions(_PROMPTS[:1], [pair], size=size))
            for pair in ([images[0], images[0]], images[:2], images[1::-1])
        ]
    except (*_FAILURES, RecipeError):
        return
    if on_shapes or not (torch.equal(both[0], both[1]) or torch.equal(both[0], both[2])):
        model.facts.most_images = 8


def _verify_with(
    model: DiffusersModel, size: Size, images: Sequence[Sequence[Image.Image]], *, on_shapes: bool
) -> None:
    """Prompts with these images, the first two of one size and the third of another; or with none."""
    session, (short, long) = model.session, _PROMPTS

    def record(*prompts: str, own: int = 0) -> Any:
        return session.record(prompts, size=size, images=images[own], transformer=model.transformer)[0]

    # First, because it turns guidance off. Every step has the same shapes.
    steps = 1 if on_shapes else _STEPS
    samples, predictions, run = _unguided_run(model, size, short, images[0], steps=steps)
    one = record(short)
    others = [record(long, own=1), record("", own=2)]
    try:
        layout = Layout.found(one, record(short, short), others)
    except (*_FAILURES, StopIteration):
        # It takes one prompt, or what it returns for two has no rows, such as lengths that are added up.
        layout = Layout.found(one, None, others)
    model.facts.layouts[bool(images[0])] = layout
    model.facts.is_inverted = bool(run.sigmas[-1] > run.sigmas[0])
    model.facts.has_whole_timesteps = not run.timesteps.is_floating_point()
    _check_timesteps(model, run)
    sigmas = run.sigmas[:steps].to(model.device)
    if model.facts.is_inverted:
        sigmas = 1 - sigmas
    model.facts.channels, model.facts.grid = _grid(model, size, samples[0].shape[1:])
    shape = model.grid.latent_shape(model.facts.channels, size)

    both = model.conditions(_PROMPTS, images[:2], size=size)
    x = [model.grid.latents(sample, shape).float() for sample in samples]
    velocities = [model.velocity(at, s[None], _rows(both, [0])) for at, s in zip(x, sigmas, strict=True)]
    sign = -1 if model.facts.is_inverted else 1
    own = [sign * model.grid.latents(prediction, shape).float() for prediction in predictions]
    bound = None if on_shapes else _bound(model)
    _check("three steps of its own run", torch.cat(velocities), torch.cat(own), bound=bound)
    others = {"the prompt": model.conditions([long], images[:1], size=size)}
    if images[0]:
        others["the image"] = model.conditions([short], images[1:2], size=size)
    if not on_shapes:
        _check_sensitivity(model, x[0], _rows(both, [0]), others)
    if not layout.is_single:
        _check_batches(model, x[0], both, bound=bound)
    if images[0] and False not in model.facts.layouts and not on_shapes:
        _check_decoding(model, x[0], size, images)


def _check_decoding(model: DiffusersModel, x: Tensor, size: Size, images: Sequence[Sequence[Image.Image]]) -> None:
    """`decode` has a latent alone."""
    first, other = (model._decoded(x, model.blank(size, each[0])) for each in images[:2])  # pyright: ignore[reportPrivateUsage]
    if not torch.equal(first, other):
        raise ValueError("what it decodes depends on the image, as a part of the latent is that image")


def _check_decoding_of_batches(model: DiffusersModel, size: Size) -> None:
    """HunyuanVideo 1.5's VAE of diffusers 0.42 fails on two videos at once."""
    x = torch.zeros((2, *model.grid.latent_shape(model.facts.channels, size)), device=model.device)
    try:
        model._decoded(x)  # pyright: ignore[reportPrivateUsage]
    except RuntimeError:
        model.decode_batch = 1


def _random_image(seed: int, width: int, height: int) -> Image.Image:
    levels = torch.randint(0, 256, (height, width, 3), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)
    return Image.fromarray(levels.numpy())


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return a.shape == b.shape and torch.equal(a, b)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(_same, a, b))
    return a is b or bool(a == b)


def _unguided_run(
    model: DiffusersModel, size: Size, prompt: str, images: Sequence[Image.Image], *, steps: int
) -> tuple[list[Tensor], list[Tensor], Run]:
    """Run the pipeline itself without guidance: latents and predictions of the first `steps` steps, and the run."""
    rows = 0
    for scale in (1.0, 0.0):
        model.session.set_guidance(scale)
        samples: list[Tensor] = []
        predictions: list[Tensor] = []
        run = Run(
            transformer=model.transformer,
            on_step=partial(_watch, samples, predictions, steps),
            on_encode=lambda _name, own: own(),
        )
        model.session.run(run, prompts=[prompt], size=size, images=images, num_steps=_STEPS)
        if len(samples) != steps:
            raise ValueError(f"{steps} steps called the scheduler {len(samples)} times")
        if run.rows == steps:
            return samples, predictions, run
        rows = run.rows
    raise ValueError(
        f"its transformer is run for {rows} rows in {steps} steps of one prompt, with guidance off; its own guidance "
        "cannot be separated"
    )


def _watch(
    samples: list[Tensor], predictions: list[Tensor], steps: int, _index: int, prediction: Tensor, sample: Tensor
) -> None:
    # Schedulers may step in place.
    samples.append(sample.clone())
    predictions.append(prediction.clone())
    if len(samples) == steps:
        raise Done


def _check_timesteps(model: DiffusersModel, run: Run) -> None:
    expected = run.sigmas[: len(run.timesteps)] * model.num_train_timesteps
    gap = float((run.timesteps.to(expected) - expected).abs().max())
    bound = 1.0 if model.facts.has_whole_timesteps else 1e-2
    if not gap <= bound:
        raise ValueError(f"its timesteps differ from {model.num_train_timesteps:g} sigma by {gap:.3g}")


def _grid(model: DiffusersModel, size: Size, shape: torch.Size) -> tuple[int, Grid]:
    def state_shape(asked: Size) -> tuple[int, ...] | None:
        shapes: list[tuple[int, ...]] = []

        def seen(index: int, prediction: Tensor, sample: Tensor) -> Tensor:
            shapes.append(tuple(sample.shape[1:]))
            raise Done

        try:
            model._run(seen, model.blank(asked), real_from=1)  # pyright: ignore[reportPrivateUsage]
        except (RecipeError, ValueError, RuntimeError):
            return None
        return shapes[0]

    grid = Grid.found(state_shape, size, makes_videos=model.session.makes_videos)
    return shape[-1] if grid.is_packed or grid.is_channels_last else shape[0], grid


def _check_sensitivity(model: DiffusersModel, x: Tensor, own: Mapping[str, Any], others: Mapping[str, Any]) -> None:
    at: Callable[[float], Tensor] = lambda level: torch.full((1,), level, device=model.device)  # noqa: E731
    plain = model.velocity(x, at(0.7), own)
    velocities = {name: model.velocity(x, at(0.7), other) for name, other in others.items()}
    for name, other in {"sigma": model.velocity(x, at(0.3), own), **velocities}.items():
        if torch.equal(plain, other):
            raise ValueError(f"its velocity does not depend on {name}")


def _check_batches(model: DiffusersModel, x: Tensor, both: dict[str, Any], *, bound: float | None) -> None:
    """Three rows at once, of two prompts where those go together, against each row alone."""
    layout = model.facts.layouts["images" in both]
    rows = [0, 0, 0] if layout.ragged or layout.unshared else [0, 1, 0]
    xs = torch.cat([x, x.flip(-1), x.flip(-2)])
    sigmas = torch.tensor([0.8, 0.5, 0.3], device=model.device)

    def check(what: str, together: Tensor, levels: Tensor) -> None:
        # One forward per row, which is only for the comparison of values.
        if bound is not None:
            alone = [model.forward(xs[n : n + 1], levels[n : n + 1], _rows(both, [rows[n]])) for n in range(3)]
            _check(what, together, torch.cat(alone), bound=bound)

    try:
        together = model.forward(xs, sigmas, _rows(both, rows))
    except (AttributeError, IndexError, RuntimeError, TypeError, ValueError):
        # What the pipeline does with its timestep is not row by row.
        layout.takes_row_sigmas = False
    else:
        check("a batch of rows with their own sigmas", together, sigmas)
        return
    same = sigmas[:1].expand(3)
    check("a batch of rows", model.forward(xs, same, _rows(both, rows)), same)


def _check(what: str, result: Tensor, expected: Tensor, *, bound: float | None) -> None:
    """bound: None on shapes, where nothing can be compared."""
    if bound is None:
        return
    gap = float((result - expected).abs().nan_to_num(nan=torch.inf).max() / expected.abs().max())
    if not gap <= bound:
        raise ValueError(f"{what} and its velocities differ by {gap:.2g} of the largest, expected at most {bound:.1g}")


def _bound(model: DiffusersModel) -> float:
    """Some ten layers of sums in another order; a wrong sigma, sign or place is of the order of the velocity."""
    has_16_bits = model.facts.has_16_bits or model.session.compute_dtype is not torch.float32
    return 0.1 if has_16_bits else 1e-4


def _rows(conditions: dict[str, Any] | Any, rows: list[int]) -> dict[str, Any]:
    return {name: [value[row] for row in rows] for name, value in conditions.items()}
