"""Attention by the libraries' own names: their lists, refusals, and that implementations agree."""

import pytest
import torch
from diffusers.models.attention_dispatch import (
    AttentionBackendName,
    _AttentionBackendRegistry,
    _check_attention_backend_requirements,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from unirl.core.errors import RecipeError
from unirl.core.match.match import match
from unirl.core.plugins.catalog import Catalog
from unirl.core.recipe.compose import compose
from unirl.model_host.attention import OF_DIFFUSERS, OF_TRANSFORMERS
from unirl.models.qwen3.config import Qwen3Config
from unirl.models.qwen3.model import build as build_qwen3
from unirl.models.qwen3.tiny import write as write_qwen3
from unirl.models.sd3.config import Sd3Config
from unirl.models.sd3.model import build as build_sd3
from unirl.models.sd3.tiny import write as write_sd3
from unirl.models.wan.config import Wan21Config
from unirl.models.wan.model import build as build_wan
from unirl.models.wan.tiny import write_wan21
from unirl.numerics.tokens.batches import pad_batch

pytestmark = pytest.mark.slow


def test_the_names_are_those_of_the_libraries():
    assert OF_DIFFUSERS.keys() == {name.value for name in AttentionBackendName}
    own = {name for name in OF_TRANSFORMERS if "/" not in name}
    assert own == {"eager", *(name for name in ALL_ATTENTION_FUNCTIONS.valid_keys() if not name.startswith("paged|"))}


@pytest.mark.parametrize("name", OF_DIFFUSERS)
def test_diffusers_needs_a_package_where_the_list_says_so(name):
    if not OF_DIFFUSERS[name].dist:
        _check_attention_backend_requirements(AttentionBackendName(name))
        return
    # None of them is part of the development dependencies.
    with pytest.raises(RuntimeError, match="not usable because"):
        _check_attention_backend_requirements(AttentionBackendName(name))


@pytest.mark.parametrize(
    ("recipe", "name", "message"),
    [
        ("quickstart", "flashy", "got 'flashy', expected one of native, _native_cudnn, "),
        (
            "quickstart",
            "sage",
            "got 'sage', which has no backward pass, but the model trains. Leave it out, or use one of",
        ),
        ("quickstart", "_flash_3", "got '_flash_3', which has no backward pass"),
        ("quickstart", "flash", "got 'flash', which needs flash-attn, but that is not installed."),
        ("quickstart", "flex", "got 'flex' with run.batch_invariant, which checks torch's alone. Use one of native,"),
        ("quickstart-text", "flash", "got 'flash', expected one of auto, sdpa, eager, flash_attention_2, "),
        ("quickstart-text", "flash_attention_3", "got 'flash_attention_3', which needs flash-attn-3, but"),
        (
            "quickstart-text",
            "kernels-community/vllm-flash-attn3",
            "got 'kernels-community/vllm-flash-attn3', which has no",
        ),
    ],
)
def test_attention_that_cannot_train_here_is_refused(recipe, name, message):
    catalog = Catalog.discover()
    words = ["run.batch_invariant=true"] if "run.batch_invariant" in message else []
    plan = compose(recipe, [f"model.attention={name}", *words], catalog=catalog)
    (reason,) = [str(one) for one in match(plan, catalog=catalog).reasons]
    assert reason.startswith(f"model.attention: {message}")


def test_a_transformer_without_a_choice_of_attention_is_refused(tmp_path):
    write_sd3(tmp_path, seed=0)
    with pytest.raises(RecipeError, match=r"model\.attention: got 'native', but SD3.* in JointAttnProcessor2_0"):
        build_sd3(Sd3Config(path=str(tmp_path), attention="native"), device="cpu")


def test_attention_of_diffusers_is_the_models_own_and_agrees_with_torchs(tmp_path):
    write_wan21(tmp_path, seed=0)
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(2, 4, 3, 4, 8, generator=draw)
    sigma, grad = torch.tensor([0.9, 0.3]), torch.randn(x.shape, generator=draw)
    results = {}
    for name in (None, "native", "_native_math"):
        before = _AttentionBackendRegistry.get_active_backend()
        model = build_wan(Wan21Config(path=str(tmp_path), attention=name), device="cpu")
        width = model.transformer.config.text_dim
        texts = torch.randn(2, 5, width, generator=torch.Generator().manual_seed(1))
        assert _AttentionBackendRegistry.get_active_backend() == before
        velocity = model.velocity(x, sigma, {"prompt_embeds": texts})
        velocity.backward(grad)
        results[name] = velocity.detach(), {key: value.grad for key, value in model.trainable.named_parameters()}
    expected, gradients = results[None]
    assert torch.equal(results["native"][0], expected)
    velocity, other = results["_native_math"]
    # fp32 sums over keys in another order, 2^-24 each, which some layers add up.
    assert float((velocity - expected).abs().max()) < 1e-5 * float(expected.abs().max())
    assert not torch.equal(velocity, expected)
    largest = max(float(value.abs().max()) for value in gradients.values())
    assert all(float((other[key] - value).abs().max()) < 1e-5 * largest for key, value in gradients.items())


def test_eager_attention_of_transformers_agrees_with_sdpa(tmp_path):
    write_qwen3(tmp_path, seed=0)
    batch = pad_batch(
        [torch.tensor([3, 4, 5]), torch.tensor([6])], [torch.tensor([7, 8]), torch.tensor([9, 1, 2])], pad_token=0
    )
    results = {}
    for name in ("sdpa", "eager"):
        model = build_qwen3(Qwen3Config(path=str(tmp_path), attention=name), device="cpu")
        log_probs, _ = model.score(batch, temperature=1.0)
        log_probs.sum().backward()
        results[name] = log_probs.detach(), {key: value.grad for key, value in model.trainable.named_parameters()}
    # As above; log-probs are of the order of 1.
    torch.testing.assert_close(results["eager"][0], results["sdpa"][0], rtol=0, atol=1e-5)
    largest = max(float(value.abs().max()) for value in results["sdpa"][1].values())
    for key, value in results["sdpa"][1].items():
        assert float((results["eager"][1][key] - value).abs().max()) < 1e-5 * largest, key
