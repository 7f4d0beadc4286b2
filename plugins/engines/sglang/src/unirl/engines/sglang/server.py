"""The server in SGLang's environment: one `DiffGenerator`, and the calls it answers."""

# SGLang is in the engine's environment alone, where type checking does not look.
# pyright: reportMissingImports=false

from __future__ import annotations

import contextlib
import json
import os
import socket
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, cast

from unirl.engine_host.serving import Answer, Call, calls_of

if TYPE_CHECKING:
    from unirl.core.types.inputs import Inputs

__all__ = ["calls"]

BUCKET_BYTES = 2**30
"""Maximum size of the weights in one message, in bytes, unless one tensor is larger."""


def calls() -> Mapping[str, Call]:
    """Calls that `unirl.engine_host.serving` answers."""
    return calls_of(_Server())


class _Server:
    """Each call takes JSON-able arguments and tensors, and returns both."""

    def __init__(self) -> None:
        self._generator: Any = None
        self._max_rows = 1

    def version(self, asked: Mapping[str, Any], tensors: Mapping[str, Any]) -> Answer:
        """The version of SGLang, from package metadata: an untested one may not even import."""
        return version("sglang"), {}

    def load(self, asked: Mapping[str, Any], tensors: Mapping[str, Any]) -> Answer:
        """Build the engine. asked: `arguments` of SGLang's `ServerArgs`, `bridge`, its `settings`, and `max_rows` of a
        batch. Returns the weights held."""
        from .control import BRIDGE_VARIABLE, SETTINGS_VARIABLE

        # Here, too: SGLang waits forever for a worker that fails while it imports its plugins.
        module, _, name = asked["bridge"].partition(":")
        getattr(import_module(module), name)
        os.environ[BRIDGE_VARIABLE] = asked["bridge"]
        os.environ[SETTINGS_VARIABLE] = json.dumps(asked["settings"])
        from sglang.multimodal_gen import DiffGenerator

        self._max_rows = asked["max_rows"]
        # With SGLang's default ports, two instances started at the same time collide.
        ports = dict(zip(("port", "scheduler_port", "master_port"), _free_ports(3), strict=True))
        self._generator = DiffGenerator.from_pretrained(**{**ports, **asked["arguments"]})
        self._call("freeze")
        held = self._call("inventory")
        return {"weights": [(name, dtype, shape) for _, _, dtype, parts in held for name, shape in parts.items()]}, {}

    def generate(self, asked: Mapping[str, Any], tensors: Mapping[str, Any]) -> Answer:
        """A track. tensors: `request`, the bytes of a `Request`. Returns those of the `Track`, and the inputs used for
        each row: see `unirl.engine_host.latent_rows`."""
        from unirl.core.types.request import Request
        from unirl.core.types.serial import from_bytes
        from unirl.engine_host import latent_rows as latent_rows

        request = from_bytes(tensors["request"].numpy().tobytes(), Request)
        made: dict[int, Mapping[str, Any]] = {}
        for rows in self._pieces(request.inputs):
            result = self._made(request.select(rows))
            made |= zip(rows, result, strict=True)
        return latent_rows.joined(request, [made[row] for row in range(request.num_rows)])

    def _pieces(self, inputs: Inputs) -> Iterator[list[int]]:
        """Batches of rows of one input, which SGLang encodes once for all of its outputs."""
        from unirl.core.types.batch import rows_by_group

        for rows in rows_by_group(inputs.ids).values():
            yield from (rows[at : at + self._max_rows] for at in range(0, len(rows), self._max_rows))

    def _made(self, piece: Any) -> list[dict[str, Any]]:
        from unirl.core.types.serial import to_bytes
        from unirl.numerics.pixels import levels

        from .stages import PIECE, ROWS

        request = self._request({PIECE: to_bytes(piece)})
        request.rollout, request.rollout_return_denoising_env = True, True
        request.num_outputs_per_prompt = piece.num_rows
        result = self._forward(request)
        rows = getattr(result.rollout_trajectory_data, ROWS, None)
        if rows is None or len(rows) != piece.num_rows:
            raise RuntimeError(f"SGLang returned no rollout for the request of sample {piece.sample_ids[0]!r}.")
        if result.output is not None:
            for row, media in zip(rows, result.output, strict=True):
                row["media"] = levels(_media(media)[None]).cpu()
        return rows

    def load_weights(self, asked: Mapping[str, Any], tensors: Mapping[str, Any]) -> Answer:
        """Load weights from files. Raises unless exactly the weights sent are held afterwards; Unchanged if nothing was
        changed."""
        from unirl.engine_host.frames import Unchanged
        from unirl.engine_host.received import read_weights

        sent = read_weights(asked["paths"], asked["checksum"])
        held = self._call("inventory")
        if asked["kind"] == "lora":
            self._call("begin", asked["version"])
            adapters = _completed(sent, [parts for *_, parts in held])
            modules = _by_module(held)
            for module in modules:
                own = adapters if len(modules) == 1 else _under(module, adapters)
                # With a frozen expert there is none for it.
                if own:
                    self._load_lora(module, own, scale=asked["scale"])
            self._call("end_lora", asked["paths"], asked["checksum"], asked["version"], asked["scale"])
            return None, {}
        if sent.keys() != {name for *_, parts in held for name in parts}:
            raise Unchanged("the names of the weights sent are not those of the weights held.")
        self._call("begin", asked["version"])
        for module, weights in _by_module(held).items():
            joined = {own: _joined([sent[name] for name in parts], dtype) for _, own, dtype, parts in weights}
            self._load_full(module, joined)
        self._call("end_full", asked["version"])
        return None, {}

    def _load_full(self, module: str, tensors: Mapping[str, Any]) -> None:
        """tensors: by SGLang's names, in SGLang's dtypes."""
        from sglang.multimodal_gen.runtime.entrypoints.post_training.io_struct import (
            UpdateWeightFromTensorCheckerReqInput,
            UpdateWeightFromTensorReqInput,
        )
        from sglang.multimodal_gen.runtime.post_training.tensor_update_checker import build_named_tensor_sha256
        from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket

        for piece in _buckets(tensors):
            bucket = FlattenedTensorBucket(named_tensors=piece)
            payload = {"flattened_tensor": bucket.get_flattened_tensor(), "metadata": bucket.get_metadata()}
            self._succeed(
                UpdateWeightFromTensorReqInput(
                    serialized_named_tensors=[_serialized({module: payload})],
                    load_format="flattened_bucket",
                    target_modules=[module],
                )
            )
        # SGLang reports success for unknown names.
        self._succeed(
            UpdateWeightFromTensorCheckerReqInput(
                target_module=module, expected_named_tensors_sha256=build_named_tensor_sha256(tensors.items())
            )
        )

    def _load_lora(self, module: str, tensors: Mapping[str, Any], *, scale: float) -> None:
        from sglang.multimodal_gen.runtime.entrypoints.post_training.io_struct import UpdateWeightFromTensorReqInput

        rank = len(next(iter(tensors.values())))
        self._succeed(
            UpdateWeightFromTensorReqInput(
                serialized_named_tensors=[_serialized(list(tensors.items()))],
                target_modules=[module],
                weight_update_mode="lora_merge",
                lora_rank=rank,
                # SGLang's scale is alpha / rank.
                lora_alpha=cast("int", scale * rank),
            )
        )

    def sleep(self, asked: Mapping[str, Any], tensors: Mapping[str, Any]) -> Answer:
        from sglang.multimodal_gen.runtime.entrypoints.post_training.io_struct import ReleaseMemoryOccupationReqInput

        self._succeed(ReleaseMemoryOccupationReqInput())
        return None, {}

    def wake(self, asked: Mapping[str, Any], tensors: Mapping[str, Any]) -> Answer:
        from sglang.multimodal_gen.runtime.entrypoints.post_training.io_struct import ResumeMemoryOccupationReqInput

        self._succeed(ResumeMemoryOccupationReqInput())
        return None, {}

    def _call(self, method: str, *arguments: Any) -> Any:
        """Call a method of the pipeline in the worker, and return its answer."""
        from .control import ANSWER, CALL

        usage = self._forward(self._request({CALL: (method, arguments)})).usage
        if not usage or ANSWER not in usage:
            raise RuntimeError(f"SGLang runs its stock pipeline, which lacks {method!r}: the plugin did not load.")
        return usage[ANSWER]

    def _request(self, extra: Mapping[str, Any]) -> Any:
        from sglang.multimodal_gen.configs.sample.sampling_params import SamplingParams
        from sglang.multimodal_gen.runtime.entrypoints.utils import prepare_request

        server = self._generator.server_args
        sampling = SamplingParams.from_user_sampling_params_args(
            server.model_path,
            server_args=server,
            prompt=" ",
            seed=0,
            # No kernels with another summation order than torch.
            quality="exact",
            generator_device="cpu",
            save_output=False,
            return_frames=False,
            suppress_logs=True,
        )
        request = prepare_request(server_args=server, sampling_params=sampling)
        request.extra |= extra
        return request

    def _succeed(self, message: Any) -> None:
        """Send a message that SGLang answers with (success, message)."""
        result = self._forward(message).output
        if not result or not result["success"]:
            raise RuntimeError(f"SGLang rejected {type(message).__name__}: {result}")

    def _forward(self, message: Any) -> Any:
        """Send it to the worker. SGLang returns errors instead of raising them."""
        from sglang.multimodal_gen.runtime.scheduler_client import sync_scheduler_client

        result = sync_scheduler_client.forward(message)
        if result.error:
            raise RuntimeError(str(result.error))
        return result


