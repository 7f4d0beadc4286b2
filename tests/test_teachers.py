"""A frozen model of the recipe as the reference policy of a stage: a teacher."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray_clusters
import torch
from safetensors.torch import load_file, save_file
from small_runs import catalog
from unirl.backends.fsdp2.backend import Fsdp2Backend
from unirl.core.errors import PlanRejected, RecipeError
from unirl.core.match.match import match
from unirl.core.specs.capability import Cap
from unirl.core.types.track import Track
from unirl.loop.build import built_parts
from unirl.models.sd3.tiny import write
from writer_and_painter import JOINT, RECIPE, composed, numbers

pytestmark = [pytest.mark.slow, pytest.mark.nightly]

STEPS = ("run.max_steps=2", "run.save_every=2", "+reward@reward.light=brightness", "reward.light.weight=0.1")
KL = ("algorithm.rewrite.kl_coef=0.5", "algorithm.rewrite.aggregation=token-mean")
PPO = ("algorithm@algorithm.rewrite=ppo", "backend.writer.critic.lr=1e-3", "algorithm.rewrite.kl_coef=0.1")
DISTILLED = """
defaults:
  - /unirl
  - /model@model.student: sd3
  - /model@model.teacher: sd3
  - /backend@backend.student: fsdp2
  - /engine: trainside
  - /algorithm: flow-grpo
  - /sampling: latent
  - /reward@reward.light: brightness
  - _self_
stages:
  image: {model: student, reference: teacher}
model:
  student: {path: "${asset:quickstart,checkpoint}"}
  teacher: {path: "${asset:quickstart,checkpoint}"}
