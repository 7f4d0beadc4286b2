"""Policies, averages, exported weights, adapters."""

import copy
import dataclasses

import pytest
import torch
from fsdp2_toy import SPEC, Clipped, ToyModel, make_backend, make_track
from peft.tuners.lora import Linear as LoraLinear
from unirl.backends.fsdp2.config import AverageConfig, LoraSettings
from unirl.core.errors import RecipeError, RunFailed
from unirl.core.roles import Job
from unirl.core.types.weights import checksum, forms
from unirl.train_host.averages import decay_at

X, SIGMA, TEXT = torch.randn(3, 2, 2, 2), torch.tensor([0.9, 0.5, 0.2]), {"text": torch.randn(3, 3)}


def velocity(model):
    with torch.no_grad():
        return model.velocity(X, SIGMA, TEXT)


@pytest.mark.parametrize("shard", ["auto", "always"])
def test_the_reference_of_lora_is_the_base_model(shard):
    base = ToyModel()
    base.net.eval()
    backend, model = make_backend(shard=shard)
    with backend.policy("reference"):
        off = velocity(model)
    live = velocity(model)
    backend.train([Job(track=make_track(model), algorithm=Clipped(to="reference"))], progress=0.0)
    with backend.policy("reference"):
        again = velocity(model)
    backend.close()
    assert torch.equal(off, velocity(base)) and torch.equal(again, off)
    assert not torch.equal(live, off)


@pytest.mark.parametrize("shard", ["auto", "always"])
@pytest.mark.parametrize("which", ["ema", "lagged", "reference"])
def test_a_policy_is_undone_bit_for_bit_also_on_an_error(shard, which):
    backend, model = make_backend(
        trains="full",
        shard=shard,
        reference_copy=True,
        ema=AverageConfig(kind="constant", decay=0.5),
        lagged=AverageConfig(kind="constant", decay=0.9, every="rollout"),
    )
    initial = velocity(model)
    backend.train([Job(track=make_track(model), algorithm=Clipped())], progress=0.0)
    live, sent = velocity(model), backend.export_weights(kind="full").checksum
    with backend.policy(which):
        inside = velocity(model)
    with pytest.raises(ZeroDivisionError), backend.policy(which):
        assert torch.equal(velocity(model), inside)
        raise ZeroDivisionError
    assert torch.equal(velocity(model), live)
    assert backend.export_weights(kind="full").checksum == sent
    assert not torch.equal(inside, live)
    # The lagged policy has not moved yet: its rollout has not ended.
    assert torch.equal(inside, initial) == (which != "ema")
    backend.close()


@pytest.mark.parametrize("trains", ["lora", "full"])
def test_the_averages_follow_their_formula(trains):
    backend, model = make_backend(
        trains=trains,
        ema=AverageConfig(kind="adaptive", decay=0.15),
        lagged=AverageConfig(kind="warmup", decay=0.5, rate=0.25, flat_moves=1, every="rollout"),
    )
    track = make_track(model)
    history = [{n: p.detach().clone() for n, p in backend._params.items()}]
    for _ in range(3):
        backend.train([Job(track=track, algorithm=Clipped())], progress=0.0)
        backend.end_rollout()
        history.append({n: p.detach().clone() for n, p in backend._params.items()})
    # adaptive: min((1 + t) / (10 + t), 0.15) for t = 0, 1, 2; warmup: 0 at t = 0 and 1, then 0.25.
    for kind, decays in (("ema", [0.1, 0.15, 0.15]), ("lagged", [0.0, 0.0, 0.25])):
        for name, result in backend._policies.copies[kind].values.items():
            expected = history[0][name].double()
            for decay, live in zip(decays, history[1:], strict=True):
                expected = decay * expected + (1 - decay) * live[name].double()
            torch.testing.assert_close(result.double(), expected, rtol=1e-6, atol=1e-7)  # three fp32 roundings


@pytest.mark.parametrize("trains", ["lora", "full"])
@pytest.mark.parametrize("shard", ["auto", "always"])
def test_a_moving_reference_takes_the_live_weights_once_in_a_period(trains, shard):
    """Every second rollout it becomes the policy as it is then; between, losses compare with what it was."""
    moving = AverageConfig(kind="constant", decay=0.0, every="rollout", period=2)
    backend, model = make_backend(trains=trains, shard=shard, moving_reference=moving)
    track, seen = make_track(model), [velocity(model)]
    for _ in range(5):
        backend.train([Job(track=track, algorithm=Clipped(to="reference"))], progress=0.0)
        backend.end_rollout()
        seen.append(velocity(model))
        with backend.policy("reference"):
            seen.append(velocity(model))
    live, reference, version = seen[1::2], seen[2::2], backend.version_of("reference")
    sent = backend.export_weights(kind="merged", policy="reference").tensors
    weights = {name: tensor.clone() for name, tensor in sent.items()}
    backend.close()
    # LoRA's adapters start without effect, so the first one is the base model either way.
    expected = [seen[0], live[1], live[1], live[3], live[3]]
    assert all(torch.equal(one, other) for one, other in zip(reference, expected, strict=True))
    assert version == 2
    plain = ToyModel()
    plain.net.load_state_dict(weights)
    plain.net.eval()
    # Adapters are folded in: another order of fp32 sums.
    torch.testing.assert_close(velocity(plain), live[3], rtol=1e-5, atol=1e-6)


