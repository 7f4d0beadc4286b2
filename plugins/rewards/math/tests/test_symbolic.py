"""Symbolic equality by math-verify, and the processes that it runs in."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from unirl.core.errors import RewardFailed
from unirl.rewards.math.symbolic import SymbolicGrader
from unirl.rewards.math.verdict import Verdict
from unirl.rewards.math.worker_pool import Job, WorkerPool

pytestmark = pytest.mark.slow

TIMEOUT_S = 1.5
"""CPU seconds. What is meant to end takes a tenth, what is meant not to would take years."""


@pytest.fixture(scope="module")
def grader() -> Iterator[SymbolicGrader]:
    result = SymbolicGrader(WorkerPool(workers=1, timeout_s=TIMEOUT_S), needs_box=False)
    # The first answer of a process also warms its caches, which takes a part of the time that it has.
    result.grade([("1/2", "0.5")])
    yield result
    result.close()


def outcome(grader: SymbolicGrader, key: str, text: str) -> str:
    return grader.grade([(key, text)])[0].outcome


@pytest.mark.parametrize(
    ("key", "text"),
    [
        # Fractions and decimals, to six places.
        (r"\frac{1}{2}", "The answer is 0.5"),
        ("1/2", r"\boxed{\dfrac{2}{4}}"),
        ("1/3", "0.333333"),
        (r"3\frac{1}{2}", r"\boxed{7/2}"),
        ("½", r"$\frac{1}{2}$"),
        # Percentages: as number and as fraction, on both sides.
        (r"50\%", r"\boxed{0.5}"),
        (r"50\%", r"\boxed{50}"),
        ("50", r"\boxed{50\%}"),
        ("50%", "It is 50%"),
        # Expressions.
        (r"2 \sqrt { 221 }", r"\boxed{2\sqrt{221}}"),
        ("x^2 + 2x + 1", r"\boxed{(x+1)^2}"),
        (r"\frac{\sqrt{2}}{2}", r"\boxed{\frac{1}{\sqrt{2}}}"),
        (r"\pi", r"\boxed{π}"),
        # Sets, tuples, intervals, unions, matrices, equations.
        (r"\{1,2,3\}", r"\boxed{3, 2, 1}"),
        ("(1,2)", r"\boxed{\left(1, 2\right)}"),
        (r"1 < x < 2", r"\boxed{(1,2)}"),
        (r"(-\infty,1) \cup (2,\infty)", r"\boxed{(2,\infty)\cup(-\infty,1)}"),
        (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\boxed{\begin{pmatrix}1\\2\end{pmatrix}}"),
        ("5", r"\boxed{x = 5}"),
        # Spelling.
        ("1234", r"\boxed{1{,}234}"),
        ("12", r"\boxed{12\text{ cm}}"),
        ("5", r"\boxed{5.}"),
        ("$7$", r"\boxed{\boxed{7}}"),
        ("18", "**Final answer:** 18"),
        (r"\text{east}", r"\boxed{\text{east}}"),
        # The last box counts.
        ("6", r"\boxed{5} was wrong, it is \boxed{6}"),
    ],
)
def test_equal_answers_are_right(grader: SymbolicGrader, key: str, text: str) -> None:
    """Equal by mathematics, or by the conventions that math-verify documents."""
    assert outcome(grader, key, text) == "right"


@pytest.mark.parametrize(
    ("key", "text"),
    [
        ("1/3", "0.333"),
        ("(1,2)", r"\boxed{(2,1)}"),
        ("[1,2)", r"\boxed{[1,2]}"),
        (r"\{1,2\}", r"\boxed{\{1,2,3\}}"),
        ("50", r"\boxed{5\%}"),
        ("18", r"It may be 18, but \boxed{19}"),
        ("x+1", r"\boxed{y+1}"),
        (r"\text{east}", r"\boxed{\text{west}}"),
        ("5", r"\boxed{6} after \boxed{5"),
    ],
)
def test_other_answers_are_wrong(grader: SymbolicGrader, key: str, text: str) -> None:
    assert outcome(grader, key, text) == "wrong"


@pytest.mark.parametrize("text", ["", "no answer", r"\boxed{}", r"\boxed{\frac{1}{", r"\boxed{!!}"])
def test_a_text_without_an_expression_has_no_answer(grader: SymbolicGrader, text: str) -> None:
    assert outcome(grader, "1/2", text) == "unparsed"


def test_with_a_box_asked_for_nothing_else_counts(grader: SymbolicGrader) -> None:
    strict = SymbolicGrader(grader._pool, needs_box=True)
    assert outcome(strict, "1/2", "The answer is 1/2") == "unparsed"
    assert outcome(strict, "5", "5") == "unparsed"
    assert outcome(strict, "1/2", r"\boxed{1/2}") == "right"


@pytest.mark.parametrize("key", ["", " ", "!!", r"\frac{1}{"])
@pytest.mark.parametrize("text", ["5", ""])
def test_a_key_that_is_no_expression_is_the_keys_fault(grader: SymbolicGrader, key: str, text: str) -> None:
    assert outcome(grader, key, text) == "bad-key"


@given(st.integers(-(10**9), 10**9), st.integers(-(10**9), 10**9))
@settings(max_examples=15)
def test_integers_are_equal_here_as_they_are_for_math_verify(grader: SymbolicGrader, one: int, other: int) -> None:
    for key, answer in ((one, one), (one, other)):
        assert outcome(grader, str(key), f"{answer:,}") == ("right" if key == answer else "wrong")
        (there,) = grader._pool.grade([(str(key), f"{answer:,}", True)])
        assert there.outcome == ("right" if key == answer else "wrong")


@given(st.text(st.sampled_from("\\boxed{frac}$ 12.,%^_()[]=<½\ud800\0\n"), max_size=30))
@settings(max_examples=40)
def test_no_text_upsets_a_worker(grader: SymbolicGrader, text: str) -> None:
    assert outcome(grader, "1/2", text) in ("right", "wrong", "unparsed", "failed")


def test_an_answer_that_takes_too_long_fails_alone(grader: SymbolicGrader) -> None:
    """A power tower is computed in C, where no signal handler of Python runs. What is beside it gets its verdict."""
    result = grader.grade(
        [("1/2", r"\boxed{0.5}"), ("1/2", r"\boxed{9^{9^{9^{9}}}}"), ("1/2", r"\boxed{1/4}")],
    )
    assert [verdict.outcome for verdict in result] == ["right", "failed", "wrong"]
    assert result[1].reason == "took more than timeout_s = 1.5 CPU seconds"


def test_a_key_that_takes_too_long_is_the_keys_fault() -> None:
    """Told apart by grading the key without an answer: the pool here fails for one key, whatever the answer is."""

    class Scripted(WorkerPool):
        def grade(self, jobs: list[Job]) -> list[Verdict]:
            fails = [key == "long" or answer == "long" for key, answer, _ in jobs]
            return [Verdict("failed", "took too long") if fail else Verdict("unparsed") for fail in fails]

    grader = SymbolicGrader(Scripted(workers=1, timeout_s=1), needs_box=False)
    result = grader.grade([("long", r"\boxed{1/2}"), ("1/2", r"\boxed{long}"), ("1/2", r"\boxed{short}")])
    assert [verdict.outcome for verdict in result] == ["bad-key", "failed", "unparsed"]
    assert result[0].reason == "math-verify cannot read: reading it took too long"
    grader.close()


def test_a_worker_that_is_killed_is_replaced(grader: SymbolicGrader) -> None:
    """By the kernel for memory, say: the answer that it had fails, the next one gets a new process."""
    (worker,) = grader._pool._all
    process = worker._started()

    def kill() -> None:
        time.sleep(0.3)
        os.kill(process.pid, signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    (result,) = grader._pool.grade([("1/2", "9^{9^{9^{9}}}", True)])
    killer.join()
    assert result == Verdict("failed", "ended the process that graded it (exit code -9)")
    assert outcome(grader, "1/2", "0.5") == "right"


def test_threads_may_grade_at_once(grader: SymbolicGrader) -> None:
    """As rewards do while a rollout streams; none of them is the main thread, where alone alarms would work."""
    pairs = [[(f"{n}/7", rf"\boxed{{\frac{{{n}}}{{7}}}}"), (f"{n}/7", r"\boxed{1/9}")] for n in range(1, 7)]
    with ThreadPoolExecutor(3) as threads:
        result = list(threads.map(grader.grade, pairs))
    assert all([verdict.outcome for verdict in verdicts] == ["right", "wrong"] for verdicts in result)


def test_closing_ends_the_process_also_while_it_grades() -> None:
    grader = SymbolicGrader(WorkerPool(workers=1, timeout_s=60), needs_box=False)
    (worker,) = grader._pool._all
    process = worker._started()
    with ThreadPoolExecutor(1) as threads:
        graded = threads.submit(grader.grade, [("1/2", r"\boxed{9^{9^{9^{9}}}}")])
        time.sleep(0.3)
        grader.close()
        grader.close()
        with pytest.raises(RewardFailed, match=r"close\(\)|closed"):
            graded.result(timeout=30)
    assert process.returncode is not None
    with pytest.raises(RewardFailed, match=r"close\(\)|closed"):
        grader.grade([("1/2", "0.5")])


def test_no_process_outlives_the_run_that_started_it() -> None:
    """The run is killed, so it cannot clean up; the pipe closes, and the worker ends with it."""
    code = """
import os, signal
from unirl.rewards.math.worker_pool import Job, WorkerPool
pool = WorkerPool(workers=1, timeout_s=5)
pool.grade([("1/2", "0.5", True)])
print(pool._all[0]._process.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    pid = int(done.stdout)
    until = time.monotonic() + 60
    while is_running(pid) and time.monotonic() < until:
        time.sleep(0.05)
    assert not is_running(pid)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_an_installation_without_math_verify_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The worker is another interpreter; here it finds a broken math_verify first."""
    (tmp_path / "math_verify.py").write_text("raise ImportError('no parser generator')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    pool = WorkerPool(workers=1, timeout_s=5)
    with pytest.raises(RewardFailed, match=r"could not be started: ImportError: no parser generator"):
        pool.grade([("1/2", "0.5", True)])
    pool.close()