backend: {student: {trains: full}}
algorithm: {kl_coef: 0.5}
data: {train: "${asset:quickstart,enhancer/prompts/train.jsonl}", prompts_per_step: 2, samples_per_prompt: 2}
sampling: {num_inference_steps: 3, height: 64, width: 64, max_sequence_length: 8}
run: {max_steps: 2, media_every: 0, threads: 1}
"""
OWN = "model.teacher.path=${asset:quickstart,enhancer/checkpoint}"
TEACHER = ("+model@model.teacher=qwen3", "stages.rewrite.reference=teacher", OWN)
SEPARATE = ("launcher=ray", "launcher.placement=separate", "launcher.cpus=0.1", "launcher.reward_cpus=0.1")


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    file = tmp_path / "writer.yaml"
    file.write_text(RECIPE, encoding="utf-8")
    return file


@pytest.fixture(scope="module")
def ray_here() -> Iterator[None]:
    with ray_clusters.joined():
        yield


@pytest.fixture
def writer(recipe: Path) -> Path:
    """The checkpoint of the writer."""
    return Path(composed(recipe).stage("rewrite").model.config.path)  # type: ignore[attr-defined]


@pytest.fixture
def teacher(writer: Path, tmp_path: Path) -> Path:
    """The writer's checkpoint with other weights."""
    folder = tmp_path / "teacher"
    shutil.copytree(writer, folder)
    torch.manual_seed(1)
    tensors = load_file(folder / "model.safetensors")
    other = {name: value + 0.1 * value.float().std() * torch.randn(value.shape) for name, value in tensors.items()}
    other = {name: value.to(tensors[name].dtype) for name, value in other.items()}
    save_file(other, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def log_probs(folder: Path, track: Track) -> list[torch.Tensor]:
    """Log-probs of the tokens of each row, by transformers."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True).eval()
    rows: list[torch.Tensor] = []
    for prompt, tokens in zip(track.text.prompt_tokens, track.text.tokens, strict=True):
        with torch.no_grad():
            logits = model(torch.cat([prompt, tokens])[None]).logits[0, len(prompt) - 1 : -1]
        scores = torch.log_softmax(logits.double() / track.text.temperature, dim=-1)
        rows.append(scores.gather(1, tokens[:, None])[:, 0])
    return rows


@pytest.mark.parametrize("trains", ["full", "lora"])
def test_the_kl_of_the_loss_is_that_to_the_teacher(
    recipe: Path, writer: Path, teacher: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trains: str
) -> None:
    """Adapters start from the checkpoint, too, and the teacher has none."""
    tracks: list[Track] = []
    train = Fsdp2Backend.train

    def noting(self, jobs, *, progress):
        tracks.extend(job.track for job in jobs)
        return train(self, jobs, progress=progress)

    monkeypatch.setattr(Fsdp2Backend, "train", noting)
    words = (*STEPS, *KL, *TEACHER, f"model.teacher.path={teacher}", "train.micro_batch_size=2", "run.stop_at=1")
    words = (*words, f"backend.writer.trains={trains}")
    (step,) = numbers(composed(recipe, *words, f"run.dir={tmp_path / 'with'}")).values()
    (without,) = numbers(
        composed(recipe, *words, "algorithm.rewrite.kl_coef=1e-12", f"run.dir={tmp_path / 'without'}")
    ).values()
    assert (tracks[0].sample_weights == 1).all()
    pairs = zip(log_probs(writer, tracks[0]), log_probs(teacher, tracks[0]), strict=True)
    # k3 of Schulman (2020), a mean over all tokens.
    terms = torch.cat([torch.exp(other - own) - 1 - (other - own) for own, other in pairs])
    expected = float(terms.mean())
    assert expected > 1e-3, "the teacher is another policy"
    # log-probs of about 5 in fp32 are good to 1e-6, and k3 grows at most by e^d - 1 of their error.
    assert step["rewrite/kl"] == pytest.approx(expected, rel=1e-3, abs=1e-5)
    assert step["rewrite/loss"] - without["rewrite/loss"] == pytest.approx(0.5 * expected, rel=1e-3, abs=1e-5)


@pytest.fixture
def taught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Taught]:
    """The first step of the recipe DISTILLED with a teacher that is another policy, as `taught(*overrides)`."""
    from diffusers import SD3Transformer2DModel

    file = tmp_path / "distilled.yaml"
    file.write_text(DISTILLED, encoding="utf-8")
    own = Path(composed(file).learners["student"].model.config.path)  # type: ignore[attr-defined]
    shutil.copytree(own, tmp_path / "teacher")
    networks = {name: SD3Transformer2DModel.from_pretrained(own / "transformer") for name in ("student", "teacher")}
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in networks["teacher"].parameters():
            parameter += 0.02 * torch.randn(parameter.shape)
    networks["teacher"].save_pretrained(tmp_path / "teacher" / "transformer")
    tracks: list[Track] = []
    train = Fsdp2Backend.train

    def noting(self, jobs, *, progress):
        tracks.extend(job.track for job in jobs)
        return train(self, jobs, progress=progress)

    monkeypatch.setattr(Fsdp2Backend, "train", noting)

    def run(*words: str) -> Taught:
        words = ("run.stop_at=1", f"model.teacher.path={tmp_path / 'teacher'}", f"run.dir={tmp_path / 'run'}", *words)
        (step,) = numbers(composed(file, *words)).values()
        return Taught(step, tracks[0], networks)

    return run


class Taught:
    """Metrics of a step, its track, and diffusers' networks of student and teacher."""

    def __init__(self, step: dict[str, float], track: Track, networks: dict[str, Any]) -> None:
        self.step, self.track, self._networks = step, track, networks

    def velocity(self, model: str, row: int, position: int, *, scale: float = 1.0) -> torch.Tensor:
        """v_neg + scale (v_pos - v_neg) at a stored latent, by diffusers."""
        segment = self.track.latent
        (slot,) = (segment.positions[row] == position).nonzero()[0].tolist()

        def of_branch(branch: str) -> torch.Tensor:
            given = self.track.conditions[branch].expanded()
            with torch.no_grad():
                return self._networks[model](
                    hidden_states=segment.latents[row, slot][None],
                    timestep=1000.0 * segment.sigmas[position][None],
                    encoder_hidden_states=given["prompt_embeds"][row][None],
                    pooled_projections=given["pooled"][row][None],
                    return_dict=False,
                )[0].double()

        positive = of_branch("positive")
        if scale == 1.0:
            return positive
        negative = of_branch("negative")
        return negative + scale * (positive - negative)


GUIDED = ("stages.image.reference_guidance=3.5",)
UNGUIDED_SAMPLES = "sampling.guidance_mode='unirl.algorithms.distillation.guidance:WithNegatives'"


@pytest.mark.parametrize(
    ("words", "own", "other"),
    [
        (("sampling.guidance_scale=1",), 1.0, 1.0),
        ((*GUIDED, UNGUIDED_SAMPLES), 1.0, 3.5),
        ((*GUIDED, "sampling.guidance_scale=2"), 2.0, 3.5),
    ],
    ids=["unguided", "guided teacher", "both guided"],
)
def test_the_kl_of_latents_is_that_to_the_teacher(
    taught: Callable[..., Taught], words: tuple[str, ...], own: float, other: float
) -> None:
    """Velocities by diffusers, and the closed form for a constant g (DanceGRPO): means differ by c (v - v_ref) with
    c = dt (1 + g^2 (1 - sigma) / (2 sigma)), and the variance of a step is g^2 |dt|."""
    result = taught("sampling.kernel=dance-sde", "sampling.eta=0.7", *words)
    segment = result.track.latent
    terms: list[float] = []
    for row, steps in enumerate(segment.scored_steps.tolist()):
        for number in steps:
            sigma, dt = float(segment.sigmas[number]), float(segment.sigmas[number + 1] - segment.sigmas[number])
            shift = dt * (1 + 0.7**2 * (1 - sigma) / (2 * sigma))
            student = result.velocity("student", row, number, scale=own)
            teacher = result.velocity("teacher", row, number, scale=other)
            terms.append(shift**2 * float((student - teacher).square().mean()) / (2 * 0.7**2 * -dt))
    expected = sum(terms) / len(terms)
    assert expected > 1e-5, "the teacher is another policy"
    # Velocities of order 1 in fp32 are good to 1e-6, their differences of order 0.01 to 1e-4.
    assert result.step["kl"] == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize(
    ("words", "scale"), [((), 1.0), ((*GUIDED, UNGUIDED_SAMPLES), 3.5)], ids=["unguided", "guided"]
)
def test_the_distilled_velocity_is_that_of_the_teacher(
    taught: Callable[..., Taught], words: tuple[str, ...], scale: float
) -> None:
    """mean (v_student - v_teacher)^2 over the whole trajectory, by diffusers. The student has no guidance."""
    result = taught("algorithm=velocity-distillation", "algorithm.num_points=3", *words)
    rows, steps = result.track.num_rows, len(result.track.latent.sigmas) - 1
    errors = [
        (result.velocity("student", row, step) - result.velocity("teacher", row, step, scale=scale)).square().mean()
        for row in range(rows)
        for step in range(steps)
    ]
    expected = float(sum(errors)) / len(errors)
    assert steps == 3 and expected > 1e-5, "the teacher is another policy"
    # As above.
    assert result.step["velocity_error"] == pytest.approx(expected, rel=1e-3)


def test_the_kl_in_the_rewards_of_ppo_is_that_to_the_teacher(
    recipe: Path, writer: Path, teacher: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tracks: list[Track] = []
    train = Fsdp2Backend.train

    def noting(self, jobs, *, progress):
        tracks.extend(job.track for job in jobs)
        return train(self, jobs, progress=progress)

    monkeypatch.setattr(Fsdp2Backend, "train", noting)
    # k1, the default, is signed: its mean nearly cancels.
    words = (*STEPS, *PPO, "algorithm.rewrite.kl_estimator=k3", *TEACHER, f"model.teacher.path={teacher}")
    (step,) = numbers(composed(recipe, *words, "run.stop_at=1", f"run.dir={tmp_path / 'run'}")).values()
    assert (tracks[0].sample_weights == 1).all()
    pairs = zip(log_probs(writer, tracks[0]), log_probs(teacher, tracks[0]), strict=True)
    expected = float(torch.cat([torch.exp(other - own) - 1 - (other - own) for own, other in pairs]).mean())
    assert expected > 1e-3, "the teacher is another policy"
    # As above.
    assert step["rewrite/kl"] == pytest.approx(expected, rel=1e-3, abs=1e-5)


@pytest.mark.parametrize(
    "words", [["backend.writer.trains=lora", *KL], [*PPO, "backend.writer.reference_copy=true"]], ids=["lora", "ppo"]
)
def test_initial_weights_as_the_teacher_give_the_numbers_of_the_reference(
    recipe: Path, writer: Path, tmp_path: Path, words: list[str]
) -> None:
    """Compared with the model with its adapters switched off, and in the rewards of PPO."""
    without = numbers(composed(recipe, *STEPS, *words, f"run.dir={tmp_path / 'without'}"))
    words = [word for word in words if "reference_copy" not in word]
    taught = (*STEPS, *words, *TEACHER, f"model.teacher.path={writer}")
    result = numbers(composed(recipe, *taught, f"run.dir={tmp_path / 'teacher'}"))
    assert without[2]["rewrite/kl"] != 0, "after an update the policy has left the reference"
    assert result == without


@pytest.mark.parametrize("model", ["writer", "painter"])
def test_initial_weights_as_the_teacher_give_the_numbers_of_a_reference_copy(
    recipe: Path, tmp_path: Path, model: str
) -> None:
    stage = {"writer": "rewrite", "painter": "image"}[model]
    words = (*STEPS, *(JOINT if model == "painter" else ()), f"algorithm.{stage}.kl_coef=0.5")
    path = f"model.teacher.path={composed(recipe).learners[model].model.config.path}"  # type: ignore[attr-defined]
    kind = {"writer": "qwen3", "painter": "sd3"}[model]
    taught = (f"+model@model.teacher={kind}", f"stages.{stage}.reference=teacher", path)
    copied = numbers(composed(recipe, *words, f"backend.{model}.reference_copy=true", f"run.dir={tmp_path / 'copy'}"))
    result = numbers(composed(recipe, *words, *taught, f"run.dir={tmp_path / 'teacher'}"))
    assert copied[2][f"{stage}/kl"] > 0, "after an update the policy has left the reference"
    assert result == copied


@pytest.mark.parametrize("words", [KL, [*KL, "backend.writer.trains=lora"], PPO], ids=["full", "lora", "ppo"])
def test_two_ranks_give_the_numbers_of_one_process(
    recipe: Path, teacher: Path, tmp_path: Path, ray_here: None, words: list[str]
) -> None:
    words = [*STEPS, *words, *TEACHER, f"model.teacher.path={teacher}"]
    expected = numbers(composed(recipe, *words, f"run.dir={tmp_path / 'here'}"))
    result = numbers(composed(recipe, *words, *SEPARATE, "launcher.train_ranks=2", f"run.dir={tmp_path / 'there'}"))
    for step, one in expected.items():
        for key in ("rewrite/kl", "rewrite/loss", "rewrite/grad_norm", "rewrite/reward_mean"):
            # Forwards of other batches: fp32 sums in another order, relative to the size of the number.
            assert result[step][key] == pytest.approx(one[key], rel=1e-4, abs=1e-6), key


def test_a_teacher_is_a_model_of_the_plan(recipe: Path) -> None:
    plan = composed(recipe, *KL, *TEACHER)
    assert match(plan, catalog=catalog()).accepted
    assert list(plan.learners) == ["writer", "painter", "teacher"]
    assert "model.teacher" in [choice.key for choice in plan.choices]


def test_the_one_stage_of_a_recipe_has_a_teacher(tmp_path: Path) -> None:
    file = tmp_path / "distilled.yaml"
    file.write_text(DISTILLED, encoding="utf-8")
    (first, second) = numbers(composed(file, f"run.dir={tmp_path / 'run'}")).values()
    # The teacher is the initial weights: nothing to pay before the first update.
    assert first["kl"] == pytest.approx(0, abs=1e-6) and second["kl"] > 0


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["stages.rewrite.reference=tutor"], "stages.rewrite.reference: got 'tutor'; the recipe has models 'writer'"),
        (["stages.rewrite.reference=''"], "model.teacher: no stage uses this model; .*`reference: teacher`"),
    ],
)
def test_teachers_that_cannot_be_composed(recipe: Path, words: list[str], says: str) -> None:
    with pytest.raises(RecipeError, match=says):
        composed(recipe, *KL, *TEACHER, *words)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["algorithm.rewrite.kl_coef=0"], "got 'teacher', but algorithm 'grpo' uses no reference policy as configured"),
        (["stages.rewrite.reference=painter", "stages.image.reference=teacher"], "which generates latent tracks; "),
        (["+backend@backend.teacher=fsdp2"], "got 'teacher', which a backend trains; expected a frozen model"),
        (["launcher=ray", "launcher.reference=separate"], "got 'teacher', but reference workers hold the initial"),
        (
            ["model@model.teacher=qwen25-vl", "stages.rewrite.reference=teacher"],
            "a model 'qwen25-vl', which reads other media than 'qwen3'",
        ),
    ],
)
def test_teachers_that_do_not_fit_are_refused(recipe: Path, words: list[str], says: str) -> None:
    plan = composed(recipe, *KL, *TEACHER, *words)
    reasons = [str(reason) for reason in match(plan, catalog=catalog()).reasons]
    assert [reason for reason in reasons if says in reason and reason.startswith("stages.")], reasons


