"""Where rewards are scored: by default beside the train ranks, on devices that are counted."""

from __future__ import annotations

import pytest
import small_runs
from unirl.core.match.match import match
from unirl.launchers.ray.config import RayConfig
from unirl.launchers.ray.placement import places

PICK = ("+reward@reward.pick=pickscore", "launcher=ray")


@pytest.mark.parametrize(
    ("placement", "on_train_device", "expected"),
    [
        ("trainside", 2, {"train": 0.5, "reward": 0.5}),
        # 1 / 3 and 1 / 4 of a GPU, as Ray counts: rounded down, because the parts must fit.
        ("colocate", 3, {"train": 0.3333, "rollout": 0.3333, "reward": 0.3333}),
        ("separate", 2, {"train": 0.5, "rollout": 1.0, "reward": 0.5}),
    ],
)
def test_by_default_each_train_rank_has_a_reward_worker_on_its_device_where_a_reward_has_weights(
    placement: str, on_train_device: int, expected: dict[str, float]
) -> None:
    config = RayConfig(train_ranks=8, rollout_workers=8, placement=placement)
    for words, beside in ((PICK, True), (PICK[1:], False)):
        rewards = config.reward_processes(small_runs.plan(*words))
        result = places(config, on_cuda=True, rewards=rewards)
        scorers = [place for place in result if place.role == "reward"]
        assert [place.device for place in scorers] == (list(range(8)) if beside else [None] * 8)
        if beside:
            assert {place.role: place.gpus for place in result} == expected
            for device in range(8):
                there = [place for place in result if place.device == device]
                assert len(there) == on_train_device and there[0].name == f"train-{device}"
                assert 1 - 1e-3 < sum(place.gpus for place in there) <= 1
        else:
            assert {place.gpus for place in scorers} == {0.0}
        on_cpu = [place for place in places(config, on_cuda=False, rewards=rewards) if place.role == "reward"]
        assert {(place.gpus, place.device) for place in on_cpu} == {(0.0, None)}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ("launcher.train_ranks=2", "launcher.reward_workers=3"),
            "launcher.reward_workers: got 3, expected at most launcher.train_ranks=2, because each shares the device "
            "of a train rank. Set launcher.reward_gpus to the GPUs of each; 0 scores on CPUs.",
        ),
        (
            ("+launcher.dedicated_rewards.pick=2",),
            "launcher.dedicated_rewards.pick: got 2, expected at most launcher.train_ranks=1, because each shares the "
            "device of a train rank. Set launcher.dedicated_gpus.pick to the GPUs of each; 0 scores on CPUs.",
        ),
        (
            ("launcher.gpus=2",),
            "launcher.gpus: got 2; reward workers share the devices of train ranks with 1 at most. Set "
            "launcher.reward_gpus to the GPUs of each; 0 scores on CPUs.",
        ),
        (("run.device=cuda", "launcher.gpus=0"), "launcher.gpus: got 0, but run.device is 'cuda'; workers without a"),
        *(
            (words, "")
            for words in (
                ("launcher.reward_workers=3", "launcher.reward_gpus=0"),
                ("launcher.reward_workers=3", "launcher.reward_gpus=0.25", "launcher.gpus=2"),
                ("launcher.reward_workers=3", "run.device=cpu"),
                ("+launcher.dedicated_rewards.shapes=3",),
            )
        ),
    ],
)
def test_reward_workers_that_have_no_device_to_share_are_refused_by_the_key(words: tuple[str, ...], said: str) -> None:
    reasons = [str(reason) for reason in match(small_runs.plan(*PICK, *words), catalog=small_runs.catalog()).reasons]
    reasons = [reason for reason in reasons if reason.startswith("launcher.")]
    assert [reason[: len(said)] for reason in reasons] == ([said] if said else [])


def test_a_worker_without_a_gpu_sees_none() -> None:
    """Whatever the machine has: code of a reward may take the first that it finds."""
    workers = places(RayConfig(), on_cuda=True, rewards=RayConfig().reward_processes(small_runs.plan()))
    # Ray shows a worker those that it was given.
    assert [worker.variables for worker in workers] == [{}, {"CUDA_VISIBLE_DEVICES": ""}]
