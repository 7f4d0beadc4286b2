"""Parts that this plugin provides."""

from __future__ import annotations

from collections.abc import Iterable

from unirl.core.plugins.hookspec import hookimpl
from unirl.core.specs.capability import Needs
from unirl.core.specs.spec import AlgorithmSpec

SFT = AlgorithmSpec(
    name="sft",
    summary="Flow-matching regression on given images or videos: supervised fine-tuning, or a regulariser",
    build="unirl.algorithms.sft.algorithm:build",
    config="unirl.algorithms.sft.config:SftConfig",
    needs=Needs(track="latent", reward="none", staleness="any"),
    proposes={"sampling.kernel": "euler", "sampling.eta": 0.0, "sampling.sde": {"mode": "none"}},
    paper="arXiv 2210.02747",
    reference="unirl.algorithms.sft.reference:loss",
)

TEXT_SFT = AlgorithmSpec(
    name="text-sft",
    summary="Next-token loss on given completions: supervised fine-tuning of a language model, or a regulariser",
    build="unirl.algorithms.sft.text:build",
    config="unirl.algorithms.sft.config:TextSftConfig",
    needs=Needs(track="text", reward="none", staleness="any"),
    paper="No paper: maximum likelihood of the completions, the loss of pretraining",
    reference="unirl.algorithms.sft.reference:text_loss",
)


@hookimpl
def unirl_algorithms() -> Iterable[AlgorithmSpec]:
    return [SFT, TEXT_SFT]