def _media(decoded: Any) -> Any:
    """An image [3, H, W] or a video [F, 3, H, W]; a VAE of videos puts the frames behind the channels, and decodes an
    image as one of them."""
    if decoded.ndim == 3:
        return decoded
    return decoded[:, 0] if decoded.shape[1] == 1 else decoded.transpose(0, 1)


def _free_ports(count: int) -> list[int]:
    """Free TCP ports of this machine, which the system does not hand out again soon."""
    with contextlib.ExitStack() as stack:
        result = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in result:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in result]


def _joined(parts: Sequence[Any], dtype: str) -> Any:
    """One trainable weight in SGLang's layout and dtype."""
    import torch

    return (torch.cat(list(parts)) if len(parts) > 1 else parts[0]).to(getattr(torch, dtype))


def _by_module(held: Iterable[Any]) -> dict[str, list[Any]]:
    """An inventory's entries by component, in its order."""
    result: dict[str, list[Any]] = {}
    for entry in held:
        result.setdefault(entry[0], []).append(entry)
    return result


def _under(module: str, tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Those whose names begin with a component, without it."""
    prefix = f"{module}."
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}


def _completed(pairs: Mapping[str, Any], weights: Iterable[Mapping[str, Sequence[int]]]) -> dict[str, Any]:
    """An adapter on some parts of a fused layer, with zeros for the others: SGLang needs one for all of them.

    weights: the trainable parts of each of SGLang's weights, name -> shape.
    """
    result = dict(pairs)
    for parts in weights:
        shapes = {name.removesuffix(".weight"): shape for name, shape in parts.items() if name.endswith(".weight")}
        sent = [layer for layer in shapes if f"{layer}.lora_A.weight" in pairs]
        for layer in shapes.keys() - sent if sent else ():
            down = pairs[f"{sent[0]}.lora_A.weight"]
            result[f"{layer}.lora_A.weight"] = down.new_zeros(down.shape)
            result[f"{layer}.lora_B.weight"] = down.new_zeros(shapes[layer][0], len(down))
    return result


def _serialized(payload: Any) -> Any:
    from sglang.srt.utils import MultiprocessingSerializer

    return MultiprocessingSerializer.serialize(payload, output_str=True)


def _buckets(tensors: Mapping[str, Any]) -> Iterator[list[tuple[str, Any]]]:
    piece: list[tuple[str, Any]] = []
    size = 0
    for name, tensor in tensors.items():
        own = tensor.numel() * tensor.element_size()
        if piece and size + own > BUCKET_BYTES:
            yield piece
            piece, size = [], 0
        piece.append((name, tensor))
        size += own
    yield piece
