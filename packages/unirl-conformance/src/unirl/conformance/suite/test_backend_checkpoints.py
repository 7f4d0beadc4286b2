"""Checkpoints: exact continuation, and clear refusals."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from unirl.conformance.claims import claim
from unirl.conformance.doubles.trainee import Trainee, largest_gap
from unirl.conformance.fixtures.backend import BackendBench, refuses
from unirl.core.errors import CheckpointError

SETTINGS: Mapping[str, Any] = {"lr": 1e-2, "weight_decay": 0.1, "max_grad_norm": 0.02}


def train(bench: BackendBench, trainee: Trainee, *numbers: int) -> None:
    for number in numbers:
        trainee.train(bench.track(number))
        trainee.backend.end_rollout()


@claim("backend")
def test_a_resumed_training_is_the_uninterrupted_one(bench: BackendBench) -> None:
    """Two steps, a checkpoint, a new process and two more steps equal four steps, bit for bit: weights, averages,
    version.

    If it fails: save the moments and step counts of the optimizer, the place in the learning rate's schedule, every
    average with its count of moves; and see that loading replaces what was there before.
    """
    for training in bench.trainings:
        caps, folder = bench.extras(training), bench.folder / training
        with bench.backend(training, *caps, **SETTINGS) as straight:
            train(bench, straight, 0, 1)
            straight.backend.save(folder)
            train(bench, straight, 2, 3)
            expected = straight.everything()
        with bench.backend(training, *caps, seed=9, **SETTINGS) as resumed:
            # Whatever it did before, loading replaces it.
            train(bench, resumed, 5)
            resumed.backend.load(folder)
            assert resumed.backend.version == 2, f"version {resumed.backend.version} after loading one of 2 steps"
            train(bench, resumed, 2, 3)
            result = resumed.everything()
            versions = (resumed.backend.version, straight.backend.version)
        differ = [name for name in expected if not torch.equal(result[name], expected[name])]
        assert not differ, f"{training}: {len(differ)} of {len(expected)} tensors differ, such as {differ[0]!r}"
        assert versions == (4, 4), f"{training}: after 2 + 2 and after 4 steps the versions are {versions}"


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


@claim("backend")
def test_a_damaged_checkpoint_is_refused_and_changes_nothing(bench: BackendBench) -> None:
    """A checkpoint with a truncated or missing file is rejected with a CheckpointError, without any effect on training.

    If it fails: check that every file and every byte is there before the first tensor is written to, and turn what
    readers raise (end of file, bad pickle, bad JSON) into a CheckpointError with its cause.
    """
    training = bench.trainings[0]
    caps, good = bench.extras(training), bench.folder / "good"
    damages: dict[str, Callable[[Path], None]] = {"cut in half": cut, "gone": Path.unlink}
    with bench.backend(training, *caps) as trainee, bench.backend(training, *caps) as twin:
        train(bench, trainee, 0, 1)
        trainee.backend.save(good)
        saved = trainee.everything()
        names = sorted(path.relative_to(good) for path in good.rglob("*") if path.is_file())
        train(bench, trainee, 2)
        train(bench, twin, 0, 1, 2)
        num_refused, bad = 0, bench.folder / "bad"
        for name in names:
            for how, damage in damages.items():
                shutil.copytree(good, bad)
                damage(bad / name)
                before = trainee.everything()
                try:
                    trainee.backend.load(bad)
                except CheckpointError:
                    num_refused += 1
                    assert largest_gap(trainee.everything(), before) == 0, f"{name} {how}: refused, and weights changed"
                else:
                    # A file that training does not need; then all of it must have been read.
                    gap = largest_gap(trainee.everything(), saved)
                    assert gap == 0, f"{name} {how}: the checkpoint is loaded all the same, and not what was saved"
                    train(bench, trainee, 2)
                shutil.rmtree(bad)
        assert num_refused, f"none of {len(names)} files is missed when it is cut or gone"
        bad.mkdir()
        with refuses(CheckpointError, "a checkpoint folder without any file"):
            trainee.backend.load(bad)
        for one in (trainee, twin):
            train(bench, one, 3)
        gap = largest_gap(trainee.everything(), twin.everything())
    bench.record("gap to a backend that loaded nothing", gap, bound=0.0)


@claim("backend")
def test_a_foreign_checkpoint_is_refused_and_changes_nothing(bench: BackendBench) -> None:
    """A checkpoint of another model, or of LoRA where all weights train, is rejected with a CheckpointError.

    If it fails: compare names, shapes and the way of training with what is there before anything is read; a load that
    is not strict leaves part of the weights at their start.
    """
    for training in bench.trainings:
        smaller = bench.model()
        smaller.net.blocks = smaller.net.blocks[:1]
        with bench.backend(training, model=smaller) as other:
            train(bench, other, 0)
            other.backend.save(bench.folder / f"{training}-smaller")
        with bench.backend(training) as other:
            train(bench, other, 0)
            other.backend.save(bench.folder / training)
    for training in bench.trainings:
        foreign = {"a model with one block less": f"{training}-smaller"}
        foreign |= {f"training of {other!r}": other for other in bench.trainings if other != training}
        with bench.backend(training) as trainee, bench.backend(training) as twin:
            train(bench, trainee, 1)
            train(bench, twin, 1)
            for whose, name in foreign.items():
                before = trainee.everything()
                with refuses(CheckpointError, f"{training}: a checkpoint of {whose}"):
                    trainee.backend.load(bench.folder / name)
                gap = largest_gap(trainee.everything(), before)
                assert gap == 0, f"{training}: a checkpoint of {whose} is refused, and weights changed"
            train(bench, trainee, 2)
            train(bench, twin, 2)
            gap = largest_gap(trainee.everything(), twin.everything())
        bench.record(f"{training}: gap to a backend that loaded nothing", gap, bound=0.0)
