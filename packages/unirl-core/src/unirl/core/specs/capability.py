"""Capabilities and needs as data: what a part provides, and what an algorithm asks for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from enum import StrEnum
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from .spec import Kind

__all__ = ["CAPABILITIES_OF", "Cap", "Needs"]


class Cap(StrEnum):
    """One thing that a part can do. The sentence says what is promised."""

    # Rollouts.
    LATENT_ROLLOUT = "latent-rollout"
    """Generates latent tracks: image or video diffusion."""
    TEXT_ROLLOUT = "text-rollout"
    """Generates text tracks."""
    SIGMAS = "sigmas"
    """Uses the sigmas of the request, bit for bit, and echoes them."""
    INITIAL_NOISE = "initial-noise"
    """Starts from the initial noise that the request's recipe gives."""
    STEP_NOISE = "step-noise"
    """Draws the noise of each SDE step from the request's recipe."""
    SEEDS = "seeds"
    """Draws the tokens of each text from the seed of its sample, whatever else it generates."""
    SDE_STEPS = "sde-steps"
    """Is stochastic at the steps that the request names, deterministic elsewhere."""
    SDE_STEPS_PER_GROUP = "sde-steps-per-group"
    """Takes another set of SDE steps for each group."""
    TRAJECTORY_WINDOW = "trajectory-window"
    """Returns the latents around the scored SDE steps, and the end."""
    TRAJECTORY_FULL = "trajectory-full"
    """Returns the latents at any further position that the request keeps."""
    LOG_PROBS_GAUSSIAN = "log-probs-gaussian"
    """Gives the log-prob of every SDE step under the policy that sampled it."""
    LOG_PROBS_TOKEN = "log-probs-token"
    """Gives the log-prob of every token under the policy that sampled it."""
    CONDITIONS = "conditions"
    """Returns the conditions (prompt embeddings) that it generated from."""
    GUIDANCE = "guidance"
    """Honours classifier-free guidance, negative prompts included, and echoes the scale."""
    PLUGIN_SAMPLERS = "plugin-samplers"
    """Computes with the kernels and guidances of plugins, named `module:Class`."""
    MEDIA_REFS = "media-refs"
    """Generates from the media of a request, where the model takes them."""
    # Weights of an engine.
    WEIGHTS_SHARED = "weights-shared"
    """Samples from the very module that trains; nothing is transferred."""
    WEIGHTS_FULL = "weights-full"
    """Takes full weights and returns the checksum of what it then holds."""
    WEIGHTS_LORA = "weights-lora"
    """Takes LoRA weights under a name."""
    SLEEP = "sleep"
    """Gives its device memory back between rollouts."""
    # Models and backends.
    LAZY_BUILD = "lazy-build"
    """Of a model: can be built without the values of `trainable`. Of a backend: shards such a module and fills in what
    each rank keeps, so that no rank ever holds the whole of it; with teachers of the model, too."""
    # Models.
    LATENT_STAGE = "latent-stage"
    """Has a denoiser: encode, velocity, schedule, decode."""
    TEXT_STAGE = "text-stage"
    """Has a decoder of tokens."""
    LORA = "lora"
    """Names the layers that LoRA adapts."""
    # Backends.
    TRAIN_LORA = "train-lora"
    """Trains LoRA adapters."""
    TRAIN_FULL = "train-full"
    """Trains all weights of the trainable module."""
    REFERENCE_ADAPTER_OFF = "reference-adapter-off"
    """Gives the reference policy by switching the adapter off."""
    REFERENCE_COPY = "reference-copy"
    """Keeps a frozen copy of the initial weights as the reference policy."""
    EMA = "ema"
    """Keeps an exponential moving average of what it trains."""
    LAGGED_POLICY = "lagged-policy"
    """Keeps a lagged policy (an EMA adapter or copy) that rollouts and losses can use."""
    MANY_RANKS = "many-ranks"
    """Trains on all ranks of torch's default process group, each with rows of its own, as one rank with all rows."""
    CRITIC = "critic"
    """Keeps a critic of its own, for tokens and for denoise steps, and trains it with an optimizer of its own; engines
    never see it."""
    THROUGH_SAMPLER = "through-sampler"
    """Backpropagates a reward through the sampler."""
    # Rewards.
    REWARD_SAMPLE = "reward-sample"
    """Scores samples one by one."""
    REWARD_GROUP = "reward-group"
    """Scores the samples of a group against each other."""
    REWARD_DIFFERENTIABLE = "reward-differentiable"
    """Is differentiable with respect to the media."""


