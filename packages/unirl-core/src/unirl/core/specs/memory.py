"""Sizes that a prediction of memory is made from: what a backend keeps by its settings, and what a model is made of."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["ModelSize", "TrainingMemory"]


@dataclass(frozen=True, kw_only=True)
class TrainingMemory:
    """What a backend keeps of the parameters that train, with its settings. Those are in fp32."""

    lora_rank: int = 0
    """Rank of the adapters; 0 trains the parameters themselves."""
    lora_targets: tuple[str, ...] = ()
    """Layers with adapters, by the end of their names; empty takes the model's list."""
    copies: tuple[str, ...] = ()
    """Policies that it keeps a copy of the trained parameters for: `reference`, `ema`, `lagged`."""
    optimizer_bytes: int = 8
    """Optimizer state of a trained parameter, in bytes: 8 are the two moments of Adam."""
    shard_ranks: int = 0
    """Ranks that a copy of the weights is sharded over; 0 is all of them."""
    row_ranks: int = 1
    """Ranks that hold the same rows."""
    sequence_ranks: int = 1
    """Of those, ranks that share the tokens of a row."""
    compute_dtype: str = ""
    """Dtype that gathered weights are cast to, such as `bfloat16`; empty leaves them."""
    whole_gradients: bool = False
    """Every rank holds the gradients of all trained parameters until the end of an update."""
    recomputes_blocks: bool = False
    """A backward pass computes the activations of each block again."""


@dataclass(frozen=True, kw_only=True)
class ModelSize:
    """Sizes of a model as its checkpoint and the settings of a stage give them. Bytes are of the dtypes it is loaded
    in; a row is one sample at one denoising step, or one text."""

    weight_bytes: int
    """Parameters and buffers of `trainable`."""
    buffer_bytes: int
    """Of those, buffers, which are not sharded."""
    trained_bytes: int
    """Of `weight_bytes`, parameters that may train."""
    trained_elements: int
    """Number of parameters that may train."""
    adapter_elements: int
    """Number of parameters of LoRA adapters."""
    block_elements: int
    """Parameters of the largest block that is sharded by itself."""
    root_elements: int
    """Parameters outside of blocks."""
    largest_elements: int
    """Elements of the largest tensor that is sent in an update."""
    encode_bytes: int
    """Text encoders and everything else outside of `trainable` that is not a decoder."""
    decode_bytes: int
    """The decoder (VAE)."""
    row_elements: int
    """Elements of a latent; tokens of a text, prompt included, as long as it may get."""
    condition_bytes: int
    """Conditions of one prompt, one branch of the guidance."""
    saved_bytes: int
    """What the forward pass of a row keeps for the backward pass, weights not included."""
    kept_bytes: int
    """Of a row with blocks that are computed again: what is kept outside of blocks, and their inputs."""
    block_bytes: int
    """What the largest block keeps of a row."""
    head_bytes: int
    """Logits of a row's tokens; 0 for latents."""
    most_head_bytes: int
    """Logits that are held at one time."""
    flops: int
    """Floating-point operations of the forward pass of a row, a multiplication and an addition being two."""
    rollout_rows: int
    """Rows that a sample is generated with."""
    train_rows: int
    """Rows that it is trained on."""
    stored_bytes: int
    """What is stored of a sample for training: latents of its trajectory, or tokens and their log-probs."""
