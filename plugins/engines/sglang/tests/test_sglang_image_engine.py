"""SGLang itself, on a CPU: what it samples, what it holds after a sync, and how it fails."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from unirl.core.config import SdeStepsConfig
from unirl.core.errors import EchoMismatch, RecipeError, RunFailed
from unirl.core.request import Request
from unirl.core.roles import WeightUpdate
from unirl.core.rollout import verify_echo
from unirl.core.track import LatentSegment, Track
from unirl.core.weights import checksum
from unirl.engines.sglang.engine import SglangEngine
from unirl.engines.trainside.config import TrainsideConfig
from unirl.engines.trainside.engine import build as build_trainside
from unirl.models.sd3.model import Sd3Model
from unirl.numerics.track_replay import TrackReplay

Ask = Callable[..., Request]
RANK = 4
ROUNDING = 1e-5
"""Bound of a difference in log-probs, in nats, and in latents of unit scale: two libraries add up an fp32 forward in
other orders, off by a few times 1e-7; over five steps of 1024 elements, whose mean a log-prob is, that stays below
2e-6. Weights of another version are off by 5e-3 and more."""


@pytest.mark.parametrize(
    "sampling",
    [
        {"kernel": "flow-sde"},
        {"kernel": "cps", "eta": 0.6},
        {"kernel": "dance-sde", "eta": 0.3, "guidance_scale": 3.5, "negative_prompt": "blurred"},
    ],
    ids=lambda sampling: sampling["kernel"],
)
def test_samples_and_log_probs_are_those_that_the_trainer_would_have_made(
    engine: SglangEngine, model: Sd3Model, ask: Ask, sampling: dict[str, Any]
) -> None:
    """Of the same noise: the latents, the images, and a ratio of 1 at the first update."""
    engine.load_weights(full(model, version=1))
    request = ask(engine, **sampling)
    found = engine.generate(request).tracks["image"]
    assert gap(found, model) < ROUNDING
    assert_same(found, trainside(model, request))


def test_what_was_asked_for_comes_back(engine: SglangEngine, model: Sd3Model, ask: Ask) -> None:
    """Also SDE steps that differ from group to group, and the latents of every step."""
    engine.load_weights(full(model, version=1))
    request = ask(engine, per_group=True, trajectory="full", same_initial_noise=True)
    rollout = engine.generate(request)
    verify_echo(request, rollout)
    segment = rollout.tracks["image"].latent
    assert segment.positions.tolist() == [[0, 1, 2, 3, 4, 5]] * 6
    assert segment.initial_noise is not None
    assert segment.initial_noise[::2] == segment.initial_noise[1::2]
    assert gap(rollout.tracks["image"], model) < ROUNDING
    evaluation = ask(engine, kernel="euler", eta=0.0, sde=SdeStepsConfig(mode="none"), decode=False)
    track = engine.generate(evaluation).tracks["image"]
    assert track.images is None
    assert_same(track, trainside(model, evaluation))


def test_a_row_does_not_depend_on_the_batch_that_it_is_made_in(engine: SglangEngine, ask: Ask) -> None:
    request = ask(engine)
    whole = engine.generate(request).tracks["image"]
    assert engine.batches == (2,) * 6, "rows of one prompt go together"
    for row in (4, 1):
        alone = engine.generate(request.select([row])).tracks["image"]
        assert engine.batches == (1,)
        assert_same(alone, whole.select([row]))
    backwards = engine.generate(request.select([5, 3, 0])).tracks["image"]
    assert_same(backwards, whole.select([5, 3, 0]))


def test_after_a_full_sync_it_samples_from_what_was_sent(engine: SglangEngine, model: Sd3Model, ask: Ask) -> None:
    engine.load_weights(full(model, version=1))
    perturb(model, seed=1)
    stale = engine.generate(ask(engine)).tracks["image"]
    assert gap(stale, model) > 1e-3, "the check does not see weights of an older version"
    update = full(model, version=7)
    receipt = engine.load_weights(update)
    track = engine.generate(ask(engine)).tracks["image"]
    assert (receipt.version, receipt.checksum, engine.version) == (7, update.checksum, 7)
    assert receipt.size_bytes == 4 * sum(value.numel() for value in update.tensors.values())
    assert track.policy_version == (7,) * 6
    assert gap(track, model) < ROUNDING


def test_an_adapter_is_sampled_from_and_gone_with_the_next_full_sync(
    engine: SglangEngine, model: Sd3Model, ask: Ask
) -> None:
    """Compared with a model that has it folded in: W + scale B A. The second one is on other layers than the first."""
    base = full(model, version=1)
    engine.load_weights(base)
    for version, targets in ((2, model.spec.lora_targets), (3, ("attn.to_q", "attn.add_v_proj"))):
        pairs = adapter(model, targets=targets, seed=version)
        receipt = engine.load_weights(updated(pairs, version=version, kind="lora", scale=1.3))
        assert receipt.num_tensors == len(pairs)
        fold(model, base.tensors, pairs, scale=1.3)
        found = engine.generate(ask(engine)).tracks["image"]
        assert found.policy_version == (version,) * 6
        assert gap(found, model) < ROUNDING
    perturb(model, seed=2)
    engine.load_weights(full(model, version=4))
    assert gap(engine.generate(ask(engine)).tracks["image"], model) < ROUNDING
    pairs = adapter(model, targets=model.spec.lora_targets, seed=5)
    merged = dict(full(model, version=5).tensors)
    fold(model, merged, pairs, scale=0.5)
    engine.load_weights(dataclasses.replace(full(model, version=5), kind="merged"))
    assert gap(engine.generate(ask(engine)).tracks["image"], model) < ROUNDING


def test_updates_that_do_not_fit_are_refused_and_change_nothing(
    engine: SglangEngine, model: Sd3Model, ask: Ask
) -> None:
    good = full(model, version=1)
    engine.load_weights(good)
    before = engine.generate(ask(engine)).tracks["image"]
    bias, tensors = "proj_out.bias", dict(good.tensors)
    others = {name: value for name, value in tensors.items() if name != bias}
    pairs = adapter(model, targets=model.spec.lora_targets, seed=1)
    up = next(name for name in pairs if name.endswith("lora_B.weight"))
    refused = {
        "a prefix": updated({f"transformer.{name}": value for name, value in tensors.items()}, version=9),
        "a stranger": updated({**tensors, "no.such.weight": tensors[bias]}, version=9),
        "one missing": updated(others, version=9),
        "a shape": updated({**others, bias: tensors[bias][None]}, version=9),
        "a dtype": updated({**others, bias: tensors[bias].bfloat16()}, version=9),
        "other bits": dataclasses.replace(
            updated({**others, bias: tensors[bias] + 1}, version=9), checksum=good.checksum
        ),
        "no pair": updated({}, version=9, kind="lora"),
        "half a pair": updated({n: v for n, v in pairs.items() if n != up}, version=9, kind="lora"),
        "an adapter's prefix": updated({f"x.{name}": value for name, value in pairs.items()}, version=9, kind="lora"),
        "an adapter's shape": updated({**pairs, up: pairs[up][None]}, version=9, kind="lora"),
        "its bits": dataclasses.replace(updated(pairs, version=9, kind="lora"), checksum=good.checksum),
    }
    for what, update in refused.items():
        with pytest.raises(EchoMismatch, match="weights:"):
            engine.load_weights(update)
            pytest.fail(f"{what} was taken")
        assert engine.version == 1
    after = engine.generate(ask(engine)).tracks["image"]
    assert torch.equal(after.latent.latents, before.latent.latents)


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("drops_a_sigma", "sigmas: the request says"),
        ("drops_the_sde_steps", "sde_steps: the request says"),
        ("drops_the_noise", "initial_noise of 's0'"),
        ("drops_the_negative_prompt", r"negative_prompt of row 0: the request says 'blurred', .* used ''"),
        ("drops_the_guidance", r"negative_prompt of row 0: the request says 'blurred', .* used None"),
        ("changes_the_guidance", r"guidance_scale of row 0: the request says 2\.0, .* used 7\.0"),
        ("swaps_rows", "sample_id of row 0: the request says 's0', .* used 's1'"),
    ],
)
def test_an_engine_that_does_something_else_is_caught_in_a_rollout_and_at_its_start(
    engine: SglangEngine, ask: Ask, fault: Callable[[str], None], name: str, what: str
) -> None:
    fault(name)
    with pytest.raises(EchoMismatch, match=what):
        engine.generate(ask(engine, guidance_scale=2.0, negative_prompt="blurred"))
    with pytest.raises(RunFailed, match="did not do as a request at its start said"):
        engine._started({})
    fault("")
    engine._started({})


def test_prompts_that_it_encodes_otherwise_are_caught_at_its_start(
    engine: SglangEngine, fault: Callable[[str], None]
) -> None:
    """In a rollout nothing would show it: training replays what came back."""
    fault("pads_prompts_otherwise")
    with pytest.raises(
        RunFailed, match=r"image\.conditions\['positive'\]\['\w+'\]: .* made something else of 'a red ring'"
    ):
        engine._started({})
    fault("")
    engine._started({})


@pytest.mark.parametrize(
    ("name", "what"),
    [("drops_extra", "it dropped extra"), ("makes_its_own_schedule", "SGLang is at step 0, from sigma 0.999")],
)
def test_requests_that_lose_what_they_carry_are_an_error_of_the_engine(
    engine: SglangEngine, ask: Ask, fault: Callable[[str], None], name: str, what: str
) -> None:
    fault(name)
    with pytest.raises(RunFailed, match=what):
        engine.generate(ask(engine))
    fault("")
    engine.generate(ask(engine))


def test_weights_that_it_says_it_took_and_did_not_are_caught(
    engine: SglangEngine, model: Sd3Model, ask: Ask, fault: Callable[[str], None]
) -> None:
    engine.load_weights(full(model, version=1))
    fault("stays_stale")
    engine.load_weights(full(model, version=2))
    with pytest.raises(EchoMismatch, match=r"version of row 0: the request says 2, .* used 1"):
        engine.generate(ask(engine))


def test_requests_that_it_cannot_honour_are_refused(engine: SglangEngine, model: Sd3Model, ask: Ask) -> None:
    engine.load_weights(full(model, version=1))
    request = ask(engine)
    with pytest.raises(RecipeError, match="'ddim-eta' was asked for"):
        engine.generate(ask(engine, kernel="ddim-eta"))
    with pytest.raises(RecipeError, match="no-such"):
        engine.generate(dataclasses.replace(request, tracks={"no-such": request.tracks["image"]}))
    with pytest.raises(RunFailed, match="samples of version 2 were asked for, it holds version 1"):
        engine.generate(dataclasses.replace(request, policy_version=2))


def test_asleep_it_refuses_and_awake_it_is_as_before_until_new_weights_come(
    engine: SglangEngine, model: Sd3Model, ask: Ask
) -> None:
    engine.load_weights(full(model, version=1))
    request = ask(engine)
    before = engine.generate(request).tracks["image"]
    engine.sleep()
    engine.sleep()
    with pytest.raises(RunFailed, match="asleep and cannot generate"):
        engine.generate(request)
    perturb(model, seed=3)
    with pytest.raises(RunFailed, match="asleep and takes none"):
        engine.load_weights(full(model, version=2))
    engine.wake()
    engine.wake()
    after = engine.generate(request).tracks["image"]
    assert torch.equal(after.latent.latents, before.latent.latents)
    with pytest.raises(RunFailed, match="Send it the weights first"):
        engine.generate(dataclasses.replace(request, policy_version=2))
    engine.load_weights(full(model, version=2))
    assert gap(engine.generate(ask(engine)).tracks["image"], model) < ROUNDING


@pytest.mark.parametrize("name", ["fails_half_way", "loses_a_weight"])
def test_an_update_that_is_applied_by_half_leaves_nothing_to_generate_with_until_full_weights_come(
    engine: SglangEngine, model: Sd3Model, ask: Ask, fault: Callable[[str], None], name: str
) -> None:
    engine.load_weights(full(model, version=1))
    request = ask(engine)
    perturb(model, seed=4)
    fault(name)
    with pytest.raises(
        RunFailed, match=r"the memory is gone|update weight check failed: checksum mismatch for 1 tensor"
    ):
        engine.load_weights(full(model, version=2))
    fault("")
    with pytest.raises(RunFailed, match="the sync of version 2 did not come to its end"):
        engine.generate(request)
    with pytest.raises(RunFailed, match="an adapter cannot repair"):
        engine.load_weights(updated(adapter(model, targets=("attn.to_q",), seed=1), version=2, kind="lora"))
    # The worker knows it as well, should its host ask all the same.
    engine._unusable = ""
    with pytest.raises(RunFailed, match="nothing is generated with these weights"):
        engine.generate(request)
    engine.load_weights(full(model, version=3))
    assert gap(engine.generate(ask(engine)).tracks["image"], model) < ROUNDING


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("names_layers_otherwise", "No LoRA layers updated"),
        ("loses_a_layer", "has an adapter, and SGLang put none on it"),
        ("scales_otherwise", "was loaded, and something else is held"),
    ],
)
def test_an_adapter_that_sglang_calls_a_success_and_is_none_is_caught(
    engine: SglangEngine, model: Sd3Model, ask: Ask, fault: Callable[[str], None], name: str, what: str
) -> None:
    engine.load_weights(full(model, version=1))
    pairs = adapter(model, targets=model.spec.lora_targets, seed=1)
    fault(name)
    with pytest.raises(RunFailed, match=what):
        engine.load_weights(updated(pairs, version=2, kind="lora"))
    fault("")
    with pytest.raises(RunFailed, match="the sync of version 2 did not come to its end"):
        engine.generate(ask(engine))
    engine.load_weights(full(model, version=3))
    assert gap(engine.generate(ask(engine)).tracks["image"], model) < ROUNDING


@pytest.mark.slow
def test_killed_in_a_rollout_in_a_sync_and_asleep_it_says_so_and_goes_on_as_before(
    engine: SglangEngine, model: Sd3Model, ask: Ask
) -> None:
    """Last, for it ends three processes of SGLang: the next full sync starts another, which goes on bit for bit."""
    engine.load_weights(full(model, version=1))
    expected = engine.generate(ask(engine)).tracks["image"]
    process: Any = engine._process
    threading.Timer(0.5, os.kill, (process.pid, signal.SIGKILL)).start()
    with pytest.raises(RunFailed, match=r"died in 'generate' \(killed by SIGKILL\)"):
        while True:
            engine.generate(ask(engine, steps=50))
    with pytest.raises(RunFailed, match=r"its process ended while it generated. Send it full weights"):
        engine.generate(ask(engine))

    killer = threading.Thread(target=kill_in_sync, args=(process, Path(engine._hosting.transfer_dir)))
    killer.start()
    with pytest.raises(RunFailed, match=r"died in 'load_weights' \(killed by SIGKILL\)"):
        engine.load_weights(full(model, version=1))
    killer.join()
    with pytest.raises(RunFailed, match="the sync of version 1 did not come to its end"):
        engine.generate(ask(engine))

    engine.load_weights(full(model, version=1))
    again = engine.generate(ask(engine)).tracks["image"]
    assert again.images is not None and expected.images is not None
    assert torch.equal(again.latent.latents, expected.latent.latents)
    assert torch.equal(again.images, expected.images)

    engine.sleep()
    os.kill(process.pid, signal.SIGKILL)
    with pytest.raises(RunFailed, match=r"died in 'wake' \(killed by SIGKILL\)"):
        engine.wake()
    with pytest.raises(RunFailed, match="asleep"):
        engine.generate(ask(engine))
    engine.close()
    with pytest.raises(RunFailed, match="which was closed"):
        engine.load_weights(full(model, version=4))
    assert not processes_of("faulty_server")


def full(model: Sd3Model, *, version: int) -> WeightUpdate:
    """All weights of the model, by the names that it has for them."""
    tensors = {name: value.detach().clone() for name, value in model.trainable.named_parameters()}
    return updated(tensors, version=version)


def updated(tensors: dict[str, Tensor], *, version: int, kind: Any = "full", scale: float = 1.0) -> WeightUpdate:
    return WeightUpdate(version=version, tensors=tensors, kind=kind, adapter_scale=scale, checksum=checksum(tensors))


def perturb(model: Sd3Model, *, seed: int) -> None:
    """Move every weight, so that a layer which kept the old ones shows."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for value in model.trainable.parameters():
            value.add_(0.05 * torch.randn(value.shape, generator=generator))


