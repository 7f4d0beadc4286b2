"""BAGEL as a text stage and as a diffusion stage of one transformer.

Source: BAGEL, arXiv 2505.14683, and its published inference code.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from unirl.core.errors import BatchError, RecipeError
from unirl.core.roles import DiffusionModel, TextModel, TokenBatch
from unirl.core.specs.check import check_config
from unirl.core.types.array import Ragged
from unirl.core.types.inputs import Inputs
from unirl.core.types.sampling import LatentSamplingConfig, TextSamplingConfig
from unirl.model_host.checkpoint_problems import past_embedding
from unirl.model_host.lazy_weights import CheckpointValues, empty_parameters, weight_files
from unirl.model_host.model_files import dtype_of, read_json
from unirl.model_host.tokens.causal_lm_files import load_tokenizer
from unirl.numerics.diffusion.schedules import static_sigmas

from .checkpoint import CONFIG, LANGUAGE, WEIGHTS, find, sizes_of
from .config import BagelConfig, ImageOptions, TextOptions, image_sizes
from .images import NAMES, Images
from .module import Bagel, Kept
from .plugin import SPEC
from .sequence import Context, Marks, layout
from .vision import grid_places

__all__ = ["SHIFT", "BagelModel", "build"]

SHIFT = 3.0
"""Shift of the schedule where `sampling.schedule.shift` is not set, that of the published inference code."""


def build(config: BagelConfig, *, device: Any, lazy: bool = False) -> BagelModel:
    """The model, its ViT and VAE frozen. Raises RecipeError when the checkpoint or a setting is wrong."""
    return BagelModel(config, device=torch.device(device), lazy=lazy)


class _Cache(NamedTuple):
    layers: list[Kept]
    shift: Tensor
    """[B, 1] int64, <= 0: an image has one position for all its tokens."""


class BagelModel(DiffusionModel, TextModel):
    """A `unirl.core.roles.DiffusionModel` and a `unirl.core.roles.TextModel`.

    Both read one sequence: the system prompt, source images, the prompt's text, the turns. Numbers of the vocabulary's
    size and above in its tokens stand for VAE latents and ViT features.
    Latents: [p p C, H / 16, W / 16], patches of the VAE's normalised latents.
    Conditions: `latents` n times [S, p p C] and `latent_places` n times [S], `features` n times [M, V] and
    `feature_places` n times [M], of the source images, S = M = 0 without any; those of an image also have `tokens`,
    n times [P], the sequence. None depends on weights that train.
    """

    spec = SPEC

    def __init__(self, config: BagelConfig, *, device: torch.device, lazy: bool) -> None:
        check_config(config, key="model")
        self.device = device
        self.folder = folder = find(config)
        name = SPEC.name
        dtype, *dtypes = (
            dtype_of(getattr(config, key), key=f"model.{key}", model=name)
            for key in ("dtype", "vision_dtype", "vae_dtype")
        )
        self.autocast = None if config.autocast is None else dtype_of(config.autocast, key="model.autocast", model=name)
        self.sizes, settings = sizes_of(folder), read_json(folder / CONFIG)
        self._image_sizes = image_sizes(settings)
        self._chunk = config.logits_chunk or None
        self.tokenizer: Any = load_tokenizer(folder)
        self.marks = _marks(self.tokenizer, folder, rows=self.sizes.vocab)
        self._longest: int = read_json(folder / LANGUAGE).get("max_position_embeddings", 2**31)
        files = weight_files(folder, WEIGHTS)
        with empty_parameters(dtype):
            self.transformer = Bagel(self.sizes).eval()
        self._values = CheckpointValues(self.transformer, files)
        if not lazy:
            self.transformer.to_empty(device=device)
            self._values.fill(self.transformer.state_dict(keep_vars=True))
        self.images = Images(
            folder,
            files=files,
            sizes=self.sizes,
            images=self._image_sizes,
            patch=settings.get("latent_patch_size", 2),
            batch=config.decode_batch,
            dtypes=(dtypes[0], dtypes[1]),
            device=device,
        )

    @property
    def trainable(self) -> torch.nn.Module:
        return self.transformer

    def fill(self, tensors: Mapping[str, Tensor]) -> None:
        """See `unirl.core.roles.Model`."""
        self._values.fill(tensors)

    # Text.

    @property
    def stop_tokens(self) -> tuple[int, ...]:
        return (self.marks.end,)

    @property
    def vocabulary(self) -> dict[str, int]:
        return dict(self.tokenizer.get_vocab())

    @property
    def pad_token(self) -> int:
        result: int | None = self.tokenizer.pad_token_id
        return self.marks.end if result is None else result

    @property
    def packs(self) -> bool:
        """False: a mask over a packed row would be quadratic in all its tokens."""
        return False

    @property
    def trunk(self) -> torch.nn.Module:
        """All of `trainable`: source images enter at its root."""
        return self.transformer

    @property
    def hidden_size(self) -> int:
        return self.sizes.width

    def prompt_tokens(self, inputs: Inputs, *, sampling: TextSamplingConfig) -> list[Tensor]:
        """The sequence of each input, and the mark that begins a text; without any marks of texts where `sampling.chat`
        is off.

        Raises RecipeError for settings that the format does not have, and for a sequence without tokens or with more
        than the checkpoint has positions. Raises DataError for an image that cannot be read.
        """
        if sampling.thinking is not None:
            raise RecipeError(
                f"sampling.thinking: got {sampling.thinking}, but the format has no such switch. Leave it unset, and "
                "ask for a thought in sampling.system_prompt."
            )
        if not sampling.chat and (sampling.system_prompt or inputs.turns is not None):
            what = "sampling.system_prompt" if sampling.system_prompt else "a stage that continues from others"
            raise RecipeError(f"sampling.chat: got false with {what}, which needs the marks of texts. Set it to true.")
        result: list[Tensor] = []
        for row in range(inputs.num_rows):
            context = self._context(inputs, row, sampling)
            if sampling.chat:
                context.tokens.append(self.marks.start)
            self._check_length(context.tokens, inputs.texts[row])
            result.append(torch.tensor(context.tokens, dtype=torch.int64))
        return result

    @torch.no_grad()
    def conditions(self, inputs: Inputs, *, sampling: TextSamplingConfig) -> Mapping[str, Ragged]:
        """Latents and features of each input's images."""
        return self.images.encoded([self._context(inputs, row, sampling).blocks for row in range(inputs.num_rows)])

    def texts(self, tokens: Sequence[Tensor]) -> list[str]:
        """Each sample's text, without special tokens."""
        decode: Any = self.tokenizer.decode
        return [
            decode(cast("Any", row).tolist(), skip_special_tokens=True, clean_up_tokenization_spaces=False)
            for row in tokens
        ]

    def score(
        self, batch: TokenBatch, *, temperature: float, with_entropy: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """Log-prob [T] fp32 of each target, and the entropy [T]."""
        return self._of_targets(
            "log_probs",
            batch,
            targets=batch.targets.to(self.device),
            temperature=temperature,
            with_entropy=with_entropy,
            chunk=self._chunk,
        )

    def hidden(self, batch: TokenBatch, *, trunk: torch.nn.Module | None = None) -> Tensor:
        """Last hidden state [T, D] at each target's position."""
        return self._of_targets("hidden", batch, trunk=trunk)

    @torch.no_grad()
    def next_logits(
        self,
        tokens: Tensor,
        *,
        positions: Tensor,
        attention_mask: Tensor,
        cache: Any,
        conditions: Mapping[str, Ragged] | None = None,
    ) -> tuple[Tensor, Any]:
        """Logits [B, V] fp32 after the last token, and the cache. Without conditions the tokens are text alone."""
        tokens, keep, positions = (one.to(self.device) for one in (tokens, attention_mask, positions))
        if cache is None:
            places, blocks = layout(tokens, keep, marks=self.marks)
            shift = (places - positions)[:, -1:]
            images = _joined(conditions)
        else:
            shift, images = cache.shift, {}
            places, blocks = positions + shift, torch.zeros_like(tokens)
        with self._precision():
            logits, layers = self.transformer(
                "logits",
                tokens=tokens,
                keep=keep,
                positions=places,
                blocks=blocks,
                images=self._sources(images, tokens),
                cache=None if cache is None else cache.layers,
            )
        return logits, _Cache(layers, shift)

    def select_cache(self, cache: Any, rows: Tensor) -> Any:
        rows = rows.to(self.device)
        return _Cache([(keys[rows], values[rows]) for keys, values in cache.layers], cache.shift[rows])

    def _of_targets(self, mode: str, batch: TokenBatch, *, trunk: torch.nn.Module | None = None, **ends: Any) -> Any:
        if batch.attention_mask is None:
            raise BatchError(f"model {SPEC.name!r}: got packed rows, expected padded ones, as `packs` is false.")
        if not batch.conditions:
            raise BatchError(
                f"model {SPEC.name!r}: got prompts without the conditions of their inputs, expected those of "
                "`conditions`."
            )
        tokens, keep = batch.tokens.to(self.device), batch.attention_mask.to(self.device)
        positions, blocks = layout(tokens, keep, marks=self.marks)
        with self._precision():
            return (self.transformer if trunk is None else trunk)(
                mode,
                tokens=tokens,
                keep=keep,
                positions=positions,
                blocks=blocks,
                images=self._sources(_joined(batch.conditions), tokens),
                index=batch.target_index.to(self.device),
                **ends,
            )

    # Images.

    @torch.no_grad()
    def encode(self, inputs: Inputs, *, sampling: LatentSamplingConfig) -> Mapping[str, Ragged]:
        """Conditions of each input. Raises DataError for an image that cannot be read."""
        contexts = [self._context(inputs, row, sampling) for row in range(inputs.num_rows)]
        for context, text in zip(contexts, inputs.texts, strict=True):
            self._check_length(context.tokens, text, is_prompt=False)
        tokens = tuple(torch.tensor(one.tokens, dtype=torch.int64, device=self.device) for one in contexts)
        return {"tokens": tokens, **self.images.encoded([context.blocks for context in contexts])}

    def velocity(self, x: Tensor, sigma: Tensor, conditions: Mapping[str, Any]) -> Tensor:
        """Velocity x1 - x0 of latents [B, p p C, h, w], each row behind its own sequence."""
        contexts: Sequence[Tensor] = conditions["tokens"]
        rows, _, height, width = x.shape
        longest, count = max(map(len, contexts)), height * width
        tokens = torch.full((rows, longest + count + 2), self.pad_token, dtype=torch.int64)
        keep = torch.ones(tokens.shape, dtype=torch.bool)
        for row, context in enumerate(contexts):
            tokens[row, : len(context)] = context
            keep[row, len(context) : longest] = False
        tokens[:, longest], tokens[:, -1] = self.marks.image_start, self.marks.image_end
        tokens[:, longest + 1 : -1] = self.marks.latent
        positions, blocks = layout(tokens, keep, marks=self.marks)
        places = grid_places(height, width, side=self.sizes.latent_side).to(self.device)
        noisy = x.flatten(2).transpose(1, 2)
        sources: Sequence[Tensor] = conditions["latents"]
        lengths = [(len(source), count) for source in sources]
        # Sources are at noise level 0, the first of `timesteps`.
        levels = [level for row in range(rows) for level in (0, row + 1)]
        sizes = torch.tensor(lengths).flatten()
        is_target = torch.tensor([False, True] * rows).repeat_interleave(sizes)
        images = {
            "latents": torch.cat([part for row in range(rows) for part in (sources[row].to(noisy), noisy[row])]),
            "latent_places": torch.cat([part for own in conditions["latent_places"] for part in (own, places)]),
            "timesteps": torch.cat([sigma.new_zeros(1), sigma]).float(),
            "levels": torch.tensor(levels).repeat_interleave(sizes).to(self.device),
            **{name: torch.cat([*conditions[name]]) for name in ("features", "feature_places")},
        }
        with self._precision():
            output: Tensor = self.transformer(
                "velocity",
                tokens=tokens.to(self.device),
                keep=keep.to(self.device),
                positions=positions.to(self.device),
                blocks=blocks.to(self.device),
                images=images,
                index=is_target.nonzero()[:, 0].to(self.device),
            )
        return output.float().view(rows, count, -1).transpose(1, 2).reshape(x.shape)

    def schedule(self, sampling: LatentSamplingConfig) -> Tensor:
        """`num_inference_steps` steps of a uniform grid, shifted; the published `num_timesteps` counts its ends, one
        more."""
        if sampling.schedule.variant != "exact":
            raise RecipeError(
                f"sampling.schedule.variant: got {sampling.schedule.variant!r}, expected 'exact': no pipeline of "
                "diffusers has another schedule for this model."
            )
        return static_sigmas(sampling.num_inference_steps, shift=sampling.schedule.shift or SHIFT)

    def latent_shape(self, sampling: LatentSamplingConfig) -> tuple[int, ...]:
        """[p p C, H / 16, W / 16]. Raises RecipeError, with the nearest size that fits, for any other."""
        for reason in self._image_sizes.problems(sampling):
            raise RecipeError(str(reason.under("sampling")))
        return (self.sizes.latent, *self._image_sizes.latent(sampling))

    def decode(self, latents: Tensor) -> Tensor:
        """Images [N, 3, H, W] fp32 in [0, 1]. Differentiable."""
        return self.images.decode(latents)

    @torch.no_grad()
    def latents_of(self, media: Tensor) -> Tensor:
        """Clean latents of images [N, 3, H, W] in [0, 1]: the mean of the VAE's posterior, normalised."""
        return self.images.latents(2 * media.to(self.device).float() - 1)

    # Sequences.

    def _context(self, inputs: Inputs, row: int, sampling: TextSamplingConfig | LatentSamplingConfig) -> Context:
        """The sequence of an input: the one place that makes it."""
        text, turns = inputs.texts[row], () if inputs.turns is None else inputs.turns[row]
        context = Context(marks=self.marks, tokenize=self._tokenized, sizes=self.images.tokens)
        with_latents, chat = True, True
        if isinstance(sampling, TextSamplingConfig):
            system, chat = sampling.system_prompt, sampling.chat
            with_latents = TextOptions(**sampling.options).sources == "all"
        else:
            system = ImageOptions(**sampling.options).system_prompt
        context.add_text(system)
        for ref in inputs.media[row]:
            context.add_image(ref, with_latents=with_latents)
        if chat:
            context.add_text(text)
        else:
            context.tokens += self._tokenized(text)
        context.add_turns(turns, with_latents=with_latents)
        return context

    def _tokenized(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def _check_length(self, tokens: Sequence[int], text: str, *, is_prompt: bool = True) -> None:
        if is_prompt and not tokens:
            raise RecipeError(f"data: prompt {text!r} has no tokens; write something.")
        if len(tokens) >= self._longest:
            raise RecipeError(
                f"data: prompt {text[:40]!r}... has {len(tokens)} tokens with its images and turns; the checkpoint has "
                f"{self._longest} positions (max_position_embeddings). Leave it out of the prompt file."
            )

    def _sources(self, images: dict[str, Tensor], tokens: Tensor) -> dict[str, Tensor]:
        """Images of a batch without noise, as `Bagel` takes them; none where it has none. tokens: [B, L]."""
        if not any(map(len, images.values())):
            return {}
        latents = images["latents"]
        return {
            **images,
            "timesteps": torch.zeros(1, device=self.device),
            "levels": torch.zeros(len(latents), dtype=torch.int64, device=self.device),
        }

    def _precision(self) -> AbstractContextManager[Any]:
        return torch.autocast(self.device.type, dtype=self.autocast) if self.autocast else nullcontext()


def _marks(tokenizer: Any, folder: Path, *, rows: int) -> Marks:
    """Raises RecipeError, key `model.path`, for a tokenizer that lacks one or does not fit the embedding."""
    vocabulary: dict[str, int] = tokenizer.get_vocab()
    if problem := past_embedding(vocabulary, rows=rows, media=frozenset(), where=str(folder)):
        raise RecipeError(f"model.path: {problem}")
    names = {"start": "im_start", "end": "im_end", "image_start": "vision_start", "image_end": "vision_end"}
    ids = {key: vocabulary.get(f"<|{name}|>") for key, name in names.items()}
    if missing := [f"<|{names[key]}|>" for key, token in ids.items() if token is None]:
        raise RecipeError(
            f"model.path: the tokenizer in {str(folder)!r} lacks {', '.join(missing)}, which mark texts and images. "
            "Use the checkpoint's own tokenizer."
        )
    return Marks(**cast("dict[str, int]", ids), latent=rows, feature=rows + 1)


def _joined(conditions: Mapping[str, Any] | None) -> dict[str, Tensor]:
    """Images of all rows, after each other."""
    return {name: torch.cat([*conditions[name]]) for name in NAMES} if conditions else {}
