"""The critic of the FSDP2 backend: its values, its training, its exact resume, and that it is never exported."""

import copy
import dataclasses
import math
from pathlib import Path

import pytest
import torch
from fsdp2_critic_ranks import CASES, ROWS, parts_of
from fsdp2_text_toy import Judged, ToyTextModel, critic_weights, make_judged, make_steps, make_texts
from fsdp2_toy import ToyModel, make_backend
from rank_processes import launch
from unirl.backends.fsdp2.backend import build
from unirl.backends.fsdp2.config import CriticConfig, Fsdp2Config, LoraSettings
from unirl.core.errors import CheckpointError, RecipeError
from unirl.core.limits import broken_limits
from unirl.core.roles import Job
from unirl.core.specs.config import TrainConfig
from unirl.numerics.tokens.replay import per_token
from unirl.train_host.critic_nets import TokenCriticNet

EVERY = {
    "plain": {},
    "wrapped": {"shard": "always"},
    "bf16": {"mixed_precision": "bf16"},
    "fp16": {"mixed_precision": "fp16"},
    "recomputed": {"activation_checkpointing": True},
    "lora": {"trains": "lora", "lora": LoraSettings(rank=2)},
}


def trained_by_torch(track, *, steps, max_grad_norm=math.inf):
    """A copy of the trunk with its output after some steps by autograd and torch's AdamW, and the loss before each."""
    trunk, head = copy.deepcopy(ToyTextModel().net.trunk), torch.nn.Linear(6, 1)
    for value in head.parameters():
        torch.nn.init.zeros_(value)
    weights = [*trunk.parameters(), *head.parameters()]
    adam = torch.optim.AdamW(weights, lr=3e-2, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0)
    losses = []
    for _ in range(steps):
        errors = []
        for row, (prompt, tokens) in enumerate(zip(track.text.prompt_tokens, track.text.tokens, strict=True)):
            seen = torch.cat([prompt, tokens])[None, :-1]
            values = head(trunk(seen, torch.arange(seen.shape[1])[None])[0]).squeeze(1)
            errors.append(values - track.rewards[row])
        loss = torch.cat(errors).square().mean()
        loss.backward()
        losses.append(loss.item())
        torch.nn.utils.clip_grad_norm_(weights, max_grad_norm)
        adam.step()
        adam.zero_grad()
    return trunk, head, losses


@pytest.mark.parametrize("settings", EVERY.values(), ids=EVERY)
def test_values_are_0_at_first_fp32_and_learnt_by_its_own_optimizer(settings):
    """Twelve steps have the losses of torch's AdamW, whatever the settings, and end below any constant value's."""
    backend, _ = make_judged(**settings)
    track = make_texts()
    assert all(not bool(values.any()) for values in backend.with_values(track).text.values)
    before = critic_weights(backend)
    reports = [backend.train([Job(track=track, algorithm=Judged())], progress=0.0).only for _ in range(12)]
    losses = trained_by_torch(track, steps=12)[2]
    # fp32 sums in another order; or weights, activations and gradients of 8 bits, of which each is off by 2^-9 at most.
    bound = 2.0**-8 if "mixed_precision" in settings else 1e-5
    assert [report["critic_loss"] for report in reports] == pytest.approx(losses, rel=0, abs=bound * losses[0])
    rewards = torch.repeat_interleave(track.rewards, torch.tensor(track.text.lengths))
    # The best constant leaves the variance over tokens; less is left to one that tells tokens apart.
    assert reports[-1]["critic_loss"] < rewards.var(correction=0)
    assert reports[0]["critic_lr"] == 3e-2 and reports[0]["lr"] == 1e-2 and reports[0]["critic_updates"] == 1
    after = critic_weights(backend)
    assert all(value.dtype is torch.float32 for value in after.values())
    assert all(not torch.equal(after[name], before[name]) for name in after if "trunk.blocks" in name)
    assert all(values.dtype is torch.float32 for values in backend.with_values(track).text.values)
    backend.close()


