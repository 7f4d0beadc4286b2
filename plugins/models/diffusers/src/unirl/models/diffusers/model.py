"""Any flow-matching pipeline of diffusers as a diffusion stage: the pipeline itself computes everything."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping, Sequence
from functools import lru_cache, partial
from typing import Any, cast

import torch
from PIL import Image
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import checkpoint  # pyright: ignore[reportUnknownVariableType]
from unirl.core.errors import DataError, RecipeError, RunFailed
from unirl.core.roles import DiffusionModel
from unirl.core.specs.check import check_config
from unirl.core.types.inputs import Inputs
from unirl.core.types.sampling import LatentSamplingConfig, ScheduleConfig
from unirl.model_host.chat_templates import bounded_templates
from unirl.model_host.diffusion.equal_forwards import in_groups
from unirl.model_host.diffusion.pipeline_model import set_attention, set_tiling
from unirl.model_host.model_files import dtype_of
from unirl.numerics.media import load_picture

from .checkpoint import find, load_pipeline
from .config import DiffusersConfig
from .facts import Facts
from .latents import Grid
from .layers import wrap_blocks
from .plugin import SPEC
from .records import SHARED
from .rows import RowTimestep
from .session import Done, Record, Run, Session, Size

__all__ = ["DiffusersModel", "build"]

_OWN = (
    *("prompt", "height", "width", "num_frames", "num_inference_steps", "max_sequence_length", "generator", "latents"),
    *("output_type", "return_dict", "num_images_per_prompt", "num_videos_per_prompt"),
    *("image", "control_image", "max_area", "frames"),
)
"""Arguments of a pipeline's call that are set here."""
_CALL, _IMAGES = "call", "images"


def build(config: DiffusersConfig, *, device: Any, lazy: bool = False) -> DiffusersModel:
    """The model of a checkpoint, after a comparison with its pipeline's own run, see `verify`. Built lazily it has no
    values to compare: its layout is found on shapes, where the transformer can be run on them, and
    `DiffusersModel.verify` does the rest.

    Raises RecipeError when the checkpoint or a setting is wrong, and for a pipeline that cannot be trained here.
    """
    from .verify import find_on_shapes

    model = DiffusersModel(config, device=torch.device(device), lazy=lazy)
    if lazy:
        find_on_shapes(model)
    else:
        model.verify()
    return model


