"""The critic of denoise steps: a copy of the denoiser, what it starts as, what trains it, and what it is shown."""

import copy
import dataclasses

import pytest
import torch
from fsdp2_text_toy import Judged, critic_weights, make_judged, make_steps
from fsdp2_toy import SPEC, ToyModel
from unirl.backends.fsdp2.config import LoraSettings
from unirl.core.errors import RecipeError
from unirl.core.roles import Job
from unirl.core.specs.config import TrainConfig
from unirl.train_host.critic_nets import POOLED, StepCriticNet


def pooled(output):
    """[64] means of runs of neighbours; the toy has 8 elements, so each is its own run and 56 are 0."""
    return torch.cat([output.flatten(), torch.zeros(POOLED - output.numel())])


def trained_by_torch(track, *, steps):
    """A copy of the denoiser with a head after some steps by autograd and torch's AdamW, a point at a time, and the
    loss before each."""
    net, head = copy.deepcopy(ToyModel().net).eval(), torch.nn.Linear(POOLED, 1)
    for value in head.parameters():
        torch.nn.init.zeros_(value)
    adam = torch.optim.AdamW(
        [*net.parameters(), *head.parameters()], lr=3e-2, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0
    )
    segment, losses = track.latent, []
    text = track.conditions["positive"].expanded()["text"]
    for _ in range(steps):
        errors = []
        for row in range(track.num_rows):
            for step in segment.sde_steps[row].tolist():
                if step < 0:
                    continue
                (slot,) = (segment.positions[row] == step).nonzero()[0].tolist()
                x, sigma = segment.latents[row, slot].flatten()[None], segment.sigmas[step][None]
                value = head(pooled(net(x, text[row][None], timestep=sigma))).squeeze()
                errors.append(value - track.rewards[row])
        loss = torch.stack(errors).square().mean()
        loss.backward()
        losses.append(loss.item())
        adam.step()
        adam.zero_grad()
    return net, head, losses


@pytest.mark.parametrize(
    "settings",
    [{}, {"shard": "always"}, {"activation_checkpointing": True}, {"trains": "lora", "lora": LoraSettings(rank=2)}],
    ids=["plain", "wrapped", "recomputed", "lora"],
)
def test_it_starts_at_0_as_the_checkpoint_and_trains_by_torchs_adamw(settings):
    """All of it trains, with adapters in the policy too; no weight of the policy is in it."""
    backend, _ = make_judged(model=ToyModel(), **settings)
    track = make_steps()
    assert not bool(backend.with_values(track).latent.values.any())
    reports = [backend.train([Job(track=track, algorithm=Judged())], progress=0.0).only for _ in range(4)]
    net, head, losses = trained_by_torch(track, steps=4)
    assert [report["critic_loss"] for report in reports] == pytest.approx(losses, rel=1e-5)
    result = critic_weights(backend)
    assert len(result) == len([*net.parameters(), *head.parameters()])
    for module, prefix in ((net, "trunk"), (head, "head")):
        for name, value in module.named_parameters():
            # fp32 rounding of gradients, which Adam divides by their own size: 1e-4 of a rate of 3e-2 a step at most.
            torch.testing.assert_close(result[f"weights/{prefix}.{name}"], value.detach(), rtol=0, atol=1.2e-5)
    backend.close()


@pytest.mark.parametrize("settings", [{}, {"shard": "always"}], ids=["plain", "wrapped"])
def test_no_micro_batch_and_no_way_to_replay_changes_what_is_learnt(settings):
    result = []
    for train in (TrainConfig(), TrainConfig(micro_batch_size=3), TrainConfig(replay="serial")):
        backend, _ = make_judged(model=ToyModel(), train=train, eps=1.0, critic={"lr": 1.0}, **settings)
        for _ in range(2):
            backend.train([Job(track=make_steps(), algorithm=Judged())], progress=0.0)
        result.append({**critic_weights(backend), **backend.export_weights(kind="full").tensors})
        backend.close()
    for other in result[1:]:
        for name, value in other.items():
            # With eps 1 a step is linear in the gradient, whose sums are fp32 in another order.
            torch.testing.assert_close(value, result[0][name], rtol=0, atol=1e-6)


