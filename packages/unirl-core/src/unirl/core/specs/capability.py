"""Capabilities and needs as data: what a part provides, and what an algorithm asks for."""

from __future__ import annotations

from dataclasses import dataclass, fields
from enum import StrEnum
from typing import TYPE_CHECKING, Literal, Self

if TYPE_CHECKING:
    from .spec import Kind

__all__ = ["Cap", "Needs"]


class Cap(StrEnum):
    """One thing that a part can do, and the kinds of parts that can have it. The sentence says what is promised.

    Algorithms state needs instead.
    """

    kinds: tuple[Kind, ...]

    def __new__(cls, value: str, *kinds: Kind) -> Self:
        """A member with its kinds."""
        member = str.__new__(cls, value)
        member._value_, member.kinds = value, kinds
        return member

    # Rollouts.
    LATENT_ROLLOUT = "latent-rollout", "engine"
    """Generates latent tracks: image or video diffusion."""
    TEXT_ROLLOUT = "text-rollout", "engine"
    """Generates text tracks."""
    SIGMAS = "sigmas", "engine"
    """Uses the sigmas of the request, bit for bit, and echoes them."""
    INITIAL_NOISE = "initial-noise", "engine"
    """Starts from the initial noise that the request's recipe gives."""
    STEP_NOISE = "step-noise", "engine"
    """Draws the noise of each SDE step from the request's recipe."""
    SEEDS = "seeds", "engine"
    """Draws the tokens of each text from the seed of its sample, whatever else it generates."""
    SDE_STEPS = "sde-steps", "engine"
    """Is stochastic at the steps that the request names, deterministic elsewhere."""
    SDE_STEPS_PER_GROUP = "sde-steps-per-group", "engine"
    """Takes another set of SDE steps for each group."""
    TRAJECTORY_WINDOW = "trajectory-window", "engine"
    """Returns the latents around the scored SDE steps, and the end."""
    TRAJECTORY_FULL = "trajectory-full", "engine"
    """Returns the latents at any further position that the request keeps."""
    LOG_PROBS_GAUSSIAN = "log-probs-gaussian", "engine"
    """Gives the log-prob of every SDE step under the policy that sampled it."""
    LOG_PROBS_TOKEN = "log-probs-token", "engine"
    """Gives the log-prob of every token under the policy that sampled it."""
    CONDITIONS = "conditions", "model", "engine"
    """Returns the conditions (prompt embeddings) that it generated from."""
    GUIDANCE = "guidance", "model", "engine"
    """Honours classifier-free guidance, negative prompts included, and echoes the scale."""
    PLUGIN_SAMPLERS = "plugin-samplers", "engine"
    """Computes with the kernels and guidances of plugins, named `module:Class`."""
    MEDIA_REFS = "media-refs", "engine"
    """Generates from the media of a request, where the model takes them."""
    TURNS = "turns", "engine"
    """Generates from the turns of a request, where the model's track continues from them."""
    TOKEN_RULES = "token-rules", "engine"
    """Generates a text by rules of its model: with the options that logits depend on, and from allowed tokens alone,
    where the model restricts them; forced ones are masked."""
    # Weights of an engine.
    WEIGHTS_SHARED = "weights-shared", "engine"
    """Samples from the very module that trains; nothing is transferred."""
    WEIGHTS_FULL = "weights-full", "engine"
    """Takes full weights and returns the checksum of what it then holds."""
    WEIGHTS_LORA = "weights-lora", "engine"
    """Takes LoRA weights under a name."""
    SLEEP = "sleep", "engine"
    """Gives its device memory back between rollouts."""
    # Models and backends.
    LAZY_BUILD = "lazy-build", "model", "backend"
    """Model: can be built without the values of `trainable`. Backend: shards such a module, teachers included, and
    fills in the shards of each rank, so that no rank ever holds all of it."""
    # Models.
    LATENT_STAGE = "latent-stage", "model"
    """Has a denoiser: encode, velocity, schedule, decode."""
    TEXT_STAGE = "text-stage", "model"
    """Has a decoder of tokens."""
    LORA = "lora", "model"
    """Names the layers that LoRA adapts."""
    OBSERVATIONS = "observations", "model"
    """Puts the text of an environment after a completion, as the next turn of a conversation."""
    # Backends.
    TRAIN_LORA = "train-lora", "backend"
    """Trains LoRA adapters."""
    TRAIN_FULL = "train-full", "backend"
    """Trains all weights of the trainable module."""
    REFERENCE_ADAPTER_OFF = "reference-adapter-off", "backend"
    """Gives the reference policy by switching the adapter off."""
    REFERENCE_COPY = "reference-copy", "backend"
    """Keeps a frozen copy of the initial weights as the reference policy."""
    EMA = "ema", "backend"
    """Keeps an exponential moving average of what it trains."""
    LAGGED_POLICY = "lagged-policy", "backend"
    """Keeps a lagged policy (an EMA adapter or copy) that rollouts and losses can use."""
    MANY_RANKS = "many-ranks", "backend"
    """Trains on all ranks of torch's default process group, each with its own rows, like one rank with all rows."""
    CRITIC = "critic", "backend"
    """Keeps a separate critic, for tokens and for denoise steps, and trains it with its own optimizer; engines never
    see it."""
    FAKE_SCORE = "fake-score", "backend"
    """Keeps a second copy of what it trains, the fake score of distribution matching, and trains it with its own
    optimizer; engines never see it."""
    THROUGH_SAMPLER = "through-sampler", "backend"
    """Backpropagates a reward through the sampler."""
    # Rewards.
    REWARD_SAMPLE = "reward-sample", "reward"
    """Scores samples one by one."""
    REWARD_GROUP = "reward-group", "reward"
    """Scores the samples of a group against each other."""
    REWARD_DIFFERENTIABLE = "reward-differentiable", "reward"
    """Is differentiable with respect to the media."""


@dataclass(frozen=True, kw_only=True)
class Needs:
    """Requirements of an algorithm on the rest of a plan."""

    track: Literal["latent", "text", "any"] = "any"
    """Kind of track that it trains on."""
    trajectory: Literal["none", "window", "full"] = "none"
    """Latents that a rollout must return: around the SDE steps, or of every step."""
    log_probs: Literal["none", "gaussian", "token"] = "none"
    """Log-probs of the policy that sampled: of SDE steps, or of tokens."""
    reference: Literal["none", "policy"] = "none"
    """`policy` is satisfied by an adapter that can be switched off or by a frozen copy."""
    sampler: Literal["live", "lagged", "ema"] = "live"
    """Policy that generates the rollouts; the backend must keep it."""
    reward: Literal["none", "scalar", "group", "differentiable"] = "scalar"
    """Kind of reward that it needs: none, a number per sample, a comparison within a group, or a gradient of the
    media."""
    critic: bool = False
    """Needs a critic, trained alongside."""
    fake_score: bool = False
    """Needs a fake score, trained alongside."""
    stochastic: bool = False
    """Needs steps with noise: eta 0 and deterministic kernels are refused."""
    step_rewards: bool = False
    """Needs the reward that each SDE step gained: samples are drawn once more from before each of them, without noise
    from there on."""
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
