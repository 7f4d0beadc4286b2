"""Checkpoints: exact continuation, and clear refusals."""

import dataclasses
import enum
import pickle
import resource
import shutil
import signal
from pathlib import Path

import pytest
import torch
from bad_input_page import answer
from fsdp2_toy import Clipped, ToyModel, make_backend, make_track
from torch.distributed.checkpoint.metadata import BytesStorageMetadata
from unirl.backends.fsdp2.config import AverageConfig, LoraSettings
from unirl.core.errors import CheckpointError
from unirl.core.roles import Job
from unirl.loop.checkpoints import Checkpoints
from unirl.train_host.checkpoint import read_keys, read_tensors, write

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
    # Two rollouts before the resume are within its first period.
    "moving reference": {
        "moving_reference": AverageConfig(kind="constant", decay=0.5, every="rollout", period=3),
    },
    "fp16": {"trains": "full", "mixed_precision": "fp16"},
    "wrapped": {"shard": "always", "ema": AverageConfig(kind="constant")},
    "rates": {
        **{"trains": "full", "lr_scales": {r"blocks\.0": 0.0, "bias": 0.1}, "lr_schedule": "cosine"},
        "ema": AverageConfig(kind="constant"),
    },
    "lora-rates": {"shard": "always", "lr_scales": {r"blocks\.0\.up": 0.0, "lora_B": 4.0}, "lr_schedule": "linear"},
}


def run(backend, steps):
    for step in steps:
        backend.train(
            [
                Job(
                    track=make_track(ToyModel(), seed=step),
                    algorithm=Clipped(to="reference" if backend.num_lora_layers else None),
                )
            ],
            progress=0.0,
        )
        backend.end_rollout()


def everything(backend):
    tensors = {**backend._weight_tensors(), **backend._optimizer.moments()}
    for policy, copy in backend._policies.copies.items():
        tensors |= {f"{policy}/{name}": value for name, value in copy.values.items()}
    return {name: (t.full_tensor() if hasattr(t, "full_tensor") else t).clone() for name, t in tensors.items()}


@pytest.mark.parametrize("case", CASES)
def test_two_steps_a_resume_and_two_steps_are_four_steps_bit_for_bit(case, tmp_path):
    straight, _ = make_backend(**CASES[case])
    run(straight, range(4))
    expected = everything(straight)
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
    result = everything(after)
    after.close()
    assert result.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(result[name], expected[name])] == []
    assert after.version == straight.version == 4


def test_a_checkpoint_before_the_first_step_loads(tmp_path):
    first, _ = make_backend()
    first.save(tmp_path)
    other, _ = make_backend()
    run(other, [0])
    other.load(tmp_path)
    assert other.export_weights(kind="lora").checksum == first.export_weights(kind="lora").checksum
    assert other.version == 0 and not other._optimizer.adams[0].state


def test_a_frozen_base_is_not_in_a_lora_checkpoint(tmp_path):
    backend, _ = make_backend()
    run(backend, [0])
    backend.save(tmp_path)
    names = read_keys(tmp_path)
    assert all("lora_" in name for name in names)
    # Eight adapter weights, each with two moments and a step count.
    assert len(names) == 8 * 4


def test_a_reference_copy_is_not_in_a_checkpoint_and_must_be_the_same_again(tmp_path):
    settings = {"trains": "full", "reference_copy": True, "ema": AverageConfig(kind="constant")}
    backend, model = make_backend(**settings)
    run(backend, [0])
    backend.save(tmp_path / "backend")
    names = read_keys(tmp_path / "backend")
    # Each weight with its average, two moments and a step count.
    assert len(names) == 5 * len(dict(model.trainable.named_parameters()))
    assert {name.partition("/")[0] for name in names} == {"weights", "ema", "adam"}
    other = ToyModel()
    with torch.no_grad():
        next(other.trainable.parameters()).view(-1)[0] += 1e-3
    changed, _ = make_backend(other, **settings)
    before = everything(changed)
    with pytest.raises(CheckpointError, match=r"reference_checksum = .*with the recipe and the base checkpoint that"):
        changed.load(tmp_path / "backend")
    assert all(torch.equal(value, before[name]) for name, value in everything(changed).items())


@pytest.fixture
def saved(tmp_path):
    backend, _ = make_backend()
    run(backend, [0])
    backend.save(tmp_path / "good")
    return tmp_path


def _cut(path, size):
    path.write_bytes(path.read_bytes()[:size])


def _replaced(path, old, new):
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))


