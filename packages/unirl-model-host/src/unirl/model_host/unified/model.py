"""Models that generate text and images in one sequence by one root module."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor
from unirl.core.errors import BatchError, RecipeError
from unirl.core.roles import DiffusionModel, TextModel, TokenBatch
from unirl.core.specs.check import check_config
from unirl.core.types.array import Ragged
from unirl.core.types.inputs import Inputs
from unirl.core.types.sampling import LatentSamplingConfig, TextSamplingConfig
from unirl.numerics.diffusion.schedules import static_sigmas

from ..checkpoint_problems import past_embedding
from ..lazy_weights import CheckpointValues, Pieces, empty_parameters
from ..model_files import dtype_of
from ..tokens.causal_lm_files import load_tokenizer
from .config import UnifiedConfig
from .encoder import DTYPES_OF_IMAGES, SequenceEncoder
from .layers import KeptLayers, PublishedModule
from .sequence import check_length

__all__ = ["SHIFT", "UnifiedModel"]

SHIFT = 3.0
"""Shift of the schedule where `sampling.schedule.shift` is not set, as in the published inference code."""


class _Cache(NamedTuple):
    kept: KeptLayers
    shift: Tensor
    """[B, 1] int64, what an image moves the positions of later tokens by."""


E = TypeVar("E", bound=SequenceEncoder[Any])


class UnifiedModel(DiffusionModel, TextModel, Generic[E]):
    """A `unirl.core.roles.DiffusionModel` and a `unirl.core.roles.TextModel` of one sequence, which its encoder makes.

    Its conditions are those of `Frozen.encoded`; those of an image also have `tokens`, n times [P], the sequence. None
    depends on weights that train.
    """

    encoder: E

    def __init__(
        self,
        config: UnifiedConfig,
        *,
        folder: Path,
        files: Sequence[Path],
        make: Callable[[], PublishedModule],
        encoder: Callable[..., E],
        rows: int,
        pieces: Pieces | None = None,
        device: torch.device,
        lazy: bool,
    ) -> None:
        """files: of the weights.  make: builds the transformer; it is called without allocating its parameters.
        encoder: its class, see `encoder_of`.  rows: of its embedding.  pieces: see `CheckpointValues`.

        Raises RecipeError when the checkpoint or a setting is wrong.
        """
        check_config(config, key="model")
        self.device, self.folder = device, folder
        name, auto = self.spec.name, config.autocast
        self.autocast = None if auto is None else dtype_of(auto, key="model.autocast", model=name)
        self._chunk = config.logits_chunk or None
        self.tokenizer: Any = load_tokenizer(folder)
        if problem := past_embedding(self.vocabulary, rows=rows, media=frozenset(), where=str(folder)):
            raise RecipeError(f"model.path: {problem}")
        with empty_parameters(dtype_of(config.dtype, key="model.dtype", model=name)):
            self.transformer = make().eval()
        self._values = self.transformer.values = CheckpointValues(self.transformer, files, pieces=pieces)
        if not lazy:
            self.transformer.to_empty(device=device)
            self._values.fill(self.transformer.state_dict(keep_vars=True))
        dtypes = tuple(dtype_of(getattr(config, key), key=f"model.{key}", model=name) for key in DTYPES_OF_IMAGES)
        self.encoder = encoder(
            folder, files=files, tokenizer=self.tokenizer, batch=config.decode_batch, dtypes=dtypes, device=device
        )

    @abstractmethod
    def _layout(self, tokens: Tensor, keep: Tensor) -> tuple[Tensor, Tensor]:
        """Positions [B, L] and numbers of images [B, L], 0 for text, of sequences [B, L] with padding anywhere.

        keep: [B, L] bool, False at padding."""

    @abstractmethod
    def _sources(self, conditions: Mapping[str, Any]) -> dict[str, Any]:
        """The images in the conditions of a batch, as the transformer takes them; empty where it has none."""

    @property
    def trainable(self) -> torch.nn.Module:
        return self.transformer

    def fill(self, tensors: Mapping[str, Tensor]) -> None:
        """See `unirl.core.roles.Model`."""
        self._values.fill(tensors)

    # Text.

    @property
    def vocabulary(self) -> dict[str, int]:
        return dict(self.tokenizer.get_vocab())

    @property
    def pad_token(self) -> int:
        result: int | None = self.tokenizer.pad_token_id
        return self.stop_tokens[0] if result is None else result

    @property
    def packs(self) -> bool:
        """False: a mask over a packed row would be quadratic in all its tokens."""
        return False

    @property
    def trunk(self) -> torch.nn.Module:
        """All of `trainable`: source images enter at its root."""
        return self.transformer

    def prompt_tokens(self, inputs: Inputs, *, sampling: TextSamplingConfig) -> list[Tensor]:
        """The sequence of each input.

        Raises RecipeError for settings that the format does not have, and for a sequence without tokens or with more
        than the checkpoint has positions. Raises DataError for an image that cannot be read.
        """
        result: list[Tensor] = []
        for row in range(inputs.num_rows):
            tokens = self.encoder.sequence(inputs, row, sampling).tokens
            if not tokens:
                raise RecipeError(f"data: prompt {inputs.texts[row]!r} has no tokens; write something.")
            check_length(tokens, inputs.texts[row], longest=self.encoder.longest)
            result.append(torch.tensor(tokens, dtype=torch.int64))
        return result

    @torch.no_grad()
    def conditions(self, inputs: Inputs, *, sampling: TextSamplingConfig) -> Mapping[str, Ragged]:
        """Those of each input's images."""
        return self.encoder.images.encoded(
            [self.encoder.sequence(inputs, row, sampling).blocks for row in range(inputs.num_rows)]
        )

    def allowed(self, tokens: Tensor, *, options: Mapping[str, Any]) -> Mapping[int, Tensor]:
        """See `SequenceEncoder.allowed`."""
        return self.encoder.allowed(tokens, options=options)

    def texts(self, tokens: Sequence[Tensor]) -> list[str]:
        """Each sample's text, without special tokens."""
        return self.encoder.texts(tokens)

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
            allowed=batch.allowed,
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
        options: Mapping[str, Any] | None = None,
    ) -> tuple[Tensor, Any]:
        """Logits [B, V] fp32 after the last token, and the cache. Without conditions the tokens are text alone. Options
        may restrict tokens (`allowed`); logits do not depend on any."""
        del options
        tokens, keep, positions = (one.to(self.device) for one in (tokens, attention_mask, positions))
        if cache is None:
            places, blocks = self._layout(tokens, keep)
            shift, images = (places - positions)[:, -1:], self._sources(conditions or {})
        else:
            places, blocks = positions + cache.shift, torch.zeros_like(tokens)
            shift, images = cache.shift, {}
        with self._precision():
            logits, kept = self.transformer(
                "logits",
                tokens=tokens,
                keep=keep,
                positions=places,
                blocks=blocks,
                images=images,
                cache=None if cache is None else cache.kept,
            )
        return logits, _Cache(kept, shift)

    def select_cache(self, cache: Any, rows: Tensor) -> Any:
        rows = rows.to(self.device)
        kept = KeptLayers([(keys[rows], values[rows]) for keys, values in cache.kept.layers])
        return _Cache(kept, cache.shift[rows])

    def _of_targets(self, mode: str, batch: TokenBatch, *, trunk: torch.nn.Module | None = None, **ends: Any) -> Any:
        name = self.spec.name
        if batch.attention_mask is None:
            raise BatchError(f"model {name!r}: got packed rows, expected padded ones, as `packs` is false.")
        if not batch.conditions:
            raise BatchError(
                f"model {name!r}: got prompts without the conditions of their inputs, expected those of `conditions`."
            )
        tokens, keep = batch.tokens.to(self.device), batch.attention_mask.to(self.device)
        positions, blocks = self._layout(tokens, keep)
        with self._precision():
            return (self.transformer if trunk is None else trunk)(
                mode,
                tokens=tokens,
                keep=keep,
                positions=positions,
                blocks=blocks,
                images=self._sources(batch.conditions),
                index=batch.target_index.to(self.device),
                **ends,
            )

    # Images.

    def latent_shape(self, sampling: LatentSamplingConfig) -> tuple[int, ...]:
        """See `SequenceEncoder.latent_shape`."""
        return self.encoder.latent_shape(sampling)

    def encode(self, inputs: Inputs, *, sampling: LatentSamplingConfig) -> Mapping[str, Ragged]:
        """Conditions of each input. Raises DataError for an image that cannot be read."""
        return self.encoder.encode(inputs, sampling)

    def schedule(self, sampling: LatentSamplingConfig) -> Tensor:
        """`num_inference_steps` steps of a uniform grid, shifted."""
        if sampling.schedule.variant != "exact":
            raise RecipeError(
                f"sampling.schedule.variant: got {sampling.schedule.variant!r}, expected 'exact': no pipeline of "
                "diffusers has another schedule for this model."
            )
        return static_sigmas(sampling.num_inference_steps, shift=sampling.schedule.shift or SHIFT)

    def decode(self, latents: Tensor) -> Tensor:
        """Images [N, 3, H, W] fp32 in [0, 1]. Differentiable."""
        return self.encoder.decode(latents)

    @torch.no_grad()
    def latents_of(self, media: Tensor) -> Tensor:
        """Clean latents of images [N, 3, H, W] in [0, 1]: the mean of the VAE's posterior, normalised."""
        return self.encoder.images.latents(2 * media.to(self.device).float() - 1)

    def _behind(self, contexts: Sequence[Tensor], generated: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Tokens [B, L] and their mask of sequences [P], padded on the right, each followed by the same tokens."""
        longest = max(map(len, contexts))
        tokens = torch.full((len(contexts), longest + len(generated)), self.pad_token, dtype=torch.int64)
        keep = torch.ones(tokens.shape, dtype=torch.bool)
        for row, context in enumerate(contexts):
            tokens[row, : len(context)] = context
            keep[row, len(context) : longest] = False
        tokens[:, longest:] = torch.tensor(generated)
        return tokens.to(self.device), keep.to(self.device)

    def _precision(self) -> AbstractContextManager[Any]:
        return torch.autocast(self.device.type, dtype=self.autocast) if self.autocast else nullcontext()
