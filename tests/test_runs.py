"""Whole runs of the quickstart's checkpoint with the real parts: ratio 1, exact resume, stopping, and what is left after a failure."""

from __future__ import annotations

import hashlib
import json
import resource
import shutil
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from bad_input_page import answer
from small_runs import catalog, copy_up_to, events, flat, start_command
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from unirl.core.cli import main
from unirl.core.errors import CheckpointError, RewardFailed, RunFolderError
from unirl.core.recipe.compose import compose
from unirl.core.types.event import Event
from unirl.core.types.request import Request
from unirl.core.types.track import Track
from unirl.engines.trainside.engine import TrainsideEngine
from unirl.loop.checkpoints import Checkpoints
from unirl.loop.run import RunResult, train

pytestmark = [pytest.mark.slow, pytest.mark.nightly]

SMALL = [
    "data.prompts_per_step=3",
    "data.samples_per_prompt=4",
    "sampling.num_inference_steps=4",
    "eval.every=0",
    "eval.num_prompts=2",
    "eval.samples_per_prompt=4",
    "data.eval=''",
    "run.media_every=0",
    "run.threads=1",
    "~tracker.report",
]


EVALUATED = "data.eval=${asset:quickstart,prompts/heldout.jsonl}"
VARIED = ["+reward@reward.light=brightness", "reward.light.weight=0.1"]
"""A second reward that no two images share: the shapes of a dozen images may all score the same."""


@pytest.fixture
def start(tmp_path: Path) -> Callable[..., RunResult]:
    def run(name: str, *overrides: str, resume: Path | None = None) -> RunResult:
        words = [*SMALL, *overrides, *([] if resume else [f"run.dir={tmp_path / name}"])]
        return train(compose("quickstart", words, catalog=catalog()), catalog=catalog(), resume=resume, overrides=words)

    return run


ROUNDING = [
    ["train.micro_batch_size=2"],
    ["train.replay=serial", "backend.activation_checkpointing=true", "engine.forward_batch=5", "model.decode_batch=3"],
]


def tensors(folder: Path, step: int, tmp_path: Path) -> dict[str, Any]:
    """Everything that a checkpoint holds, flattened by name."""
    file = tmp_path / f"{folder.name}-{step}.pt"
    (backend,) = (p.parent for p in (folder / "checkpoints" / f"step-{step:06d}").rglob(".metadata"))
    dcp_to_torch_save(backend, file)
    return flat(torch.load(file, weights_only=True))


def assert_equal_bit_for_bit(left: dict[str, Any], right: dict[str, Any]) -> None:
    assert left.keys() == right.keys()
    assert any(isinstance(value, torch.Tensor) for value in left.values())
    for name, value in left.items():
        same = torch.equal(value, right[name]) if isinstance(value, torch.Tensor) else value == right[name]
        assert same, f"{name} differs"


@pytest.mark.parametrize("replay", ["stacked", "serial"])
def test_the_first_update_has_ratio_one(start: Callable[..., RunResult], replay: str) -> None:
    result = start("run", "run.max_steps=2", f"train.replay={replay}", "train.updates_per_step=2")
    for event in events(result.folder, "step"):
        # The old-log-prob pass runs the very micro-batches of the update: the same arithmetic, hence exactly 1.
        assert event["metrics"]["ratio_max_dev_first"] == 0.0
        # Rollout and replay differ in batch shape here, and fp32 rounding of log-probs of order 1 is 1e-7.
        assert event["metrics"]["logp_mismatch_max"] < 2e-6


@pytest.mark.parametrize("source", ["detached", "auto"])
@pytest.mark.parametrize("updates", [1, 2])
@pytest.mark.parametrize("replay", ["stacked", "serial"])
def test_old_log_probs_from_the_first_updates_own_forward_pass_change_no_number(
    start: Callable[..., RunResult],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    replay: str,
    updates: int,
    source: str,
) -> None:
    generate = TrainsideEngine.generate

    def generate_off(engine: TrainsideEngine, request: Request) -> Track:
        """With log-probs that are not those of a replay, on any machine."""
        track = generate(engine, request)
        if track.latent.log_probs is None:
            return track
        return replace(track, segment=replace(track.latent, log_probs=track.latent.log_probs + 5e-4))

    monkeypatch.setattr(TrainsideEngine, "generate", generate_off)
    settings = ["run.max_steps=2", f"train.replay={replay}", f"train.updates_per_step={updates}"]
    settings += ["backend.trains=lora", "algorithm.kl_coef=0.1", "train.micro_batch_size=3", "engine.forward_batch=5"]
    replayed = start("replay", *settings, "train.old_log_probs=replay")
    other = start(source, *settings, f"train.old_log_probs={source}")
    assert_equal_bit_for_bit(tensors(replayed.folder, 2, tmp_path), tensors(other.folder, 2, tmp_path))
    numbers = [[event["metrics"] for event in events(folder, "step")] for folder in (replayed.folder, other.folder)]
    assert numbers[0] == numbers[1]
    # 5e-4, below the bound of a run, to the rounding of log-probs of order 1.
    assert all(step["logp_mismatch_max"] > 4e-4 for step in numbers[0])