def test_the_critic_starts_as_the_checkpoint_and_trains_by_torchs_adamw():
    """Two steps by autograd on a copy of the trunk; the policy trains beside it and is in none of it."""
    backend, _ = make_judged(critic={"max_grad_norm": 0.5})
    track = make_texts()
    for _ in range(2):
        backend.train([Job(track=track, algorithm=Judged())], progress=0.0)
    trunk, head, _ = trained_by_torch(track, steps=2, max_grad_norm=0.5)
    result = critic_weights(backend)
    for module, prefix in ((trunk, "trunk"), (head, "head")):
        for name, value in module.named_parameters():
            # fp32 rounding of gradients, which Adam divides by their own size: 1e-5 of a rate of 3e-2 at most.
            torch.testing.assert_close(result[f"weights/{prefix}.{name}"], value.detach(), rtol=0, atol=3e-6)
    backend.close()


@pytest.mark.parametrize("settings", [{}, {"shard": "always"}], ids=["plain", "wrapped"])
def test_no_micro_batch_or_packing_changes_what_is_learnt(settings):
    result = []
    splits = (
        TrainConfig(),
        TrainConfig(micro_batch_size=3),
        TrainConfig(micro_batch_tokens=12),
        TrainConfig(packing=False),
    )
    for train in splits:
        backend, _ = make_judged(train=train, eps=1.0, critic={"lr": 1.0}, **settings)
        for _ in range(2):
            report = backend.train([Job(track=make_texts(), algorithm=Judged())], progress=0.0)
        result.append((critic_weights(backend), backend.export_weights(kind="full").tensors, report.only))
        backend.close()
    for critic, live, metrics in result[1:]:
        for mine, whole in ((critic, result[0][0]), (live, result[0][1])):
            for name, value in mine.items():
                # With eps 1 a step is linear in the gradient, whose sums are fp32 in another order.
                torch.testing.assert_close(value, whole[name], rtol=0, atol=1e-6)
        assert metrics["critic_grad_norm"] == pytest.approx(result[0][2]["critic_grad_norm"], rel=1e-5)


@pytest.mark.parametrize(("make_model", "make"), [(ToyTextModel, make_texts), (ToyModel, make_steps)])
@pytest.mark.parametrize("settings", EVERY.values(), ids=EVERY)
def test_two_steps_a_resume_and_two_steps_are_four_steps_bit_for_bit(settings, make_model, make, tmp_path):
    how = {**settings, "lr_schedule": "cosine", "critic": {"lr_warmup_steps": 3, "max_grad_norm": 0.3}}
    kind = settings.get("trains", "full")
    straight, _ = make_judged(model=make_model(), **how)
    for number in range(4):
        if number == 2:
            straight.save(tmp_path)
        straight.train([Job(track=make(seed=number), algorithm=Judged())], progress=0.0)
    assert (tmp_path / "critic" / ".metadata").is_file()
    resumed, _ = make_judged(model=make_model(), **how)
    resumed.train([Job(track=make(seed=7), algorithm=Judged())], progress=0.0)
    resumed.load(tmp_path)
    for number in (2, 3):
        resumed.train([Job(track=make(seed=number), algorithm=Judged())], progress=0.0)
    for one, other in (
        (critic_weights(straight), critic_weights(resumed)),
        (straight._critic.optimizer.moments(), resumed._critic.optimizer.moments()),
        (straight.export_weights(kind=kind).tensors, resumed.export_weights(kind=kind).tensors),
    ):
        assert one.keys() == other.keys()
        assert all(torch.equal(one[name], other[name]) for name in one)
    straight.close()
    resumed.close()


