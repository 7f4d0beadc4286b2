"""A tracker keeps all of a run."""

from __future__ import annotations

import copy
import math
from pathlib import Path

from unirl.conformance.claims import claim
from unirl.conformance.doubles.samples import make_samples
from unirl.conformance.fixtures.tracker import (
    CONFIG,
    TrackerCase,
    clips,
    files_left,
    numbers,
    pictures,
    texts,
    writing,
)
from unirl.core.observe.tracking import MAX_SAMPLES
from unirl.core.types.batch import same
from unirl.core.types.event import Event

SHORT, LONG, WIDTH = 2, 16, 60
"""Two runs of so many steps, each of which logs so many numbers: between them lie 840 numbers."""
BYTES_A_NUMBER = 1
"""Least size of a random number: at two digits 6.6 bits."""
PROMPT, TEXT = 500, 2000
"""Characters of a prompt and of a text that are shown at each step of those two runs."""
BYTES_A_CHARACTER = 0.75
"""Least size of one of 64 random characters: six bits."""
FEW, MANY = 3, 203
"""Steps of two runs at the same time."""
STAYS = 0.9
"""Share of its size that a file must keep when it is written again. A picture of the run may be compressed better than
before; a file that lost the 120 steps of the first session keeps far less."""
KEYS = ("reward/shapes/color", "награда/среднее", "报酬", "key with spaces, commas", "a.b-c_d", "k" * 200)
TEXTS = (
    "a ring | reward 0.50",
    "",
    "word " * 4000,
    "x" * 4000,
    "two\nlines\r\n\ttabbed | reward 0.25",
    "<script>alert('&amp;')</script> ]]> {{ braces }} {% block %} $x^2$ %s {0} \\n",
    "красный круг | 紅い輪 | حلقة حمراء | 🟥🐕‍🦺",
    "no number | reward high",
    "no number | reward nan",
    "a ring | reward 0.50 | truncated",
    "bell \a, nul \0, escape \x1b[31m, line \u2028 separators \x85, \ufffd and \N{RIGHT-TO-LEFT OVERRIDE}",
)


@claim("tracker")
def test_a_whole_run_is_accepted(case: TrackerCase) -> None:
    """Every event, number, image, video and text of a run is taken without raising, also kinds of events that are new.

    A tracker that raises is left out for the rest of the run.

    If it fails: let `event` pass over kinds that it does not show, and read no more of an event's data than it needs.
    Samples of a stage may have no rewards, and those of a child have a lineage.
    """
    with case.run() as run:
        run.evaluate(0, {"score_mean": 0.25, "reward/brightness": 0.5})
        for done in (1, 2):
            run.samples("train", pictures(4), ["a red ring"] * 4, [0.5] * 4, step=done - 1)
            run.samples("train", texts("red", "so it is"), ["2 + 2", "3"], [1.0, 0.0], step=done - 1)
            run.samples("train", clips(2), ["2 + 2", "3"], step=done - 1)
            for children in (pictures(4), clips(2), texts("a", "b", "c", "d")):
                run.family("train", texts("a red ring", "red"), children, step=done - 1)
            run.step(done, {**numbers(done), "updates": 2, "steps_skipped": 0.0})
        run.emit("rollout", step=2, samples=4)
        run.events.finding("gradient RMS is small", step=2)
        run.emit("images", step=2, key="train", count=4)
        run.emit("checkpoint_saved", step=2, folder="step-2", size_bytes=4096, seconds=0.25)
        run.emit("weights_published", step=2, where={"host": "example", "ports": [1, 2]}, note=None)
        run.samples("eval", pictures(4), ["a blue disk"] * 4, [1.0] * 4, step=2)
        run.samples("eval", texts(*["a blue disk"] * 4), ["what is it?"] * 4, [1.0] * 4, step=2)
        run.evaluate(2, {"score_mean": 0.75, "reward/brightness": 0.5})
        run.finish("done")
    assert files_left(run.folder), _nothing(run.folder)


