"""SGLang itself, on a CPU: what it samples, what it holds after a sync, and how it fails."""

from __future__ import annotations

import dataclasses
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from unirl.core.errors import EchoMismatch, RecipeError, RunFailed
from unirl.core.request import Request
from unirl.core.roles import WeightUpdate
from unirl.core.rollout import verify_echo
from unirl.core.track import Status, Track
from unirl.core.weights import checksum
from unirl.models.qwen3.model import Qwen3Model
from unirl.numerics.text_replay import replay_text
from unirl.numerics.text_rollout import generate_text
from unirl.runtime.engine_host.text_engine import HostedTextEngine

pytestmark = pytest.mark.timeout(600)
"""SGLang imports itself in three processes: half a minute on free cores, minutes on busy ones."""

Ask = Callable[..., Request]
RANK = 4
ROUNDING = 1e-5
"""Bound of a log-prob's difference, in nats: two libraries add up fp32 logits of the order of 10 in other orders, each
sum of some hundred terms off by a few times 1e-7 of that. Weights of another version are off by 1e-1 and more."""


def test_log_probs_are_those_of_the_weights_at_the_sampling_temperature(
    engine: HostedTextEngine, model: Qwen3Model, ask: Ask
) -> None:
    engine.load_weights(full(model, version=1))
    for temperature in (1.0, 0.7):
        request = ask(engine, temperature=temperature)
        rollout = engine.generate(request)
        verify_echo(request, rollout)
        assert gap(rollout.tracks["text"], model) < ROUNDING


def test_greedy_texts_are_those_of_the_trainer(engine: HostedTextEngine, model: Qwen3Model, ask: Ask) -> None:
    engine.load_weights(full(model, version=1))
    assert_greedy(engine, model, ask)


def test_a_text_depends_on_its_seed_and_not_on_what_else_is_generated(
    engine: HostedTextEngine, model: Qwen3Model, ask: Ask
) -> None:
    engine.load_weights(full(model, version=1))
    request = ask(engine)
    whole = engine.generate(request).tracks["text"].text.tokens
    alone = engine.generate(request.select([4, 1])).tracks["text"].text.tokens
    others = engine.generate(ask(engine, seed=1)).tracks["text"].text.tokens
    assert [row.tolist() for row in alone] == [whole[4].tolist(), whole[1].tolist()]
    # 16 tokens of a nearly flat distribution over 261: two samples of one prompt never agree.
    assert all(one.tolist() != other.tolist() for one, other in zip(whole, others, strict=True))
    assert whole[0].tolist() != whole[1].tolist()


def test_prompts_that_do_not_fit_in_one_step_do_not_change_what_is_drawn(
    engine: HostedTextEngine, model: Qwen3Model, ask: Ask
) -> None:
    """300 tokens each, and 512 go in a step: a prompt that is cut in two must not draw twice."""
    engine.load_weights(full(model, version=1))
    request = ask(engine, chat=False)
    long = tuple(torch.cat([row.repeat(300), row])[-300:] for row in request.text("text").prompt_tokens)
    text = dataclasses.replace(request.text("text"), prompt_tokens=long)
    request = dataclasses.replace(request, tracks={"text": text})
    whole = engine.generate(request).tracks["text"].text.tokens
    for row in range(request.num_rows):
        (alone,) = engine.generate(request.select([row])).tracks["text"].text.tokens
        assert alone.tolist() == whole[row].tolist()


def test_a_text_ends_at_a_stop_token_a_stop_string_or_the_limit(
    engine: HostedTextEngine, model: Qwen3Model, ask: Ask
) -> None:
    engine.load_weights(full(model, version=1))
    free = engine.generate(ask(engine, temperature=0.0, stop_tokens=())).tracks["text"]
    assert free.status == (Status.TRUNCATED,) * 6
    assert free.text.lengths == (16,) * 6

    token = int(free.text.tokens[0][5])
    stopped = engine.generate(ask(engine, temperature=0.0, stop_tokens=(token,))).tracks["text"]
    first = free.text.tokens[0].tolist().index(token)
    assert stopped.text.tokens[0].tolist() == free.text.tokens[0].tolist()[: first + 1]
    assert stopped.status[0] is Status.COMPLETED

    # A token is a byte here, so a letter stands where its token does. Texts are the same up to it.
    drawn = engine.generate(ask(engine, stop_tokens=())).tracks["text"].text.tokens
    letter, rows = most_common_letter(model, drawn)
    found = engine.generate(ask(engine, stop_tokens=(), stop=[letter])).tracks["text"]
    assert any(row is not None for row in rows) and found.texts is not None
    for row, place in enumerate(rows):
        assert found.text.tokens[row].tolist() == drawn[row].tolist()[: 16 if place is None else place + 1]
        assert found.status[row] is (Status.TRUNCATED if place is None else Status.COMPLETED)
        assert letter not in found.texts[row]


