"""Training by torch alone, as backends should do it: plain weights, autograd, AdamW. No wrapping, no batching."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils.rnn import pad_sequence
from unirl.core.roles import Replayed
from unirl.core.types.track import Track
from unirl.numerics.diffusion.replay import replay
from unirl.numerics.diffusion.sampler import kernel_of
from unirl.numerics.tokens.batches import pad_batch
from unirl.numerics.train.actions import action_mask

from .ppo import PULL, clipped, squared_distance
from .tiny_decoder import PAD, WIDTH, TinyDecoder
from .tiny_denoiser import TinyDenoiser

if TYPE_CHECKING:
    from .trainer import Trainer

__all__ = ["PlainTraining", "critic_values", "plain_of", "velocity_of", "with_adapters"]

Weights = Mapping[str, Tensor]


def with_adapters(base: Weights, adapters: Weights, *, scale: float) -> dict[str, Tensor]:
    """base + scale B A for every layer that has `<layer>.lora_A.weight` and `<layer>.lora_B.weight`."""
    whole = dict(base)
    for name, a in adapters.items():
        layer, is_adapted, _ = name.partition(".lora_A.")
        if is_adapted:
            b = adapters[f"{layer}.lora_B.weight"]
            whole[f"{layer}.weight"] = base[f"{layer}.weight"] + scale * (b @ a)
    return whole


def velocity_of(model: TinyDenoiser, weights: Weights) -> Any:
    """The model's velocity with these weights in place of its own."""

    def velocity(x: Tensor, sigma: Tensor, conditions: Mapping[str, Tensor]) -> Tensor:
        result: Tensor = functional_call(model.net, dict(weights), (x, conditions["text"], sigma))
        return result.float()

    return velocity


def plain_of(trainer: Trainer, **settings: Any) -> PlainTraining:
    """Training by torch alone from the weights that a trainer has now."""
    scale = trainer.backend.export_weights(kind=trainer.training).adapter_scale
    base = trainer.plain if trainer.training == "lora" else None
    model = type(trainer.model)(device=trainer.model.device)
    return PlainTraining(model, trainer.trained(), base=base, scale=scale, **settings)


class PlainTraining:
    """Trains copies of `weights`: all of a plain module, or adapters over `base`."""

    def __init__(
        self,
        model: TinyDenoiser | TinyDecoder,
        weights: Weights,
        *,
        base: Weights | None = None,
        scale: float = 1.0,
        max_grad_norm: float | None = None,
        **adamw: Any,
    ) -> None:
        """model: computes with `weights` in place of its own.  base: whole weights that adapters are laid over, times
        `scale`.  adamw: settings of torch.optim.AdamW."""
        self.weights = {name: value.detach().clone().requires_grad_() for name, value in weights.items()}
        self._base, self._scale, self._bound = base, scale, max_grad_norm
        self._adam = torch.optim.AdamW(self.weights.values(), **adamw)
        self._model = model

    def whole(self) -> Weights:
        """All weights of the module, by their plain names."""
        return self.weights if self._base is None else with_adapters(self._base, self.weights, scale=self._scale)

    def step(self, track: Track, *, pull_to: Weights | None = None) -> float:
        """One update with the loss of `PPO` on all rows; returns the gradient's norm before clipping.

        pull_to: weights of another policy, of latents.
        """
        assert track.advantages is not None
        # One forward for both terms, as backends have: two would add up their gradients in another order.
        replayed = None
        if isinstance(self._model, TinyDecoder):
            new = self._token_log_probs(self._model, track)
        else:
            replayed = self._replayed(track, self.whole())
            new = replayed.log_probs
        values = clipped(new - new.detach(), track.advantages)
        if pull_to is not None:
            assert replayed is not None
            with torch.no_grad():
                others = self._replayed(track, pull_to).means
            values = values + PULL * squared_distance(replayed.means, others)
        weights = track.sample_weights[:, None] * action_mask(track)
        return self.descend((values * weights).sum() / weights.sum())

    def velocity(self) -> Any:
        """The model's velocity with the weights that train, with gradient."""
        assert isinstance(self._model, TinyDenoiser)
        return velocity_of(self._model, self.whole())

    def descend(self, loss: Tensor) -> float:
        """One update against the gradient of a loss; returns its norm before clipping."""
        loss.backward()
        bound = torch.inf if self._bound is None else self._bound
        norm = torch.nn.utils.clip_grad_norm_(self.weights.values(), bound)
        self._adam.step()
        self._adam.zero_grad()
        return float(norm)

    def _token_log_probs(self, model: TinyDecoder, track: Track) -> Tensor:
        """[n, S] of the tokens, a text at a time."""
        rows: list[Tensor] = []
        for prompt, tokens in zip(track.text.prompt_tokens, track.text.tokens, strict=True):
            batch = pad_batch([prompt], [tokens], pad_token=PAD)
            place = {"index": batch.target_index, "cache": None}
            logits, _ = functional_call(model.net, dict(self.whole()), model.layout(batch), place)
            scores = torch.log_softmax(logits / track.text.temperature, dim=1)
            rows.append(scores.gather(1, tokens[:, None]).squeeze(1))
        return pad_sequence(rows, batch_first=True)

    def _replayed(self, track: Track, weights: Weights) -> Replayed:
        """The transitions of a track under some weights."""
        assert isinstance(self._model, TinyDenoiser)
        segment = track.latent
        return replay(
            velocity_of(self._model, weights),
            latents=segment.latents,
            positions=segment.positions,
            sigmas=segment.sigmas,
            sde_steps=segment.sde_steps,
            kernel=kernel_of(segment.sampler),
            conditions={"positive": track.conditions["positive"].expanded()},
        )


def critic_values(tracks: Sequence[Track], of: Track, **adamw: Any) -> list[Tensor]:
    """[L] of each row of `of`: values of a copy of the model with one output that starts at 0, after an update on each
    track by autograd and torch's AdamW, a text at a time."""
    model = TinyDecoder()
    trunk, head = copy.deepcopy(model.net).eval(), nn.Linear(WIDTH, 1)
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    adam = torch.optim.AdamW([*trunk.parameters(), *head.parameters()], **adamw)

    def values(track: Track, row: int) -> Tensor:
        batch = pad_batch([track.text.prompt_tokens[row]], [track.text.tokens[row]], pad_token=PAD)
        return head(model.hidden(batch, trunk=trunk)).squeeze(1)

    for track in tracks:
        assert track.rewards is not None
        total = sum(track.text.lengths)
        for row in range(track.num_rows):
            ((values(track, row) - track.rewards[row]).square().sum() / total).backward()
        adam.step()
        adam.zero_grad()
    with torch.no_grad():
        return [values(of, row) for row in range(of.num_rows)]
