"""The boundary between a run and a reward, where its errors are attributed and its scores are checked."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

from unirl.core.errors import RewardFailed, UniRLError
from unirl.core.names import shortened
from unirl.core.roles import Reward, ScoreInput, Scores
from unirl.core.types.array import Array

from .parts import errors_under

if TYPE_CHECKING:
    from unirl.core.specs.spec import RewardSpec

__all__ = ["CheckedReward"]

ROUNDING = 1e-6
"""A mean or a sum of fp32 numbers may pass an exact bound of the range by this share of it."""


class CheckedReward:
    """Calls a reward, checks its reply, and refuses side effects on the run.

    Side effects that are refused: pixels changed in place (by the version counters of their tensors), another seed of
    torch's global generators, another working folder, which is put back. Draws from those generators are allowed.
    """

    def __init__(self, key: str, reward: Reward, *, spec: RewardSpec) -> None:
        """key: of the reward in the recipe, such as `reward.shapes`. Raises RewardFailed for an object without the
        methods of a reward."""
        missing = [name for name in ("score", "close") if not callable(getattr(cast(object, reward), name, None))]
        if missing:
            raise RewardFailed(
                f"{key}: {spec.build!r} returned {type(reward).__name__}, which has no method {missing[0]!r}; "
                "expected a reward with `score(samples)` and `close()`."
            )
        self._key, self._reward, self._spec = key, reward, spec

    def score(self, samples: ScoreInput) -> Scores:
        """The scores of the reward, as it gives them.

        Raises RewardFailed when it raises or exits, when the scores are not finite numbers, one per sample, or not what
        the spec declares, and for side effects.
        """
        before = _State(samples)
        try:
            with errors_under(self._key, spec=self._spec):
                if self._spec.media != "any":
                    samples.of(self._spec.media, reward=self._spec.name)
                scores: object = self._reward.score(samples)
        except UniRLError:
            raise
        except (Exception, SystemExit) as error:
            what = f"called sys.exit({error.code!r})" if isinstance(error, SystemExit) else f"raised {_named(error)}"
            raise RewardFailed(f"{self._key}: {what} on a batch of {len(samples.sample_ids)} samples.") from error
        finally:
            # Also where it fails: the checkpoints of the run belong into the old folder.
            moved = before.restore_folder()
        if moved:
            raise RewardFailed(
                f"{self._key}: changed the working folder to {moved!r}. Relative paths of the run, such as that of its "
                "checkpoints, depend on it. Use absolute paths in the reward."
            )
        if before.pixels_changed(samples):
            raise RewardFailed(
                f"{self._key}: changed pixels in place. Other rewards, trackers and the update read them afterwards. "
                "Work on a copy: `images.clone()`."
            )
        if before.reseeded():
            raise RewardFailed(
                f"{self._key}: set the seed of torch's global generator, which the whole process draws from. "
                "Use a `torch.Generator` of its own."
            )
        return self._checked(scores, samples)

    def close(self) -> None:
        """Close the reward. Raises RewardFailed when that raises or exits."""
        try:
            self._reward.close()
        except (Exception, SystemExit) as error:
            raise RewardFailed(f"{self._key}: close() raised {_named(error)}.") from error

    def _checked(self, scores: object, samples: ScoreInput) -> Scores:
        if not isinstance(scores, Scores):
            raise RewardFailed(
                f"{self._key}: score() returned {_described(scores)}; expected "
                "unirl.core.roles.Scores(values=<tensor [N]>, parts={name: <tensor [N]>})."
            )
        rows, scored = samples.num_rows, scores.scored
        if scored is not None and not (
            _is_tensor(scored) and f"{scored.dtype} {[*scored.shape]}" == f"torch.bool [{rows}]"
        ):
            raise RewardFailed(
                f"{self._key}: `scored` of Scores is {_described(scored)}; expected None or a tensor of bool, one for "
                f"each of {rows} samples."
            )
        result, expected = sorted(scores.parts), sorted(self._spec.parts)
        if result != expected:
            raise RewardFailed(
                f"{self._key}: got components {result or 'none'}, expected {expected or 'none'}, which the spec of "
                f"reward {self._spec.name!r} declares in `parts`."
            )
        for name, values in (("values", scores.values), *((f"parts[{n!r}]", v) for n, v in scores.parts.items())):
            self._check_values(name, values, samples, scored=scored)
        self._check_range(scores.values.detach(), scored=scored)
        return scores

    def _check_values(self, name: str, values: Any, samples: ScoreInput, *, scored: Array | None) -> None:
        """One finite number for each sample that has a score."""
        if not _is_tensor(values) or tuple(values.shape) != (samples.num_rows,):
            result = f"a tensor of shape {tuple(values.shape)}" if _is_tensor(values) else _described(values)
            raise RewardFailed(
                f"{self._key}: {name} of Scores is {result}; expected a tensor of shape ({samples.num_rows},), one "
                "number per sample, in their order."
            )
        finite = values.isfinite() if scored is None else values.isfinite() | ~scored.to(values.device)
        if not bool(finite.all()):
            row = int((~finite).nonzero()[0])
            raise RewardFailed(
                f"{self._key}: {name} of Scores is {float(values[row])} for sample {samples.sample_ids[row]!r} (prompt "
                f"{samples.inputs.prompts[row]!r}). A score must be finite; make the reward raise where it cannot "
                "score."
            )

    def _check_range(self, values: Array, *, scored: Array | None) -> None:
        low, high = self._spec.range
        counted = values if scored is None else values[scored.to(values.device)]
        if not counted.numel():
            return
        slack = ROUNDING * max([1.0, *(abs(bound) for bound in (low, high) if abs(bound) != float("inf"))])
        result = (float(counted.min()), float(counted.max()))
        if result[0] < low - slack or result[1] > high + slack:
            raise RewardFailed(
                f"{self._key}: got scores from {result[0]:.6g} to {result[1]:.6g}, expected {low:g} to {high:g}, the "
                f"range that the spec of reward {self._spec.name!r} declares."
            )


class _State:
    """State that a reward must leave unchanged, taken before it scores."""

    def __init__(self, samples: ScoreInput) -> None:
        self._versions = _versions(samples)
        self._seeds = _seeds()
        self._folder = _folder()

    def pixels_changed(self, samples: ScoreInput) -> bool:
        return _versions(samples) != self._versions

    def reseeded(self) -> bool:
        return _seeds() != self._seeds

    def restore_folder(self) -> str:
        """Go back to the working folder. Returns where the reward went; empty where it stayed."""
        now = _folder()
        if now == self._folder or not self._folder:
            return ""
        os.chdir(self._folder)
        return now or "a folder that is gone"


def _versions(samples: ScoreInput) -> list[int]:
    """Version counters of the pixels: torch counts changes in place, through views as well."""
    values: Any = () if samples.media is None else samples.media.values
    pixels: Sequence[Any] = (values,) if _is_tensor(values) else values
    return [value._version for value in pixels if _is_tensor(value) and not value.is_inference()]


def _seeds() -> tuple[int, ...]:
    """Seeds of torch's global generators: drawing leaves them as they are, `manual_seed` does not."""
    torch: Any = sys.modules.get("torch")
    if torch is None:
        return ()
    # CUDA that has not been initialised yet must stay so.
    cuda = (torch.cuda.initial_seed(),) if torch.cuda.is_initialized() else ()
    return (torch.initial_seed(), *cuda)


def _folder() -> str:
    try:
        return os.getcwd()  # noqa: PTH109 - a string is compared
    except FileNotFoundError:
        return ""


def _is_tensor(value: object) -> bool:
    import torch

    return isinstance(value, torch.Tensor)


def _named(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _described(value: object) -> str:
    if value is None:
        return "None"
    return f"{type(value).__name__} {shortened(repr(value), 60)}"
