"""Base class of models built on the components of a diffusers pipeline."""

from __future__ import annotations

import dataclasses
import math
from abc import abstractmethod
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar, TypeVar, cast

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint  # pyright: ignore[reportUnknownVariableType]
from unirl.core.errors import RecipeError, RunFailed
from unirl.core.roles import DiffusionModel
from unirl.core.specs.check import check_config
from unirl.core.specs.spec import MODEL_PARTS, ModelPart, ModelSpec
from unirl.core.types.array import Ragged
from unirl.core.types.inputs import Inputs
from unirl.core.types.sampling import LatentSamplingConfig
from unirl.model_host.chat_templates import bounded_templates
from unirl.model_host.diffusion.pipeline_config import PipelineConfig
from unirl.model_host.lazy_weights import CheckpointValues, empty_parameters, weight_files
from unirl.model_host.model_files import dtype_of, read_json, scheduler_config
from unirl.numerics.diffusion.schedules import MuRule, Variant, sigmas_from_scheduler_config

from .sequence_parallel import TokenSplit, split_transformer

__all__ = ["PipelineModel", "empty_component", "own_memory", "set_attention", "set_tiling"]

C = TypeVar("C", bound=PipelineConfig)


class PipelineModel(DiffusionModel):
    """A text-to-image or text-to-video model. A subclass provides `spec`, `max_sequence_length`, `encode_texts`,
    `velocity`, `latent_shape`, and how latents enter the VAE."""

    spec: ModelSpec
    max_sequence_length: int
    """Maximum number of prompt tokens."""
    token_side: int = 1
    """Patch size: side of a transformer token, in latent elements."""
    vae_of_videos: ClassVar[bool] = False
    """Whether the VAE takes images as videos of one frame."""
    mu_rule: ClassVar[MuRule] = "linear"
    """How a dynamic shift depends on the number of tokens."""
    experts: ClassVar[tuple[str, ...]] = ("transformer",)
    """Components that train. With more than one, `trainable` is a module that holds them under these names."""
    sequence: ClassVar[TokenSplit]
    """Places of the tokens that ranks may share; set by models whose spec says `splits_sequence`."""

    def __init__(
        self,
        config: C,
        *,
        find: Callable[[C], Path],
        load: Callable[[Path, C, Mapping[str, Any]], Any],
        transformer: Any,
        device: torch.device,
        lazy: bool,
        serves: frozenset[ModelPart] = MODEL_PARTS,
    ) -> None:
        """find: returns the folder of the checkpoint.  load: loads a `diffusers.DiffusionPipeline` from it, with a
        `transformer` and a `vae`, taking the components that it is given in place of the checkpoint's; all but the
        transformer is frozen.  transformer: its class, a `diffusers.ModelMixin`.
        lazy, serves: see `unirl.core.roles.Model`.

        Raises RecipeError for an invalid setting, before anything is looked up or loaded.
        """
        check_config(config, key="model")
        self._config = config
        self.folder = folder = find(config)
        # Again, for the files of a hub id.
        check_config(dataclasses.replace(config, path=str(folder)), key="model")
        name = self.spec.name
        self.device = device
        self.dtype = dtype_of(config.dtype, key="model.dtype", model=name)
        self.autocast = None if config.autocast is None else dtype_of(config.autocast, key="model.autocast", model=name)
        self.text_dtype = dtype_of(config.text_dtype, key="model.text_dtype", model=name)
        self.vae_dtype = dtype_of(config.vae_dtype, key="model.vae_dtype", model=name)
        self._values: dict[str, CheckpointValues] = {}
        self._serves = serves
        self._offloaded: frozenset[ModelPart] = frozenset()
        """Optional parts that are in CPU memory while they are idle."""
        self._on_device: frozenset[ModelPart] = frozenset()
        """Those of them that are on the device."""
        parts: dict[str, Any] = _unserved(folder, serves)
        for expert in self.experts if lazy else ():
            parts[expert] = empty = empty_component(transformer, folder / expert, dtype=self.dtype)
            files = weight_files(folder / expert, "diffusion_pytorch_model", variant=config.variant)
            self._values[expert] = CheckpointValues(empty, files)
        self.pipeline = load(folder, config, parts)
        self.scheduler_config = scheduler_config(folder)
        self.transformer: torch.nn.Module = self.pipeline.transformer
        self.vae: Any = self.pipeline.vae
        self._decode_batch = config.decode_batch
        set_tiling(self.vae, config)
        for expert in self.experts:
            set_attention(self.pipeline.components[expert], config)
        for part_name, part in self.pipeline.components.items():
            if isinstance(part, torch.nn.Module):
                part.eval()
                if part_name not in self.experts:
                    part.requires_grad_(False)
                if part not in parts.values():
                    part.to(device)

    @property
    def trainable(self) -> torch.nn.Module:
        return self.transformer

    def offload_idle(self, *parts: ModelPart) -> None:
        """From now on keep encoders and VAE, or these parts, in CPU memory while they are idle: they come to the device
        when they are called, and leave it with the next forward of the transformer, or when the others are called."""
        self._offloaded = self._on_device = frozenset(parts or self._serves) & self._serves
        self._bring()

    def _bring(self, *parts: ModelPart) -> None:
        """Have these optional parts on the device, and the others in CPU memory, where idle parts are offloaded."""
        wanted = self._offloaded & frozenset(parts)
        if self._on_device == wanted:
            return
        self._on_device = wanted
        others = {name: part for name, part in self.pipeline.components.items() if name not in self.experts}
        # Those that leave go first.
        for arrives in (False, True):
            for name, part in others.items():
                kind: ModelPart = "decode" if name == "vae" else "encode"
                if isinstance(part, torch.nn.Module) and kind in self._offloaded and (kind in wanted) == arrives:
                    part.to(self.device if arrives else "cpu")

    def fill(self, tensors: Mapping[str, Tensor]) -> None:
        """See `unirl.core.roles.Model`."""
        assert self._values, "the model was not built lazily"
        for expert, values in self._values.items():
            prefix = f"{expert}." if len(self._values) > 1 else ""
            own = {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
            values.fill(own)

    def split_sequence(self, mesh: Any) -> None:
        """See `unirl.core.roles.Model`; for those whose spec says `splits_sequence`."""
        for name in self.experts:
            split_transformer(self.pipeline.components[name], mesh, self.sequence)

    @torch.no_grad()
    def encode(self, inputs: Inputs, *, sampling: LatentSamplingConfig) -> Mapping[str, Ragged]:
        """Conditions of each input's text, [n, ...] in the dtype of the text encoders."""
        self._check_served("encode", "text encoders", "An engine that encodes prompts with the model")
        self._check_length(sampling)
        # Images among the inputs pass through the VAE.
        self._bring("encode", *(("decode",) if self.spec.inputs else ()))
        # Pipelines render templates of their tokenizers themselves.
        with bounded_templates():
            return self.encode_inputs(inputs, sampling=sampling)

    def encode_inputs(self, inputs: Inputs, *, sampling: LatentSamplingConfig) -> Mapping[str, Ragged]:
        """The same once the length is checked. Models that read images with the text override it."""
        return self.encode_texts(inputs.texts, sampling=sampling)

    @abstractmethod
    def encode_texts(self, texts: Sequence[str], *, sampling: LatentSamplingConfig) -> Mapping[str, Tensor]:
        """Conditions of these prompts, [n, ...], of `sampling.max_sequence_length` tokens each; longer prompts are
        truncated."""

    @property
    def compute_dtype(self) -> torch.dtype:
        """Dtype that the transformer computes in: its own, or that of autocast."""
        return self.autocast or self.dtype

    @contextmanager
    def computing(self) -> Generator[None]:
        """Context for a call of the transformer: autocast, if set. Encoders and VAE are idle."""
        self._bring()
        with torch.autocast(self.device.type, dtype=self.autocast) if self.autocast else nullcontext():
            yield

    def schedule(self, sampling: LatentSamplingConfig) -> Tensor:
        """The checkpoint's own schedule, on the CPU; `sampling.schedule.shift` replaces its shift."""
        shape = self.latent_shape(sampling)
        try:
            return sigmas_from_scheduler_config(
                self.scheduler_config,
                num_steps=sampling.num_inference_steps,
                image_seq_len=self.num_tokens(shape),
                shift=sampling.schedule.shift,
                variant=cast(Variant, sampling.schedule.variant),
                mu_rule=self.mu_rule,
            )
        except ValueError as error:
            raise RecipeError(f"sampling.schedule: {error}") from error

    def num_tokens(self, shape: Sequence[int]) -> int:
        """Transformer tokens of a latent of this shape."""
        *frames, height, width = shape[1:]
        return math.prod(frames) * (height // self.token_side) * (width // self.token_side)

    @abstractmethod
    def latent_shape(self, sampling: LatentSamplingConfig) -> tuple[int, ...]:
        """[C, H, W] of the latent of an image, [C, F, H, W] of a video. Raises RecipeError for an invalid size; see
        `checked_latent`."""

    def checked_latent(self, sampling: LatentSamplingConfig) -> tuple[int, ...]:
        """The same without C, by `sizes` of the config. Raises RecipeError for settings that the config says this
        checkpoint rules out."""
        for reason in self._config.unfit(sampling, self._part):
            raise RecipeError(str(reason.under("sampling")))
        self._check_length(sampling)
        sizes = self._config.sizes(self._part)
        assert sizes is not None, f"the config of model {self.spec.name!r} gives no sizes"
        return sizes.latent(sampling)

    def _check_length(self, sampling: LatentSamplingConfig) -> None:
        length, most = sampling.max_sequence_length, self.max_sequence_length
        if not 1 <= length <= most:
            raise RecipeError(f"sampling.max_sequence_length: got {length}; {self.spec.name} takes 1 to {most}.")

    def _part(self, name: str) -> Mapping[str, Any]:
        return (self.pipeline.components[name] if name else self.pipeline).config

    def decode(self, latents: Tensor) -> Tensor:
        """Images [N, 3, H, W] or videos [N, F, 3, H, W], fp32 in [0, 1], of latents [N, *latent_shape]. A video of one
        frame is an image. Differentiable.

        The VAE decodes `decode_batch` rows at a time, in the backward pass as well, where it decodes them again: the
        activations of one batch are kept.
        """
        user = "An algorithm whose loss decodes needs a differentiable reward (`Needs.reward`); an engine that decodes"
        self._check_served("decode", "VAE", user)
        self._bring("decode")
        dtype: torch.dtype = self.vae.dtype
        unscaled = self.vae_latents(latents.float()).to(dtype)
        chunks = torch.split(unscaled, self._decode_batch or max(len(latents), 1))
        decoded: Any = self._decoded
        if len(chunks) > 1 and unscaled.requires_grad:
            decoded = partial(cast(Any, checkpoint), decoded, use_reentrant=False, preserve_rng_state=False)
        return torch.cat([decoded(chunk) for chunk in chunks])

    def vae_latents(self, latents: Tensor) -> Tensor:
        """The VAE's input, fp32: denoised latents with the normalisation of its config undone, that of each channel
        if it has one, else scale and shift."""
        settings = self.vae.config
        if settings.get("latents_mean") is None:
            return latents / settings.scaling_factor + (settings.get("shift_factor") or 0.0)
        mean, std = self._channels(latents)
        return latents * std + mean

    @torch.no_grad()
    def latents_of(self, media: Tensor) -> Tensor:
        """Clean latents [N, *latent_shape] fp32 of images [N, 3, H, W] or videos [N, F, 3, H, W] in [0, 1]: the mode
        of the VAE's posterior, normalised. The inverse of `decode`, up to what the VAE loses.

        The VAE encodes `decode_batch` rows at a time.
        """
        self._check_served("decode", "VAE", "An engine that reads stored samples")
        self._bring("decode")
        pixels = 2 * media.to(self.device).float() - 1
        if media.ndim == 5:
            pixels = pixels.transpose(1, 2)
        elif self.vae_of_videos:
            pixels = pixels[:, :, None]
        chunks = torch.split(pixels.to(self.vae.dtype), self._decode_batch or max(len(media), 1))
        return self.of_vae(torch.cat([self.vae.encode(chunk).latent_dist.mode() for chunk in chunks]).float())

    def of_vae(self, encoded: Tensor) -> Tensor:
        """Clean latents, fp32, of the VAE's output: the inverse of `vae_latents`."""
        settings = self.vae.config
        if settings.get("latents_mean") is None:
            return (encoded - (settings.get("shift_factor") or 0.0)) * settings.scaling_factor
        mean, std = self._channels(encoded)
        return (encoded - mean) / std

    def _channels(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation of each channel of the VAE's latents, by its config."""
        ones = (1,) * (like.ndim - 2)
        mean, std = (like.new_tensor(self.vae.config[name]).view(-1, *ones) for name in ("latents_mean", "latents_std"))
        return mean, std

    def keep_timestep_fp32(self, embedder: torch.nn.Module) -> None:
        """Refuse forwards whose timestep, the first argument of this module, has lost precision on its way.

        A wrapper that casts the transformer's inputs, as FSDP2 does by default, would silently change sigma.
        """
        name = self.spec.name

        def check(_module: torch.nn.Module, args: tuple[Any, ...]) -> None:
            if args[0].dtype is not torch.float32:
                raise RuntimeError(
                    f"{name}: the timestep reached the transformer as {args[0].dtype}; it must stay float32. A wrapper "
                    "around the transformer casts its inputs; switch that off (FSDP2: cast_forward_inputs=False)."
                )

        embedder.register_forward_pre_hook(check)

    @contextmanager
    def without_encoders(self) -> Generator[None]:
        """Within the block `encode` may be called although the text encoders were not loaded: the caller has put
        something in their place."""
        before, self._serves = self._serves, MODEL_PARTS
        try:
            yield
        finally:
            self._serves = before

    def _check_served(self, part: ModelPart, title: str, user: str) -> None:
        if part not in self._serves:
            raise RunFailed(
                f"model {self.spec.name!r}: got a call of `{part}`, but this process was built without the {title}. "
                f"{user} names {part!r} in `EngineSpec.model_parts`."
            )

    def _decoded(self, latents: Tensor) -> Tensor:
        """Media of latents as the VAE takes them. VAEs of videos put the frames behind the channels."""
        media = (self.vae.decode(latents, return_dict=False)[0].float() / 2 + 0.5).clamp(0, 1)
        if media.ndim == 4:
            return media
        return media[:, :, 0] if media.shape[2] == 1 else media.transpose(1, 2)


def _unserved(folder: Path, serves: frozenset[ModelPart]) -> dict[str, torch.nn.Module]:
    """Encoders and VAE that this process does not use, by name, on the meta device.

    They are not left out, because a pipeline takes sizes from their configs: the scale of the VAE, layers of encoders.
    """
    place = folder / "model_index.json"
    index = read_json(place) if place.is_file() else {}
    names = [name for name in index if name == "vae" or name.startswith(("text_encoder", "image_encoder"))]
    result: dict[str, torch.nn.Module] = {}
    for name in names:
        library, kind = index[name]
        is_served = ("decode" if name == "vae" else "encode") in serves
        # Loading the pipeline reports what is missing.
        if is_served or library is None or not (folder / name / "config.json").is_file():
            continue
        cls = getattr(import_module(library), kind)
        with torch.device("meta"):
            if library == "diffusers":
                result[name] = cls.from_config(read_json(folder / name / "config.json"))
            else:
                result[name] = cls(
                    cls.config_class.from_pretrained(folder / name, local_files_only=True, trust_remote_code=False)
                )
    return result


def empty_component(cls: Any, folder: Path, *, dtype: torch.dtype) -> torch.nn.Module:
    """A diffusers module without values, its tensors in the dtypes that `from_pretrained(dtype=)` gives them."""
    with empty_parameters(dtype):
        module: Any = cls.from_config(read_json(folder / "config.json"))
    # As `from_pretrained` records it: external engines load the same folder.
    module.register_to_config(_name_or_path=str(folder))
    kept = set(cls._keep_in_fp32_modules or ())
    for name, tensor in module.state_dict(keep_vars=True).items():
        if tensor.is_floating_point():
            tensor.data = tensor.data.to(torch.float32 if kept & set(name.split(".")) else dtype)
    return module


def set_tiling(vae: Any, config: PipelineConfig) -> None:
    """Have a VAE of diffusers work in tiles if the config says so. Raises RecipeError for one that has none."""
    if config.vae_tiling and not hasattr(vae, "enable_tiling"):
        raise RecipeError(f"model.vae_tiling: {type(vae).__name__} of the checkpoint has no tiles. Set it to false.")
    if config.vae_tiling:
        vae.enable_tiling()


def set_attention(transformer: Any, config: PipelineConfig) -> None:
    """Have a transformer of diffusers compute attention as the config says. Raises RecipeError, key `model.attention`,
    where it cannot."""
    name = config.attention
    if name is None:
        return
    modules: Iterable[torch.nn.Module] = transformer.modules()
    processors = [module.processor for module in modules if hasattr(module, "processor")]
    if not any(hasattr(processor, "_attention_backend") for processor in processors):
        kinds = sorted({type(processor).__name__ for processor in processors}) or ["its own code"]
        raise RecipeError(
            f"model.attention: got {name!r}, but {type(transformer).__name__} of diffusers computes attention in "
            f"{', '.join(kinds)}, which has no choice of backend. Leave it out."
        )
    try:
        # It also becomes the choice of every other transformer in the process, which the context undoes.
        with import_module("diffusers.models.attention_dispatch").attention_backend():
            transformer.set_attention_backend(name)
    except (ImportError, OSError, RuntimeError, ValueError) as error:
        raise RecipeError(f"model.attention: got {name!r}, which diffusers cannot use here: {error}") from error


def own_memory(_module: torch.nn.Module, _args: tuple[Any, ...], output: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """A forward hook for a transformer whose output is a view, of which FSDP2 warns."""
    return tuple(part.clone() for part in output)
