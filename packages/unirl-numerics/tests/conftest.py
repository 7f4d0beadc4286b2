"""Fixtures for the loop and its replay."""

import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor
from unirl.numerics.noise import INITIAL, noise

# What the tests of this folder share lies beside them.
sys.path.insert(0, str(Path(__file__).parent))


class TinyVelocity(torch.nn.Module):
    """A small random network as a velocity: any latent rank, one condition, and a record of its calls."""

    def __init__(self, shape, *, seed=0):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        size = int(torch.tensor(shape).prod())
        self.into = torch.nn.Parameter(torch.randn(size + 4, 32, generator=generator) / (size + 4) ** 0.5)
        self.out = torch.nn.Parameter(torch.randn(32, size, generator=generator) / 32**0.5)
        self.batch_sizes = []

    def forward(self, x, sigma, conditions):
        self.batch_sizes.append(x.shape[0])
        features = torch.cat([x.flatten(1), sigma[:, None], conditions["text"]], dim=1)
        return (torch.tanh(features @ self.into) @ self.out).view(x.shape)


@dataclass(frozen=True)
class Scene:
    """Inputs of a rollout, apart from its kernel and steps."""

    velocity: TinyVelocity
    initial: Tensor
    conditions: dict[str, Tensor]
    negatives: dict[str, Tensor]
    ids: tuple[str, ...]

    @property
    def branches(self):
        return {"positive": self.conditions, "negative": self.negatives}

    def step_noise(self, step, rows):
        ids = [self.ids[int(row)] for row in rows]
        return noise(seed=0, rollout=0, ids=ids, step=step, shape=self.initial.shape[1:])


@pytest.fixture
def scene():
    def build(shape=(2, 4, 4), num_rows=5):
        ids = tuple(f"sample:{row}" for row in range(num_rows))
        text = noise(seed=1, rollout=0, ids=ids, step=0, shape=(3,))
        return Scene(
            velocity=TinyVelocity(shape),
            initial=noise(seed=0, rollout=0, ids=ids, step=INITIAL, shape=shape),
            conditions={"text": text},
            negatives={"text": torch.zeros_like(text)},
            ids=ids,
        )

    return build
