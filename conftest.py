"""Settings, hooks and fixtures of all tests of the workspace."""

from __future__ import annotations

import importlib.util
import os
import secrets
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from unirl.core.errors import PlanRejected
from unirl.numerics.batch_invariant import VARIABLES, batch_invariant

# Before anything loads torch or the hub's client, which read them once; processes that tests start inherit them.
# `MKL_CBWR=OFF pytest ...` runs all that needs no such mode.
os.environ.setdefault("MKL_CBWR", VARIABLES["MKL_CBWR"])
# Nothing is downloaded: a look-up on the hub would wait, and warn.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Each worker of pytest has a core.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# A process reads its token for Ray once, whichever cluster comes first: one of a run, or the one that tests share.
os.environ["RAY_AUTH_MODE"] = "token"
os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))

# No test depends on how busy the machine is.
settings.register_profile("unirl", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("unirl")

# Its asserts show their values, as those of test modules do.
pytest.register_assert_rewrite("external_engines")

TrlTrainer = Callable[..., Any]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests marked `gpu` or `torchao` are reported as not run where that is absent; they never pass there."""
    if importlib.util.find_spec("torchao") is None:
        absent = pytest.mark.skip(reason="not run: the extra quantize of unirl-train-host is not installed")
        for item in items:
            if item.get_closest_marker("torchao"):
                item.add_marker(absent)
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if marked:
        import torch

        if not torch.cuda.is_available():
            for item in marked:
                item.add_marker(pytest.mark.skip(reason="not run: needs a CUDA device"))


@pytest.fixture(scope="session")
def no_batch_invariance() -> str:
    """Why this process cannot compute batch-invariantly; empty where it can."""
    try:
        with batch_invariant(on_cuda=False):
            return ""
    except PlanRejected as refusal:
        return str(refusal)


@pytest.fixture(autouse=True)
def numerics_of_the_test(request: pytest.FixtureRequest) -> Iterator[None]:
    """Tests marked `batch_invariant` compute in that mode, and are not run where there is none."""
    if request.node.get_closest_marker("batch_invariant") is None:
        yield
        return
    problem: str = request.getfixturevalue("no_batch_invariance")
    if problem:
        pytest.skip(f"not run: {problem}")
    with batch_invariant(on_cuda=False):
        yield


@pytest.fixture(autouse=True)
def process_groups_of_the_test() -> Iterator[None]:
    """A test that leaves torch's default process group changes what later tests of its worker see: it fails."""

    def is_initialized() -> bool:
        dist = sys.modules.get("torch.distributed")
        return dist is not None and dist.is_available() and dist.is_initialized()

    before = is_initialized()
    yield
    if is_initialized() and not before:
        import torch.distributed as dist

        dist.destroy_process_group()
        pytest.fail("the test left a default process group: close the backend, or destroy the group")


@pytest.fixture(scope="session")
def trl_model() -> Callable[[], tuple[Any, Any]]:
    """A tiny random model of transformers and its tokenizer, the words `a` to `h`, as `trl_model()`: new ones, with the
    same weights each time."""

    def build() -> tuple[Any, Any]:
        import torch
        from tokenizers import Tokenizer, models, pre_tokenizers
        from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

        words = {word: number for number, word in enumerate(["<pad>", "<eos>", "<unk>", *"abcdefgh"])}
        core = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
        core.pre_tokenizer = pre_tokenizers.Whitespace()
        torch.manual_seed(0)
        config = Qwen3Config(
            vocab_size=len(words),
            hidden_size=16,
            intermediate_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=2,
            head_dim=8,
            pad_token_id=0,
            eos_token_id=1,
        )
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", eos_token="<eos>")
        return Qwen3ForCausalLM(config), tokenizer

    return build


@pytest.fixture(scope="session")
def trl_trainer(tmp_path_factory: pytest.TempPathFactory, trl_model: Callable[[], tuple[Any, Any]]) -> TrlTrainer:
    """TRL's GRPOTrainer, a real trainer on a tiny random model, as `trl_trainer(lengths=, rewards=, **options)`.

    It is driven through its public hooks: `rollout_func` supplies the completions, of these lengths in tokens, and
    `reward_funcs` the rewards, a row of numbers for each function. Its `given` is what TRL makes of both, advantages
    included; `compute_loss` runs on such inputs, with log-probs that a test chooses. Skips where TRL is not installed.
    """
    pytest.importorskip("trl")
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    model, tokenizer = trl_model()

    def score(row: int, values: Sequence[float]) -> Callable[..., list[float]]:
        def reward(prompts: list[Any], **_: Any) -> list[float]:
            return list(values)[: len(prompts)]

        reward.__name__ = f"reward_{row}"
        return reward

    def build(*, lengths: Sequence[int], rewards: Sequence[Sequence[float]], **options: Any) -> Any:
        def rollout(prompts: list[Any], trainer: Any) -> dict[str, Any]:
            ids = [[3 + (row + token) % 8 for token in range(length - 1)] + [1] for row, length in enumerate(lengths)]
            return {"prompt_ids": [[3, 4]] * len(prompts), "completion_ids": ids, "logprobs": None}

        trainer = GRPOTrainer(
            model=model,
            reward_funcs=[score(row, values) for row, values in enumerate(rewards)],
            args=GRPOConfig(
                output_dir=str(tmp_path_factory.mktemp("trl")),
                per_device_train_batch_size=len(lengths),
                num_generations=4,
                steps_per_generation=1,
                report_to="none",
                use_cpu=True,
                bf16=False,
                gradient_checkpointing=False,
                **options,
            ),
            train_dataset=Dataset.from_list([{"prompt": "a b"}] * len(lengths)),
            processing_class=tokenizer,
            rollout_func=rollout,
        )
        trainer.model.train()
        trainer.current_gradient_accumulation_steps = 1
        trainer.given = trainer._generate_and_score_completions([{"prompt": "a b"} for _ in lengths])
        return trainer

    return build


@pytest.fixture(scope="session")
def trl_scores() -> Callable[..., Any]:
    """Log-probs and entropies [n, S] of the completions in TRL's inputs, as `trl_scores(model, inputs)`."""
    import torch

    def scores(model: Any, inputs: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
        ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
        attention = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
        logits = model(input_ids=ids, attention_mask=attention).logits[:, :-1]
        result = logits[:, -inputs["completion_ids"].shape[1] :].log_softmax(dim=-1)
        chosen = result.gather(2, inputs["completion_ids"][..., None]).squeeze(2)
        return chosen, -(result.exp() * result).sum(dim=-1)

    return scores