def test_a_seed_gives_the_text_that_training_in_process_gives(
    engine: HostedTextEngine, model: Qwen3Model, ask: Ask
) -> None:
    """Both draw the same number for the same step. A draw between the two cumulative sums, 1e-6 apart, is not met."""
    engine.load_weights(full(model, version=1))
    for settings in ({"temperature": 0.7}, {"top_k": 20}, {"top_p": 0.5, "temperature": 1.3}):
        request = ask(engine, **settings)
        track, there = engine.generate(request).tracks["text"], generate_text(model, request.text("text"))
        assert [row.tolist() for row in track.text.tokens] == [row.tolist() for row in there.tokens]
        # Those of all tokens, also where some were left out of the draw.
        assert gap(track, model) < ROUNDING


def test_after_a_full_sync_sglang_samples_from_what_was_sent(
    engine: HostedTextEngine, model: Qwen3Model, ask: Ask
) -> None:
    """And from nothing older: a tied output layer, a fused one, keys and values of prompts that were cached."""
    engine.load_weights(full(model, version=1))
    request = ask(engine)
    engine.generate(request)
    perturb(model, seed=1)
    stale = engine.generate(request).tracks["text"]
    assert gap(stale, model) > 1e-1, "the check does not see weights of an older version"

    update = full(model, version=7)
    receipt = engine.load_weights(update)
    track = engine.generate(dataclasses.replace(request, policy_version=7)).tracks["text"]
    assert (receipt.version, receipt.checksum, engine.version) == (7, update.checksum, 7)
    assert receipt.size_bytes == 4 * sum(value.numel() for value in update.tensors.values())
    assert track.policy_version == (7,) * 6
    assert gap(track, model) < ROUNDING
    assert_greedy(engine, model, ask)


def test_an_adapter_is_sampled_from_and_gone_with_the_next_full_sync(
    engine: HostedTextEngine, model: Qwen3Model, ask: Ask
) -> None:
    """Compared with a model that has it folded in: W + scale B A."""
    base = full(model, version=1)
    engine.load_weights(base)
    for version in (2, 3):
        pairs = adapter(model, seed=version)
        engine.load_weights(updated(pairs, version=version, kind="lora", scale=1.3))
        fold(model, base.tensors, pairs, scale=1.3)
        assert gap(engine.generate(ask(engine)).tracks["text"], model) < ROUNDING
        assert_greedy(engine, model, ask)
    perturb(model, seed=2)
    engine.load_weights(full(model, version=4))
    assert gap(engine.generate(ask(engine)).tracks["text"], model) < ROUNDING


def test_updates_that_do_not_fit_are_refused_and_change_nothing(
    engine: HostedTextEngine, model: Qwen3Model, ask: Ask
) -> None:
    good = full(model, version=1)
    engine.load_weights(good)
    request = ask(engine)
    before = engine.generate(request).tracks["text"].text.tokens
    norm, tensors = "model.norm.weight", dict(good.tensors)
    others = {name: value for name, value in tensors.items() if name != norm}
    pairs = adapter(model, seed=1)
    up = next(name for name in pairs if name.endswith("lora_B.weight"))
    refused = {
        "a prefix": updated({f"module.{name}": value for name, value in tensors.items()}, version=9),
        "a stranger": updated({**tensors, "no.such.weight": tensors[norm]}, version=9),
        "one missing": updated(others, version=9),
        "a shape": updated({**others, norm: tensors[norm][None]}, version=9),
        "a dtype": updated({**others, norm: tensors[norm].bfloat16()}, version=9),
        "other bits": dataclasses.replace(
            updated({**others, norm: tensors[norm] + 1}, version=9), checksum=good.checksum
        ),
        "half a pair": updated({n: v for n, v in pairs.items() if n != up}, version=9, kind="lora"),
        "no such layer": updated({f"x.{name}": value for name, value in pairs.items()}, version=9, kind="lora"),
        "an adapter's shape": updated({**pairs, up: pairs[up][None]}, version=9, kind="lora"),
        "its bits": dataclasses.replace(updated(pairs, version=9, kind="lora"), checksum=good.checksum),
    }
    for what, update in refused.items():
        with pytest.raises(EchoMismatch, match="weights:"):
            engine.load_weights(update)
            pytest.fail(f"{what} was taken")
        assert engine.version == 1
    after = engine.generate(request).tracks["text"].text.tokens
    assert [row.tolist() for row in after] == [row.tolist() for row in before]


def test_requests_that_it_cannot_honour_are_refused(engine: HostedTextEngine, ask: Ask) -> None:
    request = ask(engine)
    with pytest.raises(RecipeError, match=r"takes 512 \(engine.max_model_len\)"):
        engine.generate(ask(engine, max_new_tokens=512))
    with pytest.raises(RecipeError, match="no-such"):
        engine.generate(dataclasses.replace(request, tracks={"no-such": request.tracks["text"]}))
    engine.sleep()
    with pytest.raises(RunFailed, match="asleep"):
        engine.generate(request)
    engine.wake()
    engine.generate(request)


