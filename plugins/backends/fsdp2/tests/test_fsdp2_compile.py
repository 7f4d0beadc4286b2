"""Blocks under torch.compile: the numbers of eager ones, for every policy, and what is not compiled."""

import pytest
import torch
from fsdp2_toy import Clipped, gradients, make_backend, make_track
from torch._dynamo.utils import counters
from unirl.backends.fsdp2.config import AverageConfig
from unirl.core.errors import RecipeError
from unirl.core.roles import Job
from unirl.core.specs.config import TrainConfig
from unirl.models.qwen3.config import Qwen3Config
from unirl.models.qwen3.model import build as build_qwen3
from unirl.models.qwen3.tiny import write as write_qwen3
from unirl.numerics.tokens.batches import pad_batch

pytestmark = [
    pytest.mark.slow,
    pytest.mark.nightly,
    # torch's compiler looks at every tensor's gradient and silences this warning by itself, but not where it is an error.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]


@pytest.fixture
def compiler():
    """The counts of torch's compiler, from 0."""
    torch.compiler.reset()
    counters.clear()
    yield counters
    torch.compiler.reset()


@pytest.mark.parametrize(
    "settings", [{}, {"shard": "always", "activation_checkpointing": True}], ids=["plain", "wrapped"]
)
def test_compiled_blocks_have_the_numbers_of_eager_ones_for_every_policy(settings, compiler):
    result = {}
    for kind in ("none", "blocks"):
        backend, model = make_backend(
            compile=kind,
            ema=AverageConfig(kind="constant", decay=0.5),
            train=TrainConfig(updates_per_step=2, micro_batch_size=3),
            **settings,
        )
        track = make_track(model)
        # Micro-batches of 3 and 1 rows; policies without an adapter, and with swapped weights.
        for policy in ("reference", "ema"):
            report = backend.train([Job(track=track, algorithm=Clipped(to=policy))], progress=0.0)
        assert report.only["ratio_max_dev_first"] < 1e-6
        velocities = []
        for policy in ("live", "reference", "ema"):
            with backend.policy(policy), torch.no_grad():
                x, text = track.latent.latents[:, 0], track.conditions["positive"].expanded()
                velocities.append(model.velocity(x, torch.full((8,), 0.5), text))
        result[kind] = torch.stack(velocities), gradients(backend, track, Clipped(to="reference"))
        assert (compiler["stats"]["unique_graphs"] > 0) == (kind == "blocks")
        backend.close()
    assert not compiler["graph_break"]
    # fp32 sums in another order, and fused ones that are rounded once: a few 2^-24, times what four updates make of them.
    (expected, grads), (velocity, others) = result["none"], result["blocks"]
    assert float((velocity - expected).abs().max()) < 2e-6 * float(expected.abs().max())
    for name, grad in grads.items():
        assert float((others[name] - grad).abs().max()) < 1e-5 * float(grad.abs().max()), name


def test_a_missing_compiler_is_named_under_the_key(compiler):
    caches = torch._inductor.config.patch({"cpp.cxx": ("no-such-compiler",), "force_disable_caches": True})
    with caches, pytest.raises(RecipeError, match=r"(?s)backend\.compile: got 'blocks', .* cpu.*g\+\+"):
        make_backend(compile="blocks")


def test_texts_are_compiled_where_they_train_and_not_where_they_are_generated(tmp_path, compiler):
    write_qwen3(tmp_path, seed=0)
    prompts, answers = [torch.tensor([3, 4, 5]), torch.tensor([6])], [torch.tensor([7, 8]), torch.tensor([9, 1, 2])]
    batch = pad_batch(prompts, answers, pad_token=0)
    result = {}
    for kind in ("none", "blocks"):
        model = build_qwen3(Qwen3Config(path=str(tmp_path)), device="cpu")
        backend, _ = make_backend(model, trains="full", compile=kind)
        tokens = torch.tensor([[3, 4, 5]])
        before = compiler["stats"]["unique_graphs"]
        logits, _ = model.next_logits(
            tokens, positions=torch.arange(3)[None], attention_mask=torch.ones(1, 3, dtype=torch.bool), cache=None
        )
        assert compiler["stats"]["unique_graphs"] == before
        log_probs, _ = model.score(batch, temperature=1.0)
        log_probs.sum().backward()
        assert (compiler["stats"]["unique_graphs"] > before) == (kind == "blocks")
        grads = {name: param.grad for name, param in model.trainable.named_parameters()}
        result[kind] = logits, log_probs.detach(), grads
        backend.close()
    (logits, expected, grads), (other, log_probs, others) = result["none"], result["blocks"]
    assert torch.equal(logits, other)
    # fp32 sums in another order, over two layers; log-probs are of the order of 10.
    torch.testing.assert_close(log_probs, expected, rtol=0, atol=1e-5)
    largest = max(float(grad.abs().max()) for grad in grads.values())
    assert all(float((others[name] - grad).abs().max()) < 1e-5 * largest for name, grad in grads.items())