def refusals(folder: Path, stage: str, *words: str) -> list[str]:
    """Reasons against a recipe with one stage, `text` or `image`, and a teacher."""
    file = Path("quickstart-distillation") if stage == "text" else folder / "image.yaml"
    if stage == "image":
        file.write_text(DISTILLED, encoding="utf-8")
    # Losses that compare the samples of a prompt need several.
    words = ("data.samples_per_prompt=2", *words)
    return [str(reason) for reason in match(composed(file, *words), catalog=catalog()).reasons]


@pytest.mark.parametrize(
    ("stage", "algorithm", "words"),
    [
        ("text", "distillation", ()),
        ("text", "dpo", ()),
        ("text", "grpo", ("algorithm.kl_coef=0.1",)),
        ("text", "ppo", ("algorithm.kl_coef=0.1", "backend.student.critic.lr=1e-3")),
        ("image", "velocity-distillation", ()),
        ("image", "diffusion-dpo", ()),
        ("image", "diffusion-nft", ("algorithm.kl_coef=0.1",)),
        ("image", "awm", ("algorithm.kl_coef=0.1",)),
        ("image", "dpok", ()),
        ("image", "ddpo", ("algorithm.kl_coef=0.1",)),
    ],
)
def test_every_loss_with_a_reference_policy_takes_a_teacher_of_its_family_alone(
    tmp_path: Path, stage: str, algorithm: str, words: tuple[str, ...]
) -> None:
    """Another family has another tokenizer, or other latents. Without a teacher, a policy that no backend keeps
    is missed."""
    words = (f"algorithm={algorithm}", *words)
    assert refusals(tmp_path, stage, *words) == []
    model, says = {
        "text": ("sd3", "which generates latent tracks; expected a model of text tracks"),
        "image": ("wan21", "a model 'wan21'; expected a model 'sd3'"),
    }[stage]
    (other,) = refusals(tmp_path, stage, *words, f"model@model.teacher={model}", "model.teacher.path=x")
    assert other.startswith(f"stages.{stage}.reference: got 'teacher', {says}"), other
    alone = ("~model.teacher", f"stages.{stage}.reference=''", "backend.student.reference_copy=false")
    missing = refusals(tmp_path, stage, *words, *alone)
    says = f"backend.student.reference_copy: algorithm '{algorithm}' needs a reference policy, which full training does"
    assert [reason for reason in missing if reason.startswith(says)], missing


