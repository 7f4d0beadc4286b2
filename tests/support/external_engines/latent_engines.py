"""Tests for every latent engine: an engine's test module imports all of them.

Its conftest has the fixtures `ask`, `fault`, `folder` and `model` of `latents`, and a fixture `engine`, which keeps the
weights of the previous test. The checks cover engine-specific differences.
"""

from __future__ import annotations

import copy
import dataclasses
import os
import signal
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from unirl.conformance.doubles.requests import params_of_another_kind
from unirl.conformance.doubles.weight_updates import full_update, perturb, with_adapter
from unirl.core.errors import EchoMismatch, RecipeError, RunFailed
from unirl.core.roles import DiffusionModel
from unirl.core.types.rollout import verify_echo
from unirl.core.types.sampling import SdeStepsConfig
from unirl.engine_host.latent_engine import ExternalLatentEngine

from .latents import ROUNDING, Ask, Fault, adapter, assert_same, gap, trainside
from .listening import Listening
from .processes import kill_in_sync, kill_soon, mark_of, processes_of
from .updates import check_unfit_updates


@pytest.mark.usefixtures("engine")
def test_it_listens_on_loopback_alone_from_its_first_moment(listening: Listening) -> None:
    """All ranks are on one host. `listening` was recorded while the engine started."""
    assert listening.addresses, "nothing was seen"
    assert not listening.beyond_loopback()


@pytest.mark.parametrize(
    "sampling",
    [
        {"kernel": "flow-sde"},
        # Its last step has no density.
        {"kernel": "cps", "eta": 0.6, "sde": SdeStepsConfig(mode="fixed", steps=[1, 3])},
        {"kernel": "dance-sde", "eta": 0.3, "guidance_scale": 3.5, "negative_prompt": "blurred"},
    ],
    ids=lambda sampling: sampling["kernel"],
)
def test_samples_and_log_probs_are_those_that_the_trainer_would_have_made(
    engine: ExternalLatentEngine, model: DiffusionModel, ask: Ask, sampling: dict[str, Any]
) -> None:
    """From the same noise: the same latents and images, and a ratio of 1 in the first update."""
    engine.load_weights(full_update(model, version=1))
    request = ask(engine, **sampling)
    result = engine.generate(request)
    assert gap(result, model) < ROUNDING
    assert_same(result, trainside(model, request))


def test_what_was_asked_for_comes_back(engine: ExternalLatentEngine, model: DiffusionModel, ask: Ask) -> None:
    """Including SDE steps per group, and the latents of every step in 16 bits."""
    engine.load_weights(full_update(model, version=1))
    request = ask(engine, per_group=True, keeps_all=True, same_initial_noise=True, trajectory_dtype="bfloat16")
    track = engine.generate(request)
    verify_echo(request, track)
    segment = track.latent
    assert segment.positions.tolist() == [[0, 1, 2, 3, 4, 5]] * 6
    assert segment.initial_noise is not None
    assert segment.initial_noise[::2] == segment.initial_noise[1::2]
    assert gap(track, model) < ROUNDING
    evaluation = ask(engine, kernel="euler", eta=0.0, sde=SdeStepsConfig(mode="none"), decode=False)
    track = engine.generate(evaluation)
    assert track.media is None
    assert_same(track, trainside(model, evaluation))


def test_after_a_full_sync_it_samples_from_what_was_sent(
    engine: ExternalLatentEngine, model: DiffusionModel, ask: Ask
) -> None:
    engine.load_weights(full_update(model, version=1))
    perturb(model, seed=1)
    stale = engine.generate(ask(engine))
    assert gap(stale, model) > 1e-3, "the check does not see weights of an older version"
    update = full_update(model, version=7)
    receipt = engine.load_weights(update)
    track = engine.generate(ask(engine))
    assert (receipt.version, receipt.checksum, engine.version) == (7, update.checksum, 7)
    assert receipt.size_bytes == 4 * sum(value.numel() for value in update.tensors.values())
    assert track.policy_version == (7,) * 6
    assert gap(track, model) < ROUNDING


