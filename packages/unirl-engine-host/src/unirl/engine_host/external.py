"""Base of external engines: start, weight updates, sleep and shutdown. Subclasses generate.

Weights are verified before and after they are loaded. After an interrupted sync the engine refuses to generate until
it receives full weights.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from unirl.core.errors import EchoMismatch, RecipeError, RunFailed
from unirl.core.roles import Model, WeightReceipt, WeightUpdate
from unirl.core.types.weights import forms, joined, tensor_digests
from unirl.engine_host.config import ExternalConfig

from .process import EngineProcess, EngineRaised, Program
from .program import Product
from .transfer import Held, adapter_mismatch, described, files_of, full_mismatch, inventory

__all__ = ["UNSYNCED", "ExternalEngine", "Hosting"]

UNSYNCED = -1
"""Version of an engine that still has its checkpoint's weights, which match no trained version."""
SHORT_S = 60.0
"""Timeout for calls that do no work."""


@dataclass(frozen=True, kw_only=True)
class Hosting:
    """The host's description of an engine."""

    title: str
    """The engine's own spelling of its name, for messages."""
    program: Program
    arguments: Mapping[str, Any]
    """Arguments of the call `load`."""
    check_version: Callable[[Any], None]
    """Checks the answer to `version`. Raises RunFailed for an untested version."""
    rounds: bool = False
    """Whether fp32 weights are rounded to the engine's dtype."""
    lora_rank: int = 0
    """Largest LoRA rank; 0 accepts no adapters."""
    leaves_out: Callable[[str], bool] = lambda name: False
    """Whether the engine computes nothing with the trained weight of this name, or its adapter, and is not sent it."""
    overwrites: bool = False
    """Whether full weights overwrite everything a sync writes, so that a failed sync needs no restart."""
    sleeps: bool = False
    """Whether `sleep` releases memory; otherwise the host only tracks the state."""
    transfer_dir: str = ""
    """See `unirl.engine_host.transfer.files_of`."""
    start_timeout_s: float = 900.0
    generate_timeout_s: float = 3600.0
    sync_timeout_s: float = 600.0

    @classmethod
    def of(
        cls,
        product: Product,
        config: ExternalConfig,
        *,
        program: Program,
        arguments: Mapping[str, Any],
        lora_rank: int,
        leaves_out: Callable[[str], bool] = lambda name: False,
        overwrites: bool = False,
    ) -> Hosting:
        """The description of an engine configured by a recipe."""
        return cls(
            title=product.title,
            program=program,
            arguments=arguments,
            check_version=product.check_version,
            rounds=config.dtype != "auto",
            lora_rank=lora_rank,
            leaves_out=leaves_out,
            overwrites=overwrites,
            sleeps=config.sleep_mode,
            transfer_dir=config.transfer_dir,
            start_timeout_s=config.start_timeout_s,
            generate_timeout_s=config.generate_timeout_s,
            sync_timeout_s=config.sync_timeout_s,
        )