@pytest.mark.parametrize(
    ("stage", "algorithm"), [("text", "text-sft"), ("text", "grpo"), ("image", "sft"), ("image", "flow-grpo")]
)
def test_a_loss_without_a_reference_policy_takes_no_teacher(tmp_path: Path, stage: str, algorithm: str) -> None:
    kl = ("algorithm.kl_coef=0",) if "grpo" in algorithm else ()
    (reason,) = refusals(tmp_path, stage, f"algorithm={algorithm}", *kl)
    assert f"algorithm '{algorithm}' uses no reference policy as configured" in reason


@pytest.mark.parametrize(
    ("stage", "words", "key", "says"),
    [
        ("text", (), "stages.text.reference_guidance", "but a text track has no guidance"),
        ("image", ("algorithm.kl_coef=0",), "stages.image.reference_guidance", "uses no reference policy"),
        ("image", (), "stages.image.reference_guidance", "without guidance the samples have no negative conditions"),
        (
            "image",
            ("algorithm.kl_coef=0.5", UNGUIDED_SAMPLES, "sampling.guidance_scale=2"),
            "sampling.guidance_options",
            "got scale 2.0, expected 1",
        ),
        (
            "image",
            ("launcher=ray", "launcher.reference=separate", "sampling.guidance_scale=2"),
            "stages.image.reference_guidance",
            "reference workers follow the student's guidance",
        ),
    ],
)
def test_guidance_that_a_teacher_cannot_have_is_refused(
    tmp_path: Path, stage: str, words: tuple[str, ...], key: str, says: str
) -> None:
    reasons = refusals(tmp_path, stage, f"stages.{stage}.reference_guidance=3.5", *words)
    assert [reason for reason in reasons if reason.startswith(f"{key}: ") and says in reason], reasons


