"""Models: plain torch, which knows nothing of engines or trainers."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol, cast

from ..errors import RecipeError
from ..types.array import Array, Module, Ragged
from .absent import absent

if TYPE_CHECKING:
    from ..specs.spec import ModelSpec
    from ..types.inputs import Inputs
    from ..types.media import Media
    from ..types.sampling import LatentSamplingConfig, TextSamplingConfig

__all__ = [
    "DiffusionModel",
    "DivergenceKind",
    "Model",
    "OutputHead",
    "TextModel",
    "TokenBatch",
    "diffusion_model",
    "text_model",
]


class Model(Protocol):
    """Base of both kinds of model. Build: `build(config, *, device) -> Model`, a `DiffusionModel` or a `TextModel`.

    With the capability `lazy-build` it also takes `lazy`: if true, the parameters of `trainable` are on the meta
    device, without values, in the dtypes that they have otherwise. Buffers, and all that is outside of it, have their
    values. The backend shards `trainable` and then calls `fill`. With `optional_parts` in its spec it also takes
    `serves`, a frozenset of those to load; by default all of them. Using another one raises RunFailed; all else,
    schedule and shapes included, is the same without it.

    Inherit the role: methods that the spec does not promise then have defaults, which raise an error that names them.
    """

    spec: ModelSpec
    device: Any

    @property
    @abstractmethod
    def trainable(self) -> Module:
        """The module that trains: those of its parameters that require a gradient when a backend takes it. The others
        stay as they are. A backend may wrap its blocks in place, never replace it.

        All use of its parameters is inside a call of this module itself: a backend that shards it gathers them in hooks
        of that call.
        """

    def fill(self, tensors: Mapping[str, Array]) -> None:
        """With `lazy-build`: set these parameters and persistent buffers of `trainable`, or this rank's
        shards of them, to the values of the checkpoint.

        tensors: by their names in the module as it was built, any of them, in any floating dtype. Values are those of a
        model that is not lazy: rounded to its dtypes first. Not collective; no rank holds more than a piece of a tensor
        besides its shards.
        """
        raise absent(f"model {self.spec.name!r}", self, "fill", "with the capability 'lazy-build'")

    def verify(self) -> None:
        """With `verifies_values`: compare what the filled `trainable` computes with a reference for each checkpoint,
        beyond the tests of the model.

        Called once a lazily built model has its values, before anything else runs it; not built lazily, it has done so
        when `build` returns. Collective: every rank calls it, and runs `trainable` equally often.
        Raises RecipeError, key `model.path`, with the difference.
        """
        raise absent(f"model {self.spec.name!r}", self, "verify", "whose spec states `verifies_values`")

    def split_sequence(self, mesh: Any) -> None:
        """With `splits_sequence`: split the sequence of every later forward of `trainable` over ranks, in place.

        mesh: a `torch.distributed.DeviceMesh` of one dim. Its ranks get the same rows and call `trainable` equally
        often. Outputs are whole, and the same on all; the gradient of a rank is its share, for every parameter: those
        of the ranks add up to the whole gradient. Called once, before `trainable` is sharded.
        Raises RecipeError, key `backend.mesh.sequence`, for attention heads that the ranks cannot share evenly, before
        anything changes; a forward raises it for such a sequence.
        """
        raise absent(f"model {self.spec.name!r}", self, "split_sequence", "whose spec states `splits_sequence`")


class DiffusionModel(Model, Protocol):
    """A denoiser with its encoders and decoder."""

    @abstractmethod
    def encode(self, inputs: Inputs, *, sampling: LatentSamplingConfig) -> Mapping[str, Ragged]:
        """Conditions of each input: name -> [len(inputs), ...], or as many arrays of any shape. No gradient.

        They never depend on trainable parameters: conditions are kept across steps and replayed, so hidden states that
        `trainable` computes would be stale and get no gradient.
        inputs: distinct ones. Media among them have roles that `ModelSpec.inputs` names.
        """

    @abstractmethod
    def velocity(self, x: Array, sigma: Array, conditions: Mapping[str, Any]) -> Array:
        """Velocity x1 - x0 at noise level sigma.

        x: [B, ...] fp32.  sigma: [B] in [0, 1].  conditions: as `encode` gives them, one entry per row.
        Returns [B, ...] fp32.
        """

    @abstractmethod
    def schedule(self, sampling: LatentSamplingConfig) -> Array:
        """Sigmas [T+1], fp32, falling, ending in 0."""

    @abstractmethod
    def latent_shape(self, sampling: LatentSamplingConfig) -> tuple[int, ...]:
        """Shape of one sample's latent."""

    @abstractmethod
    def decode(self, latents: Array) -> Array:
        """Media of latents [N, ...], fp32: images [N, 3, H, W] or videos [N, F, 3, H, W] in [0, 1]; or, with `media` in
        its spec, sound [N, C, S] in [-1, 1]."""

    def num_cut(self, texts: Sequence[str], *, sampling: LatentSamplingConfig) -> int | None:
        """How many of these texts are longer than its encoder reads, so that their ends have no effect. None of models
        that refuse such texts, or cannot tell."""
        return None

    def latents_of(self, media: Array) -> Array:
        """Clean latents [N, ...] fp32 of media as `decode` gives them, the most likely ones. No gradient.

        For engines that read stored samples.
        """
        raise RecipeError(
            f"model: got {self.spec.name!r}, which does not implement latents_of(); expected one that encodes stored "
            "samples."
        )


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
    conditions: Mapping[str, Ragged] = field(default_factory=lambda: dict[str, Ragged]())
    """name -> one entry per row, of models that read media; see `TextModel.conditions`."""
    options: Mapping[str, Any] = field(default_factory=lambda: dict[str, Any]())
    """Options that the rows were generated with, of models whose logits depend on some."""
    allowed: Mapping[int, Array] = field(default_factory=lambda: dict[int, Array]())
    """Number of a target -> ids [K] int64 that its token was chosen from, of models that restrict some; the others are
    chosen from the whole vocabulary. Log-probs, entropies and divergences are over these alone."""