def test_the_engines_log_probs_are_the_replayed_ones_at_equal_batch_shape(start: Callable[..., RunResult]) -> None:
    result = start(
        "run", "run.max_steps=1", "train.replay=serial", "train.updates_per_step=1", "train.micro_batch_size=0"
    )
    (event,) = events(result.folder, "step")
    assert event["metrics"]["logp_mismatch_max"] == 0.0
    result = start(
        "engine", "run.max_steps=1", "train.replay=serial", "train.updates_per_step=1", "train.old_log_probs=engine"
    )
    (event,) = events(result.folder, "step")
    assert event["metrics"]["ratio_max_dev_first"] == 0.0


@pytest.mark.parametrize(
    "overrides",
    [
        ["sampling.kernel=dance-sde", "sampling.eta=0.3", "sampling.same_initial_noise=true", *VARIED],
        ["sampling.kernel=cps", "sampling.eta=0.8", *VARIED],
        ["sampling.kernel=cps", "+sampling.kernel_options.constants=false", *VARIED],
        ["sampling.guidance_scale=2", "sampling.negative_prompt=a red ring on the left"],
        ["sampling.guidance_scale=2", "sampling.guidance_mode=two-pass", "train.micro_batch_size=5"],
        ["sampling.guidance_scale=2", "sampling.guidance_mode=norm-corrected"],
        ["algorithm.ratio_norm=true", "algorithm.step_weight=inverse-dt"],
        ["sampling.sde.mode=random", "sampling.sde.last=1.0", "sampling.sde.count=2", "sampling.sde.per_group=true"],
        ["advantage.combine=normalize-then-sum", "+reward@reward.light=brightness"],
        ["backend.shard=always", "backend.activation_checkpointing=true"],
        ["engine.forward_batch=5"],
        ["sampling.trajectory_dtype=bfloat16"],
        ["sampling.trajectory_dtype=float16", "sampling.kernel=cps"],
    ],
    ids=lambda words: " ".join(words),
)
def test_every_variant_starts_at_ratio_one(start: Callable[..., RunResult], overrides: list[str]) -> None:
    result = start("run", "run.max_steps=1", "train.updates_per_step=2", *overrides)
    (event,) = events(result.folder, "step")
    assert event["metrics"]["ratio_max_dev_first"] == 0.0
    # Batch shapes of rollout and replay differ; fp32 rounding of log-probs of order 1 is 1e-7, more under guidance.
    assert event["metrics"]["logp_mismatch_max"] < 5e-6


def test_the_kl_to_the_reference_is_zero_until_the_adapter_has_moved(start: Callable[..., RunResult]) -> None:
    lora = ["backend.trains=lora", "backend.lr=1e-3", "algorithm.kl_coef=0.1"]
    result = start("run", "run.max_steps=2", "train.updates_per_step=1", *lora, *VARIED)
    first, second = (event["metrics"]["kl"] for event in events(result.folder, "step"))
    # A new adapter adds exactly 0, so both policies are one; after a step they are not.
    assert first == 0.0
    assert second > 0.0


