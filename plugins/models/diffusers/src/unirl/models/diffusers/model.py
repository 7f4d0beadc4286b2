"""Any flow-matching pipeline of diffusers as a diffusion stage: the pipeline itself computes everything."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import checkpoint  # pyright: ignore[reportUnknownVariableType]
from unirl.core.errors import RecipeError
from unirl.core.specs.check import check_config
from unirl.core.types.inputs import Inputs
from unirl.core.types.sampling import LatentSamplingConfig, ScheduleConfig
from unirl.numerics.diffusion.equal_forwards import check_equal_forwards
from unirl.numerics.diffusion.pipeline_model import check_size
from unirl.numerics.model_files import dtype_of

from .checkpoint import find, load_pipeline
from .config import DiffusersConfig
from .latents import Grid
from .layers import wrap_blocks
from .plugin import SPEC
from .records import Layout
from .rows import RowTimestep
from .session import Done, Record, Run, Session, Size

__all__ = ["DiffusersModel", "build"]

_OWN = (
    *("prompt", "height", "width", "num_frames", "num_inference_steps", "max_sequence_length", "generator", "latents"),
    *("output_type", "return_dict", "num_images_per_prompt", "num_videos_per_prompt"),
)
"""Arguments of a pipeline's call that are set here."""
_CALL = "call"


def build(config: DiffusersConfig, *, device: Any) -> DiffusersModel:
    """The model of a checkpoint, after a comparison with its pipeline's own run, see `verify`.

    Raises RecipeError when the checkpoint or a setting is wrong, and for a pipeline that cannot be trained here.
    """
    from .verify import verify

    model = DiffusersModel(config, device=torch.device(device))
    verify(model)
    return model