def test_an_adapter_is_sampled_from_and_gone_with_the_next_full_sync(
    engine: ExternalLatentEngine, model: DiffusionModel, ask: Ask
) -> None:
    """Compared with a model with merged weights, W + scale B A. The second adapter is on other layers than the first:
    one that engines fuse, and one that some engines rename."""
    engine.load_weights(full_update(model, version=1))
    for version, targets in ((2, model.spec.lora_targets), (3, ("attn.to_out.0", "attn.add_k_proj"))):
        update, added = adapter(model, targets=targets, version=version)
        receipt = engine.load_weights(update)
        assert receipt.num_tensors == len(update.tensors)
        result = engine.generate(ask(engine))
        assert result.policy_version == (version,) * 6
        assert gap(result, model) > 1e-3, "the check does not see an adapter"
        assert gap(result, with_adapter(copy.deepcopy(model), added)) < ROUNDING
    perturb(model, seed=2)
    engine.load_weights(full_update(model, version=4))
    assert gap(engine.generate(ask(engine)), model) < ROUNDING
    _, added = adapter(model, targets=model.spec.lora_targets, version=5)
    engine.load_weights(full_update(with_adapter(model, added), version=5, kind="merged"))
    assert gap(engine.generate(ask(engine)), model) < ROUNDING


def test_updates_that_do_not_fit_are_refused_and_change_nothing(
    engine: ExternalLatentEngine, model: DiffusionModel, ask: Ask
) -> None:
    check_unfit_updates(engine, model, lambda: engine.generate(ask(engine)).latent.latents.tolist())


def test_weights_that_it_says_it_took_and_did_not_are_caught(
    engine: ExternalLatentEngine, model: DiffusionModel, ask: Ask, fault: Fault
) -> None:
    engine.load_weights(full_update(model, version=1))
    fault("stays_stale")
    engine.load_weights(full_update(model, version=2))
    with pytest.raises(EchoMismatch, match=r"version of row 0: the request says 2, .* used 1"):
        engine.generate(ask(engine))


def test_requests_that_it_cannot_honour_are_refused(
    engine: ExternalLatentEngine, model: DiffusionModel, ask: Ask
) -> None:
    engine.load_weights(full_update(model, version=1))
    request = ask(engine)
    with pytest.raises(RecipeError, match="got 'ddim-eta'"):
        engine.generate(ask(engine, kernel="ddim-eta"))
    with pytest.raises(RecipeError, match="another"):
        engine.generate(dataclasses.replace(request, track="another", params=params_of_another_kind(request)))
    with pytest.raises(RunFailed, match="got a request for weights version 2, but it holds version 1"):
        engine.generate(dataclasses.replace(request, policy_version=2))


def test_asleep_it_refuses_and_awake_it_is_as_before_until_new_weights_come(
    engine: ExternalLatentEngine, model: DiffusionModel, ask: Ask
) -> None:
    engine.load_weights(full_update(model, version=1))
    request = ask(engine)
    before = engine.generate(request)
    engine.sleep()
    engine.sleep()
    with pytest.raises(RunFailed, match="asleep and cannot generate"):
        engine.generate(request)
    perturb(model, seed=3)
    with pytest.raises(RunFailed, match="asleep and cannot load weights"):
        engine.load_weights(full_update(model, version=2))
    engine.wake()
    engine.wake()
    after = engine.generate(request)
    assert torch.equal(after.latent.latents, before.latent.latents)
    with pytest.raises(RunFailed, match="Send it the weights first"):
        engine.generate(dataclasses.replace(request, policy_version=2))
    engine.load_weights(full_update(model, version=2))
    assert gap(engine.generate(ask(engine)), model) < ROUNDING


def check_rows(engine: ExternalLatentEngine, ask: Ask, *, batches: Sequence[int]) -> None:
    """A row does not depend on its batch. batches: sizes of the batches that rows are generated in."""
    request = ask(engine)
    whole = engine.generate(request)
    assert sorted(set(engine.batches)) == sorted(set(batches)), engine.batches
    for row in (4, 1):
        alone = engine.generate(request.select([row]))
        assert engine.batches == (1,)
        assert_same(alone, whole.select([row]))
    backwards = engine.generate(request.select([5, 3, 0]))
    assert_same(backwards, whole.select([5, 3, 0]))