@claim("tracker")
def test_every_number_that_is_logged_is_kept(case: TrackerCase) -> None:
    """All numbers of all steps are kept: a longer run leaves more behind.

    What is written is the tracker's own matter, so it is the size that counts: 840 random numbers take 840 bytes at
    the very least, which one number of each step, or all numbers of one step, do not reach.

    If it fails: write what `log` gets and flush it in `finish`. A tracker that sends elsewhere needs settings in its
    spec's `trial` with which it writes files below the run folder, as W&B does offline.
    """
    sizes: list[int] = []
    for steps in (SHORT, LONG):
        with case.run(f"of-{steps}") as run:
            run.steps(range(1, steps + 1), width=WIDTH)
            run.finish("done")
        left = files_left(run.folder)
        assert left, _nothing(run.folder)
        sizes.append(sum(left.values()))
    more = (LONG - SHORT) * WIDTH
    case.record("bytes a number", (sizes[1] - sizes[0]) / more)
    assert sizes[1] - sizes[0] >= BYTES_A_NUMBER * more, (
        f"{SHORT} steps leave {sizes[0]} bytes and {LONG} leave {sizes[1]}: too few for {more} more numbers"
    )


@claim("tracker")
def test_every_text_that_is_shown_is_kept(case: TrackerCase) -> None:
    """Texts are kept whole, with their prompts: a run that shows more of them leaves more behind.

    How they are shown is the tracker's own matter, so it is the size that counts: 14 texts of 2000 random characters
    with prompts of 500 take 26,250 bytes at the very least, which their beginnings alone do not reach.

    If it fails: write what `samples` gets, each text as long as it is, and the captions with it. Bound how many of a
    batch are kept, if anything.
    """
    sizes: list[int] = []
    for steps in (SHORT, LONG):
        with case.run(f"of-{steps}") as run:
            for done in range(1, steps + 1):
                text, prompt = writing(done, length=TEXT), writing(-done, length=PROMPT)
                run.samples("train", texts(text), [prompt], [0.5], step=done - 1)
                run.steps((done,))
            run.finish("done")
        left = files_left(run.folder)
        assert left, _nothing(run.folder)
        sizes.append(sum(left.values()))
    more = (LONG - SHORT) * (TEXT + PROMPT)
    case.record("bytes a character", (sizes[1] - sizes[0]) / more)
    assert sizes[1] - sizes[0] >= BYTES_A_CHARACTER * more, (
        f"{SHORT} texts leave {sizes[0]} bytes and {LONG} leave {sizes[1]}: too few for {more} more characters"
    )


@claim("tracker")
def test_resuming_loses_nothing(case: TrackerCase) -> None:
    """A session that resumes at an earlier checkpoint continues in the same run folder and loses no file of the first.

    If it fails: open files to append when `resumed_at` is set, or new ones beside the old, and take up the id of the
    first session; what is written as a whole has to hold both sessions.
    """
    with case.run() as first:
        first.samples("eval", texts(writing(0, length=TEXT)), ["2 + 2"], [0.5], step=0)
        first.steps(range(1, 121))
        first.finish("stopped")
    before = files_left(first.folder)
    assert before, _nothing(first.folder)
    # The last two steps came after the checkpoint and are done again.
    with case.run(resumed_at=118) as second:
        second.steps(range(119, 124))
        second.samples("eval", texts("so it is"), ["2 + 2"], [1.0], step=123)
        second.finish("done")
    after = files_left(second.folder)
    for name, size in before.items():
        assert name in after, f"{name} of the first session is gone"
        assert after[name] >= STAYS * size, f"{name} had {size} bytes after the first session, now {after[name]}"
    assert after != before, "the resumed session left nothing behind"


@claim("tracker")
def test_a_tracker_may_join_when_a_run_is_resumed(case: TrackerCase) -> None:
    """A run that began without the tracker can be resumed with it: nothing of an earlier session has to be there.

    If it fails: where `resumed_at` is set, check whether there is something to continue, and start anew otherwise.
    """
    with case.run(resumed_at=5) as run:
        run.steps((6, 7))
        run.finish("done")
    assert files_left(run.folder), _nothing(run.folder)


@claim("tracker")
def test_non_finite_numbers_are_accepted(case: TrackerCase) -> None:
    """NaN and infinity do not make a tracker raise: the step that has them is the one that has to be seen.

    If it fails: look for `int(...)`, strict JSON, and axes that are scaled to the largest number.
    """
    with case.run() as run:
        run.steps((1,))
        for done, value in enumerate((math.nan, math.inf, -math.inf), start=2):
            run.step(done, {"reward_mean": value, "reward/1": value})
        run.evaluate(4, {"score_mean": math.nan})
        run.steps((5,))
        run.finish("failed")
    assert files_left(run.folder), _nothing(run.folder)


