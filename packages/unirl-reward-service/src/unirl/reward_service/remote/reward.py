"""The reward `remote`: sends samples to a service and checks what comes back."""

from __future__ import annotations

import os
import tempfile
import uuid
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from unirl.core.errors import RewardFailed
from unirl.core.roles import ScoreInput, Scores
from unirl.core.specs.check import check_config
from unirl.core.types.batch import rows_by_group
from unirl.core.types.media import MediaKind
from unirl.reward_service.wire import FORMAT, ScoreReply, ScoreRequest, decode, encode, from_samples, to_scores
from unirl.reward_service.wire_pixels import Codec, WireError

from .config import RemoteConfig
from .own_service import OwnService
from .replicas import Replicas

__all__ = ["RemoteReward", "build"]


def build(config: RemoteConfig, *, device: Any) -> RemoteReward:
    """Raises RewardFailed where no replica answers or its own service does not start, and for another version than the
    settings expect."""
    check_config(config, key="reward.remote")
    if not config.serve:
        return RemoteReward(config)
    handle, log = tempfile.mkstemp(prefix="unirl-reward-service-", suffix=".jsonl")
    os.close(handle)
    service = OwnService(Path(config.serve), log=Path(log))
    try:
        return RemoteReward(replace(config, urls=[service.url], serve=""), service=service)
    except BaseException:
        service.close()
        raise


class RemoteReward:
    def __init__(self, config: RemoteConfig, *, service: OwnService | None = None) -> None:
        """service: to be closed with it."""
        self._config, self._service = config, service
        self._replicas = Replicas(config)
        try:
            self._info = self._replicas.describe(within_s=config.deadline_s)
        except BaseException:
            self._replicas.close()
            raise
        self._threads = ThreadPoolExecutor(config.concurrency, thread_name_prefix="reward-remote")
        if unknown := [part for part in config.parts if part not in self._info.parts]:
            self.close()
            known = ", ".join(self._info.parts) or "none"
            raise RewardFailed(f"reward.remote.parts: got {unknown[0]!r}, expected some of the scorer's: {known}.")

    @property
    def version(self) -> str:
        """Version of the scorer; every reply has it."""
        return self._info.version

    def score(self, samples: ScoreInput) -> Scores:
        """The scores of the service, in the order of the samples; without a gradient.

        Raises RewardFailed for samples that the scorer refuses, for a reply that does not fit them, for another version
        than at the start, and when no replica gives a reply in time.
        """
        if self._info.media != "any":
            samples.of(cast(MediaKind, self._info.media), reward="remote")
        if samples.media is None:
            raise RewardFailed("reward.remote: got samples without media. Set sampling.decode=true.")
        if not len(samples):
            empty = torch.zeros(0)
            return Scores(values=empty, parts=dict.fromkeys(self._config.parts, empty))
        samples = replace(samples, media=samples.media.with_frames(self._config.frames_read))
        pieces = self._pieces(samples)
        results = list(self._threads.map(self._score_piece, [samples.select(rows) for rows in pieces]))
        order = torch.tensor([row for rows in pieces for row in rows]).argsort()
        is_partial = any(result.scored is not None for result in results)
        masks = [torch.ones(len(r.values), dtype=torch.bool) if r.scored is None else r.scored for r in results]
        return Scores(
            values=torch.cat([result.values for result in results])[order],
            parts={name: torch.cat([r.parts[name] for r in results])[order] for name in self._config.parts},
            scored=torch.cat(masks)[order] if is_partial else None,
        )

    def close(self) -> None:
        self._threads.shutdown()
        self._replicas.close()
        if self._service is not None:
            self._service.close()

    def _pieces(self, samples: ScoreInput) -> list[list[int]]:
        """Rows of each request. A scorer that compares the samples of a group gets no group in two requests."""
        size = min(self._config.batch_size, self._info.max_samples)
        if not self._info.scores_groups:
            return [list(range(start, min(start + size, len(samples)))) for start in range(0, len(samples), size)]
        pieces: list[list[int]] = []
        for rows in rows_by_group(samples.group_ids).values():
            if pieces and len(pieces[-1]) + len(rows) <= size:
                pieces[-1] += rows
            else:
                pieces.append(list(rows))
        return pieces

    def _score_piece(self, samples: ScoreInput) -> Scores:
        request_id = uuid.uuid4().hex
        try:
            request = ScoreRequest(
                format=FORMAT,
                id=request_id,
                scorer=self._config.scorer,
                version=self._info.version,
                samples=from_samples(samples, codec=cast(Codec, self._config.encoding)),
            )
            body = encode(request)
        except WireError as error:
            raise RewardFailed(f"reward.remote: {error}") from error
        if len(body) > self._info.max_body_bytes:
            raise RewardFailed(
                f"reward.remote.batch_size: {len(samples)} samples have {len(body)} bytes, expected at most "
                f"{self._info.max_body_bytes}. Use a smaller batch_size or encoding=png, or raise the service's "
                "max_body_mb."
            )
        reply = self._replicas.post(body)
        try:
            return self._checked(decode(reply, ScoreReply), samples.sample_ids, request_id)
        except WireError as error:
            raise RewardFailed(f"reward.remote: the reply of scorer {self._config.scorer!r}: {error}") from error

    def _checked(self, reply: ScoreReply, sample_ids: Sequence[str], request_id: str) -> Scores:
        if reply.version != self._info.version:
            raise RewardFailed(
                f"reward.remote: scorer {self._config.scorer!r} is {reply.version}, expected {self._info.version} "
                "as at the start. Its code, settings or weights have changed."
            )
        if missing := sorted(set(self._config.parts) - reply.parts.keys()):
            raise RewardFailed(f"reward.remote.parts: {missing[0]!r} is missing in the reply.")
        return to_scores(reply, sample_ids=sample_ids, request_id=request_id)