class DiffusersModel(DiffusionModel):
    """Any pipeline of diffusers that predicts a velocity.

    Latents: see `Grid`. Conditions: what the pipeline's recorded methods return, `<method>.<call>.<place>` -> a tensor
    for each prompt; `call` [n, 4], the size that they were made for; for prompts with images `images`, n times [k, 2],
    their widths and heights.
    """

    spec = SPEC

    def __init__(self, config: DiffusersConfig, *, device: torch.device, lazy: bool = False) -> None:
        check_config(config, key="model")
        dtype = dtype_of(config.dtype, key="model.dtype", model=SPEC.name)
        autocast = None if config.autocast is None else dtype_of(config.autocast, key="model.autocast", model=SPEC.name)
        self.device = device
        self.pipeline, self._values = load_pipeline(find(config), config, lazy=lazy)
        self.transformer: torch.nn.Module = self.pipeline.transformer
        self.vae: Any = self.pipeline.vae
        set_tiling(self.vae, config)
        set_attention(self.transformer, config)
        self.decode_batch = config.decode_batch
        for part in self.pipeline.components.values():
            if isinstance(part, torch.nn.Module):
                part.eval().requires_grad_(part is self.transformer)
                if part is not self.transformer or not lazy:
                    part.to(device)
        blocks = wrap_blocks(self.transformer)
        for part in self.transformer.modules():
            if part is self.transformer or type(part).__name__ in blocks:
                part.register_forward_hook(_own_memory)
        self.session = Session(self.pipeline, device=device, call=config.call, dtype=dtype, autocast=autocast)
        _check_call(config.call, self.session)
        self.num_train_timesteps = float(self.pipeline.scheduler.config.num_train_timesteps)
        self.facts = Facts()
        self._blanks: dict[Size, Mapping[str, Any]] = {}

    @property
    def trainable(self) -> torch.nn.Module:
        return self.transformer

    def fill(self, tensors: Mapping[str, Tensor]) -> None:
        """See `unirl.core.roles.Model`."""
        assert self._values is not None, "the model was not built lazily"
        self._values.fill(tensors)

    def verify(self) -> None:
        """See `unirl.core.roles.Model`. The pipeline's own run has the same transformer, sharded or not."""
        from .verify import verify

        verify(self)

    def forget(self) -> None:
        """All that was found out."""
        # In place, for copies of the model.
        vars(self.facts).update(vars(Facts()))
        self._blanks.clear()

    @property
    def grid(self) -> Grid:
        if self.facts.grid is None:
            raise RecipeError(
                f"model.path: {type(self.pipeline).__name__}'s latents are known once its transformer has run, which "
                "depends on values, and this process has no weights for it. Build the model on one process."
            )
        return self.facts.grid

    @torch.no_grad()
    def encode(self, inputs: Inputs, *, sampling: LatentSamplingConfig) -> Mapping[str, Any]:
        """Each prompt is encoded by itself: padding to the longest would change the answer of a pipeline without a
        mask."""
        if sampling.is_guided and self.session.has_embedded_guidance:
            raise RecipeError(
                f"sampling.guidance_scale: got {sampling.guidance_scale}, but {type(self.pipeline).__name__} is "
                "distilled: its transformer reads the scale. Set sampling.guidance_scale=1, and the embedded scale by "
                "+model.call.guidance_scale."
            )
        size = self._size(sampling)
        images = [self._images(text, media) for text, media in zip(inputs.texts, inputs.media, strict=True)]
        if any(images) and not all(images):
            text = inputs.texts[images.index(())]
            raise DataError(
                f"media: prompt {text!r} has no image, and others have. Give all prompts of a file images, or none."
            )
        try:
            return self.conditions(inputs.texts, images, size=size)
        except (RuntimeError, ValueError) as error:
            raise RecipeError(
                f"model.path: what {type(self.pipeline).__name__} makes of these prompts has another form than when it "
                f"was loaded: {error}."
            ) from error

    def conditions(
        self, texts: Sequence[str], images: Sequence[Sequence[Image.Image]], *, size: Size
    ) -> dict[str, Any]:
        """Conditions of prompts with these images, all with some or all without."""
        layout = self.facts.layouts[bool(images[0])]
        own = zip(texts, images, strict=True)
        result = layout.conditions([self._recorded(text, size, each)[0] for text, each in own])
        result[_CALL] = torch.tensor([dataclasses.astuple(size)] * len(texts), device=self.device)
        if images[0]:
            result[_IMAGES] = tuple(torch.tensor([one.size for one in each]) for each in images)
        return result

    def _images(self, text: str, media: Sequence[Any]) -> tuple[Image.Image, ...]:
        """Source images of a prompt. Raises DataError where the pipeline takes none, more, or fewer."""
        name, takes = type(self.pipeline).__name__, (min(self.facts.layouts) * 1, self.facts.most_images)
        if not takes[0] <= len(media) <= takes[1]:
            expected = f"{takes[0]} to {takes[1]}" if takes[0] < takes[1] else f"{takes[0]}"
            raise DataError(
                f"media: got {len(media)} images for prompt {text!r}; {name} takes {expected}. Change the prompt file, "
                "or choose another checkpoint."
            )
        return tuple(map(load_picture, media))

    def velocity(self, x: Tensor, sigma: Tensor, conditions: Mapping[str, Any]) -> Tensor:
        """Velocity x1 - x0. Rows go together where their conditions have equal shapes."""
        layout = self.facts.layouts[_IMAGES in conditions]
        if not layout.is_split and _IMAGES not in conditions:
            return self.forward(x, sigma, conditions)
        levels = sigma.tolist() if not layout.takes_row_sigmas else [0.0] * len(x)
        keys: list[Any] = []
        for row, level in enumerate(levels):
            shapes = tuple(conditions[name][row].shape for name in sorted(layout.ragged))
            sizes = str(conditions[_IMAGES][row].tolist()) if _IMAGES in conditions else ""
            shared = row if layout.is_single else int(conditions[SHARED][row]) if layout.unshared else 0
            keys.append((shapes, sizes, shared, level))

        def forward(rows: list[int]) -> Tensor:
            own = {name: [value[row] for row in rows] for name, value in conditions.items()}
            return self.forward(x[rows], sigma[rows], own)

        return in_groups(keys, forward, module=self.transformer)

    def forward(self, x: Tensor, sigma: Tensor, conditions: Mapping[str, Any]) -> Tensor:
        """The same in one run of the pipeline: its first step is answered with x, its second has the prediction."""
        self._check_verified()
        found: list[Tensor] = []
        state = self.grid.state(x.float())

        def on_step(index: int, prediction: Tensor, sample: Tensor) -> Tensor:
            if index == 0:
                # In fp32, and so is the timestep then, whatever the encoders are in.
                return state
            found.append(prediction)
            raise Done

        level = 1 - sigma if self.facts.is_inverted else sigma
        self._run(on_step, conditions, at=self.timestep(level), level=level[:1])
        velocity = self.grid.latents(found[0], tuple(x.shape[1:])).float()
        return -velocity if self.facts.is_inverted else velocity

    def _check_verified(self) -> None:
        is_fake = isinstance(next(self.transformer.parameters()), FakeTensor)
        if not (self.facts.is_verified or is_fake):
            raise RunFailed(
                "model: got a forward of a model that was built without weights and not compared with its pipeline "
                "since. Call `verify` on every rank once it is filled."
            )

    def timestep(self, level: Tensor) -> Any:
        """The timesteps of two steps at the scheduler's own sigmas [B]."""
        t = level.double() * self.num_train_timesteps
        t = (t + 1e-3).long() if self.facts.has_whole_timesteps else t.float()
        if bool((t == t[0]).all()):
            return t[:1].expand(2)
        return [RowTimestep.of(t)] * 2

    def schedule(self, sampling: LatentSamplingConfig) -> Tensor:
        """The pipeline's own sigmas, on the CPU."""
        if sampling.schedule != ScheduleConfig():
            raise RecipeError(
                f"sampling.schedule: got {sampling.schedule}, but model 'diffusers' takes the schedule of the "
                "pipeline's own run. Leave it out, or change scheduler/scheduler_config.json of the checkpoint."
            )
        size = self._size(sampling)
        images = () if False in self.facts.layouts else (_grey(size.width, size.height),)
        run = self._recorded("", size, images, num_steps=sampling.num_inference_steps)[1]
        if len(run.timesteps) != sampling.num_inference_steps:
            raise RecipeError(
                f"sampling.num_inference_steps: got {sampling.num_inference_steps}, but the checkpoint of "
                f"{type(self.pipeline).__name__} has a schedule of {len(run.timesteps)} steps. Set that number."
            )
        sigmas = run.sigmas.float().cpu()
        return 1 - sigmas if self.facts.is_inverted else sigmas

    def latent_shape(self, sampling: LatentSamplingConfig) -> tuple[int, ...]:
        """[C, h, w], or [C, F, h, w] of a video. Raises RecipeError, with the nearest size that fits, for any other."""
        return self.grid.latent_shape(self.facts.channels, self._size(sampling))

    def decode(self, latents: Tensor) -> Tensor:
        """Images [N, 3, H, W] or videos [N, F, 3, H, W], fp32 in [0, 1]. A video of one frame is an image.
        Differentiable; chunks are decoded again in the backward pass, so that the activations of one are kept."""
        chunks = torch.split(latents.float(), self.decode_batch or max(len(latents), 1))
        decoded: Any = self._decoded
        if len(chunks) > 1 and latents.requires_grad:
            decoded = partial(cast(Any, checkpoint), decoded, use_reentrant=False, preserve_rng_state=False)
        return torch.cat([decoded(chunk) for chunk in chunks])

    def _decoded(self, latents: Tensor, blank: Mapping[str, Any] | None = None) -> Tensor:
        state = self.grid.state(latents).to(self.vae.dtype)
        size = self.grid.size(tuple(latents.shape[1:]), max_sequence_length=self.blank_length)
        blank = self.blank(size) if blank is None else blank
        if self.facts.layouts[_IMAGES in blank].is_single and len(latents) > 1:
            return torch.cat([self._decoded(row[None]) for row in latents])
        rows = {name: [value[0]] * len(latents) for name, value in blank.items()}
        level = torch.full((1,), 0.5, device=self.device)
        media: Tensor = self._run(
            lambda index, prediction, sample: state,
            rows,
            at=self.timestep(level),
            level=level,
            real_from=2,
            output_type="pt",
        )
        media = _on_white(media.float().clamp(0, 1))
        return media[:, 0] if media.ndim == 5 and media.shape[1] == 1 else media

    blank_length = 256
    """Tokens of prompts that are not read."""

    @torch.no_grad()
    def blank(self, size: Size, image: Image.Image | None = None) -> Mapping[str, Any]:
        """Conditions of one row, for runs that do not read them. image: where the pipeline needs one, another than
        a grey one."""
        if image is not None or size not in self._blanks:
            own = (image or _grey(size.width, size.height),) if False not in self.facts.layouts else ()
            result = self.conditions([""], [own], size=size)
            if image is not None:
                return result
            self._blanks[size] = result
        return self._blanks[size]

    def _run(
        self, on_step: Any, conditions: Mapping[str, Any], *, real_from: int = 1, output_type: str = "latent", **at: Any
    ) -> Any:
        call = conditions[_CALL]
        queue = self.facts.layouts[_IMAGES in conditions].record(conditions)
        # The loop reads their sizes at most.
        images = [_grey(*each) for each in conditions[_IMAGES][0].tolist()] if _IMAGES in conditions else []

        def replay(name: str, own: object) -> Any:
            recorded, value = queue.pop(0)
            assert recorded == name, f"{name} is called where {recorded} was recorded"
            return value

        run = Run(transformer=self.transformer, on_step=on_step, on_encode=replay, real_from=real_from, **at)
        size = Size(*map(int, call[0].tolist()))
        return self.session.run(run, prompts=[""] * len(call), size=size, images=images, output_type=output_type)

    def _recorded(
        self, text: str, size: Size, images: Sequence[Image.Image] = (), *, num_steps: int = 2
    ) -> tuple[Record, Run]:
        try:
            # Pipelines render templates of their tokenizers themselves.
            with bounded_templates():
                return self.session.record(
                    [text], size=size, images=images, transformer=self.transformer, num_steps=num_steps
                )
        except ValueError as error:
            sizes = f" and images of {[one.size for one in images]}" if images else ""
            raise RecipeError(f"sampling: {type(self.pipeline).__name__} refuses {size}{sizes}: {error}") from error

    def _size(self, sampling: LatentSamplingConfig) -> Size:
        for reason in self.grid.sizes.problems(sampling):
            raise RecipeError(str(reason.under("sampling")))
        return Size(sampling.height, sampling.width, sampling.frames, sampling.max_sequence_length)


