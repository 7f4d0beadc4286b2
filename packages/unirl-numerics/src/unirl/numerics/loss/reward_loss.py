"""Losses of differentiable rewards, and the gradient of a reward with respect to latents."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from unirl.core.errors import RewardFailed, RunFailed

if TYPE_CHECKING:
    from unirl.core.roles import GradientScore
    from unirl.core.types.track import Track

__all__ = ["backpropagated", "reward_loss"]

SCALES = (2.0**16, 2.0**8, 1.0)
"""Factors of the reward in the backward pass, tried in turn: the gradient of one pixel of a mean underflows in fp16,
and a large factor may overflow. Powers of two change no digit in fp32."""


def reward_loss(rewards: Tensor, *, kind: str, target: float | None) -> Tensor:
    """`linear` -R, `hinge` max(target - R, 0), `target` |target - R|; the shape of `rewards`, with their gradient.

    Source: linear DRaFT, arXiv 2309.17400, equation 1; hinge ReFL, arXiv 2304.05977, its loss map; target the code of
    AlignProp, arXiv 2310.03739.
    """
    if kind == "linear":
        return -rewards
    assert target is not None, "the config's problems() refuses a loss without its target"
    return (target - rewards).clamp(min=0) if kind == "hinge" else (target - rewards).abs()


def backpropagated(
    latents: Tensor,
    *,
    track: Track,
    decode: Callable[[Tensor], Tensor],
    score: GradientScore,
    rewards: Sequence[str],
) -> Tensor:
    """Rewards [n] of decoded latents [n, ...], with the gradient of the latents.

    Their gradient is taken at once, so that decoder and reward keep nothing for the backward pass of the sampler: the
    memory of both never adds up. Where the latents need no gradient, the rewards have none.

    track: its rows are those of the latents; of rows with weight 0 the gradient is 0.  decode, score: each row's result
    depends on that row alone.  rewards: names of those that count, for errors.

    Raises RewardFailed for a gradient of the media that is not finite, and RunFailed for one of the decoder.
    """
    if not (torch.is_grad_enabled() and latents.requires_grad):
        return score(track, decode(latents))
    leaf, counted = latents.detach().requires_grad_(), (track.sample_weights > 0).to(latents.device)
    for scale in SCALES:
        media = decode(leaf)
        values = score(track, media)
        of_media, of_latents = (g.float() for g in torch.autograd.grad(values.sum() * scale, (media, leaf)))
        bad = counted & ~of_latents.isfinite().flatten(1).all(dim=1)
        if not bool(bad.any()):
            slope = of_latents.where(counted.view(-1, *(1,) * (latents.ndim - 1)), 0.0) / scale
            return values.detach() + (slope * (latents - leaf.detach())).flatten(1).sum(dim=1)
        if scale == SCALES[-1]:
            raise _not_finite(track, int(bad.nonzero()[0]), of_media, of_latents, rewards=rewards)
    raise AssertionError("the last factor returns or raises")


def _not_finite(
    track: Track, row: int, of_media: Tensor, of_latents: Tensor, *, rewards: Sequence[str]
) -> RewardFailed | RunFailed:
    where = f"for sample {track.sample_ids[row]!r} (prompt {track.inputs.prompts[row]!r})"
    if bool(of_media[row].isfinite().all()):
        value = _first_bad(of_latents[row])
        return RunFailed(
            f"model: the decoder's gradient is {value} {where}, though the reward's is finite. Load the decoder in "
            "fp32 or bf16."
        )
    key = f"reward.{rewards[0]}" if len(rewards) == 1 else "reward"
    among = "" if len(rewards) == 1 else f" of the sum of {', '.join(rewards)}"
    return RewardFailed(
        f"{key}: got a gradient{among} that is {_first_bad(of_media[row])} {where}, though the score is finite; "
        "expected finite numbers. Look for a root, norm or logarithm at 0 in the reward; add a small constant there."
    )


def _first_bad(values: Tensor) -> float:
    return float(values[~values.isfinite()][0])