def test_several_steps_per_update_are_several_steps_on_the_same_returns():
    """The targets of the toy are rewards, so three steps after one update are three updates of one step each."""
    track = make_steps()
    thrice, _ = make_judged(model=ToyModel(), critic={"steps_per_update": 3})
    report = thrice.train([Job(track=track, algorithm=Judged())], progress=0.0)
    *_, losses = trained_by_torch(track, steps=3)
    assert report.only["critic_updates"] == 3 and report.num_updates == 1
    assert report.only["critic_loss"] == pytest.approx(losses[0], rel=1e-5)
    once, _ = make_judged(model=ToyModel())
    for _ in range(3):
        once.train([Job(track=track, algorithm=Judged())], progress=0.0)
    expected = critic_weights(once)
    assert all(torch.equal(value, expected[name]) for name, value in critic_weights(thrice).items())


def test_a_value_depends_on_the_latent_before_its_step_the_noise_level_and_the_prompt_alone():
    backend, _ = make_judged(model=ToyModel())
    track = make_steps()
    for _ in range(3):
        backend.train([Job(track=track, algorithm=Judged())], progress=0.0)
    values = backend.with_values(track).latent.values
    assert float(values[-1, 1]) == 0.0 and values[:-2].std() > 0
    latents = track.latent.latents.clone()
    latents[0, track.latent.positions[0] == 1] += 1.0  # after step 0, which no other step starts from
    after = dataclasses.replace(track, segment=dataclasses.replace(track.latent, latents=latents))
    assert torch.equal(backend.with_values(after).latent.values, values)
    latents[0, track.latent.positions[0] == 2] += 1.0
    moved = dataclasses.replace(track, segment=dataclasses.replace(track.latent, latents=latents))
    result = backend.with_values(moved).latent.values
    assert torch.equal(result[0, :1], values[0, :1]) and result[0, 1] != values[0, 1]
    # fp32 sums of a batch may be in another order where other rows change; these do not.
    torch.testing.assert_close(result[1:], values[1:], rtol=0, atol=1e-6)
    positive = track.conditions["positive"]
    conditions = {"positive": dataclasses.replace(positive, values={"text": positive.values["text"].flip(0)})}
    assert not torch.isclose(
        backend.with_values(dataclasses.replace(track, conditions=conditions)).latent.values[0], values[0]
    ).any()


def test_a_model_of_16_bits_has_a_critic_of_fp32_weights():
    class SixteenBits(ToyModel):
        def __init__(self):
            super().__init__()
            self.net.to(torch.bfloat16)

        def velocity(self, x, sigma, conditions):
            return super().velocity(x.bfloat16(), sigma, {"text": conditions["text"].bfloat16()})

    backend, _ = make_judged(model=SixteenBits(), trains="lora", lora=LoraSettings(rank=2))
    track = make_steps()
    reports = [backend.train([Job(track=track, algorithm=Judged())], progress=0.0).only for _ in range(40)]
    assert {value.dtype for value in critic_weights(backend).values()} == {torch.float32}
    assert backend.with_values(track).latent.values.dtype is torch.float32
    # Rewards are memorised to less than half of their mean square.
    assert reports[-1]["critic_loss"] < reports[0]["critic_loss"] / 2


def test_a_spec_that_names_another_attribute_is_refused():
    class Elsewhere(ToyModel):
        def __init__(self):
            super().__init__(spec=dataclasses.replace(SPEC, trainable="transformer"))

    with pytest.raises(RecipeError, match=r"backend\.critic\.lr: .*model\.transformer, but model 'toy' keeps"):
        StepCriticNet(Elsewhere())
