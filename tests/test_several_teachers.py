"""Several teachers of a stage: each sample is compared with the one that its prompt names."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, cast

import pytest
import ray_clusters
import torch
from safetensors.torch import load_file, save_file
from small_runs import catalog, steps
from torch import Tensor
from unirl.conformance.doubles.requests import make_request
from unirl.conformance.doubles.rollouts import make_rollout
from unirl.conformance.doubles.tiny_decoder import TinyDecoder
from unirl.conformance.doubles.tiny_denoiser import TinyDenoiser
from unirl.core.errors import BatchError, DataError, RecipeError
from unirl.core.match.match import match
from unirl.core.recipe.compose import compose
from unirl.core.roles import Model, Replayed, ReplayedTokens
from unirl.core.specs.plan import Plan
from unirl.core.types.sampling import LatentSamplingConfig, SdeStepsConfig, TextSamplingConfig
from unirl.core.types.track import Track
from unirl.loop.run import train
from unirl.numerics.train.track_replay import TrackReplay

NAMES = ("maths", "code", "maths", "code", "maths", "maths")
"""Teacher of each of the six rows of the rollouts below."""
RECIPE = """
defaults:
  - /unirl
  - /model@model.student: sd3
  - /model@model.one: sd3
  - /model@model.other: sd3
  - /backend@backend.student: fsdp2
  - /engine: trainside
  - /algorithm: velocity-distillation
  - /sampling: latent
  - _self_
stages:
  image: {model: student, teachers: [one, other]}
model:
  student: {path: "${asset:quickstart,checkpoint}"}
  one: {path: "${asset:quickstart,checkpoint}"}
  other: {path: "${asset:quickstart,checkpoint}"}
