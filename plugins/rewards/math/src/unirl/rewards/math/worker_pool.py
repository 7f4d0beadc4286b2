"""A pool of grading processes, each killed when an answer takes too long."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import select
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from unirl.core.errors import RewardFailed

from .verdict import Verdict

__all__ = ["Job", "WorkerPool"]

Job = tuple[str, str, bool]
"""The key, the answer, and whether the answer stands alone."""
START_S = 120.0
"""Wall time to import sympy, on a busy machine with a cold disk."""


class WorkerPool:
    """Starts up to `workers` processes at the first job. Thread-safe.

    math-verify stops itself by SIGALRM, which works in the main thread of a process alone, and rewards run in threads;
    a fork of a process that has threads may hang. So each worker is a fresh interpreter that is talked to by pipes: it
    ends with the pipe, even when this process is killed.
    """

    def __init__(self, *, workers: int, timeout_s: float) -> None:
        self._is_closed = False
        self._idle: queue.LifoQueue[_Worker] = queue.LifoQueue()
        self._all = [_Worker(timeout_s=timeout_s) for _ in range(workers)]
        for worker in self._all:
            self._idle.put(worker)
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix="math-verify")

    def grade(self, jobs: list[Job]) -> list[Verdict]:
        """Verdicts in the order of the jobs. Raises RewardFailed when a worker cannot be started, or after `close`."""
        if self._is_closed:
            raise closed()
        return list(self._threads.map(self._grade, jobs))

    def close(self) -> None:
        """Stop the processes. May be called twice; grading calls in progress raise."""
        self._is_closed = True
        for worker in self._all:
            worker.stop()
        # Each thread sees its pipe end; the pipes are closed when none reads them any more.
        self._threads.shutdown()
        for worker in self._all:
            worker.clean_up()

    def _grade(self, job: Job) -> Verdict:
        worker = self._idle.get()
        try:
            return worker.grade(job)
        finally:
            self._idle.put(worker)


class _Worker:
    """One process, started on demand and restarted after it ends. One thread at a time grades; any may stop it."""

    def __init__(self, *, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._is_over = False
        self._unread = b""

    def grade(self, job: Job) -> Verdict:
        key, answer, is_bare = job
        process = self._started()
        request = {"key": key, "answer": answer, "is_bare": is_bare, "timeout_s": self._timeout_s}
        # CPU time is the limit. Much more wall time than that means a process that is stuck.
        patience_s = START_S + 10 * self._timeout_s
        reply = self._ask(process, request, patience_s=patience_s)
        if reply is not None:
            return Verdict(reply["outcome"], reply["reason"])
        hangs = process.poll() is None
        code = self.clean_up()
        if self._is_over:
            raise closed()
        if hangs:
            return Verdict("failed", f"gave no reply for {patience_s:g} s")
        if code == -signal.SIGPROF:
            return Verdict("failed", f"took more than timeout_s = {self._timeout_s:g} CPU seconds")
        return Verdict("failed", f"ended the process that graded it (exit code {code})")

    def stop(self) -> None:
        """Stop the process and start no other."""
        with self._lock:
            self._is_over = True
            if self._process is not None:
                self._process.kill()

    def clean_up(self) -> int | None:
        """End the process, if there is one, and forget it; its exit code. By the thread that grades, or after it."""
        with self._lock:
            process, self._process, self._unread = self._process, None, b""
        if process is None:
            return None
        assert process.stdin is not None and process.stdout is not None
        # Without effect on one that has ended: its own exit code stays.
        process.kill()
        code = process.wait()
        process.stdout.close()
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()
        return code

    def _started(self) -> subprocess.Popen[bytes]:
        with self._lock:
            if self._is_over:
                raise closed()
            if self._process is not None:
                return self._process
            self._process = process = subprocess.Popen(
                [sys.executable, "-P", "-m", "unirl.rewards.math.worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                bufsize=0,
                # An interrupt at the keyboard is for the run, which then ends its workers.
                start_new_session=True,
            )
        ready = self._read(process, patience_s=START_S)
        if ready is None or ready["error"]:
            code = self.clean_up()
            result = ready["error"] if ready else f"it ended with exit code {code} before it could say why"
            raise RewardFailed(
                f"reward.math: a process for method=math-verify could not be started: {result}. "
                "Check that `python -c 'import math_verify'` works here."
            )
        return process

    def _ask(self, process: subprocess.Popen[bytes], request: dict[str, Any], *, patience_s: float) -> Any:
        """The reply, or None when the process ended or did not answer in time."""
        assert process.stdin is not None
        # Surrogates, which a detokenizer may leave, survive as escapes.
        line = json.dumps(request).encode("ascii") + b"\n"
        try:
            # Unbuffered pipes may take a part of what they are given.
            while line:
                line = line[process.stdin.write(line) or 0 :]
        except BrokenPipeError:
            return None
        return self._read(process, patience_s=patience_s)

    def _read(self, process: subprocess.Popen[bytes], *, patience_s: float) -> Any:
        assert process.stdout is not None
        until = time.monotonic() + patience_s
        pipe = process.stdout.fileno()
        poll = select.poll()
        poll.register(pipe, select.POLLIN | select.POLLHUP)
        while b"\n" not in self._unread:
            if not poll.poll(max(0.0, until - time.monotonic()) * 1000):
                return None
            piece = os.read(pipe, 65536)
            if not piece:
                # The pipe ends a moment before the process does, and a kill in between would hide its exit code.
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(timeout=10)
                return None
            self._unread += piece
        line, self._unread = self._unread.split(b"\n", 1)
        return json.loads(line)


def closed() -> RewardFailed:
    return RewardFailed("reward.math: got a call of score() after close(); build the reward again.")
