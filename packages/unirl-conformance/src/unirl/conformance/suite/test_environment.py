"""Episodes depend on their prompt, seed and answers alone; each answer gets an observation, and closing ends them."""

from __future__ import annotations

import multiprocessing
import threading
from contextlib import closing

from unirl.conformance.claims import claim
from unirl.conformance.fixtures.environment import EnvironmentCase

SETTLES_S = 5.0
"""Longest wait for threads that were told to end. Ending takes milliseconds; a busy machine takes longer."""


@claim("environment")
def test_a_seed_decides_an_episode(case: EnvironmentCase) -> None:
    """With the same seed and answers an episode is the same: again, in another environment, beside others or alone.
    A resumed run then continues as if it had never stopped.

    If it fails: draw from a generator made of the seed in `reset`, never from a global one, and keep nothing from one
    `reset` to the next.
    """
    for example in case.examples:
        with case.episodes([example] * 3, seeds=[5, 6, 5]) as episodes:
            told = episodes.run()
            again = episodes.run()
        with case.episodes([example], seeds=[6]) as alone:
            (other,) = alone.run()
        assert told[0] == told[2], f"two episodes of one seed differ: {told[0]} and {told[2]}"
        assert told == again, f"another reset gives {again}, the first one gave {told}"
        assert told[1] == other, f"alone it is {other}, beside others {told[1]}"


@claim("environment")
def test_every_answer_gets_an_observation(case: EnvironmentCase) -> None:
    """Each episode gets an observation at its start and after each answer, and nothing else; while it goes on the
    observation has a text, and the example's last answer ends it.

    If it fails: return an entry for each id that `step` was given, say something whenever `done` is false, and set
    `done` with the last answer.
    """
    for example in case.examples:
        with case.episodes([example] * 2, seeds=[1, 2]) as episodes:
            for told in episodes.run():
                ends = [one.done for one in told]
                expected = [False] * len(example.answers) + [True]
                assert ends == expected, f"answers {example.answers} end the episode so: {ends}, expected {expected}"


@claim("environment")
def test_episodes_that_are_over_are_left_alone(case: EnvironmentCase) -> None:
    """Episodes may be stepped apart from each other: those that do not answer in a turn, because they are over or were
    cut off, are not waited for, and the others go on as if they were alone.

    If it fails: look episodes up by the ids of `step`, and ask for no others.
    """
    for example in case.examples:
        with case.episodes([example] * 2, seeds=[1, 2]) as episodes:
            (_, expected) = episodes.run()
            start = episodes.start()
            told = [start[1], *(episodes.step([1], turn)[0] for turn in range(len(example.answers)))]
        assert told == expected, f"stepped alone it is {told}, beside another one {expected}"


@claim("environment")
def test_closing_an_environment_leaves_nothing(case: EnvironmentCase) -> None:
    """After `close`, which may come twice and in the middle of an episode, no thread or process is left.

    If it fails: end in `close` what `build` and `reset` have started, and join threads.
    """
    threads, processes = set(threading.enumerate()), set(multiprocessing.active_children())
    for example in case.examples:
        with closing(case.built()) as environment, case.episodes([example], seeds=[1]) as episodes:
            episodes.run()
            episodes.start()
            environment.close()
    for thread in set(threading.enumerate()) - threads:
        thread.join(SETTLES_S)
    left = [thread.name for thread in set(threading.enumerate()) - threads]
    left += [str(process) for process in set(multiprocessing.active_children()) - processes]
    assert not left, f"left after close: {', '.join(left)}"