backend: {student: {trains: full, lr: 1e-4}}
algorithm: {num_points: 2}
data: {train: prompts.jsonl, prompts_per_step: 4, samples_per_prompt: 2}
sampling: {num_inference_steps: 3, height: 64, width: 64, max_sequence_length: 8}
run: {max_steps: 2, media_every: 0, threads: 1}
"""


def named(track: Track, names: Sequence[str] = NAMES) -> Track:
    return dataclasses.replace(track, metadata=tuple({"teacher": name} for name in names))


def latents() -> tuple[TinyDenoiser, dict[str, TinyDenoiser], Track]:
    """A student, its teachers, and a rollout of the student."""
    student = TinyDenoiser(seed=0)
    sampling = LatentSamplingConfig(num_inference_steps=4, height=24, width=16, sde=SdeStepsConfig(mode="all"))
    track = make_rollout(student, make_request(student, sampling, track="image"))
    return student, {"maths": TinyDenoiser(seed=1), "code": TinyDenoiser(seed=2)}, named(track)


def texts() -> tuple[TinyDecoder, dict[str, TinyDecoder], Track]:
    student = TinyDecoder(seed=0)
    sampling = TextSamplingConfig(max_new_tokens=12, chat=False)
    track = make_rollout(student, make_request(student, sampling, track="text"))
    return student, {"maths": TinyDecoder(seed=1), "code": TinyDecoder(seed=2)}, named(track)


def replay_of(student: Model, teachers: dict[str, Any]) -> TrackReplay:
    forward = TrackReplay(student, stacked=True, policy_context=lambda which: nullcontext())
    forward.teachers = teachers
    return forward


def rows_of(name: str) -> list[int]:
    return [row for row, other in enumerate(NAMES) if other == name]


def alone(student: Model, teacher: Model, track: Track, name: str) -> tuple[TrackReplay, Track]:
    """A forward with one teacher, and the rows that name it."""
    return replay_of(student, {"": teacher}), track.select(rows_of(name))


def test_velocities_and_transitions_are_those_of_the_teacher_that_a_row_names() -> None:
    """Against each teacher alone. The rows go through the same module in the same batch: bit for bit."""
    student, teachers, track = latents()
    x = torch.randn(6, 2, *track.latent.latents.shape[2:], generator=torch.Generator().manual_seed(0))
    sigma = torch.tensor([[0.9, 0.3]]).repeat(6, 1)
    forward = replay_of(student, teachers)
    velocity = forward.velocity(track, x, sigma, policy="reference")
    replayed = cast(Replayed, forward(track, policy="reference"))
    assert not velocity.requires_grad and not replayed.means.requires_grad
    for name, teacher in teachers.items():
        rows = rows_of(name)
        one, part = alone(student, teacher, track, name)
        assert torch.equal(velocity[rows], one.velocity(part, x[rows], sigma[rows], policy="reference"))
        expected = cast(Replayed, one(part, policy="reference"))
        for field in dataclasses.fields(Replayed):
            assert torch.equal(getattr(replayed, field.name)[rows], getattr(expected, field.name)), field.name
    assert not torch.equal(*(replay_of(student, {"": one}).velocity(track, x, sigma, policy="reference") for one in teachers.values()))  # fmt: skip
    live = cast(Replayed, forward(track))
    assert torch.equal(live.means, cast(Replayed, replay_of(student, {})(track)).means), "the student stays itself"


@pytest.mark.parametrize("kind", ["reverse", "forward", "jensen"])
def test_divergences_and_their_gradients_are_those_of_the_teacher_that_a_text_names(kind: str) -> None:
    """Texts of one teacher are padded to the longest of all. Gradients add up over the teachers: fp32 sums."""
    student, teachers, track = texts()
    lengths = track.text.lengths
    assert len(set(lengths)) > 1, "texts of several lengths"
    forward = replay_of(student, teachers)
    result = forward.divergence(track, kind=kind)  # type: ignore[arg-type]
    factors = torch.linspace(0.5, 1.5, result.log_probs.numel()).view_as(result.log_probs)
    assert result.divergence is not None and result.log_probs.shape == (6, max(lengths))
    ours = gradient(student, (result.divergence * factors).sum())
    total: Tensor | None = None
    for name, teacher in teachers.items():
        rows = rows_of(name)
        one, part = alone(student, teacher, track, name)
        expected = one.divergence(part, kind=kind)  # type: ignore[arg-type]
        width = expected.log_probs.shape[1]
        assert expected.divergence is not None
        assert torch.equal(result.divergence[rows, :width], expected.divergence)
        assert torch.equal(result.valid[rows, :width], expected.valid) and not result.valid[rows, width:].any()
        theirs = gradient(student, (expected.divergence * factors[rows, :width]).sum())
        total = theirs if total is None else total + theirs
    torch.testing.assert_close(ours, total, rtol=1e-5, atol=1e-7)
    log_probs = cast(ReplayedTokens, forward(track, policy="reference")).log_probs
    for name, teacher in teachers.items():
        one, part = alone(student, teacher, track, name)
        expected = cast(ReplayedTokens, one(part, policy="reference"))
        assert torch.equal(log_probs[rows_of(name), : expected.log_probs.shape[1]], expected.log_probs)


def gradient(student: TinyDecoder, value: Tensor) -> Tensor:
    given = torch.autograd.grad(value, list(student.net.parameters()), retain_graph=True, allow_unused=True)
    return torch.cat([each.flatten() for each in given if each is not None])


def test_a_teacher_of_no_row_is_called_as_often_and_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that share the weights of a teacher must call it equally often, and take the same backward passes."""
    student, teachers, track = texts()
    only = named(track, ["maths"] * 6)
    calls: list[object] = []
    hidden = TinyDecoder.output_head

    def noted(self: TinyDecoder, *given: Any, **more: Any) -> Any:
        calls.append(self)
        return hidden(self, *given, **more)

    monkeypatch.setattr(TinyDecoder, "output_head", noted)
    result = replay_of(student, teachers).divergence(only, kind="reverse")
    assert calls == [*teachers.values()]
    expected = replay_of(student, {"": teachers["maths"]}).divergence(only, kind="reverse")
    assert result.divergence is not None and expected.divergence is not None
    assert torch.equal(result.divergence, expected.divergence)
    torch.testing.assert_close(
        gradient(student, result.divergence.sum()), gradient(student, expected.divergence.sum()), rtol=0, atol=0
    )


def test_a_row_that_names_no_teacher_is_told() -> None:
    student, teachers, track = latents()
    forward, wrong = replay_of(student, teachers), named(track, [*NAMES[:-1], "art"])
    with pytest.raises(BatchError, match=r"'teacher' 'art', expected one of 'maths', 'code'"):
        forward(wrong, policy="reference")


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    """The recipe, with prompts of both teachers, and teachers of other weights than the student."""
    rows = [
        {"prompt": f"a {colour} circle", "metadata": {"teacher": teacher}}
        for colour, teacher in zip(["red", "blue", "green", "red"], ["one", "other", "one", "one"], strict=True)
    ]
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    file = tmp_path / "taught.yaml"
    file.write_text(RECIPE.replace("prompts.jsonl", str(prompts)), encoding="utf-8")
    return file


def composed(recipe: Path, *words: str) -> Plan:
    return compose(str(recipe), list(words), catalog=catalog())


def taught(recipe: Path, folder: Path, *words: str) -> dict[int, dict[str, float]]:
    words = (f"run.dir={folder}", *words)
    train(composed(recipe, *words), catalog=catalog(), overrides=words)
    return steps(folder)