def adapter(model: Sd3Model, *, targets: tuple[str, ...], seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    found: dict[str, Tensor] = {}
    for name, layer in model.trainable.named_modules():
        if name.endswith(targets):
            assert isinstance(layer, torch.nn.Linear)
            found[f"{name}.lora_A.weight"] = 0.3 * torch.randn(RANK, layer.in_features, generator=generator)
            found[f"{name}.lora_B.weight"] = 0.3 * torch.randn(layer.out_features, RANK, generator=generator)
    assert found
    return found


def fold(model: Sd3Model, base: Any, pairs: dict[str, Tensor], *, scale: float) -> None:
    """The model has the base's weights, and the adapter in them."""
    with torch.no_grad():
        for name, value in model.trainable.named_parameters():
            value.copy_(base[name])
            layer = name.removesuffix(".weight")
            if f"{layer}.lora_A.weight" in pairs:
                value.add_(scale * pairs[f"{layer}.lora_B.weight"] @ pairs[f"{layer}.lora_A.weight"])


def gap(track: Track, model: Sd3Model) -> float:
    """Largest difference to the trainer's log-probs of the same transitions."""
    replay = TrackReplay(model, stacked=True, policy_context=lambda _: contextlib.nullcontext())
    with torch.no_grad():
        found: Any = replay(track)
    assert track.latent.log_probs is not None
    return float((found.log_probs - track.latent.log_probs).abs().max())


def trainside(model: Sd3Model, request: Request) -> Track:
    """The rollout of the module that trains."""
    engine = build_trainside(TrainsideConfig(), model=model, device="cpu")
    engine.version = request.policy_version
    return engine.generate(request).tracks["image"]


def assert_same(found: Track, expected: Track) -> None:
    """Of one policy and one noise. Pixels are in [0, 1], where a VAE of unit gain keeps the scale of latents."""
    one, other = found.latent, expected.latent
    assert isinstance(one, LatentSegment)
    assert found.sample_ids == expected.sample_ids
    assert torch.equal(one.sde_steps, other.sde_steps)
    for row, (own, wanted) in enumerate(zip(one.positions.tolist(), other.positions.tolist(), strict=True)):
        kept = [position for position in wanted if position >= 0]
        assert [position for position in own if position >= 0] == kept
        difference = (one.latents[row, : len(kept)] - other.latents[row, : len(kept)]).abs().max()
        assert float(difference) < ROUNDING * max(1.0, float(other.latents[row].abs().max()))
    if expected.images is None:
        assert found.images is None
    else:
        assert found.images is not None
        assert float((found.images - expected.images).abs().max()) < ROUNDING
    for kind, wanted in expected.conditions.items():
        own = found.conditions[kind].expanded()
        for name, value in wanted.expanded().items():
            torch.testing.assert_close(own[name], value, rtol=ROUNDING, atol=ROUNDING)
    assert found.conditions.keys() == expected.conditions.keys()


def kill_in_sync(process: Any, weights: Path) -> None:
    """Kill the process that the sync starts, as soon as the weights for it are being written."""
    while not (process.pid and list(weights.iterdir())):
        threading.Event().wait(0.002)
    os.kill(process.pid, signal.SIGKILL)


def processes_of(word: str) -> list[str]:
    found: list[str] = []
    for line in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = line.read_bytes().replace(b"\0", b" ").decode()
        except OSError:
            continue
        if word in words:
            found.append(words)
    return found