BREAKS = {
    "data cut": (lambda folder: [_cut(p, 3000) for p in folder.glob("*.distcp")], "is truncated, 3000 bytes"),
    "data missing": (lambda folder: [p.unlink() for p in folder.glob("*.distcp")], "is missing"),
    "metadata cut": (lambda folder: _cut(folder / ".metadata", 700), ".metadata: cannot be read"),
    "metadata missing": (lambda folder: (folder / ".metadata").unlink(), "never completed"),
    "facts cut": (lambda folder: _cut(folder / "training.json", 30), "training.json: cannot be read"),
    "facts missing": (lambda folder: (folder / "training.json").unlink(), "training.json is missing"),
    "facts of another version": (
        lambda folder: _replaced(folder / "training.json", '"format": 2', '"format": 1'),
        "got format 1, expected 2. Resume with the version that wrote it",
    ),
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
        ({"lora": LoraSettings(rank=4, alpha=6.0, targets=["up"])}, r"it has 16 unexpected tensors"),
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


def test_a_folder_that_another_machine_does_not_see_is_not_made_there(tmp_path):
    """The driver makes the folder of a checkpoint; where it is missing, no file system is shared, and tensors are lost."""
    backend, _ = make_backend()
    with pytest.raises(FileNotFoundError):
        backend.save(tmp_path / ".part-step-000001" / "backend")
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def short_files():
    """Files past 2 KB fail in this process, as on a full disk."""
    before, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2048, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    signal.signal(signal.SIGXFSZ, handler)


def test_a_disk_that_fills_up_inside_torchs_writer_leaves_the_checkpoints_before_it(tmp_path, short_files):
    """The writer's own error ends a run: torch may tell of positions in a file, and nothing of a disk."""
    backend, _ = make_backend()
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    checkpoints.save(1, write=lambda folder: None, state={})
    with pytest.raises(
        CheckpointError, match=r"step-000002: the checkpoint could not be written: .*: step-000001\. When"
    ):
        checkpoints.save(2, write=backend.save, state={})
    assert [path.name for path in checkpoints.folder.iterdir()] == ["step-000001"]


class Payload:
    """Payload of a malicious pickle: unpickling it makes a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (Path.touch, (self.path,))


def _as_object(metadata, evidence):
    metadata.planner_data = Payload(evidence)


def _as_bytes(metadata, evidence):
    name = next(iter(metadata.state_dict_metadata))
    metadata.state_dict_metadata[name] = BytesStorageMetadata()


def _elsewhere(metadata, evidence):
    index, place = next(iter(metadata.storage_data.items()))
    metadata.storage_data[index] = dataclasses.replace(place, relative_path="../../passwords")


@pytest.mark.parametrize(
    ("tamper", "message"),
    [
        (_as_object, r"names pathlib\.Path\.touch|names pathlib\.Path|names builtins\.getattr"),
        (_as_bytes, r"names torch\.distributed\.checkpoint\.metadata\.BytesStorageMetadata"),
        (_elsewhere, r"names a file outside of the folder"),
    ],
)
def test_a_tampered_checkpoint_runs_nothing(tamper, message, saved, tmp_path):
    evidence = tmp_path / "evidence"
    file = saved / "good" / ".metadata"
    metadata = pickle.loads(file.read_bytes())
    tamper(metadata, evidence)
    file.write_bytes(pickle.dumps(metadata))
    if tamper is _as_object:
        pickle.loads(file.read_bytes())
        assert evidence.exists(), "the payload must work where it is unpickled"
        evidence.unlink()
    backend, _ = make_backend()
    for read in (lambda: backend.load(saved / "good"), lambda: read_tensors(saved / "good", {}, single=True)):
        with pytest.raises(CheckpointError, match=message) as caught:
            read()
        if tamper is _as_object:
            assert answer("a checkpoint that was altered to run code") in str(caught.value)
    assert not evidence.exists()


class _EarlyPickler(pickle.Pickler):
    """Pickles members of enums as Python 3.11.0 to 3.11.3 do."""

    def reducer_override(self, obj):
        return (getattr, (type(obj), obj.name)) if isinstance(obj, enum.Enum) else NotImplemented


def test_a_checkpoint_that_an_early_python_311_wrote_loads(saved):
    file = saved / "good" / ".metadata"
    metadata = pickle.loads(file.read_bytes())
    with file.open("wb") as out:
        _EarlyPickler(out).dump(metadata)
    assert b"getattr" in file.read_bytes()
    backend, _ = make_backend()
    backend.load(saved / "good")


def test_every_dtype_that_trains_is_read_as_it_was_written(tmp_path):
    tensors = {
        str(dtype): torch.arange(6).reshape(2, 3).to(dtype)
        for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool)
    }
    write(tmp_path, tensors=tensors, facts={}, is_writer=True, single=True)
    into = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    read_tensors(tmp_path, into, single=True)
    assert all(torch.equal(into[name], tensor) for name, tensor in tensors.items())