def test_a_model_without_guidance_has_no_guided_teacher(tmp_path: Path) -> None:
    file = tmp_path / "distilled.yaml"
    file.write_text(DISTILLED, encoding="utf-8")
    plan = composed(file, *GUIDED, "sampling.guidance_scale=2")
    (stage,) = plan.stages
    capabilities = stage.model.spec.capabilities - {Cap.GUIDANCE}
    spec = dataclasses.replace(stage.model.spec, capabilities=capabilities)
    learner = dataclasses.replace(stage.learner, model=dataclasses.replace(stage.learner.model, spec=spec))
    plan = dataclasses.replace(plan, stages=(dataclasses.replace(stage, learner=learner),))
    reasons = [str(reason) for reason in match(plan, catalog=catalog()).reasons]
    says = "model.student: stages.image.reference_guidance 3.5 needs 'guidance'; model 'sd3' does not provide it."
    assert says in reasons, reasons


def test_a_student_may_learn_its_own_guidance(tmp_path: Path) -> None:
    """With the initial weights as the teacher: without their own guidance nothing would move."""
    words = ("algorithm=velocity-distillation", "~model.teacher", "stages.image.reference=''")
    words = (*words, "backend.student.reference_copy=true")
    (reason,) = refusals(tmp_path, "image", *words)
    assert "has no teacher" in reason
    assert refusals(tmp_path, "image", *words, *GUIDED, UNGUIDED_SAMPLES) == []


