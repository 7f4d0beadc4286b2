"""Stand-ins for tests of the train stack: a linear model, SGD written out by hand, and ranks that are threads."""

from __future__ import annotations

import dataclasses
import threading

import torch
from unirl.core.errors import BatchError, RunFailed
from unirl.core.roles import Job, Losses, LossTerm, Metric, Replayed
from unirl.core.specs.config import TrainConfig
from unirl.core.types.inputs import Inputs
from unirl.core.types.track import LatentSegment, Sampler, Status, Track
from unirl.numerics.train.stack import StepReport, train_on

DEADLINE_S = 20


class Alone:
    """An updater for one rank that notes what it was asked to do. The model is one vector."""

    device = torch.device("cpu")
    num_ranks = 1
    gradient_reduction = "mean"

    def __init__(self, *, lr=0.0):
        self.weight = torch.tensor([0.5, -0.25, 1.0], dtype=torch.float64, requires_grad=True)
        self.lr = lr
        self.calls = []
        self.gradients = []

    def zero_grad(self):
        self.calls.append("zero")
        self.weight.grad = None

    def backward(self, loss, *, last):
        self.calls.append("last" if last else "backward")
        loss.backward()

    def joined(self, gradient):
        return gradient

    def step(self):
        gradient = self.joined(self.weight.grad)
        self.calls.append("step")
        self.gradients.append(gradient.clone())
        skipped = not bool(torch.isfinite(gradient).all())
        if not skipped:
            with torch.no_grad():
                self.weight -= self.lr * gradient
        norm = float(gradient.norm())
        return StepReport(grad_norm=norm, grad_rms=norm / 3, skipped=skipped, metrics={"lr": self.lr})

    def all_reduce_sum(self, values):
        return values

    def all_reduce_max(self, values):
        return values

    @property
    def replay(self):
        return Forwarded(self.weight)


class Forwarded:
    """Log-probs that depend on the model: the latent's first three entries times its weight."""

    def __init__(self, weight):
        self.weight, self.meter, self.teachers, self.reference_guidance = weight, None, {}, None

    def __call__(self, track, *, policy="live"):
        inputs = track.latent.latents[:, 0, :3].double()
        log_probs = (inputs * self.weight).sum(1, keepdim=True).expand(-1, 2)
        still = torch.zeros(track.num_rows, 2, 1)
        valid = track.latent.sde_steps >= 0
        replayed = Replayed(log_probs=log_probs, means=still, std=still, g=still, next=still, valid=valid)
        if policy == "live" and self.meter is not None:
            self.meter.observe(track, replayed)
        return replayed


class ThreadRank(Alone):
    """One of several ranks: threads that meet at every collective, or fail together after the deadline."""

    def __init__(self, rank, board, barrier, reduction, *, lr):
        super().__init__(lr=lr)
        self.rank, self.board, self.barrier = rank, board, barrier
        self.num_ranks = barrier.parties
        self.gradient_reduction = reduction

    def gathered(self, values):
        self.board[self.rank] = values.clone()
        self.barrier.wait(DEADLINE_S)
        every = torch.stack([self.board[rank] for rank in range(self.num_ranks)])
        self.barrier.wait(DEADLINE_S)
        return every

    def joined(self, gradient):
        every = self.gathered(gradient)
        return every.mean(0) if self.gradient_reduction == "mean" else every.sum(0)

    def all_reduce_sum(self, values):
        return self.gathered(values).sum(0)

    def all_reduce_max(self, values):
        return self.gathered(values).amax(0)