CAPABILITIES_OF: Mapping[Kind, tuple[Cap, ...]] = {
    "model": (Cap.LATENT_STAGE, Cap.TEXT_STAGE, Cap.LORA, Cap.CONDITIONS, Cap.GUIDANCE, Cap.LAZY_BUILD),
    "engine": (
        Cap.LATENT_ROLLOUT,
        Cap.TEXT_ROLLOUT,
        Cap.SIGMAS,
        Cap.INITIAL_NOISE,
        Cap.STEP_NOISE,
        Cap.SEEDS,
        Cap.SDE_STEPS,
        Cap.SDE_STEPS_PER_GROUP,
        Cap.TRAJECTORY_WINDOW,
        Cap.TRAJECTORY_FULL,
        Cap.LOG_PROBS_GAUSSIAN,
        Cap.LOG_PROBS_TOKEN,
        Cap.CONDITIONS,
        Cap.GUIDANCE,
        Cap.PLUGIN_SAMPLERS,
        Cap.MEDIA_REFS,
        Cap.WEIGHTS_SHARED,
        Cap.WEIGHTS_FULL,
        Cap.WEIGHTS_LORA,
        Cap.SLEEP,
    ),
    "backend": (
        Cap.TRAIN_LORA,
        Cap.TRAIN_FULL,
        Cap.REFERENCE_ADAPTER_OFF,
        Cap.REFERENCE_COPY,
        Cap.EMA,
        Cap.LAGGED_POLICY,
        Cap.MANY_RANKS,
        Cap.CRITIC,
        Cap.THROUGH_SAMPLER,
        Cap.LAZY_BUILD,
    ),
    "algorithm": (),
    "reward": (Cap.REWARD_SAMPLE, Cap.REWARD_GROUP, Cap.REWARD_DIFFERENTIABLE),
    "tracker": (),
    "launcher": (),
    "transport": (),
}
"""Capabilities that a part of each kind can have. Algorithms state needs instead."""


@dataclass(frozen=True, kw_only=True)
class Needs:
    """What an algorithm asks of the rest of a plan."""

    track: Literal["latent", "text", "any"] = "any"
    """Kind of track that it trains on."""
    trajectory: Literal["none", "window", "full"] = "none"
    """Latents that a rollout must return: around the SDE steps, or of every step."""
    log_probs: Literal["none", "gaussian", "token"] = "none"
    """Log-probs of the policy that sampled: of SDE steps, or of tokens."""
    reference: Literal["none", "policy"] = "none"
    """`policy` is satisfied by an adapter that can be switched off or by a frozen copy."""
    sampler: Literal["live", "lagged", "ema"] = "live"
    """Whose samples it trains on: rollouts come from this policy, which the backend must keep."""
    reward: Literal["none", "scalar", "group", "differentiable"] = "scalar"
    """What rewards must give: nothing, so that there need be none, a number per sample, a comparison within a group, or
    a gradient of the media."""
    critic: bool = False
    """Needs a critic, which trains along."""
    stochastic: bool = False
    """Needs steps with noise: eta 0 and deterministic kernels are refused."""
    multi_update: bool = True
    """Valid for several optimizer steps on one rollout."""
    staleness: Literal["unstated", "none", "ratio", "any"] = "unstated"
    """Samples of older weights than those that train: `none` is refused them; `ratio` corrects for their age by its
    ratio to the policy that sampled, so the old log-probs must be the engine's; `any` is valid whoever sampled.
    `unstated` is treated as `none`."""

    @property
    def compares_groups(self) -> bool:
        """Whether the advantages of a sample come from the others of its group, or of its rollout."""
        return self.reward in ("scalar", "group") and not self.critic

    def merged(self, other: Needs) -> Needs:
        """Both needs at once: where `other` differs from the default it decides."""
        default = Needs()
        changed = {
            f.name: getattr(other, f.name) for f in fields(self) if getattr(other, f.name) != getattr(default, f.name)
        }
        return Needs(**{**{f.name: getattr(self, f.name) for f in fields(self)}, **changed})