def moved(folder: Path, to: Path, *, seed: int) -> Path:
    """A checkpoint of sd3 with a denoiser of other weights."""
    import shutil

    shutil.copytree(folder, to)
    (file,) = (to / "transformer").glob("*.safetensors")
    torch.manual_seed(seed)
    tensors = load_file(file)
    save_file({name: value + 0.05 * value.float().std() * torch.randn(value.shape) for name, value in tensors.items()}, file)  # fmt: skip
    return to


def test_the_error_is_that_to_the_teacher_of_each_prompt(recipe: Path, tmp_path: Path) -> None:
    """Teacher `one` has the student's own weights, so its samples add nothing before the first update."""
    start = Path(composed(recipe).learners["student"].model.config.path)  # type: ignore[attr-defined]
    other = f"model.other.path={moved(start, tmp_path / 'other', seed=1)}"
    both = taught(recipe, tmp_path / "both", other, "run.max_steps=1")[1]["velocity_error"]
    alone = ("stages.image.teachers=[]", "stages.image.reference=other", "~model.one")
    every = taught(recipe, tmp_path / "alone", other, "run.max_steps=1", *alone)[1]["velocity_error"]
    assert 0 < both < every
    swapped = ("stages.image.teachers=[other,one]", other, "run.max_steps=1")
    assert taught(recipe, tmp_path / "swapped", *swapped)[1]["velocity_error"] == both, "names, not places"


@pytest.mark.slow
def test_two_ranks_give_the_numbers_of_one_process(recipe: Path, tmp_path: Path) -> None:
    """One rank has samples of one teacher alone, and calls both."""
    start = Path(composed(recipe).learners["student"].model.config.path)  # type: ignore[attr-defined]
    words = (f"model.other.path={moved(start, tmp_path / 'other', seed=1)}",)
    here = taught(recipe, tmp_path / "here", *words)
    ranks = ("launcher=ray", "launcher.train_ranks=2", "launcher.cpus=0.1")
    with ray_clusters.joined():
        there = taught(recipe, tmp_path / "there", *words, *ranks, "backend.student.mesh.shard=2")
    for step, one in here.items():
        for key in ("velocity_error", "loss", "grad_norm"):
            # Forwards of other batches: fp32 sums in another order, relative to the size of the number.
            assert there[step][key] == pytest.approx(one[key], rel=1e-4, abs=1e-7), key


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["stages.image.teachers=[one,tutor]"], "stages.image.teachers: got 'tutor'; the recipe has models"),
        (["stages.image.teachers=[one,one]"], "stages.image.teachers: got 'one' twice; name each model once."),
        (
            ["+stages.image.reference=one"],
            "stages.image.teachers: got 'one', 'other' beside stages.image.reference=one",
        ),
        (["stages.image.teachers=[one]"], "model.other: no stage uses this model"),
    ],
)
def test_teachers_that_a_stage_cannot_have(recipe: Path, words: list[str], says: str) -> None:
    with pytest.raises(RecipeError) as raised:
        composed(recipe, *words)
    assert says in str(raised.value), raised.value


def test_each_teacher_is_checked(recipe: Path) -> None:
    plan = composed(recipe, "model@model.other=wan21", "model.other.path=wan")
    reasons = [str(reason) for reason in match(plan, catalog=catalog()).reasons]
    assert any(
        reason.startswith("stages.image.teachers: got 'other', a model 'wan21'; expected a model 'sd3'")
        for reason in reasons
    ), reasons
    assert match(composed(recipe), catalog=catalog()).accepted


@pytest.mark.parametrize(
    ("teacher", "says"),
    [
        (None, "got no metadata 'teacher', expected one of 'one', 'other', stages.image.teachers."),
        ("othr", "got the metadata 'teacher' 'othr', expected one of 'one', 'other', stages.image.teachers; did you"),
    ],
)
def test_a_prompt_without_a_teacher_is_refused_before_anything_is_built(
    recipe: Path, tmp_path: Path, teacher: str | None, says: str
) -> None:
    prompts = tmp_path / "prompts.jsonl"
    lines = prompts.read_text(encoding="utf-8").splitlines()
    row = {"prompt": "a red ring", "metadata": {"teacher": teacher} if teacher else {}}
    prompts.write_text("\n".join([*lines, json.dumps(row)]) + "\n", encoding="utf-8")
    with pytest.raises(DataError) as raised:
        taught(recipe, tmp_path / "run")
    assert f"data.train: {prompts}:5: {says}" in str(raised.value)
