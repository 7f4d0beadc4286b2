"""Checkpoints: exact continuation, and clear refusals."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from unirl.conformance.claims import claim
from unirl.conformance.doubles.trainer import Trainer, largest_gap
from unirl.conformance.fixtures.backend import BackendCase, refuses
from unirl.conformance.verdicts import NotApplicable
from unirl.core.errors import CheckpointError

SETTINGS: Mapping[str, Any] = {"lr": 1e-2, "weight_decay": 0.1, "max_grad_norm": 0.02}


def train(case: BackendCase, trainer: Trainer, *numbers: int) -> None:
    for number in numbers:
        trainer.train(case.track(number))
        trainer.backend.end_rollout()


@claim("backend")
def test_a_resumed_training_is_the_uninterrupted_one(case: BackendCase) -> None:
    """Two steps, a checkpoint, a new process and two more steps equal four steps, bit for bit: weights, averages,
    version.

    If it fails: save the moments and step counts of the optimizer, the place in the learning rate's schedule, every
    average with its count of moves; and see that loading replaces what was there before.
    """
    for training in case.trainings:
        caps, folder = case.extras(training), case.folder / training
        with case.backend(training, *caps, **SETTINGS) as straight:
            train(case, straight, 0, 1)
            straight.backend.save(folder)
            train(case, straight, 2, 3)
            expected = straight.everything()
        with case.backend(training, *caps, seed=9, **SETTINGS) as resumed:
            # Whatever it did before, loading replaces it.
            train(case, resumed, 5)
            resumed.backend.load(folder)
            assert resumed.backend.version == 2, f"version {resumed.backend.version} after loading one of 2 steps"
            train(case, resumed, 2, 3)
            result = resumed.everything()
            versions = (resumed.backend.version, straight.backend.version)
        differ = [name for name in expected if not torch.equal(result[name], expected[name])]
        assert not differ, f"{training}: {len(differ)} of {len(expected)} tensors differ, such as {differ[0]!r}"
        assert versions == (4, 4), f"{training}: after 2 + 2 and after 4 steps the versions are {versions}"


@claim("backend")
def test_a_snapshot_keeps_the_state_of_its_moment(case: BackendCase) -> None:
    """A snapshot that is written after a further step resumes as a checkpoint saved in its place does, bit for bit.

    If it fails: `snapshot` has to copy weights, moments, averages and every count, and what it returns may write
    nothing else; a view of a tensor that trains is no copy.
    """
    for training in case.trainings:
        caps, folder = case.extras(training), case.folder / training
        with case.backend(training, *caps, **SETTINGS) as straight:
            train(case, straight, 0, 1)
            write = straight.backend.snapshot()
            if write is None:
                raise NotApplicable("the backend takes no snapshots")
            train(case, straight, 2)
            write(folder)
            train(case, straight, 3)
            expected = straight.everything()
        with case.backend(training, *caps, seed=9, **SETTINGS) as resumed:
            resumed.backend.load(folder)
            assert resumed.backend.version == 2, f"version {resumed.backend.version} after loading one of 2 steps"
            train(case, resumed, 2, 3)
            result = resumed.everything()
        differ = [name for name in expected if not torch.equal(result[name], expected[name])]
        assert not differ, f"{training}: {len(differ)} of {len(expected)} tensors differ, such as {differ[0]!r}"


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


@claim("backend")
def test_a_damaged_checkpoint_is_refused_and_changes_nothing(case: BackendCase) -> None:
    """A checkpoint with a truncated or missing file is rejected with a CheckpointError, without any effect on training.

    If it fails: check that every file and every byte is there before the first tensor is written to, and turn what
    readers raise (end of file, bad pickle, bad JSON) into a CheckpointError with its cause.
    """
    training = case.trainings[0]
    caps, good = case.extras(training), case.folder / "good"
    damages: dict[str, Callable[[Path], None]] = {"cut in half": cut, "gone": Path.unlink}
    with case.backend(training, *caps) as trainer, case.backend(training, *caps) as twin:
        train(case, trainer, 0, 1)
        trainer.backend.save(good)
        saved = trainer.everything()
        names = sorted(path.relative_to(good) for path in good.rglob("*") if path.is_file())
        train(case, trainer, 2)
        train(case, twin, 0, 1, 2)
        num_refused, bad = 0, case.folder / "bad"
        for name in names:
            for how, damage in damages.items():
                shutil.copytree(good, bad)
                damage(bad / name)
                before = trainer.everything()
                try:
                    trainer.backend.load(bad)
                except CheckpointError:
                    num_refused += 1
                    assert largest_gap(trainer.everything(), before) == 0, f"{name} {how}: refused, and weights changed"
                else:
                    # A file that training does not need; then all of it must have been read.
                    gap = largest_gap(trainer.everything(), saved)
                    assert gap == 0, f"{name} {how}: the checkpoint is loaded all the same, and not what was saved"
                    train(case, trainer, 2)
                shutil.rmtree(bad)
        assert num_refused, f"none of {len(names)} files is missed when it is cut or gone"
        bad.mkdir()
        with refuses(CheckpointError, "a checkpoint folder without any file"):
            trainer.backend.load(bad)
        for one in (trainer, twin):
            train(case, one, 3)
        gap = largest_gap(trainer.everything(), twin.everything())
    case.record("gap to a backend that loaded nothing", gap, bound=0.0)


@claim("backend")
def test_a_foreign_checkpoint_is_refused_and_changes_nothing(case: BackendCase) -> None:
    """A checkpoint of another model, or of LoRA where all weights train, is rejected with a CheckpointError.

    If it fails: compare names, shapes and the way of training with what is there before anything is read; a load that
    is not strict leaves part of the weights at their start.
    """
    for training in case.trainings:
        smaller = case.model()
        smaller.net.blocks = smaller.net.blocks[:1]
        with case.backend(training, model=smaller) as other:
            train(case, other, 0)
            other.backend.save(case.folder / f"{training}-smaller")
        with case.backend(training) as other:
            train(case, other, 0)
            other.backend.save(case.folder / training)
    for training in case.trainings:
        foreign = {"a model with one block less": f"{training}-smaller"}
        foreign |= {f"training of {other!r}": other for other in case.trainings if other != training}
        with case.backend(training) as trainer, case.backend(training) as twin:
            train(case, trainer, 1)
            train(case, twin, 1)
            for whose, name in foreign.items():
                before = trainer.everything()
                with refuses(CheckpointError, f"{training}: a checkpoint of {whose}"):
                    trainer.backend.load(case.folder / name)
                gap = largest_gap(trainer.everything(), before)
                assert gap == 0, f"{training}: a checkpoint of {whose} is refused, and weights changed"
            train(case, trainer, 2)
            train(case, twin, 2)
            gap = largest_gap(trainer.everything(), twin.everything())
        case.record(f"{training}: gap to a backend that loaded nothing", gap, bound=0.0)