def test_killed_in_a_sync_and_in_a_rollout_it_says_so_and_comes_back(
    engine: HostedTextEngine, model: Qwen3Model, ask: Ask
) -> None:
    """Last, for it starts SGLang again: in a sync first, then in the rollout after the start that a full sync made."""
    engine.load_weights(full(model, version=1))
    process: Any = engine._process
    stop(process.pid)
    kill_soon(process.pid)
    with pytest.raises(RunFailed, match=r"died in 'load_weights' \(killed by SIGKILL\)"):
        engine.load_weights(full(model, version=2))
    assert engine.version == 1
    with pytest.raises(RunFailed, match="the sync of version 2 did not come to its end"):
        engine.generate(ask(engine))

    perturb(model, seed=3)
    engine.load_weights(full(model, version=3))
    assert gap(engine.generate(ask(engine)).tracks["text"], model) < ROUNDING

    # The folder that its processes are told, for others may run SGLang on this machine.
    mine = f"/{process._folder.name} "
    assert processes_of(mine)
    kill_soon(process.pid)
    began = time.monotonic()
    with pytest.raises(RunFailed, match=r"died in 'generate' \(killed by SIGKILL\)"):
        while True:
            engine.generate(ask(engine, max_new_tokens=400, stop_tokens=()))
    # Killed after 0.5 s; the guard polls every 0.1 s. The rest is the machine's load.
    assert time.monotonic() - began < 10
    engine.close()
    engine.close()
    with pytest.raises(RunFailed, match="which was closed"):
        engine.load_weights(full(model, version=4))
    assert not processes_of(mine)


def full(model: Qwen3Model, *, version: int) -> WeightUpdate:
    """All weights of the model, by the names that it has for them."""
    tensors = {name: value.detach().clone() for name, value in model.trainable.named_parameters()}
    return updated(tensors, version=version)


def updated(tensors: dict[str, torch.Tensor], *, version: int, kind: Any = "full", scale: float = 1.0) -> WeightUpdate:
    return WeightUpdate(version=version, tensors=tensors, kind=kind, adapter_scale=scale, checksum=checksum(tensors))


def perturb(model: Qwen3Model, *, seed: int) -> None:
    """Move every weight, so that a layer which kept the old ones shows."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for value in model.trainable.parameters():
            value.add_(0.05 * torch.randn(value.shape, generator=generator))


def gap(track: Track, model: Qwen3Model) -> float:
    """Largest difference to the trainer's log-probs of the same tokens."""
    found = replay_text(model, track.text, packing=False, with_entropy=False).log_probs.detach()
    assert track.text.log_probs is not None
    return max(float((found[row, : len(own)] - own).abs().max()) for row, own in enumerate(track.text.log_probs))


def assert_greedy(engine: HostedTextEngine, model: Qwen3Model, ask: Ask) -> None:
    """Token for token; equal likeliest tokens are no matter in random weights."""
    request = ask(engine, temperature=0.0)
    here, there = engine.generate(request).tracks["text"].text, generate_text(model, request.text("text"))
    assert [row.tolist() for row in here.tokens] == [row.tolist() for row in there.tokens]
    assert here.log_probs is not None
    for own, other in zip(here.log_probs, there.log_probs, strict=True):
        assert float((own - other).abs().max()) < ROUNDING


def adapter(model: Qwen3Model, *, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    found: dict[str, Tensor] = {}
    for name, layer in model.trainable.named_modules():
        if name.endswith(model.spec.lora_targets):
            assert isinstance(layer, torch.nn.Linear)
            found[f"{name}.lora_A.weight"] = 0.1 * torch.randn(RANK, layer.in_features, generator=generator)
            found[f"{name}.lora_B.weight"] = 0.1 * torch.randn(layer.out_features, RANK, generator=generator)
    return found


def fold(model: Qwen3Model, base: Any, pairs: dict[str, Tensor], *, scale: float) -> None:
    weights = dict(model.trainable.named_parameters())
    with torch.no_grad():
        for name in [name for name in pairs if name.endswith("lora_A.weight")]:
            layer = name.removesuffix(".lora_A.weight")
            change = scale * pairs[f"{layer}.lora_B.weight"] @ pairs[name]
            weights[f"{layer}.weight"].copy_(base[f"{layer}.weight"] + change)


def most_common_letter(model: Qwen3Model, rows: Sequence[Tensor]) -> tuple[str, list[int | None]]:
    """The ASCII letter that most rows have, and its first place in each."""
    written = [model.texts([row[place : place + 1] for place in range(len(row))]) for row in rows]
    letters = {letter for row in written for letter in row if letter.isascii() and letter.isalnum()}
    letter = max(sorted(letters), key=lambda letter: sum(letter in row for row in written))
    return letter, [row.index(letter) if letter in row else None for row in written]


def stop(pid: int) -> None:
    """Hold it, so that what is asked next is still on its way when it is killed."""
    os.kill(pid, signal.SIGSTOP)


def kill_soon(pid: int) -> None:
    threading.Timer(0.5, os.kill, (pid, signal.SIGKILL)).start()


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
