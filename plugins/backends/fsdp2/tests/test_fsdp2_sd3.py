"""The same promises on a real architecture: diffusers' SD3 transformer, two blocks."""

import copy
import dataclasses

import pytest
import torch
from diffusers import SD3Transformer2DModel
from fsdp2_toy import SPEC, Clipped, ToyModel, gradients, make_backend, make_track
from tensor_meter import stored
from unirl.core.errors import RecipeError
from unirl.core.roles import Job
from unirl.core.specs.config import TrainConfig
from unirl.core.specs.memory import quantized_bytes
from unirl.train_host.quantize import dequantized, is_quantized

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


QUANTIZED = {"int8": {"activation_checkpointing": True}, "nf4": {}}


@pytest.mark.torchao
@pytest.mark.parametrize("kind", QUANTIZED)
def test_a_quantized_base_trains_as_the_model_with_its_rounded_weights(kind):
    """Its weights are those of the checkpoint within the step of the format, and nothing else differs: the gradients
    are those of an ordinary model that has these weights."""
    original, backend_of = Sd3(), {}
    backend_of["quantized"], small = make_backend(copy.deepcopy(original), quantize=kind, **QUANTIZED[kind])
    rounded, layers = copy.deepcopy(original), 0
    with torch.no_grad():
        for name, weight in small.net.named_parameters():
            if is_quantized(weight):
                plain, layers = name.replace(".base_layer", ""), layers + 1
                before, after = rounded.net.get_parameter(plain), dequantized(weight)
                assert "transformer_blocks." in name and weight.shape == before.shape and after.dtype == before.dtype
                assert sum(part.nbytes for part in stored(weight)) == quantized_bytes(
                    *weight.shape, kind=kind, itemsize=4
                )
                step = _largest_error(before, kind)
                assert ((after - before).abs() <= step).all(), name
                before.copy_(after)
    blocks = [part for block in original.net.transformer_blocks for part in block.modules()]
    assert layers == sum(isinstance(part, torch.nn.Linear) for part in blocks)
    track = track_of(original)
    backend_of["rounded"], _ = make_backend(rounded)
    result = {name: gradients(backend, track, Clipped()) for name, backend in backend_of.items()}
    for backend in backend_of.values():
        backend.close()
    assert len(result["rounded"]) == 28
    largest = max(float(grad.abs().max()) for grad in result["rounded"].values())
    for name, grad in result["rounded"].items():
        # fp32 rounding: int8 codes are multiplied before their scale is.
        assert float((result["quantized"][name] - grad).abs().max()) < 1e-5 * largest, name


@pytest.mark.torchao
def test_frozen_adapters_of_a_quantized_base_are_not_quantized():
    backend, _ = make_backend(Sd3(), quantize="int8", lr_scales={"lora_A": 0.0}, **QUANTIZED["int8"])
    adapters = {name: param for name, param in backend._held.items() if ".lora_" in name}
    assert len(adapters) == 28 and not any(is_quantized(param) for param in adapters.values())
    assert sum(is_quantized(param) for param in backend._held.values()) > 14
    backend.close()


def _largest_error(weight, kind):
    """int8: half a step of an output channel, whose 255 steps go from -max to max.  nf4: half of the widest gap between
    its levels, from -1 to -0.6962, times the largest of a block of 64; and its scale, which is quantized itself in 255
    steps of the range of scales, is off by half of such a step."""
    if kind == "int8":
        # And the rounding of fp32: 255 x 6e-8 of half a step, in the largest weight.
        return weight.abs().amax(1, keepdim=True) / 255 * (1 + 1e-4)
    scales = weight.reshape(-1, 64).abs().amax(1, keepdim=True)
    off = (scales - scales.mean()).abs().max() / 128
    return ((1 - 0.6962) / 2 * scales + off).expand(-1, 64).reshape(weight.shape) * (1 + 1e-4)


@pytest.mark.torchao
def test_a_velocity_on_int8_is_within_the_bound_that_its_rounding_gives():
    """Interval arithmetic: an error of x passes a layer as |W| times it, and the layer's own rounding, half a step of
    each weight, adds that times |x|. tanh does not widen an error."""
    model = ToyModel()
    plain = copy.deepcopy(model)
    plain.net.eval()
    backend, model = make_backend(model, quantize="int8", activation_checkpointing=True)
    x, sigma, text = torch.randn(4, 2, 2, 2), torch.rand(4), {"text": torch.randn(4, 3)}

    def layer(part, x, error):
        step = part.weight.abs().amax(1) / 255
        return part(x), error @ part.weight.abs().T + (x.abs() + error).sum(1, keepdim=True) * step

    with torch.no_grad(), backend.policy("reference"):
        net = plain.net
        hidden = net.enter(torch.cat([x.flatten(1), text["text"], sigma[:, None]], dim=1))
        error = torch.zeros_like(hidden)
        for block in net.blocks:
            up, error_up = layer(block.up, hidden, error)
            down, error_down = layer(block.down, torch.tanh(up), error_up)
            hidden, error = hidden + down, error + error_down
        bound = error @ net.leave.weight.abs().T
        differs = (model.velocity(x, sigma, text) - plain.velocity(x, sigma, text)).abs().flatten(1)
    backend.close()
    assert (differs <= bound + 1e-6).all(), "1e-6: the rounding of fp32"
    assert differs.max() > 1e-4 * bound.max()


@pytest.mark.torchao
@pytest.mark.parametrize("kind", QUANTIZED)
def test_exports_from_a_quantized_base_have_the_names_and_shapes_of_any(kind):
    quantized, small = make_backend(Sd3(), quantize=kind, **QUANTIZED[kind])
    plain, _ = make_backend(Sd3())
    assert not any(is_quantized(param) for param in quantized._params.values())
    for what in ("lora", "merged"):
        result, expected = (backend.export_weights(kind=what).tensors for backend in (quantized, plain))
        assert {name: (t.shape, t.dtype) for name, t in result.items()} == {
            name: (t.shape, t.dtype) for name, t in expected.items()
        }
        if what == "lora":
            assert all(torch.equal(tensor, expected[name]) for name, tensor in result.items())
    # Merged: into the weights that the policy computes with.
    name = "transformer_blocks.0.attn.to_q"
    base, scale = dequantized(small.net.get_parameter(f"{name}.base_layer.weight")), 6.0 / 4
    a, b = (small.net.get_parameter(f"{name}.lora_{side}.default.weight") for side in "AB")
    assert torch.equal(result[f"{name}.weight"], base + b @ a * scale)
    before = dequantized(small.net.get_parameter(f"{name}.base_layer.weight"))
    quantized.offload()
    quantized.onload()
    assert torch.equal(dequantized(small.net.get_parameter(f"{name}.base_layer.weight")), before)
    for backend in (quantized, plain):
        backend.close()


@pytest.mark.torchao
def test_a_layer_that_nf4_cannot_hold_is_named():
    with pytest.raises(
        RecipeError, match=r"^backend.quantize: got nf4, but layer 'blocks.0.up.base_layer' has 288 weights"
    ):
        make_backend(quantize="nf4")
