"""transformers' own generation on a checkpoint: what the model is compared with. Nothing of the model is used here."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer
from unirl.conformance.reference import TextReferenceRun
from unirl.core.types.inputs import Inputs
from unirl.core.types.sampling import TextSamplingConfig

__all__ = ["run"]


@torch.no_grad()
def run(folder: Path, *, inputs: Inputs, sampling: TextSamplingConfig) -> TextReferenceRun:
    """`apply_chat_template`, `generate` and a plain forward, in fp32 on the CPU, one prompt after the other: without
    padding, so without anything that padding could spoil. Fits `unirl.conformance.reference.RunTextReference`.
    """
    # Their signatures are untyped.
    tokenizers, models = cast(Any, AutoTokenizer), cast(Any, AutoModelForCausalLM)
    tokenizer: Any = tokenizers.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    causal_lm: Any = models.from_pretrained(
        folder, dtype=torch.float32, local_files_only=True, use_safetensors=True, trust_remote_code=False
    )
    causal_lm.eval()
    ends = causal_lm.generation_config.eos_token_id
    several = cast("list[int]", ends if isinstance(ends, list) else [ends])
    stops = [*several, *sampling.stop_token_ids]
    asked = [_prompt(tokenizer, prompt, sampling) for prompt in inputs.texts]
    texts: list[Tensor] = []
    log_probs: list[Tensor] = []
    for tokens in asked:
        whole = causal_lm.generate(
            tokens[None],
            attention_mask=torch.ones_like(tokens)[None],
            max_new_tokens=sampling.max_new_tokens,
            do_sample=False,
            eos_token_id=stops,
            pad_token_id=stops[0],
        )[0]
        logits = causal_lm(whole[None]).logits[0]
        scores = logits[len(tokens) - 1 : -1].double().log_softmax(dim=1)
        texts.append(whole[len(tokens) :])
        log_probs.append(scores.gather(1, texts[-1][:, None]).squeeze(1).float())
    return TextReferenceRun(prompt_tokens=tuple(asked), tokens=tuple(texts), log_probs=tuple(log_probs))


def _prompt(tokenizer: Any, prompt: str, sampling: TextSamplingConfig) -> Tensor:
    if not sampling.chat:
        return torch.tensor(tokenizer(prompt)["input_ids"])
    system = [{"role": "system", "content": sampling.system_prompt}] if sampling.system_prompt else []
    switch = {} if sampling.thinking is None else {"enable_thinking": sampling.thinking}
    messages = [*system, {"role": "user", "content": prompt}]
    result = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, tokenize=True, return_dict=False, **switch
    )
    return torch.tensor(result)
