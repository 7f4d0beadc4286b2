"""A small denoiser, trajectories of it, and a policy-gradient algorithm over them, for tests of backends."""

from __future__ import annotations

import dataclasses

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor
from unirl.core.roles import Job, Losses, LossTerm, Metric
from unirl.core.specs.spec import ModelSpec
from unirl.core.types.inputs import Inputs
from unirl.core.types.track import Conditions, LatentSegment, Sampler, Status, Track
from unirl.numerics.diffusion.denoise import denoise
from unirl.numerics.diffusion.kernels import make_kernel
from unirl.numerics.loss.losses import clipped_surrogate
from unirl.numerics.train.actions import action_mask, per_action, with_per_action

SIGMAS = torch.tensor([1.0, 0.8, 0.6, 0.35, 0.0])
SDE_STEPS = (0, 2)
SPEC = ModelSpec(
    name="toy",
    summary="Two blocks.",
    build="",
    config="",
    tracks={"image": "latent"},
    trainable="net",
    lora_targets=("up", "down"),
    wrap_blocks=("ToyBlock",),
)


class ToyBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(12, 24)
        self.down = nn.Linear(24, 12)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.down(torch.tanh(self.up(hidden)))


class ToyNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(8 + 3 + 1, 12)
        self.blocks = nn.ModuleList([ToyBlock(), ToyBlock()])
        self.leave = nn.Linear(12, 8)
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: torch.Tensor, text: torch.Tensor, timestep: torch.Tensor) -> torch.Tensor:
        hidden = self.enter(torch.cat([x, text, timestep[:, None].to(x.dtype)], dim=1))
        for block in self.blocks:
            hidden = block(hidden)
        return self.leave(self.dropout(hidden))


class ToyModel:
    def __init__(self, *, seed: int = 0, spec: ModelSpec = SPEC) -> None:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.net = ToyNet()
        self.spec = spec
        self.device = torch.device("cpu")

    @property
    def trainable(self) -> nn.Module:
        return self.net

    def velocity(self, x, sigma, conditions):
        return self.net(x.flatten(1), conditions["text"], timestep=sigma).view_as(x).float()


class Clipped:
    """A clipped surrogate with replayed old log-probs, and the squared distance to another policy's means if asked."""

    trains_critic = False
    trains_fake_score = False
    separates_steps = False

    def __init__(self, *, to: str | None = None) -> None:
        self.to = to

    def with_old_log_probs(self, track, replay):
        segment = dataclasses.replace(track.latent, log_probs=replay(track).log_probs)
        return dataclasses.replace(track, segment=segment)

    def loss_weights(self, track):
        policy = track.sample_weights[:, None] * (track.latent.sde_steps >= 0)
        return {"policy": policy} if self.to is None else {"policy": policy, "pull": policy}

    def loss(self, track, replay, *, progress):
        new = replay(track)
        weights = self.loss_weights(track)
        out = clipped_surrogate(new.log_probs - track.latent.log_probs, track.advantages, clip_low=0.2, clip_high=0.2)
        terms = [LossTerm(name="policy", values=out.loss, weights=weights["policy"])]
        if self.to is not None:
            other = replay(track, policy=self.to)
            pull = (new.means - other.means).square().flatten(2).mean(2)
            terms.append(LossTerm(name="pull", values=pull, weights=weights["pull"], scale=3.0))
        counted = weights["policy"] > 0
        deviation = torch.where(counted, (out.ratio - 1).abs(), 0.0)
        return Losses(
            terms=terms,
            metrics={
                "ratio_mean": Metric(
                    total=float((out.ratio * weights["policy"]).sum()), weight=float(weights["policy"].sum())
                ),
                "ratio_max_dev": Metric(total=float(deviation.max()), reduce="max"),
            },
        )


