"""What all tests of the workspace share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

# Its asserts show their values, as those of test modules do.
pytest.register_assert_rewrite("hosted_engines")

TrlTrainer = Callable[..., Any]
MUTANTS = "packages/unirl-conformance/tests/test_mutants.py"
"""Its tests share one report of each kind of part, and nothing between the kinds."""
LONG = (
    "packages/unirl-runtime/tests/test_launchers.py",
    "tests/test_third_party.py",
    "plugins/engines/sglang/tests/test_sglang_image_engine.py",
    "packages/unirl-runtime/tests/test_faults.py",
    f"{MUTANTS}[algorithm",
    f"{MUTANTS}[backend",
    "plugins/engines/vllm-omni/tests/test_vllm_omni_engine.py",
    "packages/unirl-conformance/tests/test_meta.py",
    "tests/test_runs.py",
    "plugins/engines/sglang-llm/tests/test_sglang_engine.py",
    "tests/test_asynchrony.py",
    "plugins/transports/transfer-queue/tests/test_transfer_queue_run.py",
    "packages/unirl-conformance/tests/test_new_installed.py",
    "plugins/engines/vllm/tests/test_vllm_engine.py",
    "packages/unirl-runtime/tests/test_cluster.py",
    f"{MUTANTS}[engine",
    "plugins/backends/fsdp2/tests/test_fsdp2_mesh.py",
    "tests/test_docs.py",
)
"""What takes half a minute or more, the longest first: it starts first, so that several workers end together."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests marked `gpu` are reported as not run where there is no CUDA device; they never pass there."""
    if hasattr(config, "workerinput"):
        places = {name: place for place, name in enumerate(LONG)}
        scopes = [scope(item.nodeid) for item in items]
        # After the long ones those with many tests, as xdist has it.
        counts = {name: scopes.count(name) for name in set(scopes)}
        items.sort(key=lambda item: (places.get(scope(item.nodeid), len(LONG)), -counts[scope(item.nodeid)]))
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if marked:
        import torch

        if not torch.cuda.is_available():
            for item in marked:
                item.add_marker(pytest.mark.skip(reason="not run: needs a CUDA device"))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> object:
    """`--dist loadfile` in the order that the workers collect, and the mutants by their kind."""
    option: Any = config.option
    if option.dist != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class LongestFirst(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return scope(nodeid)

    option.loadscopereorder = False
    return LongestFirst(config, log)


def scope(nodeid: str) -> str:
    """What one worker has to run together: the file of a test, of mutants those of their kind."""
    file, _, name = nodeid.partition("::")
    kind = name.partition("[")[2].rstrip("]").partition("-")[0]
    return f"{file}[{kind}" if file == MUTANTS and kind else file


@pytest.fixture(scope="session")
def trl_trainer(tmp_path_factory: pytest.TempPathFactory) -> TrlTrainer:
    """TRL's GRPOTrainer, a real trainer on a tiny random model, as `trl_trainer(lengths=, rewards=, **options)`.

    It is driven through its public hooks: `rollout_func` supplies the completions, of these lengths in tokens, and
    `reward_funcs` the rewards, a row of numbers for each function. Its `given` is what TRL makes of both, advantages
    included; `compute_loss` runs on such inputs, with log-probs that a test chooses. Skips where TRL is not installed.
    """
    pytest.importorskip("trl")
    import torch
    from datasets import Dataset
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
    from trl import GRPOConfig, GRPOTrainer

    words = {word: number for number, word in enumerate(["<pad>", "<eos>", "<unk>", *"abcdefgh"])}
    core = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(
        Qwen3Config(
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
    )

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
            processing_class=PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", eos_token="<eos>"),
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
        found = logits[:, -inputs["completion_ids"].shape[1] :].log_softmax(dim=-1)
        chosen = found.gather(2, inputs["completion_ids"][..., None]).squeeze(2)
        return chosen, -(found.exp() * found).sum(dim=-1)

    return scores
