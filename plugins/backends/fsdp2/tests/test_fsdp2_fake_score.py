"""The fake score of the FSDP2 backend: when it trains, its warm-up, its memory, and ranks."""

from pathlib import Path

import pytest
import torch
from fsdp2_fake_score_ranks import CASES, ROWS, run, weights_of
from fsdp2_toy import ToyModel, make_backend, make_track
from rank_processes import launch
from unirl.backends.fsdp2.config import FakeScoreConfig
from unirl.conformance.doubles.ppo import PPO, FakeScorePPO
from unirl.core.errors import BatchError
from unirl.core.roles import Job
from unirl.core.specs.config import TrainConfig


class Noted(FakeScorePPO):
    """Notes its losses in order: the number of the repeat, or `policy`."""

    def __init__(self):
        super().__init__()
        self.order = []

    def loss(self, track, forward, *, progress):
        self.order.append("policy")
        return super().loss(track, forward, progress=progress)

    def fake_score_loss(self, track, forward, *, progress, repeat):
        self.order.append(repeat)
        return super().fake_score_loss(track, forward, progress=progress, repeat=repeat)


def make(*, train=None, model=None, fake=None, **changes):
    chosen = FakeScoreConfig(**{"lr": 1e-2, "max_grad_norm": None, **(fake or {})})
    return make_backend(model, train=train, fake_score=chosen, **changes)[0]


def train(backend, algorithm):
    return backend.train([Job(track=make_track(ToyModel()), algorithm=algorithm)], progress=0.0).only


def test_it_takes_its_steps_before_each_update_of_the_policy():
    backend, algorithm = make(train=TrainConfig(updates_per_step=2), fake={"steps_per_update": 3}), Noted()
    metrics = train(backend, algorithm)
    assert algorithm.order == [0, 1, 2, "policy", 0, 1, 2, "policy"]
    assert (metrics["fake_score_updates"], metrics.get("updates_empty", 0)) == (6, 0)
    assert metrics["fake_score_lr"] == 1e-2 and metrics["lr"] == 1e-2
    assert backend.version == 2 and metrics["fake_score_grad_norm"] > 0


def test_the_policy_waits_in_its_warm_up():
    backend, algorithm = make(fake={"steps_per_update": 2, "warmup_steps": 4}), Noted()
    before = weights_of(backend)
    for _ in range(2):
        assert "grad_norm" not in train(backend, algorithm)
    after = weights_of(backend)
    assert algorithm.order == [0, 1] * 2 and backend.version == 0
    assert all(torch.equal(value, after["live"][name]) for name, value in before["live"].items())
    assert any(not torch.equal(value, after["fake"][name]) for name, value in before["fake"].items())
    train(backend, algorithm)
    assert algorithm.order[-1] == "policy" and backend.version == 1


def test_the_loss_that_is_told_is_that_before_its_first_step():
    backend = make(fake={"steps_per_update": 5, "lr": 0.1})
    first, second = (train(backend, FakeScorePPO())["fake_score_loss"] for _ in range(2))
    once = make(fake={"steps_per_update": 1, "lr": 0.1})
    # The same weights and the same rows.
    assert train(once, FakeScorePPO())["fake_score_loss"] == first > second


def test_one_job_trains_it_and_another_algorithm_is_refused():
    backend = make()
    job = Job(track=make_track(ToyModel()), algorithm=FakeScorePPO())
    with pytest.raises(BatchError, match="a fake score is trained by one job, got 2"):
        backend.train([job, job], progress=0.0)
    with pytest.raises(BatchError, match=r"keeps a fake score, and PPO trains none; .*fake_score\.lr=null"):
        train(backend, PPO())
    with pytest.raises(
        BatchError, match=r"FakeScorePPO trains a fake score, and the backend keeps none; .*fake_score\.lr"
    ):
        train(make_backend()[0], FakeScorePPO())


@pytest.mark.parametrize(
    "settings",
    [{"trains": "full"}, {}, {"shard": "always"}, {"mixed_precision": "bf16"}, {"mixed_precision": "fp16"}],
    ids=["full", "lora", "wrapped", "bf16", "fp16"],
)
def test_offloaded_and_back_it_trains_on(settings):
    backend, twin = make(**settings), make(**settings)
    for one in (backend, twin):
        train(one, FakeScorePPO())
    backend.offload()
    backend.onload()
    for one in (backend, twin):
        train(one, FakeScorePPO())
    result, expected = weights_of(backend), weights_of(twin)
    for one in (backend, twin):
        one.close()
    for policy in ("live", "fake"):
        assert all(torch.equal(value, expected[policy][name]) for name, value in result[policy].items())


def test_it_holds_one_copy_of_what_trains_and_no_module():
    model = ToyModel()
    count = len(list(model.net.parameters()))
    backend = make(model=model, trains="full")
    assert len(list(model.net.parameters())) == count
    assert sum(value.numel() for value in backend._policies.copies["fake"].values.values()) == backend.num_trainable


@pytest.mark.slow
def test_two_ranks_learn_what_one_does_and_either_goes_on_from_the_others_checkpoint(tmp_path: Path):
    launch(Path(__file__).with_name("fsdp2_fake_score_ranks.py"), tmp_path / "store", tmp_path, ranks=2)
    everything = torch.load(tmp_path / "found.pt", weights_only=True)
    for case, settings in CASES.items():
        expected = run(case, list(range(8)), folder=None)
        for number in range(len(ROWS)):
            result = everything[case, number]
            for policy in ("live", "fake"):
                for name, value in result[policy].items():
                    # Steps of rate 1 along gradients of order 1, whose fp32 sums have another order: some ten roundings of
                    # 1e-7 in each of six updates.
                    torch.testing.assert_close(
                        value, expected[policy][name], rtol=0, atol=6e-6, msg=lambda m, at=(case, name): f"{at}: {m}"
                    )
            for name in ("fake_score_loss", "fake_score_grad_norm", "grad_norm"):
                assert result["metrics"][name] == pytest.approx(expected["metrics"][name], rel=1e-4), (case, name)
            own = {name: value for name, value in settings.items() if name != "mesh"}
            alone = make(fake={"lr": 1.0, "steps_per_update": 2}, eps=1.0, **own)
            alone.load(tmp_path / f"{case}-{number}")
            saved = weights_of(alone)
            for policy in ("live", "fake"):
                assert all(torch.equal(saved[policy][name], value) for name, value in result[policy].items())
            alone.close()
