"""Weights that VeOmni trained on two ranks, sent to vLLM: it then computes with them, and with nothing older."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from causal_lm_moe import write as write_moe
from external_engines.environments import make
from transformers import AutoModelForCausalLM
from unirl.conformance.doubles.requests import make_request
from unirl.core.types.rollout import verify_echo
from unirl.core.types.sampling import TextSamplingConfig
from unirl.core.types.weights import checksum
from unirl.engines.vllm.config import VllmConfig
from unirl.engines.vllm.engine import build as build_vllm
from unirl.models.causal_lm.config import AutoCausalLmConfig
from unirl.models.causal_lm.model import build as build_text
from unirl.models.causal_lm.tiny import write as write_dense

pytestmark = [pytest.mark.slow, pytest.mark.nightly]

SCRIPT = Path(__file__).with_name("veomni_exports.py")
WRITE = {"dense": lambda folder: write_dense(folder, seed=0), "moe": write_moe}
PROMPTS = ("What is 47 + 85?", "a")
ROUNDING = 1e-5
"""Tolerance of a log-prob, in nats: as between two libraries that sum fp32 logits of order 10 in different orders."""
SECONDS = 280


@pytest.fixture(scope="module")
def exports(tmp_path_factory):
    """The weight updates of rank 0 by checkpoint and `backend.trains`, after two updates, and the checkpoints."""
    folder = tmp_path_factory.mktemp("exports")
    for name, write in WRITE.items():
        write(folder / name)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, str(SCRIPT), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=SECONDS)
    assert done.returncode == 0, done.stderr[-6000:]
    return torch.load(folder / "found-2.pt", weights_only=False), folder


def with_update(module, update):
    """Transformers' own module with the weights of an update: replaced, or W + scale B A."""
    weights = dict(module.named_parameters())
    with torch.no_grad():
        for name, tensor in update.tensors.items():
            if update.kind == "full":
                weights[name].copy_(tensor)
            elif name.endswith(".lora_A.weight"):
                layer = name.removesuffix(".lora_A.weight")
                up = update.tensors[f"{layer}.lora_B.weight"].double()
                weights[f"{layer}.weight"].add_((update.adapter_scale * up @ tensor.double()).float())
    return module


def gap(track, module):
    """Largest difference of the engine's log-probs to those of transformers, each text computed alone."""
    result = 0.0
    for prompt, tokens, log_probs in zip(
        track.text.prompt_tokens, track.text.tokens, track.text.log_probs, strict=True
    ):
        with torch.no_grad():
            logits = module(torch.cat([prompt, tokens])[None]).logits[0, len(prompt) - 1 : -1]
        expected = logits.log_softmax(-1).gather(1, tokens[:, None])[:, 0]
        result = max(result, float((log_probs - expected).abs().max()))
    return result


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", ["dense", "moe"])
def test_vllm_computes_with_the_weights_that_veomni_trained(name, exports):
    """Adapters first, on the weights of the checkpoint, and then all weights, without the adapters."""
    make("vllm")
    updates, folder = exports
    path = str(folder / name)
    model = build_text(AutoCausalLmConfig(path=path), device="cpu", lazy=True)
    engine = build_vllm(VllmConfig(kv_cache_mb=64, max_num_seqs=8, lora_rank=4), model=model, device="cpu")
    try:
        for trains in ("lora", "full"):
            update = updates[name, trains]
            receipt = engine.load_weights(update)
            assert receipt.version == engine.version == update.version == 2
            assert receipt.checksum == update.checksum == checksum(update.tensors)
            request = make_request(
                model,
                TextSamplingConfig(max_new_tokens=16),
                track="text",
                prompts=PROMPTS,
                samples_per_prompt=2,
                policy_version=2,
            )
            track = engine.generate(request)
            verify_echo(request, track)
            base = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
            assert gap(track, base) > 1e-2, "the check does not see weights that were not trained"
            assert gap(track, with_update(base, update)) < ROUNDING
    finally:
        engine.close()