@pytest.mark.parametrize(
    "overrides",
    [
        # A new adapter diverges by nothing, and then by about the target: the coefficient falls and rises.
        [
            "backend.trains=lora",
            "backend.lr=1e-3",
            "algorithm.kl_coef=0.1",
            "algorithm.kl_target=1e-3",
            "algorithm.kl_horizon=60",
        ],
        ["backend.trains=full"],
        ["backend.trains=full", "backend.ema.kind=adaptive", "eval.policy=ema", EVALUATED],
        ["backend.trains=lora", "backend.lagged.kind=linear"],
        ["sampling.sde.mode=window", "sampling.sde.window=2", "sampling.sde.move_every=1", "backend.lr_warmup_steps=3"],
    ],
    ids=["lora, adaptive kl", "full", "ema", "lagged", "window"],
)
def test_two_steps_and_two_after_a_resume_equal_four(
    start: Callable[..., RunResult], tmp_path: Path, overrides: list[str]
) -> None:
    whole = start("whole", "run.max_steps=4", "run.save_every=2", "run.keep=0", *overrides)
    second = start("parts", "run.max_steps=4", *overrides, resume=copy_up_to(whole.folder, 2, tmp_path / "parts"))
    assert (second.status, second.step) == ("done", 4)
    assert_equal_bit_for_bit(tensors(whole.folder, 4, tmp_path), tensors(second.folder, 4, tmp_path))
    numbers = [[event["metrics"] for event in events(folder, "step")] for folder in (whole.folder, second.folder)]
    assert numbers[0] == numbers[1]
    assert len(numbers[0]) == 4


def test_resuming_with_another_recipe_says_what_differs(start: Callable[..., RunResult]) -> None:
    first = start("run", "run.max_steps=2", "run.stop_at=1")
    with pytest.raises(CheckpointError, match=r"another recipe: algorithm\.clip_range was .*, is 0\.5"):
        start("run", "run.max_steps=2", "algorithm.clip_range=0.5", resume=first.folder)
    assert start("run", "run.max_steps=2", resume=first.folder).status == "done"


SMOOTH = [
    "~reward.shapes",
    "+reward@reward.light=brightness",
    "backend.max_grad_norm=null",
    "backend.lr=10",
    "backend.eps=1",
]
"""Steps along the gradient: far above its elements, eps keeps Adam from turning the rounding of zeros into whole steps.
The mean brightness jumps nowhere, unlike the shapes that are seen in the pixels."""


@pytest.mark.parametrize("changes", ROUNDING)
def test_a_resumed_run_may_change_what_changes_nothing_but_rounding(
    start: Callable[..., RunResult], tmp_path: Path, changes: list[str]
) -> None:
    words = ["run.max_steps=4", "run.save_every=2", "run.keep=0", "train.updates_per_step=1", *SMOOTH]
    whole = start("whole", *words, "train.micro_batch_size=4")
    parts = copy_up_to(whole.folder, 2, tmp_path / "parts")
    second = start("parts", *words, *changes, resume=parts)
    assert (second.status, second.step) == ("done", 4)
    before, expected, result = (
        torch.cat([value.flatten() for name, value in tensors(folder, step, tmp_path).items() if "/weights" in name])
        for folder, step in ((whole.folder, 2), (whole.folder, 4), (second.folder, 4))
    )
    # The same fp32 sums in another order, 1e-6 of the largest in each of two steps. A mean over a micro-batch instead of
    # the whole batch, or a row that is left out, is of the order of the step.
    assert float((result - expected).abs().max()) < 1e-4 * float((expected - before).abs().max())
    with pytest.raises(CheckpointError, match=r"another recipe: backend\.lr was 10\.0, is 5\.0"):
        start("parts", *words, *changes, "backend.lr=5", resume=parts)


def test_a_run_that_hashed_more_settings_resumes_and_another_recipe_is_still_refused(
    start: Callable[..., RunResult],
) -> None:
    """Runs from before `rounding_only`: their manifests have other hashes, and settings that no longer count."""
    first = start("run", "run.max_steps=2", "run.stop_at=1", "train.micro_batch_size=4")
    checkpoints = Checkpoints(first.folder / "checkpoints")
    saved = checkpoints.load()
    numbers = {**saved.state["numbers"], "train.micro_batch_size": 4, "engine.forward_batch": 0}

    def write(folder: Path) -> None:
        shutil.copytree(saved.backend_folder(""), folder, dirs_exist_ok=True)

    checkpoints.save(1, write=write, state={**saved.state, "plan_hash": "0" * 16, "numbers": numbers})
    with pytest.raises(CheckpointError, match=r"another recipe: backend\.lr was [\d.e-]+, is 5\.0\. Resume"):
        start("run", "run.max_steps=2", "backend.lr=5", resume=first.folder)
    second = start("run", "run.max_steps=2", "train.micro_batch_size=2", resume=first.folder)
    assert (second.status, second.step) == ("done", 2)