def test_an_average_that_moves_in_periods_counts_them():
    backend, model = make_backend(
        trains="full", ema=AverageConfig(kind="linear", rate=0.25, decay=0.5, every="step", period=2)
    )
    track = make_track(model)
    history = [{n: p.detach().clone() for n, p in backend._params.items()}]
    for _ in range(6):
        backend.train([Job(track=track, algorithm=Clipped())], progress=0.0)
        history.append({n: p.detach().clone() for n, p in backend._params.items()})
    # Its updates are after steps 2, 4 and 6, with d = 0, 0.25, 0.5.
    for name, result in backend._policies.copies["ema"].values.items():
        expected = history[0][name].double()
        for decay, live in zip([0.0, 0.25, 0.5], history[2::2], strict=True):
            expected = decay * expected + (1 - decay) * live[name].double()
        torch.testing.assert_close(result.double(), expected, rtol=1e-6, atol=1e-7)  # three fp32 roundings


def test_the_decays_of_every_kind():
    linear = AverageConfig(kind="linear", decay=0.5, rate=0.2)
    assert [decay_at(linear, t) for t in (0, 1, 2, 9)] == [0.0, 0.2, 0.4, 0.5]
    assert decay_at(AverageConfig(kind="constant", decay=0.3), 7) == 0.3
    adaptive = AverageConfig(kind="adaptive", decay=0.9999)
    assert decay_at(adaptive, 0) == 0.1 and decay_at(adaptive, 90) == 0.91


def test_policies_that_are_not_kept_are_refused():
    backend, _ = make_backend(trains="full")
    for which, key in (("ema", "ema.kind"), ("lagged", "lagged.kind"), ("reference", "reference_copy=true")):
        with pytest.raises(RecipeError, match=rf"policy '{which}'.*backend\.{key}"), backend.policy(which):
            pass


@pytest.mark.parametrize("shard", ["auto", "always"])
def test_merged_weights_are_those_of_pefts_own_merge(shard):
    backend, model = make_backend()
    merged = copy.deepcopy(model.net)
    for part in list(merged.modules()):
        if isinstance(part, LoraLinear):
            part.merge()
    expected = {
        name.replace(".base_layer.", "."): param for name, param in merged.named_parameters() if "lora_" not in name
    }
    backend, model = make_backend(shard=shard)
    result = backend.export_weights(kind="merged").tensors
    reference = backend.export_weights(kind="merged", policy="reference").tensors
    backend.close()
    base = dict(ToyModel().net.named_parameters())
    assert result.keys() == expected.keys() == base.keys()
    assert all(torch.equal(result[name], expected[name]) for name in expected)
    assert all(torch.equal(reference[name], base[name]) for name in base)
    assert not torch.equal(result["blocks.0.up.weight"], base["blocks.0.up.weight"])


def test_lora_weights_are_named_by_their_layer_and_are_no_views():
    backend, model = make_backend()
    update = backend.export_weights(kind="lora")
    assert sorted(update.tensors)[:2] == ["blocks.0.down.lora_A.weight", "blocks.0.down.lora_B.weight"]
    assert len(update.tensors) == 8 and update.version == 0
    assert update.tensors["blocks.0.up.lora_A.weight"].shape == (4, 12)
    kept = dict(update.tensors)
    assert update.checksum == checksum(kept)
    backend.train([Job(track=make_track(model), algorithm=Clipped())], progress=0.0)
    assert update.checksum == checksum(kept), "a later step must not reach what was sent"
    with pytest.raises(RunFailed, match=r"version 0 of the live policy was asked for, which is at version 1 by now"):
        checksum(update.tensors)
    later = backend.export_weights(kind="lora")
    assert later.version == 1 and later.checksum != update.checksum


@pytest.mark.parametrize("trains", ["full", "lora"])
def test_weights_are_exported_in_the_dtypes_of_who_takes_them(trains: str):
    backend, _ = make_backend(trains=trains)
    whole = backend.export_weights(kind="merged")
    dtypes = dict.fromkeys(whole.tensors, "bfloat16") | {"blocks.0.up.bias": "float32"}
    update = backend.export_weights(kind="merged", dtypes=dtypes)
    assert "blocks.0.up.bias" in update.tensors
    kept = dict(update.tensors)
    for name, tensor in whole.tensors.items():
        expected = tensor if name == "blocks.0.up.bias" else tensor.to(torch.bfloat16)
        assert kept[name].dtype == forms(update.tensors)[name].dtype == expected.dtype
        assert torch.equal(kept[name], expected), "rounded once, to nearest"
    assert update.checksum == checksum(kept)
    assert update.version == whole.version
    if trains == "lora":
        # Names of adapters are not those of weights.
        assert (
            backend.export_weights(kind="lora", dtypes=dtypes).checksum == backend.export_weights(kind="lora").checksum
        )


