"""The reward `unit-tests`: extracts the code of each completion and runs the prompt's tests on it."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from unirl.core.errors import RewardFailed
from unirl.core.roles import ScoreInput, Scores
from unirl.core.specs.check import check_config

from .config import UnitTestsConfig
from .layouts import read_tests
from .sandbox import Report, Sandbox

__all__ = ["UnitTestsReward", "build", "code_of"]

_NAME = "reward.unit-tests"
_BLOCK = re.compile(r"^ {0,3}(`{3,}|~{3,})[^\n`]*\n(.*?)^ {0,3}\1[`~]*[ \t]*$", re.DOTALL | re.MULTILINE)


def code_of(text: str) -> str | None:
    """The last closed fenced block after the last </think>, whatever its language; None without one."""
    blocks = _BLOCK.findall(text.rpartition("</think>")[2])
    return blocks[-1][1] if blocks else None


def build(config: UnitTestsConfig, *, device: Any) -> UnitTestsReward:
    """Raises RewardFailed when no sandbox can be started on this machine."""
    return UnitTestsReward(config)


class UnitTestsReward:
    def __init__(self, config: UnitTestsConfig) -> None:
        check_config(config, key=_NAME)
        self._config = config
        self._sandbox = Sandbox(config)
        # Before the first rollout, not after it.
        self._sandbox.run(code="", setup="", entry="", tests=[])
        self._threads = ThreadPoolExecutor(config.workers, thread_name_prefix="unit-tests")

    def score(self, samples: ScoreInput) -> Scores:
        """The share of passed tests, or with `score=all` whether all passed; 0 without code.

        Parts, each [N]: `passed`, `timeouts` and `errors` are shares of the tests (the rest gave a wrong result);
        `no-code` and `broken` (the sandbox ended early) are 0 or 1.
        Raises RewardFailed, naming the sample, for tests that are missing or cannot be read.
        """
        texts = samples.of("text", reward="unit-tests").texts
        jobs = [self._job(samples, row, code_of(text)) for row, text in enumerate(texts)]
        reports = list(self._threads.map(self._report, jobs))
        counts = [len(job["tests"]) for job in jobs]

        def share(outcome: str) -> torch.Tensor:
            shares = [r.outcomes.count(outcome) / n for r, n in zip(reports, counts, strict=True)]  # pyright: ignore[reportArgumentType]
            return torch.tensor(shares, dtype=torch.float32)

        passed = share("passed")
        return Scores(
            values=(passed == 1).float() if self._config.score == "all" else passed,
            parts={
                "passed": passed,
                "timeouts": share("timeout"),
                "errors": share("error"),
                "no-code": torch.tensor([float(job["code"] is None) for job in jobs]),
                "broken": torch.tensor([float(report.is_broken) for report in reports]),
            },
        )

    def close(self) -> None:
        self._sandbox.close()
        self._threads.shutdown()

    def _report(self, job: dict[str, Any]) -> Report:
        return Report(outcomes=()) if job["code"] is None else self._sandbox.run(**job)

    def _job(self, samples: ScoreInput, row: int, code: str | None) -> dict[str, Any]:
        metadata = samples.metadata[row]
        where = f"sample {samples.sample_ids[row]!r} (prompt {samples.inputs.prompts[row][:80]!r})"
        if "tests" not in metadata:
            raise RewardFailed(f"{_NAME}: metadata 'tests' of {where} is missing; add it to the prompt file.")
        try:
            tests = read_tests(metadata)
        except ValueError as error:
            raise RewardFailed(f"{_NAME}: metadata 'tests' of {where} {error}. Fix the prompt file.") from error
        setup, entry = (metadata.get(key) or "" for key in ("setup", "entry_point"))
        if isinstance(metadata["tests"], dict):
            entry = metadata["tests"].get("fn_name") or entry
        return {"code": code, "setup": setup, "entry": entry, "tests": tests}