def _on_white(media: Tensor) -> Tensor:
    """Media [..., 3, H, W] of those that may have a fourth channel, their opacity, as Qwen-Image 2.1's."""
    if media.shape[-3] != 4:
        return media
    colors, opacity = media.split([3, 1], dim=-3)
    return colors * opacity + 1 - opacity


@lru_cache(maxsize=256)
def _grey(width: int, height: int) -> Image.Image:
    return Image.new("RGB", (width, height), (128, 128, 128))


def _own_memory(_module: torch.nn.Module, _args: Any, output: Any) -> Any:
    """FSDP2 warns of modules that return views, as blocks do that split a joint sequence."""
    return tree_map(lambda part: part.clone() if isinstance(part, Tensor) and part._is_view() else part, output)


def _check_call(call: Mapping[str, Any], session: Session) -> None:
    name = type(session.pipeline).__name__
    if not {"height", "width"} <= set(session.parameters):
        raise RecipeError(
            f"model.path: {name} has no arguments `height` and `width`: the size of its results follows from its "
            "images. Choose another checkpoint."
        )
    needed = [
        name
        for name, parameter in session.parameters.items()
        if parameter.default is parameter.empty
        and parameter.kind is not parameter.VAR_KEYWORD
        and name not in ("self", *_OWN, *call)
    ]
    if needed:
        raise RecipeError(
            f"model.path: {name} needs {', '.join(map(repr, needed))}, expected a pipeline "
            "that generates from text, or from text and images. Choose another checkpoint."
        )
    for key in call:
        if key in _OWN:
            raise RecipeError(f"model.call.{key}: `sampling` and the prompts set it. Leave it out.")
        if key not in session.parameters:
            near = difflib.get_close_matches(key, session.parameters, n=3, cutoff=0.3)
            raise RecipeError(f"model.call.{key}: {name} has no such argument. Nearest: {', '.join(near) or 'none'}.")