class ExternalEngine:
    """Most of a `unirl.core.roles.Engine`. Callable from any thread, one call at a time.

    Its program answers `version` (checked by `check_version`), `load` (takes `arguments`; returns name, dtype and shape
    of each weight as `weights`), `load_weights` (raises `frames.Unchanged` if nothing was written), `sleep`, `wake`.
    """

    def __init__(self, hosting: Hosting, *, model: Model) -> None:
        """Start the engine. Raises RecipeError for a model whose weight names it does not use, RunFailed if it does not
        start or has an untested version."""
        self.version = UNSYNCED
        self._hosting = hosting
        self._model = model
        self._lock = threading.RLock()
        self._process = EngineProcess(hosting.program)
        self._held: dict[str, Held] = {}
        self._left_out: dict[str, Held] = {}
        """Trained weights that it is not sent."""
        self._unusable = ""
        """Why the engine cannot generate until a full sync; empty if it can."""
        self._has_other_base = False
        """Whether the checkpoint's weights have been replaced."""
        self._is_asleep = False
        self._is_closed = False
        try:
            self._start()
        except BaseException:
            self.close()
            raise

    def load_weights(self, update: WeightUpdate) -> WeightReceipt:
        """Load full weights or an adapter. The engine verifies bit for bit that it now uses the weights sent.

        Raises EchoMismatch for an incompatible update, before anything changes. Raises RunFailed when the engine fails
        during the update; it then refuses to generate until it receives full weights, which also restart a dead engine.
        """
        with self._lock:
            if self._is_closed:
                raise RunFailed(f"weights: version {update.version} cannot be sent to {self._name}: it is closed.")
            if update.kind != "lora" and not self._process.is_running:
                self._process.close()
                self._start()
            used = [name for name in update.tensors if not self._hosting.leaves_out(name)]
            self._refuse_unfit(update)
            expected = _checksum(update, used)
            before, self._unusable = self._unusable, f"the sync of version {update.version} did not complete."
            with files_of(update, folder=self._hosting.transfer_dir, names=used) as paths:
                asked = {
                    "kind": "lora" if update.kind == "lora" else "full",
                    "paths": paths,
                    "checksum": expected,
                    "scale": update.adapter_scale,
                    "version": update.version,
                }
                self._has_other_base = self._has_other_base or update.kind != "lora"
                try:
                    self._process.call("load_weights", asked, timeout_s=self._hosting.sync_timeout_s)
                except EngineRaised as error:
                    if error.unchanged:
                        # The result of the previous sync is unchanged.
                        self._unusable = before
                        raise EchoMismatch(
                            f"weights: {update.kind} of version {update.version}: {error.text}"
                        ) from error
                    # Its layers are from two versions.
                    if not self._hosting.overwrites:
                        self._process.close()
                    raise
            self._unusable = ""
            self.version = update.version
            return WeightReceipt(
                version=update.version,
                checksum=update.checksum,
                num_tensors=len(update.tensors),
                size_bytes=sum(form.nbytes for form in forms(update.tensors).values()),
            )

    @property
    def weight_dtypes(self) -> Mapping[str, str] | None:
        """See `unirl.core.roles.Engine`."""
        return {name: held.dtype for name, held in self._held.items()} if self._hosting.rounds else None

    def sleep(self) -> None:
        """Release memory if the engine can, keeping the weights elsewhere. A sleeping engine does not generate."""
        with self._lock:
            if self._hosting.sleeps and not self._is_asleep:
                self._process.call("sleep", timeout_s=self._hosting.sync_timeout_s)
            self._is_asleep = True

    def wake(self) -> None:
        with self._lock:
            if self._hosting.sleeps and self._is_asleep:
                self._process.call("wake", timeout_s=self._hosting.sync_timeout_s)
            self._is_asleep = False

    def close(self) -> None:
        """Stop the engine and all its processes. Idempotent; may be called while another thread generates."""
        self._is_closed = True
        self._process.close()

    @property
    def _name(self) -> str:
        return f"engine {self._hosting.program.name!r}"

    def _started(self, found: Mapping[str, Any]) -> None:
        """Subclass hook, called after every start. found: the result of `load`."""

    def _refuse_idle(self) -> None:
        """Raise RunFailed if the engine cannot generate now."""
        if self._is_asleep:
            raise RunFailed(f"{self._name} is asleep and cannot generate; wake it first.")
        if self._unusable:
            raise RunFailed(f"{self._name} cannot generate: {self._unusable} Send it full weights.")

    def _generate(self, arguments: Mapping[str, Any], tensors: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Call `generate`."""
        try:
            return self._process.call(
                "generate", arguments, tensors=tensors, timeout_s=self._hosting.generate_timeout_s
            )
        except RunFailed:
            if not self._process.is_running:
                self._unusable = "its process ended while generating."
            raise

    def _start(self) -> None:
        self._process.start()
        version, _ = self._process.call("version", timeout_s=SHORT_S)
        self._hosting.check_version(version)
        self._process.note(f"{self._name}: version {version}, run by {self._process.program.python}")
        result, _ = self._process.call("load", self._hosting.arguments, timeout_s=self._hosting.start_timeout_s)
        self._held = inventory(result["weights"])
        self._refuse_other_names()
        self.version, self._has_other_base, self._is_asleep = UNSYNCED, False, False
        self._started(result)

    def _refuse_other_names(self) -> None:
        """Reject a model whose weights have other names in the engine at start-up, not at the first sync."""
        # PEFT nests an adapted layer's own weight one name deeper.
        named = self._model.trainable.named_parameters()
        trains = {name.replace(".base_layer.", "."): weight for name, weight in named if ".lora_" not in name}
        self._left_out = {name: described(one) for name, one in trains.items() if self._hosting.leaves_out(name)}
        unknown = sorted(trains.keys() - self._held.keys() - self._left_out.keys())
        if unknown:
            raise RecipeError(
                f"engine: {self._hosting.title} has no weights with the names of {len(unknown)} trained weights of "
                f"model {self._model.spec.name!r}, such as {unknown[0]!r}, so they cannot be synced. MoE experts are "
                "stored in another layout; use a dense model, or engine=trainside."
            )

    def _refuse_unfit(self, update: WeightUpdate) -> None:
        what, rounds = f"weights: {update.kind} of version {update.version}", self._hosting.rounds
        held = {**self._held, **self._left_out}
        if self._is_asleep:
            raise RunFailed(f"{what}: {self._name} is asleep and cannot load weights; wake it first.")
        if update.kind != "lora":
            mismatch = full_mismatch(update, held, rounds=rounds)
            if mismatch and not full_mismatch(update, held, rounds=True):
                mismatch += " Or set engine.dtype, to which fp32 weights are then rounded."
        elif update.tensors and not self._hosting.lora_rank:
            rank = next(iter(forms(update.tensors).values())).shape[0]
            raise RecipeError(f"{what}: {self._name} was started without LoRA support; set engine.lora_rank={rank}.")
        elif self._unusable and self._has_other_base:
            raise RunFailed(f"{what}: an adapter update is not enough, since {self._unusable} Send full weights.")
        else:
            mismatch = adapter_mismatch(update, held, most_rank=self._hosting.lora_rank)
        if mismatch:
            raise EchoMismatch(f"{what}: {mismatch}")


def _checksum(update: WeightUpdate, names: Sequence[str]) -> str:
    """Of the tensors of these names. Raises EchoMismatch when that of all is not the update's."""
    if len(names) == len(update.tensors):
        return update.checksum
    digests = update.digests or tensor_digests(update.tensors)
    if (whole := joined(digests[name] for name in sorted(digests))) != update.checksum:
        raise EchoMismatch(
            f"weights: {update.kind} of version {update.version}: got tensors with the checksum {whole}, expected "
            f"{update.checksum}. They changed after they were exported."
        )
    return joined(digests[name] for name in sorted(names))
