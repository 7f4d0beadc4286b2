"""Frozen weights of blocks in CPU memory: the numbers of a model that is whole on its device."""

from __future__ import annotations

import pytest
import torch
from fsdp2_toy import Clipped, ToyBlock, ToyModel, gradients, make_backend, make_track
from unirl.backends.fsdp2.config import AverageConfig, LoraSettings
from unirl.core.errors import RecipeError
from unirl.core.roles import Job
from unirl.core.specs.config import TrainConfig

OFFLOADED = {"offload_frozen": "blocks"}


def deep(num_blocks: int) -> ToyModel:
    """More blocks than the two that are on the device."""
    model = ToyModel()
    with torch.random.fork_rng():
        torch.manual_seed(5)
        model.net.blocks.extend(ToyBlock() for _ in range(num_blocks - 2))
    return model


def states(num_blocks, *, policies=("live", "reference", "ema"), **settings):
    """What sampling, training and exports give: velocities of each policy, gradients, and merged weights."""
    train = settings.pop("train", TrainConfig(updates_per_step=2, micro_batch_size=3))
    backend, model = make_backend(
        deep(num_blocks), ema=AverageConfig(kind="constant", decay=0.5), train=train, **settings
    )
    track = make_track(model)
    report = backend.train([Job(track=track, algorithm=Clipped(to="ema"))], progress=0.0)
    assert report.num_updates == train.updates_per_step
    result = {}
    for policy in policies:
        with backend.policy(policy), torch.no_grad():
            x, text = track.latent.latents[:, 0], track.conditions["positive"].expanded()
            result[f"velocity/{policy}"] = model.velocity(x, torch.full((8,), 0.5), text)
    result |= gradients(backend, track, Clipped(to="reference"))
    update = backend.export_weights(kind="merged")
    result |= {f"merged/{name}": update.tensors[name] for name in update.tensors}
    backend.close()
    return result


@pytest.mark.parametrize("num_blocks", [1, 2, 5, 6])
@pytest.mark.parametrize("replay", ["serial", "stacked"])
@pytest.mark.parametrize("recomputes", [False, True], ids=["kept", "recomputed"])
def test_samples_gradients_and_exports_are_those_of_the_whole_model(num_blocks, replay, recomputes):
    settings = {
        "train": TrainConfig(updates_per_step=2, micro_batch_size=3, replay=replay),
        "activation_checkpointing": recomputes,
    }
    expected, result = states(num_blocks, **settings), states(num_blocks, **settings, **OFFLOADED)
    assert result.keys() == expected.keys()
    assert all(torch.equal(result[name], expected[name]) for name in expected)