class Weighted:
    """Rows weigh their weight times their valid steps; the loss is the advantage times the log-prob."""

    trains_critic = False
    trains_fake_score = False
    separates_steps = False

    def __init__(self):
        self.anchored = []
        self.trained = []

    def with_old_log_probs(self, track, replay):
        self.anchored.append(track.sample_ids)
        segment = dataclasses.replace(track.latent, log_probs=replay(track).log_probs.float())
        return dataclasses.replace(track, segment=segment)

    def loss_weights(self, track):
        return {"policy": track.sample_weights[:, None] * (track.latent.sde_steps >= 0)}

    def loss(self, track, replay, *, progress):
        self.trained.append(track.sample_ids)
        new = replay(track).log_probs
        ratio = (new - track.latent.log_probs).exp()
        weights = self.loss_weights(track)["policy"].double()
        values = -track.advantages[:, None] * ratio
        ratio = ratio.detach()
        counted = weights > 0
        return Losses(
            terms=[LossTerm(name="policy", values=values, weights=weights)],
            metrics={
                "ratio_mean": Metric(total=float((ratio * weights).sum()), weight=float(weights.sum())),
                "ratio_max_dev": Metric(total=float(torch.where(counted, (ratio - 1).abs(), 0.0).max()), reduce="max"),
                "progress": Metric(total=progress),
            },
        )


class FromEngine(Weighted):
    """Keeps the log-probs of the engine."""

    def with_old_log_probs(self, track, replay):
        return track


class Pairs(Weighted):
    """DPO's loss: -log sigmoid of the difference of the log-probs of the rows of a unit, the better one first."""

    def loss_weights(self, track):
        return {"pairs": track.sample_weights[[rows[0] for rows in track.units()]]}

    def loss(self, track, replay, *, progress):
        self.trained.append(track.sample_ids)
        better, worse = torch.tensor(track.units()).unbind(dim=1)
        log_probs = replay(track).log_probs[:, 0]
        values = -torch.nn.functional.logsigmoid(log_probs[better] - log_probs[worse])
        return Losses(terms=[LossTerm(name="pairs", values=values, weights=self.loss_weights(track)["pairs"])])


def make_track(num_rows=8, *, groups=None, log_probs=None):
    generator = torch.Generator().manual_seed(0)
    steps = torch.tensor([[0, 1]] * num_rows)
    steps[1::3, 1] = -1  # ragged: some rows have one step
    segment = LatentSegment(
        latents=torch.randn(num_rows, 3, 4, generator=generator),
        positions=torch.tensor([[0, 1, 2]] * num_rows),
        sde_steps=steps,
        sigmas=torch.tensor([1.0, 0.5, 0.0]),
        sampler=Sampler(kernel="flow-sde", eta=0.7),
        log_probs=log_probs,
    )
    return Track(
        name="image",
        sample_ids=tuple(f"s{i}" for i in range(num_rows)),
        group_ids=groups or tuple(f"g{i // 4}" for i in range(num_rows)),
        inputs=Inputs.of_texts(("",) * num_rows),
        metadata=({},) * num_rows,
        segment=segment,
        advantages=torch.randn(num_rows, generator=generator),
        sample_weights=torch.ones(num_rows),
        status=(Status.COMPLETED,) * num_rows,
        policy_version=(0,) * num_rows,
    )


def run(track, algorithm=None, *, rank=None, version=None, updates=1, **settings):
    rank = rank or Alone()
    report = train_on(
        [Job(track=track, algorithm=algorithm or Weighted())],
        forward=rank.replay,
        updater=rank,
        train=TrainConfig(updates_per_step=updates, **settings),
        version=version,
        progress=0.25,
    )
    return rank, report


def run_ranks(tracks, *, reduction="mean", lr=0.0, **settings):
    board, barrier = {}, threading.Barrier(len(tracks))
    ranks = [ThreadRank(i, board, barrier, reduction, lr=lr) for i in range(len(tracks))]
    result = [None] * len(tracks)

    def work(i):
        try:
            result[i] = run(tracks[i], rank=ranks[i], **settings)
        except (BatchError, RunFailed) as error:
            result[i] = error

    threads = [threading.Thread(target=work, args=(i,), daemon=True) for i in range(len(tracks))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * DEADLINE_S)
        assert not thread.is_alive()
    return result
