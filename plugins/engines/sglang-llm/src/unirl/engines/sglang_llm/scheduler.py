"""What is put into SGLang's scheduler process, by its own extension points: tokens drawn by the seed of their sample,
and texts that end where the request says.

`register_sampler_backend` takes the sampler; SGLang's hook registry takes the rest. Every hook is checked to be in
place before the scheduler starts, for SGLang itself goes on without one that could not be applied. Runs in the engine's
environment.
"""

# SGLang is in the engine's environment alone, where type checking does not look.
# pyright: reportMissingImports=false

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from sglang.srt.layers.sampler import Sampler, register_sampler_backend
from sglang.srt.managers.schedule_batch import FINISH_MATCHED_TOKEN, Req
from sglang.srt.managers.scheduler import run_scheduler_process
from sglang.srt.plugins import load_plugins
from sglang.srt.plugins.hook_registry import HookRegistry, HookType
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
from unirl.numerics.token_draws import BLOCK, choose_tokens, draws

__all__ = ["SeededSampler", "run_scheduler"]

SAMPLER = "pytorch"
"""Name of the sampling backend whose place it takes: SGLang goes back to this one from some others."""


class SeededSampler(Sampler):
    """Draws every token by `unirl.numerics.token_draws`, and says its log-prob under softmax(logits / temperature) of
    all tokens, at temperature 0 under softmax(logits).

    The uniform numbers of a row come with the batch, see `_with_draws`: nothing is fetched from the device to draw.
    """

    def forward(
        self,
        logits_output: Any,
        sampling_info: Any,
        return_logprob: bool,
        top_logprobs_nums: list[int],
        token_ids_logprobs: list[Any],
        positions: torch.Tensor,
        *,
        logprob_logits: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Tokens [B] int32; their log-probs go into `logits_output`. positions: [B] of the last tokens so far."""
        if any(top_logprobs_nums) or any(ids is not None for ids in token_ids_logprobs) or logprob_logits is not None:
            raise RuntimeError("log-probs of the tokens that are drawn are made, and of no others.")
        logits = self._preprocess_logits(logits_output.next_token_logits, sampling_info)
        if sampling_info.is_all_greedy:
            uniform = torch.zeros(len(logits), dtype=torch.float64, device=logits.device)
            tokens, log_probs = choose_tokens(logits, uniform, temperature=0.0)
        else:
            table = sampling_info.sampling_seed
            if table is None or table.dtype != torch.float64:
                raise RuntimeError("a batch came without the draws of its samples.")
            # The first column is the length of the prompt. What is drawn after a part of one, SGLang throws away.
            step = (positions.to(table) + 1 - table[:, 0]).clamp(min=0)
            uniform = table.gather(1, 1 + step.long()[:, None]).squeeze(1)
            # All rows have the settings of one request; finding these two takes a look at the device.
            cuts = sampling_info.need_top_p_sampling or sampling_info.need_top_k_sampling
            tokens, log_probs = choose_tokens(
                logits.float() / sampling_info.temperatures,
                uniform,
                temperature=1.0,
                top_p=_only(sampling_info.top_ps) if cuts else 1.0,
                top_k=_only(sampling_info.top_ks) if cuts and sampling_info.need_top_k_sampling else 0,
            )
        if return_logprob:
            logits_output.next_token_logprobs = log_probs
        return tokens.to(torch.int32)


def run_scheduler(*arguments: Any, **named: Any) -> None:
    """SGLang's scheduler, in the process that it is started in. Raises RuntimeError when a hook is not in place."""
    register_sampler_backend(SAMPLER, SeededSampler)
    batches = "sglang.srt.sampling.sampling_batch_info.SamplingBatchInfo.from_schedule_batch"
    HookRegistry.register(batches, _with_draws, HookType.AFTER)
    ends = "sglang.srt.managers.schedule_batch.Req._check_token_based_finish"
    HookRegistry.register(ends, _ends_by_token, HookType.REPLACE)
    load_plugins()
    for found in (SamplingBatchInfo.from_schedule_batch, Req._check_token_based_finish):
        if not hasattr(found, "__wrapped__"):
            raise RuntimeError(f"SGLang did not apply the hook on {found.__qualname__}.")
    run_scheduler_process(*arguments, **named)


def _with_draws(info: Any, cls: Any, batch: Any, *_: Any, **__: Any) -> None:
    """Put the draws of each sample where SGLang keeps their seeds: it moves the rows along when batches change.

    A table [B, 1 + draws] in fp64: the length of the prompt, and a uniform number for each step.
    """
    rows: list[Any] = []
    for request in batch.reqs:
        wanted = request.sampling_params
        count = -(-max(1, wanted.max_new_tokens) // BLOCK)
        seed = wanted.sampling_seed or 0
        numbers = [draws(seed, block) for block in range(count)]
        rows.append(np.concatenate([[float(len(request.origin_input_ids))], *numbers]))
    info.sampling_seed = torch.from_numpy(np.stack(rows)).to(info.device)


def _ends_by_token(request: Any, new_tokens: list[int]) -> bool:
    """Whether one of these tokens is among those that the request names. SGLang would add the checkpoint's own."""
    for place, token in enumerate(new_tokens):
        if token in (request.sampling_params.stop_token_ids or ()):
            request.finished_reason = FINISH_MATCHED_TOKEN(matched=token)
            request.finished_len = len(request.output_ids) - len(new_tokens) + place + 1
            return True
    return False


def _only(values: torch.Tensor) -> Any:
    """The value that all rows share."""
    found = set(values.tolist())
    if len(found) != 1:
        raise RuntimeError(f"rows of one batch ask for different settings: {sorted(found)}.")
    return found.pop()