def test_a_latent_teacher_is_of_the_same_model(recipe: Path) -> None:
    words = (
        "+model@model.teacher=wan21",
        "model.teacher.path=wan",
        "stages.image.reference=teacher",
        "algorithm.image.kl_coef=0.5",
    )
    plan = composed(recipe, *JOINT, *words)
    assert any("got 'teacher', a model 'wan21'; expected a model 'sd3'" in str(r) for r in match(plan).reasons)


@pytest.mark.parametrize("algorithm", ["flow-grpo", "velocity-distillation", "diffusion-dpo"])
def test_a_teacher_of_other_latents_is_refused(recipe: Path, tmp_path: Path, algorithm: str) -> None:
    """The miniature of sd3 has latents of 16 channels, the checkpoint of the quickstart 4."""
    write(tmp_path / "miniature", seed=0)
    own = ("algorithm.image.kl_coef=0.5",) if algorithm == "flow-grpo" else (f"algorithm@algorithm.image={algorithm}",)
    words = (*own, "+model@model.teacher=sd3", "stages.image.reference=teacher")
    plan = composed(recipe, *JOINT, *words, f"model.teacher.path={tmp_path / 'miniature'}")
    assert match(plan).accepted, "only the loaded models show it"
    with (
        pytest.raises(PlanRejected, match=r"stages\.image\.reference: 'teacher' has latents of shape \[16, .*\[4, "),
        built_parts(plan, catalog=catalog()),
    ):
        pass


@pytest.mark.parametrize("algorithm", ["grpo", "distillation", "dpo"])
def test_a_teacher_of_another_vocabulary_is_refused(recipe: Path, teacher: Path, algorithm: str) -> None:
    file = teacher / "tokenizer.json"
    tokenizer = json.loads(file.read_text(encoding="utf-8"))
    vocabulary = tokenizer["model"]["vocab"]
    first, second, *_ = sorted(vocabulary, key=vocabulary.get)[-2:]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    file.write_text(json.dumps(tokenizer), encoding="utf-8")
    own = KL if algorithm == "grpo" else (f"algorithm@algorithm.rewrite={algorithm}",)
    plan = composed(recipe, *own, *TEACHER, f"model.teacher.path={teacher}")
    with (
        pytest.raises(PlanRejected, match=r"stages\.rewrite\.reference: 'teacher' has a vocabulary of \d+ tokens"),
        built_parts(plan, catalog=catalog()),
    ):
        pass