def test_kinds_that_this_training_has_not_are_refused():
    backend, _ = make_backend()
    with pytest.raises(RecipeError, match="got 'lora', which has no 'full' weights"):
        backend.export_weights(kind="full")
    with pytest.raises(RecipeError, match="no 'lora' weights to export"):
        backend.export_weights(kind="lora", policy="reference")
    full, _ = make_backend(trains="full")
    with pytest.raises(RecipeError, match="got 'full', which has no 'lora' weights"):
        full.export_weights(kind="lora")
    assert full.export_weights(kind="merged").checksum == full.export_weights(kind="full").checksum


def test_targets_that_match_nothing_name_the_nearest():
    with pytest.raises(RecipeError, match=r"lora.targets: 'upp' matches no linear layer of ToyNet. Nearest: up"):
        make_backend(lora=LoraSettings(targets=["down", "upp"]))
    bare = dataclasses.replace(SPEC, lora_targets=())
    with pytest.raises(RecipeError, match="the model has no default targets"):
        make_backend(ToyModel(spec=bare))


def test_the_number_of_adapted_layers_is_reported():
    backend, model = make_backend(lora=LoraSettings(rank=2, targets=["blocks.0.up", "leave"]))
    report = backend.train([Job(track=make_track(model), algorithm=Clipped())], progress=0.0)
    assert backend.num_lora_layers == 2
    assert report.only["lora_layers"] == 2
    # Rank 2: A and B of 12 -> 24 and of 12 -> 8.
    assert report.only["trainable_weights"] == 2 * (12 + 24) + 2 * (12 + 8)


def test_adapters_start_at_the_base_and_depend_on_the_seed_alone():
    from unirl.backends.fsdp2.backend import build
    from unirl.backends.fsdp2.config import Fsdp2Config
    from unirl.core.specs.config import TrainConfig

    sums = []
    for global_seed, seed in ((1, 0), (2, 0), (1, 1)):
        torch.manual_seed(global_seed)
        model = ToyModel()
        before = torch.random.get_rng_state()
        backend = build(Fsdp2Config(), model=model, train=TrainConfig(), steps=1, seed=seed)
        assert torch.equal(torch.random.get_rng_state(), before)
        sums.append(backend.export_weights(kind="lora").checksum)
        base = ToyModel()
        base.net.eval()
        assert torch.equal(velocity(model), velocity(base))
    assert sums[0] == sums[1] != sums[2]


def test_offload_and_onload_leave_training_as_it_was():
    plain, model = make_backend(ema=AverageConfig(kind="constant"))
    moved, other = make_backend(ema=AverageConfig(kind="constant"))
    for backend, its in ((plain, model), (moved, other)):
        backend.train([Job(track=make_track(its), algorithm=Clipped())], progress=0.0)
        if backend is moved:
            backend.offload()
            backend.onload()
        backend.train([Job(track=make_track(ToyModel()), algorithm=Clipped())], progress=0.0)
    assert plain.export_weights(kind="lora").checksum == moved.export_weights(kind="lora").checksum


@pytest.mark.parametrize("shard", ["auto", "always"])
def test_what_the_model_has_frozen_gets_no_adapter_no_moments_and_keeps_its_dtype(shard):
    for trains in ("full", "lora"):
        model = ToyModel()
        model.net.blocks[0].to(torch.bfloat16).requires_grad_(False)
        before = {name: param.detach().clone() for name, param in model.net.blocks[0].named_parameters()}
        backend, _ = make_backend(model, trains=trains, shard=shard)
        assert not any(name.startswith("blocks.0.") for name in backend._params)
        assert not any(name.startswith("adam/blocks.0.") for name in backend._optimizer.moments(create=True))
        # An engine gets all weights, those that cannot change included.
        sent = dict(backend.export_weights(kind="merged").tensors)
        for name, value in before.items():
            assert sent[f"blocks.0.{name}"].dtype is torch.bfloat16 and torch.equal(sent[f"blocks.0.{name}"], value)
        backend.close()


def test_lora_targets_that_the_model_has_frozen_are_refused():
    model = ToyModel()
    for block in model.net.blocks:
        block.up.requires_grad_(False)
    with pytest.raises(
        RecipeError, match=r"'up' matches 2 layers of ToyNet, such as 'blocks\.0\.up', and the model has"
    ):
        make_backend(model)
    model.net.requires_grad_(False)
    for trains in ("full", "lora"):
        with pytest.raises(
            RecipeError, match=r"model 'toy' has frozen every parameter of its 'net', so there is nothing"
        ):
            make_backend(model, trains=trains)
