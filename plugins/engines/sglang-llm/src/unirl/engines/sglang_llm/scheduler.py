"""Hooks in SGLang's scheduler process, through its extension points: per-sample seeded sampling, and the request's
own stop tokens.

`register_sampler_backend` installs the sampler, SGLang's hook registry the rest. Every hook is verified before the
scheduler starts, because SGLang silently ignores hooks it cannot apply. Runs in the engine's environment.
"""

# SGLang is in the engine's environment alone, where type checking does not look.
# pyright: reportMissingImports=false

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from sglang.srt.layers.sampler import Sampler, register_sampler_backend
from sglang.srt.managers.schedule_batch import FINISH_MATCHED_TOKEN, Req
from sglang.srt.managers.scheduler import run_scheduler_process
from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager
from sglang.srt.plugins import load_plugins
from sglang.srt.plugins.hook_registry import HookRegistry, HookType
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
from unirl.engine_host.host_memory import ReleasedMemory
from unirl.numerics.tokens.draws import BLOCK, choose_tokens, draws

__all__ = ["USED", "SeededSampler", "run_scheduler"]

USED = "unirl_used"
"""Key of a completion's meta-information: the prompt tokens, hashes of images and temperature used. SGLang represents
temperature 0 as top_k = 1 at temperature 1."""
_RELEASED: dict[str, ReleasedMemory] = {}
"""Memory that is released on a CPU, by SGLang's names of its parts."""
SAMPLER = "pytorch"
"""Name of the sampling backend replaced: the one that SGLang falls back to from some others."""


class SeededSampler(Sampler):
    """Samples tokens with `unirl.numerics.tokens.draws`, and returns their log-probs under softmax(logits /
    temperature) over the whole vocabulary; at temperature 0 under softmax(logits).

    The uniform numbers of a row come with the batch, see `_with_draws`, so sampling needs no device synchronisation.
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
        """Sampled tokens [B] int32; their log-probs go into `logits_output`. positions: [B], of the last token of each
        row."""
        if any(top_logprobs_nums) or any(ids is not None for ids in token_ids_logprobs) or logprob_logits is not None:
            raise RuntimeError("only log-probs of the sampled tokens are supported.")
        logits = self._preprocess_logits(logits_output.next_token_logits, sampling_info)
        if sampling_info.is_all_greedy:
            uniform = torch.zeros(len(logits), dtype=torch.float64, device=logits.device)
            tokens, log_probs = choose_tokens(logits, uniform, temperature=0.0)
        else:
            table = sampling_info.sampling_seed
            if table is None or table.dtype != torch.float64:
                raise RuntimeError("got a batch without the random draws of its samples.")
            # The first column is the prompt length. SGLang discards the token sampled after a partial prefill.
            step = (positions.to(table) + 1 - table[:, 0]).clamp(min=0)
            uniform = table.gather(1, 1 + step.long()[:, None]).squeeze(1)
            # All rows share the settings of one request; reading these two synchronises with the device.
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
    """Run SGLang's scheduler in its process. Raises RuntimeError when a hook is not in place."""
    register_sampler_backend(SAMPLER, SeededSampler)
    batches = "sglang.srt.sampling.sampling_batch_info.SamplingBatchInfo.from_schedule_batch"
    HookRegistry.register(batches, _with_draws, HookType.AFTER)
    ends = "sglang.srt.managers.schedule_batch.Req._check_token_based_finish"
    HookRegistry.register(ends, _ends_by_token, HookType.REPLACE)
    updater = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
    HookRegistry.register(f"{updater}.release_memory_occupation", _release, HookType.AROUND)
    HookRegistry.register(f"{updater}.resume_memory_occupation", _resume, HookType.AROUND)
    load_plugins()
    for result in (
        SamplingBatchInfo.from_schedule_batch,
        Req._check_token_based_finish,
        SchedulerWeightUpdaterManager.release_memory_occupation,
        SchedulerWeightUpdaterManager.resume_memory_occupation,
    ):
        if not hasattr(result, "__wrapped__"):
            raise RuntimeError(f"SGLang did not apply the hook on {result.__qualname__}.")
    run_scheduler_process(*arguments, **named)


def _with_draws(info: Any, cls: Any, batch: Any, *_: Any, **__: Any) -> None:
    """Store the uniform draws of each sample where SGLang keeps seeds, because it moves those rows when batches change.

    A table [B, 1 + draws] in fp64: the prompt length, and a uniform number for each step.
    """
    rows: list[Any] = []
    for request in batch.reqs:
        expected = request.sampling_params
        count = -(-max(1, expected.max_new_tokens) // BLOCK)
        seed = expected.sampling_seed or 0
        numbers = [draws(seed, block) for block in range(count)]
        # Returned with the completion. SGLang keeps such lists per token; the one entry belongs to the first.
        temperature = 0.0 if expected.top_k <= 1 else float(expected.temperature)
        # In the padded tokens, those of an image are replaced by its hash.
        tokens = [int(token) for token in request.origin_input_ids_unpadded]
        media = request.multimodal_inputs
        hashes = [] if media is None else [item.hash for item in media.mm_items]
        request.customized_info = {USED: [[tokens, hashes, temperature]]}
        rows.append(np.concatenate([[float(len(request.origin_input_ids))], *numbers]))
    info.sampling_seed = torch.from_numpy(np.stack(rows)).to(info.device)


def _ends_by_token(request: Any, new_tokens: list[int]) -> bool:
    """Whether a new token is one of the request's stop tokens. SGLang would add those of the checkpoint."""
    for place, token in enumerate(new_tokens):
        if token in (request.sampling_params.stop_token_ids or ()):
            request.finished_reason = FINISH_MATCHED_TOKEN(matched=token)
            request.finished_len = len(request.output_ids) - len(new_tokens) + place + 1
            return True
    return False


def _release(stock: Callable[..., Any], manager: Any, asked: Any) -> Any:
    """On a CPU, where SGLang's memory saver is missing, release the weights and the KV cache as well."""
    result = stock(manager, asked)
    runner = manager.tp_worker.model_runner
    if next(runner.model.parameters()).device.type == "cpu":
        weights = [*runner.model.parameters(), *runner.model.buffers()]
        if runner.server_args.enable_lora:
            weights += _tensors(vars(runner.lora_manager.memory_pool))
        _RELEASED["kv_cache"] = ReleasedMemory(kept=(), dropped=_tensors(vars(runner.token_to_kv_pool)))
        _RELEASED["weights"] = ReleasedMemory(kept=weights)
    return result


def _resume(stock: Callable[..., Any], manager: Any, asked: Any) -> Any:
    for part in asked.tags:
        if part in _RELEASED:
            _RELEASED.pop(part).restore()
    return stock(manager, asked)


def _tensors(value: Any) -> list[torch.Tensor]:
    """Tensors in mappings and sequences."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    return [tensor for item in value for tensor in _tensors(item)] if isinstance(value, list | tuple) else []


def _only(values: torch.Tensor) -> Any:
    """The value shared by all rows."""
    result = set(values.tolist())
    if len(result) != 1:
        raise RuntimeError(f"rows of one batch have different settings: {sorted(result)}.")
    return result.pop()
