"""Checkpoints: exact continuation, and clear refusals."""

import shutil

import pytest
import torch
from fsdp2_toy import Clipped, ToyModel, make_backend, make_track
from unirl.backends.fsdp2.config import AverageConfig, LoraSettings
from unirl.core.errors import CheckpointError

CASES = {
    "lora": {"lr_schedule": "cosine", "lr_warmup_steps": 2},
    "full": {"trains": "full", "weight_decay": 0.1, "max_grad_norm": 0.1},
    "averages": {
        "trains": "full",
        "reference_copy": True,
        "ema": AverageConfig(kind="adaptive"),
        "lagged": AverageConfig(kind="linear", rate=0.2, decay=0.7, every="rollout"),
    },
    "lora-averages": {"ema": AverageConfig(kind="linear", rate=0.1), "lagged": AverageConfig(kind="constant")},
    "fp16": {"trains": "full", "mixed_precision": "fp16"},
    "wrapped": {"shard": "always", "ema": AverageConfig(kind="constant")},
}


def run(backend, steps):
    for step in steps:
        backend.train(
            make_track(ToyModel(), seed=step),
            Clipped(to="reference" if backend.num_lora_layers else None),
            progress=0.0,
        )
        backend.end_rollout()


def everything(backend):
    tensors = {**backend._weight_tensors(), **backend._optimizer.moments()}
    return {name: (t.full_tensor() if hasattr(t, "full_tensor") else t).clone() for name, t in tensors.items()}


@pytest.mark.parametrize("case", CASES)
def test_two_steps_a_resume_and_two_steps_are_four_steps_bit_for_bit(case, tmp_path):
    straight, _ = make_backend(**CASES[case])
    run(straight, range(4))
    wanted = everything(straight)
    straight.close()

    before, _ = make_backend(**CASES[case])
    run(before, range(2))
    before.save(tmp_path / "backend")
    before.close()
    after, _ = make_backend(**CASES[case])
    run(after, [7])  # whatever it did before, loading replaces
    after.load(tmp_path / "backend")
    assert after.version == 2
    run(after, range(2, 4))
    found = everything(after)
    after.close()
    assert found.keys() == wanted.keys()
    assert [name for name in wanted if not torch.equal(found[name], wanted[name])] == []
    assert after.version == straight.version == 4


def test_a_checkpoint_before_the_first_step_loads(tmp_path):
    first, _ = make_backend()
    first.save(tmp_path)
    other, _ = make_backend()
    run(other, [0])
    other.load(tmp_path)
    assert other.weights(kind="lora").checksum == first.weights(kind="lora").checksum
    assert other.version == 0 and not other._optimizer.adam.state


def test_a_frozen_base_is_not_in_a_lora_checkpoint(tmp_path):
    backend, _ = make_backend()
    run(backend, [0])
    backend.save(tmp_path)
    from unirl.backends.fsdp2.checkpoint import read_keys

    names = read_keys(tmp_path)
    assert all("lora_" in name for name in names)
    # Eight adapter weights, each with two moments and a step count.
    assert len(names) == 8 * 4


@pytest.fixture
def saved(tmp_path):
    backend, _ = make_backend()
    run(backend, [0])
    backend.save(tmp_path / "good")
    return tmp_path


def _cut(path, size):
    path.write_bytes(path.read_bytes()[:size])


BREAKS = {
    "data cut": (lambda folder: [_cut(p, 3000) for p in folder.glob("*.distcp")], "is truncated, 3000 bytes"),
    "data missing": (lambda folder: [p.unlink() for p in folder.glob("*.distcp")], "is missing"),
    "metadata cut": (lambda folder: _cut(folder / ".metadata", 700), ".metadata: cannot be read"),
    "metadata missing": (lambda folder: (folder / ".metadata").unlink(), "never completed"),
    "facts cut": (lambda folder: _cut(folder / "training.json", 30), "training.json: cannot be read"),
    "facts missing": (lambda folder: (folder / "training.json").unlink(), "training.json is missing"),
    "folder missing": (lambda folder: shutil.rmtree(folder), "training.json is missing"),
}


@pytest.mark.parametrize("how", BREAKS)
def test_a_broken_checkpoint_is_refused_and_changes_nothing(how, saved):
    damage, message = BREAKS[how]
    damage(saved / "good")
    backend, _ = make_backend()
    run(backend, [1])
    before = everything(backend)
    with pytest.raises(CheckpointError, match=message):
        backend.load(saved / "good")
    after = everything(backend)
    assert all(torch.equal(after[name], before[name]) for name in before) and backend.version == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"lora": LoraSettings(rank=2, alpha=6.0)},
            r"lora_A.default.weight/exp_avg' is torch.float32\[4, 24\] there and .*\[2, 24\]",
        ),
        ({"lora": LoraSettings(rank=4, alpha=8.0)}, r"lora_alpha = 6.0; this recipe has 8.0"),
        ({"lora": LoraSettings(rank=4, alpha=6.0, targets=["up"])}, r"it has 16 tensors that are not wanted"),
        ({"trains": "full"}, r"trains = 'lora'; this recipe has 'full'"),
        ({"ema": AverageConfig(kind="constant")}, r"8 tensors are missing from it, such as 'ema/blocks.0.down"),
    ],
)
def test_a_checkpoint_of_another_set_up_is_refused_and_says_what_differs(changes, message, saved):
    backend, _ = make_backend(**changes)
    with pytest.raises(CheckpointError, match=message):
        backend.load(saved / "good")


def test_a_disk_that_refuses_is_an_os_error(tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("in the way")
    backend, _ = make_backend()
    with pytest.raises(OSError, match="file"):
        backend.save(blocked)