DivergenceKind = Literal["forward", "reverse", "jensen"]
"""KL(teacher || student), KL(student || teacher), or the generalised Jensen-Shannon divergence between them."""


@dataclass(frozen=True, kw_only=True)
class OutputHead:
    """Parts of a model's distributions over its next tokens, without their logits."""

    hidden: Array
    """[T, D] last hidden states at each target's position."""
    weight: Array
    """[V, D] output projection. Valid after the forward, whatever shards or swaps the weights."""


class TextModel(Model, Protocol):
    """A decoder of tokens with its tokenizer."""

    @property
    @abstractmethod
    def stop_tokens(self) -> tuple[int, ...]:
        """Tokens that end a text, by the checkpoint's own settings."""

    @property
    @abstractmethod
    def vocabulary(self) -> Mapping[str, int]:
        """Every token with its id. Read where another model is the reference policy: the two must be equal."""

    @property
    @abstractmethod
    def pad_token(self) -> int:
        """Token that rows are padded with; always masked."""

    @property
    @abstractmethod
    def packs(self) -> bool:
        """`score` takes packed batches: its attention keeps the samples of a row apart."""

    @abstractmethod
    def prompt_tokens(self, inputs: Inputs, *, sampling: TextSamplingConfig) -> list[Array]:
        """Tokens [P] int64 of each input on the CPU, with the chat template as `sampling` asks; P >= 1.

        inputs: distinct ones. Media among them have roles that `ModelSpec.inputs` names.
        """

    @abstractmethod
    def texts(self, tokens: Sequence[Array]) -> list[str]:
        """Each sample's tokens [L] as text, without special tokens."""

    def observation_tokens(
        self, texts: Sequence[str], *, after: Sequence[Array], role: str, sampling: TextSamplingConfig
    ) -> list[Array]:
        """With the capability `observations`: tokens [L] int64 on the CPU, L >= 1, that put each text behind a
        completion as the next message of the conversation, and begin the completion that follows: as the chat template
        writes them, the end of the completion included where it has none; with `sampling.chat` off the text alone.

        after: tokens [L] int64 of those completions.  role: of the message, `user` or `tool`.
        """
        raise absent(f"model {self.spec.name!r}", self, "observation_tokens", "with the capability 'observations'")

    def completion_length(self, *, sampling: TextSamplingConfig) -> int | None:
        """Tokens of every completion where the model fixes them, such as those of an image's grid; None where stop
        tokens end it. Asked of text tracks with a medium in `ModelSpec.media`."""
        return None

    def media_of(self, tokens: Sequence[Array], *, sampling: TextSamplingConfig) -> Media:
        """With a medium in `ModelSpec.media` for a text track: what each sample's tokens [L] become. No gradient."""
        raise absent(f"model {self.spec.name!r}", self, "media_of", "whose spec states `media`")

    @abstractmethod
    def score(self, batch: TokenBatch, *, temperature: float, with_entropy: bool = False) -> tuple[Array, Array | None]:
        """Log-prob [T] fp32 of each target under softmax(logits / temperature), over what `batch.allowed` says, and the
        entropy [T] of that.

        With gradient, unless in no_grad. Never holds [B, L, V].
        """

    @property
    @abstractmethod
    def trunk(self) -> Module:
        """The part of `trainable` whose outputs are the hidden states, without the output projection."""

    @property
    @abstractmethod
    def hidden_size(self) -> int:
        """Size D of the hidden states."""

    @abstractmethod
    def hidden(self, batch: TokenBatch, *, trunk: Module | None = None) -> Array:
        """Last hidden state [T, D] at each target's position, the input of the output projection.

        trunk: a copy to run in place of the model's own, such as that of a critic. With gradient, unless in no_grad.
        """

    @abstractmethod
    def next_logits(self, tokens: Array, *, positions: Array, attention_mask: Array, cache: Any) -> tuple[Array, Any]:
        """Logits [B, V] fp32 after the last of tokens [B, L], and the cache with them in it.

        positions: [B, L].  attention_mask: [B, cached + L] bool, False at padding on the left.  cache: what the call
        before gave; None at the start. No gradient. A model that reads media also takes `conditions`, one entry per
        row: with the prompts alone, where `cache` is None; None afterwards. One with `token_options` in its spec also
        takes `options`, a mapping, in every call.
        """

    def allowed(self, tokens: Array, *, options: Mapping[str, Any]) -> Mapping[int, Array]:
        """With `restricts` in its spec: the ids [K] int64 that may be at a position of a completion, K >= 1, for each
        position where not all may. Of one id the token is forced, and not trained on; several are chosen from at the
        temperature, as if the vocabulary had no others.

        tokens: [L] int64 on the CPU, the completion so far.  options: as in `TokenBatch`.
        Positions are 0 to L; position p depends on the tokens before it alone, so that a whole completion gives at once
        what it gave token by token.
        """
        raise absent(f"model {self.spec.name!r}", self, "allowed", "whose spec states `restricts`")

    @abstractmethod
    def select_cache(self, cache: Any, rows: Array) -> Any:
        """The cache of these rows alone; the others are finished. rows: [B'] int64."""

    def conditions(self, inputs: Inputs, *, sampling: TextSamplingConfig) -> Mapping[str, Ragged]:
        """With `inputs` in its spec: the conditions of each input besides its `prompt_tokens`, such as pixel patches:
        name -> one entry per input. A function of each input alone. No gradient.

        They never depend on trainable parameters: conditions are kept across steps and replayed, so hidden states that
        `trainable` computes would be stale and get no gradient.
        inputs: distinct ones. Raises DataError for media that cannot be read.
        """
        raise absent(f"model {self.spec.name!r}", self, "conditions", "whose spec states `inputs`")

    def completion_tokens(self, texts: Sequence[str]) -> list[Array]:
        """Tokens [L] int64 of each completion on the CPU, as a rollout would have given them: with a stop token at the
        end, L >= 2. For engines that read stored samples.

        Raises DataError for a text that its tokens do not give again exactly, such as one with special tokens in it.
        """
        raise RecipeError(
            f"model: got {self.spec.name!r}, which does not implement completion_tokens(); expected one that does, to "
            "read stored completions."
        )

    def output_head(self, batch: TokenBatch) -> OutputHead:
        """The parts of each target's distribution. No gradient. For distillation, as student and as teacher."""
        raise _not_compared(self, "output_head")

    def divergence(
        self,
        batch: TokenBatch,
        *,
        teacher: OutputHead,
        kind: DivergenceKind,
        beta: float,
        top_k: int | None,
        temperature: float,
    ) -> tuple[Array, Array]:
        """Divergence [T] fp32 from the teacher at each target's position, with gradient unless in no_grad, and the
        log-prob [T] fp32 of each target, without. Never holds [T, V].

        beta: weight of the teacher in the mixture of `jensen`.  top_k: tokens compared one by one, the teacher's
        likeliest; all others count as one. None compares every token.  temperature: of both.
        """
        raise _not_compared(self, "divergence")


def diffusion_model(model: Model) -> DiffusionModel:
    """The model of a latent track, as what its spec declares."""
    assert "latent" in model.spec.tracks.values(), f"model {model.spec.name!r} has no latent track"
    return cast("DiffusionModel", model)


def text_model(model: Model) -> TextModel:
    """The model of a text track, as what its spec declares."""
    assert "text" in model.spec.tracks.values(), f"model {model.spec.name!r} has no text track"
    return cast("TextModel", model)


def _not_compared(model: TextModel, method: str) -> RecipeError:
    return RecipeError(
        f"model: got a {type(model).__name__}, which does not implement {method}(); expected a model that shows its "
        "distributions over tokens with output_head() and divergence(), as student and as teacher. A KL penalty of "
        "sampled tokens works with any text model: algorithm.kl_coef of grpo."
    )
