"""Text engines that share a device with training: they sleep while it trains, and give their memory back."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import ray_clusters
from external_engines.environments import make
from external_engines.texts import Ask, ask
from small_runs import SMALL_TEXT, run, steps
from transformers import Qwen3Config as Sizes
from transformers import Qwen3ForCausalLM
from unirl.conformance.doubles.weight_updates import full_update, perturb
from unirl.core.roles import TextModel
from unirl.engine_host.text_engine import ExternalTextEngine
from unirl.model_host.tokens.miniature import byte_tokenizer, save_random
from unirl.models.qwen3.config import Qwen3Config
from unirl.models.qwen3.model import build as build_model
from unirl.models.qwen3.tiny import CHAT_TEMPLATE
from unirl.quickstart import text_checkpoint_path

__all__ = ["ask"]

pytestmark = [pytest.mark.slow, pytest.mark.nightly]

ENGINES = ("vllm", "sglang-llm")
WORDS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Wide MLPs: 200 MB of weights in a few large tensors, which no allocator keeps when they are freed."""
    made = tmp_path_factory.mktemp("qwen3") / "wide"
    tokenizer = byte_tokenizer(WORDS, chat_template=CHAT_TEMPLATE)
    sizes = Sizes(
        vocab_size=len(tokenizer),
        hidden_size=512,
        intermediate_size=16_384,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=None,
        bos_token_id=None,
    )
    save_random(made, Qwen3ForCausalLM, sizes, tokenizer, seed=0)
    return made


def started(name: str, model: TextModel) -> ExternalTextEngine:
    make(name)
    if name == "vllm":
        from unirl.engines.vllm.config import VllmConfig as Config
        from unirl.engines.vllm.engine import build
    else:
        from unirl.engines.sglang_llm.config import SglangConfig as Config
        from unirl.engines.sglang_llm.engine import build
    return build(Config(kv_cache_mb=64, max_num_seqs=8, sleep_mode=True), model=model, device="cpu")


@pytest.mark.parametrize("name", ENGINES)
def test_a_sleeping_engine_gives_back_the_memory_of_its_weights(name: str, folder: Path, ask: Ask) -> None:
    model = build_model(Qwen3Config(path=str(folder)), device="cpu")
    weights = sum(parameter.nbytes for parameter in model.trainable.parameters())
    engine = started(name, model)
    try:
        perturb(model, seed=1)
        engine.load_weights(full_update(model, version=1))
        before, awake = engine.generate(ask(engine)), resident(engine)
        engine.sleep()
        asleep = resident(engine)
        engine.wake()
        after = engine.generate(ask(engine))
        again = resident(engine)
    finally:
        engine.close()
    # A tenth for pages that the process frees or takes meanwhile for anything else.
    assert awake - asleep > 0.9 * weights, f"it released {(awake - asleep) / 2**20:.0f} MiB"
    assert again - asleep > 0.9 * weights
    assert [row.tolist() for row in after.text.tokens] == [row.tolist() for row in before.text.tokens]


def resident(engine: ExternalTextEngine) -> int:
    """Bytes of memory that the engine's processes alone use."""
    process = psutil.Process(engine._process.pid)
    return sum(one.memory_full_info().uss for one in (process, *process.children(recursive=True)))


@pytest.fixture(scope="module")
def ray_here() -> Iterator[None]:
    with ray_clusters.joined():
        yield


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", ENGINES)
def test_a_run_whose_engine_sleeps_while_it_trains_gives_the_same_numbers(
    name: str, tmp_path: Path, ray_here: None
) -> None:
    make(name)
    words = (
        "launcher=ray",
        "launcher.cpus=0.5",
        f"engine={name}",
        "engine.kv_cache_mb=64",
        "engine.max_num_seqs=16",
        "engine.dtype=bfloat16",
        "run.max_steps=2",
    )
    places = {
        "apart": ["launcher.placement=separate"],
        "shared": ["launcher.placement=colocate", "engine.sleep_mode=true"],
    }
    for place, settings in places.items():
        run(tmp_path / place, *words, *settings, recipe="quickstart-text", small=SMALL_TEXT)
    numbers = {place: steps(tmp_path / place) for place in places}
    trained = {
        place: {step: {key: value for key, value in each.items() if "/" not in key} for step, each in own.items()}
        for place, own in numbers.items()
    }
    assert trained["apart"] == trained["shared"]
    assert trained["apart"][2]["reward_mean"] >= 0 and trained["apart"][2]["updates"] > 0
    # Sent as the engine holds them, not in the fp32 in which they train; names and checksums come with them.
    model = build_model(Qwen3Config(path=str(text_checkpoint_path())), device="cpu").trainable
    sent = 2 * sum(parameter.numel() for parameter in model.parameters())
    assert sent <= numbers["shared"][2]["sync/bytes"] < 1.25 * sent