@claim("tracker")
def test_odd_names_and_long_texts_are_accepted(case: TrackerCase) -> None:
    """Keys with slashes and spaces, words of any script, prompts and texts of any length, and many samples are taken.

    If it fails: quote keys before they become file names, write files as UTF-8, and escape what goes into a page.
    """
    with case.run(name='проба 1/2 – <b>"bold"</b>') as run:
        run.step(1, dict.fromkeys(KEYS, 0.5))
        prompts = [TEXTS[row % len(TEXTS)] for row in range(MAX_SAMPLES)]
        rewards = [0.5] * MAX_SAMPLES
        for step, key in enumerate(("eval", "eval/held-out set", "картинки")):
            run.samples(key, pictures(MAX_SAMPLES), prompts, rewards, step=step)
            run.samples(key, clips(2), prompts[:2], step=step)
            written = texts(*[TEXTS[-row % len(TEXTS)] for row in range(MAX_SAMPLES)])
            run.samples(key, written, prompts, rewards, step=step)
            run.family(key, written, pictures(MAX_SAMPLES), step=step)
        run.samples("train", pictures(1, height=40), TEXTS[2:3], step=2)
        for text in TEXTS:
            run.events.finding(text, step=2)
        run.evaluate(2, dict.fromkeys(KEYS, 0.5))
        run.finish("done")
    assert files_left(run.folder), _nothing(run.folder)


@claim("tracker")
def test_two_runs_in_one_process_do_not_mix(case: TrackerCase) -> None:
    """Two runs at once, as in a sweep, are kept apart, and one continues when the other ends.

    If it fails: look for a run, a writer or a step that is kept on the class or the module instead of the object, and
    for libraries that have one "current" run unless they are told otherwise (`reinit="create_new"` of W&B).
    """
    with case.run("one") as one, case.run("other") as other:
        for done in range(1, MANY):
            one.steps((done,), prefix="first-run/")
            if done < FEW:
                other.steps((done,), prefix="second-run/")
        other.finish("done")
        one.steps((MANY,), prefix="first-run/")
        one.finish("done")
    left = {run: files_left(run.folder) for run in (one, other)}
    for run, strange in ((one, b"second-run/"), (other, b"first-run/")):
        assert left[run], _nothing(run.folder)
        mixed = [name for name in left[run] if strange in (run.folder / name).read_bytes()]
        assert not mixed, f"{mixed[0]} of run {run.folder.name!r} has numbers of the other run"
    many, few = (sum(left[run].values()) for run in (one, other))
    more = len(numbers(0)) * (MANY - FEW)
    assert many - few >= BYTES_A_NUMBER * more, (
        f"the run of {MANY} steps left {many} bytes and the one of {FEW - 1} steps {few}: numbers went astray"
    )


@claim("tracker")
def test_a_tracker_does_not_modify_its_input(case: TrackerCase) -> None:
    """Numbers, samples, events and the recipe are unchanged afterwards: other trackers get the very same.

    If it fails: look for operations in place on the images (`mul_`, `clamp_`), for `pop` and `update` on the recipe,
    the metrics, the lineage or an event's data, and make a copy first.
    """
    with case.run() as run:
        metrics, lineage = numbers(1), {"text": texts("a ring", "a disk")}
        media = (pictures(2), clips(2), texts("so it is", "a text"))
        tracks = [make_samples(each, ["ring", "disk"], [0.5, 1.0], truncated=[0]) for each in media]
        data = {"metrics": dict(metrics), "phases": {"train": 0.25}, "samples": 4}
        given = (metrics, lineage, tracks, data)
        before = copy.deepcopy(given)
        run.tracker.log(metrics, step=1)
        for each in tracks:
            run.tracker.samples("train", each, step=1, lineage=lineage)
        run.tracker.event(Event(kind="step", step=1, data=data))
        run.finish("done")
    assert metrics == before[0], f"the metrics were {before[0]}, now they are {metrics}"
    assert same(lineage, before[1]), f"the lineage was {before[1]}, now it is {lineage}"
    for each, untouched in zip(tracks, before[2], strict=True):
        kind = "nothing" if each.media is None else each.media.kind
        assert same(each, untouched), f"the samples of {kind} were changed in place"
    assert data == before[3], f"the data of an event was {before[3]}, now it is {data}"
    assert run.info.config == CONFIG, f"the recipe was {CONFIG}, now it is {run.info.config}"


def _nothing(folder: Path) -> str:
    return f"nothing was left in the run folder {folder.name!r} besides the run's own files"