def test_a_checkpoint_without_a_critic_or_with_a_broken_one_changes_nothing(tmp_path):
    with_critic, _ = make_judged()
    with_critic.train([Job(track=make_texts(), algorithm=Judged())], progress=0.0)
    with_critic.save(tmp_path / "with")
    without = build(Fsdp2Config(trains="full"), model=ToyTextModel(), train=TrainConfig(), steps=10)
    without.save(tmp_path / "without")
    with pytest.raises(CheckpointError, match="made with critic = True; this recipe has None"):
        without.load(tmp_path / "with")
    with pytest.raises(CheckpointError, match="made with critic = None; this recipe has True"):
        with_critic.load(tmp_path / "without")
    (tmp_path / "with" / "critic" / ".metadata").unlink()
    with_critic.train([Job(track=make_texts(), algorithm=Judged())], progress=0.0)
    before = {**critic_weights(with_critic), **with_critic.export_weights(kind="full").tensors}
    with pytest.raises(CheckpointError, match=r"critic: \.metadata is missing"):
        with_critic.load(tmp_path / "with")
    after = {**critic_weights(with_critic), **with_critic.export_weights(kind="full").tensors}
    assert with_critic.version == 2 and all(torch.equal(after[name], before[name]) for name in before)


@pytest.mark.parametrize("trains", ["full", "lora"])
def test_no_weight_of_the_critic_is_ever_in_an_update_for_engines(trains):
    how = {"trains": trains, "lora": LoraSettings(rank=2)}
    backend, _ = make_judged(**how)
    alone = build(Fsdp2Config(**how), model=ToyTextModel(), train=TrainConfig(), steps=10, seed=3)
    for kind in (trains, "merged"):
        sent, expected = backend.export_weights(kind=kind), alone.export_weights(kind=kind)
        assert sent.tensors.keys() == expected.tensors.keys() and sent.checksum == expected.checksum
    backend.train([Job(track=make_texts(), algorithm=Judged())], progress=0.0)
    critic = {value.data_ptr() for value in backend._critic.net.parameters()}
    assert critic.isdisjoint(value.data_ptr() for value in backend._module.parameters())
    assert backend.export_weights(kind=trains).tensors.keys() == alone.export_weights(kind=trains).tensors.keys()


@pytest.mark.parametrize(
    ("dtype", "settings", "expected"),
    [
        (torch.bfloat16, {"trains": "lora"}, torch.bfloat16),
        (torch.bfloat16, {"trains": "lora", "shard": "always", "activation_checkpointing": True}, torch.bfloat16),
        (torch.float16, {"trains": "lora"}, torch.float16),
        (torch.float32, {"trains": "lora"}, torch.float32),
        # The policy trains fp32 copies, too.
        (torch.bfloat16, {"trains": "full"}, torch.float32),
    ],
)
def test_it_computes_in_the_dtype_of_the_policy_and_keeps_fp32_weights_and_values(dtype, settings, expected):
    model = ToyTextModel()
    model.net.to(dtype)
    backend, _ = make_judged(model=model, lora=LoraSettings(rank=2), **settings)
    seen = set()
    backend._critic.net.trunk.blocks[0].up.register_forward_hook(lambda _, args, output: seen.add(output.dtype))
    track = make_texts()
    reports = [backend.train([Job(track=track, algorithm=Judged())], progress=0.0).only for _ in range(12)]
    assert seen == {expected}
    assert {value.dtype for value in critic_weights(backend).values()} == {torch.float32}
    assert {values.dtype for values in backend.with_values(track).text.values} == {torch.float32}
    assert reports[-1]["critic_loss"] < reports[0]["critic_loss"]
    backend.close()


def test_while_the_critic_warms_up_the_policy_keeps_every_bit():
    backend, _ = make_judged(train=TrainConfig(updates_per_step=2), critic={"warmup_steps": 3})
    start = backend.export_weights(kind="full").tensors
    versions = []
    for number in range(3):
        report = backend.train([Job(track=make_texts(seed=number), algorithm=Judged())], progress=0.0)
        versions.append((backend.version, report.num_updates, report.only["critic_updates"]))
        if number == 1:
            assert all(torch.equal(value, start[n]) for n, value in backend.export_weights(kind="full").tensors.items())
    # A round of two updates that begins at the critic's step 0 or 2, before its third, is its own.
    assert versions == [(0, 0, 2.0), (0, 0, 2.0), (2, 2, 2.0)]