def test_a_run_can_be_extended_and_says_so(start: Callable[..., RunResult]) -> None:
    first = start("run", "run.max_steps=1")
    longer = start("run", "run.max_steps=2", resume=first.folder)
    assert (longer.status, longer.step) == ("done", 2)
    assert any("run.max_steps was 1, is 2" in event["text"] for event in events(first.folder, "finding"))


def test_a_truncated_checkpoint_is_refused_by_name(start: Callable[..., RunResult]) -> None:
    first = start("run", "run.max_steps=2", "run.save_every=1", "run.keep=0", "run.stop_at=2")
    checkpoint = first.folder / "checkpoints" / "step-000002"
    largest = max((path for path in checkpoint.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
    largest.write_bytes(largest.read_bytes()[:-10])
    with pytest.raises(
        CheckpointError, match=rf"file .*{largest.name} {answer('a checkpoint file that is cut short')}.*step-000001"
    ):
        start("run", "run.max_steps=3", resume=first.folder)
    assert start("run", "run.max_steps=3", resume=checkpoint.with_name("step-000001")).step == 3


def test_a_folder_that_holds_a_run_is_not_written_over(start: Callable[..., RunResult]) -> None:
    first = start("run", "run.max_steps=1")
    before = (first.folder / "events.jsonl").read_text()
    with pytest.raises(CheckpointError, match="already contains a run"):
        start("run", "run.max_steps=1")
    assert (first.folder / "events.jsonl").read_text() == before


def test_a_command_that_is_given_again_continues_the_run_until_it_is_done(tmp_path: Path) -> None:
    """The rest of a run that was killed before its first checkpoint is started again, and a run that is done stays so."""
    words = [*SMALL, f"run.dir={tmp_path / 'run'}", "run.max_steps=2", "--continue"]
    (tmp_path / "run").mkdir()
    cut_off = '{"kind":"step","step":1,"time":1.0,"metrics":{},"phases":{},"samples":12}\n'
    (tmp_path / "run" / "events.jsonl").write_text(cut_off)
    steps: list[list[int]] = []
    for more in (["run.stop_at=1"], [], []):
        before = len(events(tmp_path / "run", "step"))
        assert unirl_here("train", "quickstart", *words, *more) == 0
        steps.append([event["step"] for event in events(tmp_path / "run", "step")][before:])
    assert steps == [[1], [2], []]


def test_a_command_to_be_given_again_names_its_folder(capsys: pytest.CaptureFixture[str]) -> None:
    assert unirl_here("train", "quickstart", "--continue") == 2
    assert "--continue: name the run's folder, `run.dir=runs/mine`" in capsys.readouterr().err
    assert unirl_here("train", "quickstart", "--continue", "--resume", "runs/mine") == 2
    assert "use only one of them" in capsys.readouterr().err


def test_a_reward_that_fails_leaves_the_steps_before_it_resumable(
    start: Callable[..., RunResult], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from unirl.core.roles import ScoreInput, Scores
    from unirl.rewards.rules.brightness import BrightnessReward

    scored, sound = 0, BrightnessReward.score

    def breaks_in_the_third_step(self: BrightnessReward, samples: ScoreInput) -> Scores:
        nonlocal scored
        scored += 1
        scores = sound(self, samples)
        return Scores(values=scores.values * float("nan")) if scored == 3 else scores

    extra = ["+reward@reward.light=brightness", "run.max_steps=3"]
    monkeypatch.setattr(BrightnessReward, "score", breaks_in_the_third_step)
    with pytest.raises(RewardFailed, match=r"reward\.light: values of Scores is nan for sample 'r2/") as caught:
        start("run", *extra)
    assert any("unirl train --resume" in note for note in caught.value.__notes__)
    monkeypatch.setattr(BrightnessReward, "score", sound)
    assert start("run", *extra, resume=tmp_path / "run").step == 3
    finished = events(tmp_path / "run", "run_finished")
    assert [(event["status"], event["step"]) for event in finished] == [("failed", 2), ("done", 3)]


def test_a_constant_reward_skips_the_step_and_says_so_or_stops_the_run_on_request(
    start: Callable[..., RunResult],
) -> None:
    # 1e-46 of a brightness underflows to 0 in fp32.
    constant = [
        "run.max_steps=1",
        "+reward@reward.light=brightness",
        "reward.shapes.weight=0",
        "reward.light.weight=1e-46",
    ]
    with pytest.raises(RewardFailed, match="all 12 samples of step 0 got 0"):
        start("fail", *constant, "advantage.constant_reward=fail")
    result = start("skip", *constant)
    assert events(result.folder, "step")[0]["metrics"]["steps_skipped"] == 1.0
    assert any("all 12 samples of step 0 got 0" in event["text"] for event in events(result.folder, "finding"))


def test_a_loss_that_reads_no_score_trains_whatever_the_rewards_are(tmp_path: Path) -> None:
    """Distillation logs them; eight completions that score 0 are as good to learn from as any."""
    words = (
        *("quickstart-distillation", "run.max_steps=1", "data.prompts_per_step=8", "data.eval=''", "~tracker.report"),
        *("reward.math.weight=0", "advantage.constant_reward=fail", f"run.dir={tmp_path / 'run'}"),
    )
    result = train(compose(words[0], words[1:], catalog=catalog()), catalog=catalog())
    metrics = events(result.folder, "step")[0]["metrics"]
    assert metrics["updates"] == 2 and metrics["reward_std"] == 0.0


def unirl_here(*words: str) -> int | str | None:
    """The exit code of a command in this process, which has imported everything."""
    with pytest.raises(SystemExit) as caught:
        main([*words])
    return caught.value.code


def test_ctrl_c_leaves_a_resumable_run_and_says_how(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = start_command("train", "quickstart", *SMALL, "run.dir=run", "run.max_steps=500", cwd=tmp_path)
    log, deadline = tmp_path / "run" / "events.jsonl", time.monotonic() + 120
    while (
        command.poll() is None
        and time.monotonic() < deadline
        and not (log.exists() and '"kind":"step"' in log.read_text())
    ):
        time.sleep(0.05)
    command.send_signal(signal.SIGINT)
    output, _ = command.communicate(timeout=60)
    steps = [event["step"] for event in events(tmp_path / "run", "step")]
    assert events(tmp_path / "run", "run_finished")[-1]["status"] == "stopped", output
    assert "unirl train --resume run" in output
    assert (tmp_path / "run" / "checkpoints" / f"step-{steps[-1]:06d}" / "manifest.json").is_file()
    monkeypatch.chdir(tmp_path)
    assert unirl_here("train", "--resume", "run", f"run.max_steps={steps[-1] + 1}") == 0
    assert [event["step"] for event in events(tmp_path / "run", "step")] == [*steps, steps[-1] + 1]


def test_a_full_disk_stops_the_run_and_keeps_the_checkpoints_before_it(start: Callable[..., RunResult]) -> None:
    first = start("run", "run.max_steps=2", "run.stop_at=1")
    before, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    # Files past 1 MB cannot be written, as on a full disk: the weights are larger, the event log is not.
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, before[1]))
    try:
        with pytest.raises(
            CheckpointError,
            match=rf"could not be written: .*{answer('a checkpoint that cannot be written')}: step-000001",
        ):
            start("run", "run.max_steps=2", resume=first.folder)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert [path.name for path in (first.folder / "checkpoints").iterdir()] == ["step-000001"]
    assert start("run", "run.max_steps=2", resume=first.folder).status == "done"


@pytest.mark.parametrize("how", ["deleted", "moved", "replaced"])
def test_a_run_whose_folder_goes_stops_with_an_error_and_writes_nowhere_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """After the first of three steps. The folder does not come back, and that of another run is left alone."""
    words = [*SMALL, "run.dir=run", "run.max_steps=3", "run.save_every=1"]
    monkeypatch.chdir(tmp_path)

    def lose(event: Event) -> None:
        if event.kind == "checkpoint_saved" and event.step == 1:
            Path("run").rename("moved")
            if how == "deleted":
                shutil.rmtree("moved")
            elif how == "replaced":
                Path("run").mkdir()
                Path("run/events.jsonl").touch()

    plan = compose("quickstart", words, catalog=catalog())
    with pytest.raises(RunFolderError, match=answer("a run folder that is deleted or moved under its run")):
        train(plan, catalog=catalog(), overrides=words, listeners=[lose])
    left = {"deleted": [], "moved": ["moved"], "replaced": ["moved", "run"]}[how]
    assert sorted(path.name for path in tmp_path.iterdir()) == left
    if how == "replaced":
        assert [path.name for path in Path("run").iterdir()] == ["events.jsonl"]
    if how == "moved":
        result = train(plan, catalog=catalog(), overrides=words, resume=Path("moved"))
        assert (result.status, result.folder) == ("done", Path("moved"))


def test_a_live_run_is_not_joined_and_a_killed_one_is_taken_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def said() -> str:
        return "".join(capfd.readouterr())

    monkeypatch.chdir(tmp_path)
    words = ("train", "quickstart", *SMALL, "run.dir=run", "run.max_steps=500", "run.save_every=1")
    command = start_command(*words, cwd=tmp_path)
    deadline = time.monotonic() + 120
    while (
        command.poll() is None
        and time.monotonic() < deadline
        and not list((tmp_path / "run").glob("checkpoints/step-*/manifest.json"))
    ):
        time.sleep(0.05)
    assert command.poll() is None, command.communicate()[0]
    try:
        events_of_both = ("two runs at once with one `run.dir`", "a resume of a run that is still running")
        for event, second in zip(events_of_both, (words, ("train", "--resume", "run")), strict=True):
            assert unirl_here(*second) == 1
            output = said()
            assert answer(event) in output
            assert f"process {command.pid} on host" in output
    finally:
        command.kill()
        command.communicate()
    done = max(int(path.name[5:]) for path in (tmp_path / "run" / "checkpoints").glob("step-*"))
    assert unirl_here("train", "--resume", "run", f"run.max_steps={done + 1}") == 0
    assert f"{answer('the lock of a killed run')} {command.pid} on host" in said()
    assert not (tmp_path / "run" / "run.lock").exists()


def test_a_resume_is_refused_that_could_not_go_on_as_it_began(start: Callable[..., RunResult], tmp_path: Path) -> None:
    from unirl.quickstart import prompts_path

    file = tmp_path / "prompts.jsonl"
    file.write_bytes(Path(prompts_path("train")).read_bytes())
    first = start("run", f"data.train={file}", "run.max_steps=2")
    for words, says in (
        (["run.max_steps=1"], r"run\.max_steps: got 1; " + answer("a resume with fewer steps than are done")),
        (["run.max_steps=3", "run.stop_at=2"], r"run\.stop_at: got 2; 2 steps are done"),
    ):
        with pytest.raises(CheckpointError, match=says):
            start("run", f"data.train={file}", *words, resume=first.folder)
    file.write_bytes(file.read_bytes() + b'{"prompt": "a", "color": "red", "shape": "ring", "place": "left"}\n')
    with pytest.raises(
        CheckpointError, match=r"data\.train: .*" + answer("a resume after the prompt file has changed")
    ):
        start("run", f"data.train={file}", "run.max_steps=3", resume=first.folder)


def test_a_resume_is_refused_when_the_code_of_a_reward_has_changed(
    start: Callable[..., RunResult], tmp_path: Path
) -> None:
    file = tmp_path / "mine.py"
    code = "def score(images): return [float(image.getpixel((32, 32))[0]) for image in images]\n"
    file.write_text(code)
    words = (EVALUATED, "+reward@reward.mine=function", f"reward.mine.target={file}:score")
    first = start("run", *words, "run.max_steps=1")
    recorded = json.loads((first.folder / "recipe.json").read_text())["files"]
    assert recorded["reward.mine.target"] == hashlib.sha256(code.encode()).hexdigest()
    assert {"data.train", "data.eval"} <= recorded.keys()
    file.write_text(code.replace("[0]", "[1]"))
    says = answer("a resume after the file of a reward function has changed")
    with pytest.raises(CheckpointError, match=rf"reward\.mine\.target: .*mine.py:score {says}"):
        start("run", *words, "run.max_steps=2", resume=first.folder)


def test_a_disk_that_fills_up_leaves_the_events_whole(tmp_path: Path) -> None:
    from unirl.core.errors import DiskFull
    from unirl.core.observe.events import EventStream, read_events

    stream = EventStream(tmp_path / "events.jsonl")
    stream.emit("rollout", step=1, text="x" * 600)
    before, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        with pytest.raises(DiskFull, match=r"events\.jsonl: could not be written: .*MiB are free in"):
            stream.emit("rollout", step=2, text="x" * 600)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    stream.close()
    assert [event.step for event in read_events(tmp_path / "events.jsonl")] == [1]
