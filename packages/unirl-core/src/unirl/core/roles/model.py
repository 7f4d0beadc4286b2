"""What a model does: it is plain torch, and knows nothing of engines or trainers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, cast

from ..types.array import Array, Module

if TYPE_CHECKING:
    from ..specs.spec import ModelSpec
    from ..types.inputs import Inputs
    from ..types.sampling import LatentSamplingConfig, TextSamplingConfig

__all__ = ["DiffusionModel", "Model", "TextModel", "TokenBatch", "diffusion_model", "text_model"]


class Model(Protocol):
    """What every model has. Build: `build(config, *, device) -> Model`, a `DiffusionModel` or a `TextModel`."""

    spec: ModelSpec
    device: Any

    @property
    def trainable(self) -> Module:
        """The module that trains. A backend may wrap its blocks in place, never replace it."""
        ...


class DiffusionModel(Model, Protocol):
    """A denoiser with its encoders and decoder."""

    def encode(self, inputs: Inputs, *, sampling: LatentSamplingConfig) -> Mapping[str, Array]:
        """Conditions of each input: name -> [len(inputs), ...]. No gradient.

        inputs: distinct ones. Media among them have roles that `ModelSpec.inputs` names.
        """
        ...

    def velocity(self, x: Array, sigma: Array, conditions: Mapping[str, Array]) -> Array:
        """Velocity x1 - x0 at noise level sigma.

        x: [B, ...] fp32.  sigma: [B] in [0, 1].  conditions: name -> [B, ...].  Returns [B, ...] fp32.
        """
        ...

    def schedule(self, sampling: LatentSamplingConfig) -> Array:
        """Sigmas [T+1], fp32, falling, ending in 0."""
        ...

    def latent_shape(self, sampling: LatentSamplingConfig) -> tuple[int, ...]:
        """Shape of one sample's latent."""
        ...

    def decode(self, latents: Array) -> Array:
        """Media of latents [N, ...]: images [N, 3, H, W] or videos [N, F, 3, H, W], fp32 in [0, 1]."""
        ...


@dataclass(frozen=True, kw_only=True)
class TokenBatch:
    """Rows of prompt and generated tokens as a causal model reads them, padded or packed.

    The targets are the generated tokens of all rows after each other, the same for both layouts.
    """

    tokens: Array
    """[B, S] int64. Padded: B = n rows. Packed: B = 1, and S the sum of their lengths."""
    positions: Array
    """[B, S] int64, from 0 at the first token of each row."""
    attention_mask: Array | None
    """[n, S] bool, False for padding; None when packed."""
    cu_seqlens: Array | None
    """[n + 1] int32, offsets of the packed rows, from 0; None when padded."""
    max_length: int
    """Tokens of the longest row, prompt included."""
    target_index: Array
    """[T] int64. Where in the flattened [B * S] the prediction of each target is made: one before its own place."""
    targets: Array
    """[T] int64. The generated tokens."""
    rows: Array
    """[T] int64. The row of each target, rising."""
    lengths: tuple[int, ...]
    """Generated tokens of each row; `to_rows` takes them."""


class TextModel(Model, Protocol):
    """A decoder of tokens with its tokenizer."""

    @property
    def stop_tokens(self) -> tuple[int, ...]:
        """Tokens that end a text, by the checkpoint's own settings."""
        ...

    @property
    def pad_token(self) -> int:
        """What fills rows up; never looked at."""
        ...

    @property
    def packs(self) -> bool:
        """`score` takes packed batches: its attention keeps the samples of a row apart."""
        ...

    def prompt_tokens(self, inputs: Inputs, *, sampling: TextSamplingConfig) -> list[Array]:
        """Tokens [P] int64 of each input on the CPU, with the chat template as `sampling` asks; P >= 1.

        inputs: distinct ones. Media among them have roles that `ModelSpec.inputs` names.
        """
        ...

    def texts(self, tokens: Sequence[Array]) -> list[str]:
        """Each sample's tokens [L] as text, without special tokens."""
        ...

    def score(self, batch: TokenBatch, *, temperature: float, with_entropy: bool = False) -> tuple[Array, Array | None]:
        """Log-prob [T] fp32 of each target under softmax(logits / temperature), and the entropy [T] of that.

        With gradient, unless in no_grad. Never holds [B, L, V].
        """
        ...

    @property
    def trunk(self) -> Module:
        """The part of `trainable` whose outputs are the hidden states, without the output projection."""
        ...

    def hidden(self, batch: TokenBatch, *, trunk: Module | None = None) -> Array:
        """Last hidden state [T, D] at each target's position, what the output projection would be given there.

        trunk: to run in place of its own, a copy of it, such as that of a critic. With gradient, unless in no_grad.
        """
        ...

    def next_logits(self, tokens: Array, *, positions: Array, attention_mask: Array, cache: Any) -> tuple[Array, Any]:
        """Logits [B, V] fp32 after the last of tokens [B, L], and the cache with them in it.

        positions: [B, L].  attention_mask: [B, cached + L] bool, False at padding on the left.  cache: what the call
        before gave; None at the start. No gradient.
        """
        ...

    def select_cache(self, cache: Any, rows: Array) -> Any:
        """The cache of these rows alone: the others have ended. rows: [B'] int64."""
        ...


def diffusion_model(model: Model) -> DiffusionModel:
    """The model of a latent track, as what its spec declares."""
    assert "latent" in model.spec.tracks.values(), f"model {model.spec.name!r} has no latent track"
    return cast("DiffusionModel", model)


def text_model(model: Model) -> TextModel:
    """The model of a text track, as what its spec declares."""
    assert "text" in model.spec.tracks.values(), f"model {model.spec.name!r} has no text track"
    return cast("TextModel", model)
