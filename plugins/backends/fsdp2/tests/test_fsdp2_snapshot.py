"""Snapshots: of their moment, and written as a save of it would have been."""

import dataclasses
import errno
import gc
import threading
import weakref
from pathlib import Path

import pytest
import torch
from fsdp2_snapshot_ranks import CASES as RANK_CASES
from fsdp2_snapshot_ranks import run
from fsdp2_text_toy import Judged, make_judged, make_texts
from fsdp2_toy import ToyModel, make_backend, make_track
from rank_processes import launch
from slow_disk import slow_disk
from unirl.backends.fsdp2.config import AverageConfig
from unirl.core.errors import CheckpointError
from unirl.core.roles import Job
from unirl.loop.checkpoints import Checkpoints
from unirl.train_host.checkpoint_metadata import read_metadata

CASES = {
    "lora": {"ema": AverageConfig(kind="linear", rate=0.1)},
    "full": {"trains": "full", "reference_copy": True, "lagged": AverageConfig(kind="constant")},
    "fp16": {"trains": "full", "mixed_precision": "fp16"},
    "wrapped": {"shard": "always", "ema": AverageConfig(kind="constant")},
}


def files(folder):
    """Contents of a checkpoint's files. DCP's metadata has an id of each save, and the folder it was written to."""
    return {
        str(path.relative_to(folder)): repr(dataclasses.replace(read_metadata(path.parent), storage_meta=None))
        if path.name == ".metadata"
        else path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def on_device(device):
    model = ToyModel()
    model.net.to(device)
    model.device = torch.device(device)
    return model


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("case", CASES)
def test_a_snapshot_is_of_its_moment_and_written_file_for_file_as_a_save(case, device, tmp_path):
    backend, _ = make_backend(on_device(device), **CASES[case])
    track = make_track(ToyModel())
    # Before the first step there are no moments: the next snapshot needs more memory.
    for number in range(3):
        folder = tmp_path / str(number)
        folder.mkdir()
        backend.save(folder / "sync")
        write = backend.snapshot()
        assert backend._staging._memory.is_pinned() == (device == "cuda")
        run(backend, track, 1)
        backend.end_rollout()
        write(folder / "async")
        backend.save(folder / "later")
        assert files(folder / "async") == files(folder / "sync") != files(folder / "later")
    resumed, _ = make_backend(on_device(device), **CASES[case])
    resumed.load(tmp_path / "2" / "async")
    run(resumed, track, 1)
    resumed.end_rollout()
    resumed.save(tmp_path / "resumed")
    assert files(tmp_path / "resumed") == files(tmp_path / "2" / "later")
    backend.close()
    resumed.close()


def test_a_snapshot_has_the_critic(tmp_path):
    backend, _ = make_judged()
    for step in range(2):
        backend.train([Job(track=make_texts(), algorithm=Judged())], progress=0.0)
        if step == 0:
            backend.save(tmp_path / "sync")
            write = backend.snapshot()
    write(tmp_path / "async")
    result = files(tmp_path / "async")
    assert result == files(tmp_path / "sync") and "critic/.metadata" in result
    backend.close()


def test_tensors_of_any_layout_are_written_as_they_are(tmp_path):
    """A transposed weight, a part of a larger one, an empty one and 16-bit numbers that begin between two words."""
    backend, _ = make_backend()
    memory = torch.arange(24, dtype=torch.float32)
    given = {
        "count": torch.tensor(3.0),
        "transposed": memory.view(4, 6).t(),
        "part": memory.view(4, 6)[:, 1:4],
        "last": memory.view(2, 3, 2, 2).to(memory_format=torch.channels_last),
        "empty": torch.empty(0, 3),
        "half": memory[:3].half(),
        "bfloat16": memory[:5].bfloat16(),
    }
    (copies,) = backend._staging.copies([given])
    for name, tensor in given.items():
        assert torch.equal(copies[name], tensor) and copies[name].stride() == tensor.clone().stride()
        assert copies[name].dtype == tensor.dtype
    backend.close()


def views_of(memory):
    """References to the tensors of this process in this memory, itself among them."""
    tensors = [item for item in gc.get_objects() if type(item) is torch.Tensor]
    dense = [item for item in tensors if item.layout is torch.strided and item.device.type == "cpu"]
    own = memory.untyped_storage().data_ptr()
    return [weakref.ref(item) for item in dense if item.untyped_storage().data_ptr() == own]


def test_a_snapshot_that_cannot_be_written_fails_as_a_save_and_releases_its_memory(tmp_path):
    backend, _ = make_backend(trains="full")
    run(backend, make_track(ToyModel()), 1)
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    checkpoints.save(1, write=backend.save, state={})
    write = backend.snapshot()
    copies = views_of(backend._staging._memory)
    assert len(copies) > 1
    caught = []

    def save():
        with pytest.raises(CheckpointError) as error:
            checkpoints.save(2, write=write, state={})
        caught.append(error.value)

    with slow_disk() as disk:
        disk.error = OSError(errno.ENOSPC, "No space left on device")
        thread = threading.Thread(target=save)
        thread.start()
        thread.join()
    text = "step-000002: the checkpoint could not be written: No space left on device. Earlier checkpoints are intact: "
    assert text in str(caught[0])
    assert [path.name for path in checkpoints.folder.iterdir()] == ["step-000001"]
    # The error is still there, with all its causes.
    gc.collect()
    assert not [copy for copy in copies if copy() is not None]
    assert backend._staging._memory.numel() == 0
    # Another one can be written.
    backend.snapshot()(tmp_path / "again")
    backend.save(tmp_path / "sync")
    assert files(tmp_path / "again") == files(tmp_path / "sync")
    backend.close()


@pytest.fixture(scope="module", params=[1, 2])
def ranks(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    script = Path(__file__).with_name("fsdp2_snapshot_ranks.py")
    launch(script, folder / "store", folder, request.param, ranks=request.param)
    return folder, request.param


@pytest.mark.slow
@pytest.mark.parametrize("case", RANK_CASES)
def test_ranks_train_while_their_snapshot_is_written(case, ranks):
    folder, count = ranks
    assert files(folder / case / "async") == files(folder / case / "sync") != files(folder / case / "next")
    for rank in range(count):
        weights, used_again = torch.load(folder / f"rank-{rank}.pt")[case]
        assert used_again
        # Trained as without a write beside them.
        first = torch.load(folder / "rank-0.pt")[case][0]
        assert all(torch.equal(weights[name], first[name]) for name in first)
