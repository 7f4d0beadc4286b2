"""Loss and gradient against TRL's DPOTrainer, on the same pairs and the same model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from token_algorithms.tracks import one_group
from unirl.algorithms.dpo.algorithm import build
from unirl.algorithms.dpo.config import DpoConfig
from unirl.core.roles import ReplayedTokens
from unirl.core.specs.config import AdvantageConfig, TrainConfig
from unirl.core.types.inputs import Inputs
from unirl.core.types.track import TextSegment, Track
from unirl.numerics.loss.reduction import reduce_terms, weight_totals
from unirl.numerics.tokens.replay import token_mask

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

PAIRS = [
    {"prompt": "a b", "chosen": " c d e", "rejected": " f"},
    {"prompt": "c", "chosen": " a", "rejected": " b b g h"},
    {"prompt": "d e f", "chosen": " h g", "rejected": " a c"},
]


class OfTransformers:
    """Log-probs of a live and of a reference model of transformers, row by row."""

    def __init__(self, live: Any, reference: Any) -> None:
        self._models = {"live": live, "reference": reference}

    def __call__(self, track: Track, *, policy: str = "live") -> ReplayedTokens:
        valid = token_mask(track.text)
        rows: list[torch.Tensor] = []
        with torch.set_grad_enabled(policy == "live"):
            for prompt, tokens in zip(track.text.prompt_tokens, track.text.tokens, strict=True):
                logits = self._models[policy](torch.cat([prompt, tokens])[None]).logits[0, len(prompt) - 1 : -1]
                scores = logits.log_softmax(dim=-1).gather(1, tokens[:, None])[:, 0]
                rows.append(torch.nn.functional.pad(scores, (0, valid.shape[1] - len(tokens))))
        return ReplayedTokens(log_probs=torch.stack(rows), entropy=None, valid=valid)


def track_of(inputs: dict[str, Any]) -> Track:
    """The rows of a batch of TRL: the chosen ones, then the rejected ones."""
    ids, completion = inputs["input_ids"], inputs["completion_mask"].bool()
    prompt = inputs["attention_mask"].bool() & ~completion
    segment = TextSegment(
        prompt_tokens=tuple(row[mask] for row, mask in zip(ids, prompt, strict=True)),
        tokens=tuple(row[mask] for row, mask in zip(ids, completion, strict=True)),
    )
    pairs = len(ids) // 2
    names = tuple(f"pair {number}" for number in range(pairs)) * 2
    return one_group(
        segment,
        advantages=torch.tensor([1.0] * pairs + [-1.0] * pairs),
        unit_ids=names,
        inputs=Inputs.of_texts(names),
    )


@pytest.mark.parametrize(
    ("loss_type", "pairs", "beta", "smoothing"),
    [
        ("sigmoid", PAIRS, 0.1, 0.0),
        ("sigmoid", PAIRS, 2.0, 0.0),
        # TRL ignores `label_smoothing` in `sigmoid`. Of a single pair, `aot` is the conservative DPO that we compute.
        ("aot", PAIRS[:1], 0.7, 0.2),
    ],
)
def test_loss_and_gradient_are_those_of_trl(
    trl_model: Callable[[], tuple[Any, Any]],
    tmp_path: Path,
    loss_type: str,
    pairs: list[dict[str, str]],
    beta: float,
    smoothing: float,
) -> None:
    pytest.importorskip("trl")
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer

    (model, tokenizer), (reference, _) = trl_model(), trl_model()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    trainer = DPOTrainer(
        model=model,
        ref_model=reference,
        args=DPOConfig(
            output_dir=str(tmp_path),
            per_device_train_batch_size=len(pairs),
            loss_type=[loss_type],
            beta=beta,
            label_smoothing=smoothing,
            report_to="none",
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
        ),
        train_dataset=Dataset.from_list(pairs),
        processing_class=tokenizer,
    )
    inputs = next(iter(trainer.get_train_dataloader()))
    # The batch is ours to score before TRL's forward, which may change it.
    track = track_of(inputs)
    assert track.num_rows == 2 * len(pairs)
    trainer.model.train()
    theirs = trainer.compute_loss(trainer.model, inputs)
    theirs.backward()
    gradient = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    algorithm = build(
        DpoConfig(beta=beta, label_smoothing=smoothing),
        advantage=AdvantageConfig(),
        reward_weights={"one": 1.0},
        train=TrainConfig(),
        seed=3,
    )
    losses = algorithm.loss(track, OfTransformers(model, reference), progress=0.0)  # type: ignore[arg-type]
    ours = reduce_terms(losses.terms, totals=weight_totals(algorithm.loss_weights(track)))
    ours.backward()
    # Log-probs of order 2 in fp32, padded in theirs and alone in ours.
    assert float(ours) == pytest.approx(float(theirs), rel=1e-5)
    assert abs(float(ours) - 0.6931) > 1e-3, "the reference is another policy"
    for name, parameter in model.named_parameters():
        # fp32 sums in another order, of terms that partly cancel; relative to the largest entry of the tensor.
        bound = 1e-4 * float(gradient[name].abs().max()) + 1e-9
        torch.testing.assert_close(parameter.grad, gradient[name], rtol=0, atol=bound, msg=name)