def test_offloading_takes_the_critic_along_and_changes_nothing():
    backend, _ = make_judged()
    backend.train([Job(track=make_texts(), algorithm=Judged())], progress=0.0)
    before = critic_weights(backend)
    backend.offload()
    assert all(value.device.type == "cpu" for value in backend._critic.net.parameters())
    backend.onload()
    assert all(torch.equal(value, before[name]) for name, value in critic_weights(backend).items())


def test_what_cannot_be_is_refused_in_a_sentence():
    backend, _ = make_backend(ToyModel())
    with pytest.raises(RecipeError, match=r"backend\.critic\.lr: got null, but the algorithm needs the values"):
        backend.with_values(make_texts())
    wrong = CriticConfig(lr=0.0, max_grad_norm=-1.0, lr_warmup_steps=-1, warmup_steps=-2, steps_per_update=0)
    keys = [reason.key for reason in broken_limits(Fsdp2Config(critic=wrong), key="backend")]
    names = ("lr", "max_grad_norm", "lr_warmup_steps", "warmup_steps", "steps_per_update")
    assert keys == [f"backend.critic.{key}" for key in names]


@pytest.mark.slow
def test_two_ranks_learn_what_one_does_and_either_goes_on_from_the_others_checkpoint(tmp_path: Path):
    launch(Path(__file__).with_name("fsdp2_critic_ranks.py"), tmp_path / "store", tmp_path, ranks=2)
    everything = torch.load(tmp_path / "found.pt", weights_only=True)
    for case in CASES:
        settings, make_model, track = parts_of(case)
        alone, _ = make_judged(train=TrainConfig(micro_batch_size=2), model=make_model(), **settings)
        for _ in range(2):
            report = alone.train([Job(track=track, algorithm=Judged())], progress=0.0)
        expected, live = critic_weights(alone), alone.export_weights(kind=settings.get("trains", "full")).tensors
        for number in range(len(ROWS)):
            result = everything[case, number]
            for one, other in ((result["critic"], expected), (result["live"], live)):
                for name, value in one.items():
                    # Steps of rate 1 along gradients of order 1, whose fp32 sums have another order: some ten
                    # roundings of 1e-7 in each of four updates.
                    torch.testing.assert_close(
                        value, other[name], rtol=0, atol=3e-6, msg=lambda m, at=(case, number, name): f"{at}: {m}"
                    )
            for name in ("critic_loss", "critic_grad_norm", "grad_norm", "values_mean"):
                assert result["metrics"][name] == pytest.approx(report.only[name], rel=1e-4), (case, number, name)
            if case != "tensor":
                alone.load(tmp_path / f"{case}-{number}")
                saved = critic_weights(alone)
                assert all(torch.equal(saved[name], value) for name, value in result["critic"].items())


def test_values_stand_before_the_token_that_they_are_of():
    """The value of a token depends on the tokens before it, not on itself."""
    backend, _ = make_judged()
    backend.train([Job(track=make_texts(), algorithm=Judged())], progress=0.0)
    track = make_texts()
    values = per_token(backend.with_values(track).text, "values")
    tokens = list(track.text.tokens)
    tokens[0] = tokens[0].clone()
    tokens[0][1] = (tokens[0][1] + 1) % 9
    changed = dataclasses.replace(track, segment=dataclasses.replace(track.text, tokens=tuple(tokens)))
    other = per_token(backend.with_values(changed).text, "values")
    assert torch.equal(values[0, :2], other[0, :2]) and torch.equal(values[1:], other[1:])


def test_the_mesh_of_tensor_slices_takes_the_plan_of_the_trunk():
    net = TokenCriticNet(ToyTextModel())
    assert net.place == "trunk"
    assert net.tensor_parallel({"trunk.blocks.*.up": "colwise", "head": "colwise"}) == {"trunk.blocks.*.up": "colwise"}
