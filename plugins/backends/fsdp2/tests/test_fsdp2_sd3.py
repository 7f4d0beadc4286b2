"""The same promises on a real architecture: diffusers' SD3 transformer, two blocks."""

import copy
import dataclasses

import pytest
import torch
from diffusers import SD3Transformer2DModel
from fsdp2_toy import SPEC, Clipped, gradients, make_backend, make_track
from unirl.core.roles import Job
from unirl.core.specs.config import TrainConfig

SHAPE = (4, 8, 8)
TARGETS = tuple(
    f"attn.{name}" for name in ("to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj")
)


class Sd3:
    def __init__(self) -> None:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.net = SD3Transformer2DModel(
                sample_size=8,
                patch_size=2,
                in_channels=4,
                num_layers=2,
                attention_head_dim=8,
                num_attention_heads=2,
                joint_attention_dim=16,
                caption_projection_dim=16,
                pooled_projection_dim=12,
                out_channels=4,
                pos_embed_max_size=8,
            )
            # Output layers start at 0 and would stop every gradient.
            for param in self.net.parameters():
                if param.ndim > 1:
                    torch.nn.init.normal_(param, std=0.1)
        self.spec = dataclasses.replace(SPEC, lora_targets=TARGETS, wrap_blocks=("JointTransformerBlock",))
        self.device = torch.device("cpu")

    @property
    def trainable(self):
        return self.net

    def velocity(self, x, sigma, conditions):
        return self.net(
            hidden_states=x,
            encoder_hidden_states=conditions["tokens"],
            pooled_projections=conditions["pooled"],
            timestep=sigma * 1000,
            return_dict=False,
        )[0].float()


def track_of(model):
    generator = torch.Generator().manual_seed(9)
    texts = {"tokens": torch.randn(1, 5, 16, generator=generator), "pooled": torch.randn(1, 12, generator=generator)}
    return make_track(model, num_rows=4, shape=SHAPE, texts=texts)


@pytest.mark.parametrize("trains", ["lora", "full"])
def test_sd3_gradients_do_not_depend_on_batching_or_wrapping(trains):
    result = {}
    for case in ((0, "auto"), (1, "auto"), (0, "always"), (0, "recompute")):
        backend, model = make_backend(
            Sd3(),
            trains=trains,
            train=TrainConfig(micro_batch_size=case[0]),
            shard="always" if case[1] == "always" else "auto",
            activation_checkpointing=case[1] == "recompute",
        )
        result[case] = gradients(backend, track_of(model), Clipped())
        backend.close()
    plain = result[0, "auto"]
    # Two blocks of the context stream of seven targets; the last block has no output of the context stream.
    assert len(plain) == 28 if trains == "lora" else len(plain) > 50
    assert all(torch.equal(result[0, "recompute"][name], plain[name]) for name in plain)
    largest = max(float(grad.abs().max()) for grad in plain.values())
    # Relative to the largest gradient: biases before a softmax have gradients that are rounding alone.  Wrapping
    # changes the order in which the blocks' gradients of the time embedding are added up, nothing else.
    for case in ((1, "auto"), (0, "always")):
        assert max(float((result[case][n] - plain[n]).abs().max()) for n in plain) < 1e-6 * largest


def test_sd3_in_bf16_is_the_bf16_module_fed_like_a_pipeline():
    model = Sd3()
    low = copy.deepcopy(model.net).eval()
    # Parameters alone: buffers, here the table of positions, stay fp32 under FSDP as well.
    for param in low.parameters():
        param.data = param.data.bfloat16()
    backend, model = make_backend(model, trains="full", mixed_precision="bf16")
    x, sigma = torch.randn(2, *SHAPE), torch.tensor([0.987, 0.31])
    tokens, pooled = torch.randn(2, 5, 16), torch.randn(2, 12)
    with torch.no_grad():
        result = model.velocity(x, sigma, {"tokens": tokens, "pooled": pooled})
        expected = low(
            hidden_states=x.bfloat16(),
            encoder_hidden_states=tokens.bfloat16(),
            pooled_projections=pooled.bfloat16(),
            timestep=sigma * 1000,
            return_dict=False,
        )[0]
    report = backend.train([Job(track=track_of(model), algorithm=Clipped())], progress=0.0)
    backend.close()
    assert torch.equal(result, expected.float())
    assert report.num_updates == 1
    # The rollout had the batch shape of the update, so in bf16 too the log-probs agree to the last bit.
    assert report.only["ratio_max_dev_first"] == 0.0 == report.only["logp_mismatch_max"]