def make_track(model, *, num_rows: int = 8, seed: int = 1, shape=(2, 2, 2), texts=None) -> Track:
    """Rows of groups of 4, sampled with the model as it is; the engine's log-probs are those of the rollout."""
    generator = torch.Generator().manual_seed(seed)
    initial = torch.randn(num_rows, *shape, generator=generator)
    noise = torch.randn(len(SIGMAS), num_rows, *shape, generator=generator)
    num_groups = -(-num_rows // 4)
    values = {"text": torch.randn(num_groups, 3, generator=generator)} if texts is None else texts
    index = torch.arange(num_rows) // 4
    conditions = Conditions(values=values, index=index)
    steps = torch.tensor(SDE_STEPS).expand(num_rows, -1).contiguous()
    was_training = model.net.training
    model.net.eval()
    with torch.no_grad():
        path = denoise(
            model.velocity,
            initial,
            sigmas=SIGMAS,
            kernel=make_kernel("flow-sde", eta=0.7),
            sde_steps=steps.numpy(),
            conditions={"positive": conditions.expanded()},
            step_noise=lambda step, rows: noise[step][rows],
        ).segment()
    model.net.train(was_training)
    segment = LatentSegment(
        latents=path.latents,
        positions=path.positions,
        sde_steps=steps,
        log_probs=path.log_probs,
        sigmas=SIGMAS,
        sampler=Sampler(kernel="flow-sde", eta=0.7),
    )
    return Track(
        name="image",
        sample_ids=tuple(f"s{i}" for i in range(num_rows)),
        group_ids=tuple(f"g{i // 4}" for i in range(num_rows)),
        inputs=Inputs.of_texts(("",) * num_rows),
        metadata=({},) * num_rows,
        conditions={"positive": conditions},
        segment=segment,
        advantages=torch.randn(num_rows, generator=generator),
        sample_weights=torch.ones(num_rows),
        status=(Status.COMPLETED,) * num_rows,
        policy_version=(0,) * num_rows,
    )


class Judged:
    """REINFORCE with a critic: advantages are rewards less values, over their root mean square over all ranks."""

    trains_critic = True
    trains_fake_score = False
    separates_steps = False

    def advantages(self, track):
        return track, {}

    def with_old_log_probs(self, track, replay):
        return track

    def after_anchor(self, track, sum_over_ranks):
        valid = action_mask(track) & (track.sample_weights > 0)[:, None]
        values = per_action(track, "values")
        returns = torch.where(valid, track.rewards[:, None], 0.0)
        errors = torch.where(valid, returns - values, 0.0)
        sums = sum_over_ranks(torch.stack([errors.double().square().sum(), valid.sum().double()]))
        scaled = errors / float(sums[0] / sums[1]) ** 0.5
        numbers = {"values_mean": Metric(total=float(values[valid].double().sum()), weight=float(valid.sum()))}
        return with_per_action(track, advantages=scaled, returns=returns), numbers

    def loss_weights(self, track):
        return {"policy": action_mask(track) * track.sample_weights[:, None]}

    def loss(self, track, replay, *, progress):
        values = -replay(track).log_probs * per_action(track, "advantages")
        return Losses(terms=[LossTerm(name="policy", values=values, weights=self.loss_weights(track)["policy"])])

    def critic_weights(self, track):
        return {"value": self.loss_weights(track)["policy"]}

    def critic_loss(self, track, values, *, progress):
        errors = (values - per_action(track, "returns")).square()
        return Losses(terms=[LossTerm(name="value", values=errors, weights=self.critic_weights(track)["value"])])


def make_steps(*, num_rows: int = 8, seed: int = 1) -> Track:
    """Trajectories of the toy denoiser with rewards; those of the last rows have one scored step less."""
    track = make_track(ToyModel(), num_rows=num_rows, seed=seed)
    steps = track.latent.sde_steps.clone()
    steps[-2:, -1] = -1
    rewards = torch.randn(num_rows, generator=torch.Generator().manual_seed(seed))
    segment = dataclasses.replace(track.latent, sde_steps=steps)
    return dataclasses.replace(track, segment=segment, rewards=rewards, advantages=None)


def draw_adapters(backend) -> None:
    """Draw the adapters' B instead of 0, so that every adapter weight has a gradient from the first step."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, param in backend._params.items():
            if ".lora_B." in name:
                whole = torch.randn(tuple(param.shape), generator=generator) * 0.1
                if isinstance(param, DTensor):
                    whole = distribute_tensor(whole, param.device_mesh, param.placements)
                param.copy_(whole)
        for copy in backend._policies.copies.values():
            copy.values = {name: param.detach().clone() for name, param in backend._params.items()}


def gradients(backend, track, algorithm) -> dict[str, torch.Tensor]:
    """Whole gradients of one update, caught just before the optimizer would take them."""
    from unirl.train_host.sharding import full

    caught: dict[str, torch.Tensor] = {}
    step = backend._optimizer.step

    def catch():
        caught.update({n: full(backend._view(p.grad)) for n, p in backend._params.items() if p.grad is not None})
        return step()

    backend._optimizer.step = catch
    try:
        backend.train([Job(track=track, algorithm=algorithm)], progress=0.0)
    finally:
        backend._optimizer.step = step
    return caught
