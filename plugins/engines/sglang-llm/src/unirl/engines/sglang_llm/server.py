"""The server in SGLang's environment: one `sglang.Engine`, and the calls it answers."""

# SGLang is in the engine's environment alone, where type checking does not look.
# pyright: reportMissingImports=false

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Coroutine, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from unirl.engine_host.serving import Answer, Call, calls_of, rendezvous

__all__ = ["calls"]

ADAPTER = "default"
INIT_METHOD_VARIABLE = "SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE"
"""SGLang reads from it the `init_method` of torch's process group."""
IDLE_WITHIN_S = 30.0
WEIGHTS, CACHE = ("weights",), ("kv_cache", "cuda_graph")
LOADERS = "unirl.engines.sglang_llm.held"
"""Module of the functions that SGLang calls to load weights and to report those held."""


def calls() -> Mapping[str, Call]:
    """Calls that `unirl.engine_host.serving` answers."""
    return calls_of(_Server())


class _Server:
    """Each call takes JSON-able arguments and tensors, and returns both."""

    def __init__(self) -> None:
        self._engine: Any = None
        self._weights = ""
        """Name given to the full weights; SGLang returns it with every completion."""
        self._has_adapter = False
        self._adapter_targets: frozenset[str] = frozenset()
        self._asleep = list[str]()
        """Parts of its memory that are released, by SGLang's names."""

    def version(self, asked: Mapping[str, Any], tensors: Mapping[str, Any]) -> Answer:
        """The version of SGLang, from package metadata: an untested one may not even import."""
        return version("sglang"), {}

    def load(self, asked: Mapping[str, Any], tensors: Mapping[str, Any]) -> Answer:
        """Build the engine. asked: arguments of `sglang.Engine`. Returns the context length and the weights."""
        from sglang.srt.entrypoints.engine import Engine
        from unirl.engines.sglang_llm.images import identify_images
        from unirl.engines.sglang_llm.scheduler import run_scheduler

        identify_images()

        class SeededEngine(Engine):
            run_scheduler_process_func = staticmethod(run_scheduler)

        os.environ[INIT_METHOD_VARIABLE] = rendezvous()
        loaders = [f"{LOADERS}.{name}" for name in ("list_weights", "load_full", "check_adapter")]
        self._engine = SeededEngine(**asked, custom_weight_loader=loaders)
        self._adapter_targets = frozenset(asked.get("lora_target_modules", ()))
        weights = self._in_scheduler("list_weights", {}, name="checkpoint")
        # SGLang has already subtracted its margin for a prompt and its completion.
        longest = self._engine._scheduler_init_result.scheduler_infos[0]["max_req_input_len"]
        return {"max_model_len": longest, "weights": weights}, {}

    def generate(self, asked: Mapping[str, Any], tensors: Mapping[str, Any]) -> Answer:
        """Completions of prompts. See `rows` for the arguments and `generated` for the answer."""
        from unirl.engine_host.received import generated, rows
        from unirl.engines.sglang_llm.images import image_data, key_of
        from unirl.engines.sglang_llm.scheduler import USED

        each = rows(asked, tensors)
        token = getattr(self._engine.tokenizer_manager.model_config.hf_config, "image_token_id", None)
        images = [image_data(row, token=token) for row in each]
        sampling = [{**asked["sampling"], "sampling_seed": seed} for seed in asked["seeds"]]
        outputs = self._generate([row.prompt for row in each], sampling, images=images if any(images) else None)
        used = [output["meta_info"][USED][0] for output in outputs]
        entries = [output["meta_info"]["output_token_logprobs"] for output in outputs]
        for output, row in zip(outputs, entries, strict=True):
            if [entry[1] for entry in row] != output["output_ids"]:
                raise RuntimeError("SGLang's log-probs are for other tokens than its completion.")
        return generated(
            [output["output_ids"] for output in outputs],
            [[entry[0] for entry in row] for row in entries],
            [output["meta_info"]["finish_reason"]["type"] for output in outputs],
            prompts=[prompt for prompt, _, _ in used],
            media=[key_of(hashes, asked["media"]) for _, hashes, _ in used],
            temperatures=[temperature for _, _, temperature in used],
        )

    def load_weights(self, asked: Mapping[str, Any], tensors: Mapping[str, Any]) -> Answer:
        """Load weights from files. Raises unless exactly the weights sent are held afterwards; Unchanged if nothing was
        changed."""
        told = {"paths": asked["paths"], "checksum": asked["checksum"], "scale": asked["scale"]}
        if asked["kind"] == "lora":
            self._load_adapter(told)
        else:
            self._in_scheduler("load_full", told)
            # Renamed only after loading: SGLang accepts a new name for its weights even from a call that changed
            # nothing.
            self._in_scheduler("list_weights", {}, name=f"version {asked['version']}")
            self._unload_adapter()
        self._flush()
        return None, {}

    def sleep(self, asked: Mapping[str, Any], tensors: Mapping[str, Any]) -> Answer:
        """Release the memory of the KV cache, of CUDA graphs, and of the weights, which are kept in host memory."""
        # SGLang ends all its processes when it is not idle.
        self._flush()
        self._engine.release_memory_occupation()
        self._asleep = [*WEIGHTS, *CACHE]
        return None, {}

    def wake(self, asked: Mapping[str, Any], tensors: Mapping[str, Any]) -> Answer:
        """Bring the weights back. The KV cache follows with the next completion: until new weights are loaded, their
        copies need the memory."""
        self._rouse(WEIGHTS)
        return None, {}

    def _rouse(self, parts: Sequence[str]) -> None:
        tags = [part for part in parts if part in self._asleep]
        if tags:
            self._engine.resume_memory_occupation(tags=tags)
            self._asleep = [part for part in self._asleep if part not in tags]

    def _generate(self, prompts: list[list[int]], sampling: list[dict[str, Any]], *, images: Any = None) -> list[Any]:
        self._rouse(CACHE)
        outputs = self._engine.generate(
            input_ids=prompts,
            image_data=images,
            sampling_params=sampling,
            return_logprob=True,
            lora_path=[ADAPTER] * len(prompts) if self._has_adapter else None,
        )
        held = {output["meta_info"]["weight_version"] for output in outputs}
        if held != {self._weights}:
            raise RuntimeError(f"completions used weights {sorted(held)}, expected {self._weights!r}.")
        return outputs

    def _load_adapter(self, told: Mapping[str, Any]) -> None:
        from unirl.engine_host.frames import Unchanged
        from unirl.engine_host.received import read_weights

        tensors = read_weights(told["paths"], told["checksum"])
        layers = sorted({name.rpartition(".lora_")[0] for name in tensors})
        targets = sorted({layer.rpartition(".")[2] for layer in layers})
        if unknown := sorted(set(targets) - self._adapter_targets):
            known = ", ".join(sorted(self._adapter_targets))
            raise Unchanged(f"got an adapter for {unknown[0]!r}; SGLang was started for {known}.")
        rank = len(next(iter(tensors.values())))
        settings = {
            "peft_type": "LORA",
            "r": rank,
            "lora_alpha": told["scale"] * rank,
            "target_modules": targets,
            "bias": "none",
            "lora_dropout": 0.0,
        }
        named = {f"base_model.model.{name}": value for name, value in tensors.items()}
        self._unload_adapter()
        try:
            loaded = self._engine.load_lora_adapter_from_tensors(ADAPTER, named, settings)
        except ValueError as error:
            raise RuntimeError(f"SGLang rejected the adapter: {error}") from error
        if not loaded.success:
            raise RuntimeError(f"SGLang rejected the adapter: {loaded.error_message}")
        self._has_adapter = True
        # SGLang copies an adapter to the buffers it computes with when a batch first needs it.
        self._generate([[0]], [{"temperature": 0.0, "max_new_tokens": 1}])
        try:
            self._in_scheduler("check_adapter", told)
        except Unchanged as error:
            # The check changed nothing, but the load before it did.
            raise RuntimeError(f"the loaded adapter cannot be verified: {error}") from error

    def _unload_adapter(self) -> None:
        if self._has_adapter:
            unloaded = self._engine.unload_lora_adapter(ADAPTER)
            if not unloaded.success:
                raise RuntimeError(f"SGLang did not unload the adapter: {unloaded.error_message}")
            self._has_adapter = False

    def _flush(self) -> None:
        """Drop keys and values of the KV cache once SGLang is idle, a moment after its last answer."""
        end = time.monotonic() + IDLE_WITHIN_S
        while not self._engine.flush_cache().success:
            if time.monotonic() > end:
                raise RuntimeError(f"SGLang was not idle within {IDLE_WITHIN_S:g} s, and did not flush its KV cache.")
            time.sleep(0.01)

    def _in_scheduler(self, function: str, told: Mapping[str, Any], *, name: str = "") -> Any:
        """Call a function of `held` in the scheduler process, and return its answer.

        name: new name of SGLang's weights; empty keeps the old one.
        Raises Unchanged when the function did, RuntimeError for everything else.
        """
        import torch
        from sglang.srt.managers.io_struct import UpdateWeightsFromTensorReqInput
        from sglang.srt.utils import MultiprocessingSerializer
        from unirl.engine_host.frames import UNCHANGED, Unchanged

        manager = self._engine.tokenizer_manager
        with tempfile.TemporaryDirectory() as folder:
            answer = Path(folder) / "answer.json"
            asked = json.dumps({**told, "answer": str(answer)})
            update = UpdateWeightsFromTensorReqInput(
                serialized_named_tensors=[MultiprocessingSerializer.serialize([(asked, torch.zeros(1))])],
                load_format=f"{LOADERS}.{function}",
                flush_cache=False,
                weight_version=name or None,
            )
            _sure(self._engine.begin_weight_update())
            try:
                _sure(self._run(manager.update_weights_from_tensor(update, None)))
            finally:
                _sure(self._engine.end_weight_update())
            result = json.loads(answer.read_text(encoding="utf-8"))
        if "raised" in result:
            raise (Unchanged if result[UNCHANGED] else RuntimeError)(result["raised"])
        self._weights = name or self._weights
        return result["value"]

    def _run(self, call: Coroutine[Any, Any, Any]) -> Any:
        return self._engine.loop.run_until_complete(call)


def _sure(answer: Any) -> None:
    """SGLang returns (success, message) and raises nothing."""
    succeeded, message = answer
    if not succeeded:
        raise RuntimeError(f"SGLang did not change its weights: {message}")