class DiffusersModel:
    """A `unirl.core.roles.DiffusionModel`.

    Latents: see `Grid`. Conditions: what the pipeline's methods `encode_*` return, `<method>.<call>.<place>` -> a
    tensor for each prompt, and `call` [n, 4], the size that they were made for.
    """

    spec = SPEC
    takes_row_sigmas = True
    """Whether the rows of a run may differ in sigma. If not, there is a forward for each sigma."""

    def __init__(self, config: DiffusersConfig, *, device: torch.device) -> None:
        check_config(config, key="model")
        dtype = dtype_of(config.dtype, key="model.dtype", model=SPEC.name)
        autocast = None if config.autocast is None else dtype_of(config.autocast, key="model.autocast", model=SPEC.name)
        self.device = device
        self.pipeline = load_pipeline(find(config), config)
        self.transformer: torch.nn.Module = self.pipeline.transformer
        self.vae: Any = self.pipeline.vae
        self._decode_batch = config.decode_batch
        for part in self.pipeline.components.values():
            if isinstance(part, torch.nn.Module):
                part.eval().to(device)
                part.requires_grad_(part is self.transformer)
        blocks = wrap_blocks(self.transformer)
        for part in self.transformer.modules():
            if part is self.transformer or type(part).__name__ in blocks:
                part.register_forward_hook(_own_memory)
        self.session = Session(self.pipeline, call=config.call, dtype=dtype, autocast=autocast)
        _check_call(config.call, self.session)
        self.num_train_timesteps = float(self.pipeline.scheduler.config.num_train_timesteps)
        # Found by `verify`.
        self.layout: Layout
        self.grid: Grid
        self.channels = 0
        self.is_inverted = False
        """Sigma is 1 - noise level, and the velocity x0 - x1, as in Mochi."""
        self.has_whole_timesteps = False
        self.blank: Mapping[str, Any] = {}
        """Conditions of one row, for runs that do not read them."""

    @property
    def trainable(self) -> torch.nn.Module:
        return self.transformer

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
        records = [self._recorded(text, size)[0] for text in inputs.texts]
        try:
            conditions = self.layout.conditions(records)
        except (RuntimeError, ValueError) as error:
            raise RecipeError(
                f"model.path: what {type(self.pipeline).__name__} makes of these prompts has another form than when it "
                f"was loaded: {error}."
            ) from error
        return {**conditions, _CALL: torch.tensor([dataclasses.astuple(size)] * len(records), device=self.device)}

    def velocity(self, x: Tensor, sigma: Tensor, conditions: Mapping[str, Any]) -> Tensor:
        """Velocity x1 - x0. Rows go together where their conditions have equal shapes."""
        groups: dict[Any, list[int]] = {}
        levels = sigma.tolist() if not self.takes_row_sigmas else [0.0] * len(x)
        for row in range(len(x)):
            shapes = tuple(conditions[name][row].shape for name in sorted(self.layout.ragged))
            groups.setdefault((shapes, levels[row]), []).append(row)
        if self.layout.ragged or len(groups) > 1:
            name = type(self.pipeline).__name__
            check_equal_forwards(
                self.transformer, reason=f"rows of {name} that differ in the length of their prompts or in sigma"
            )
        if len(groups) == 1:
            return self.forward(x, sigma, conditions)
        result: dict[int, Tensor] = {}
        for rows in groups.values():
            own = {name: [value[row] for row in rows] for name, value in conditions.items()}
            result |= zip(rows, self.forward(x[rows], sigma[rows], own), strict=True)
        return torch.stack([result[row] for row in range(len(x))])

    def forward(self, x: Tensor, sigma: Tensor, conditions: Mapping[str, Any]) -> Tensor:
        """The same in one run of the pipeline: its first step is answered with x, its second has the prediction."""
        found: list[Tensor] = []
        state = self.grid.state(x.float())

        def on_step(index: int, prediction: Tensor, sample: Tensor) -> Tensor:
            if index == 0:
                # In fp32, and so is the timestep then, whatever the encoders are in.
                return state
            found.append(prediction)
            raise Done

        level = 1 - sigma if self.is_inverted else sigma
        self._run(on_step, conditions, at=self.timestep(level), level=level[:1])
        velocity = self.grid.latents(found[0], tuple(x.shape[1:])).float()
        return -velocity if self.is_inverted else velocity

    def timestep(self, level: Tensor) -> Any:
        """The timesteps of two steps at the scheduler's own sigmas [B]."""
        t = level.double() * self.num_train_timesteps
        t = (t + 1e-3).long() if self.has_whole_timesteps else t.float()
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
        run = self._recorded("", self._size(sampling), num_steps=sampling.num_inference_steps)[1]
        sigmas = run.sigmas.float().cpu()
        return 1 - sigmas if self.is_inverted else sigmas

    def latent_shape(self, sampling: LatentSamplingConfig) -> tuple[int, ...]:
        """[C, h, w], or [C, F, h, w] of a video. Raises RecipeError, with the nearest size that fits, for any other."""
        return self.grid.latent_shape(self.channels, self._size(sampling))

    def decode(self, latents: Tensor) -> Tensor:
        """Images [N, 3, H, W] or videos [N, F, 3, H, W], fp32 in [0, 1]. A video of one frame is an image.
        Differentiable; chunks are decoded again in the backward pass, so that the activations of one are kept."""
        chunks = torch.split(latents.float(), self._decode_batch or max(len(latents), 1))
        decoded: Any = self._decoded
        if len(chunks) > 1 and latents.requires_grad:
            decoded = partial(cast(Any, checkpoint), decoded, use_reentrant=False, preserve_rng_state=False)
        return torch.cat([decoded(chunk) for chunk in chunks])

    def _decoded(self, latents: Tensor) -> Tensor:
        state = self.grid.state(latents).to(self.vae.dtype)
        size = self.grid.size(tuple(latents.shape[1:]), max_sequence_length=int(self.blank[_CALL][0][3]))
        rows = {name: [value[0]] * len(latents) for name, value in self.blank.items()}
        rows[_CALL] = [torch.tensor(dataclasses.astuple(size))]
        level = torch.full((1,), 0.5, device=self.device)
        media: Tensor = self._run(
            lambda index, prediction, sample: state,
            rows,
            at=self.timestep(level),
            level=level,
            real_from=2,
            output_type="pt",
        )
        media = media.float().clamp(0, 1)
        return media[:, 0] if media.ndim == 5 and media.shape[1] == 1 else media

    def _run(
        self, on_step: Any, conditions: Mapping[str, Any], *, real_from: int = 1, output_type: str = "latent", **at: Any
    ) -> Any:
        call = conditions[_CALL]
        queue = self.layout.record(conditions)

        def replay(name: str, own: object) -> Any:
            recorded, value = queue.pop(0)
            assert recorded == name, f"{name} is called where {recorded} was recorded"
            return value

        run = Run(transformer=self.transformer, on_step=on_step, on_encode=replay, real_from=real_from, **at)
        size = Size(*map(int, call[0].tolist()))
        rows = next(len(value) for name, value in conditions.items() if name != _CALL)
        return self.session.run(run, prompts=[""] * rows, size=size, output_type=output_type)

    def _recorded(self, text: str, size: Size, *, num_steps: int = 2) -> tuple[Record, Run]:
        try:
            return self.session.record([text], size=size, transformer=self.transformer, num_steps=num_steps)
        except ValueError as error:
            raise RecipeError(f"sampling: {type(self.pipeline).__name__} refuses {size}: {error}") from error

    def _size(self, sampling: LatentSamplingConfig) -> Size:
        grid = self.grid
        if not grid.frame_step and sampling.frames != 1:
            raise RecipeError(
                f"sampling.frames: got {sampling.frames}; {type(self.pipeline).__name__} generates single images."
            )
        check_size("height", sampling.height, first=grid.unit, step=grid.unit)
        check_size("width", sampling.width, first=grid.unit, step=grid.unit)
        check_size("frames", sampling.frames, first=1, step=grid.frame_step or 1)
        return Size(sampling.height, sampling.width, sampling.frames, sampling.max_sequence_length)


def _own_memory(_module: torch.nn.Module, _args: Any, output: Any) -> Any:
    """FSDP2 warns of modules that return views, as blocks do that split a joint sequence."""
    return tree_map(lambda part: part.clone() if isinstance(part, Tensor) and part._is_view() else part, output)


def _check_call(call: Mapping[str, Any], session: Session) -> None:
    needed = [
        name
        for name, parameter in session.parameters.items()
        if parameter.default is parameter.empty
        and parameter.kind is not parameter.VAR_KEYWORD
        and name not in ("self", *_OWN, *call)
    ]
    if needed:
        raise RecipeError(
            f"model.path: {type(session.pipeline).__name__} needs {', '.join(map(repr, needed))}, expected a pipeline "
            "that generates from text alone. Choose another checkpoint."
        )
    for name in call:
        if name in _OWN:
            raise RecipeError(f"model.call.{name}: `sampling` and the prompts set it. Leave it out.")
        if name not in session.parameters:
            near = difflib.get_close_matches(name, session.parameters, n=3, cutoff=0.3)
            raise RecipeError(
                f"model.call.{name}: {type(session.pipeline).__name__} has no such argument. Nearest: "
                f"{', '.join(near) or 'none'}."
            )