def check_caught(engine: ExternalLatentEngine, ask: Ask, fault: Fault, *, name: str, what: str) -> None:
    """An engine that ignores a request is caught in a rollout and at start-up."""
    fault(name)
    with pytest.raises(EchoMismatch, match=what):
        engine.generate(ask(engine, guidance_scale=2.0, negative_prompt="blurred"))
    with pytest.raises(RunFailed, match="did not follow the probe request at start-up"):
        engine._started({})
    fault("")
    engine._started({})


def check_conditions_caught(engine: ExternalLatentEngine, fault: Fault, *, name: str) -> None:
    """Wrongly encoded prompts are caught at start-up. A rollout would not show them, because training reuses the
    returned conditions."""
    fault(name)
    with pytest.raises(
        RunFailed, match=r"image\.conditions\['positive'\]\['\w+'\]: .* encodes 'a red ring' differently"
    ):
        engine._started({})
    fault("")
    engine._started({})


def check_half_applied(
    engine: ExternalLatentEngine, model: DiffusionModel, ask: Ask, fault: Fault, *, name: str, what: str
) -> None:
    """After a partial update the engine does not generate until it receives full weights."""
    engine.load_weights(full_update(model, version=1))
    request = ask(engine)
    perturb(model, seed=4)
    fault(name)
    with pytest.raises(RunFailed, match=what):
        engine.load_weights(full_update(model, version=2))
    fault("")
    with pytest.raises(RunFailed, match="the sync of version 2 did not complete"):
        engine.generate(request)
    update, _ = adapter(model, targets=("attn.to_q",), version=2)
    with pytest.raises(RunFailed, match="an adapter update is not enough"):
        engine.load_weights(update)
    # The worker refuses as well, in case its host asks anyway.
    engine._unusable = ""
    with pytest.raises(RunFailed, match="cannot generate with these weights"):
        engine.generate(request)
    engine.load_weights(full_update(model, version=3))
    assert gap(engine.generate(ask(engine)), model) < ROUNDING


def check_deaths(engine: ExternalLatentEngine, model: DiffusionModel, ask: Ask) -> None:
    """Killed during a rollout, during a sync and while asleep, the engine reports it, and the next full sync starts a
    new process, which continues bit for bit. Ends with the engine closed."""
    engine.load_weights(full_update(model, version=1))
    expected = engine.generate(ask(engine))
    process: Any = engine._process
    kill_soon(process.pid)
    with pytest.raises(RunFailed, match=r"died in 'generate' \(killed by SIGKILL\)"):
        while True:
            engine.generate(ask(engine, num_inference_steps=50))
    with pytest.raises(RunFailed, match=r"its process ended while generating. Send it full weights"):
        engine.generate(ask(engine))

    killer = threading.Thread(target=kill_in_sync, args=(process, Path(engine._hosting.transfer_dir)))
    killer.start()
    with pytest.raises(RunFailed, match=r"died in 'load_weights' \(killed by SIGKILL\)"):
        engine.load_weights(full_update(model, version=1))
    killer.join()
    with pytest.raises(RunFailed, match="the sync of version 1 did not complete"):
        engine.generate(ask(engine))

    engine.load_weights(full_update(model, version=1))
    again = engine.generate(ask(engine))
    assert again.media is not None and expected.media is not None
    assert torch.equal(again.latent.latents, expected.latent.latents)
    assert torch.equal(again.media.stacked, expected.media.stacked)

    mark = mark_of(process)
    engine.sleep()
    os.kill(process.pid, signal.SIGKILL)
    with pytest.raises(RunFailed, match=r"died in 'wake' \(killed by SIGKILL\)"):
        engine.wake()
    with pytest.raises(RunFailed, match="asleep"):
        engine.generate(ask(engine))
    engine.close()
    with pytest.raises(RunFailed, match="it is closed"):
        engine.load_weights(full_update(model, version=4))
    assert not processes_of(mark)
