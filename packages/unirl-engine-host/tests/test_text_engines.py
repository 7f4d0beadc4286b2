"""Engines for text before they start, and the updates that they refuse. None of this needs an engine."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, cast

import pytest
import torch
from packaging.specifiers import SpecifierSet
from unirl.core.errors import RecipeError, RunFailed
from unirl.core.roles import Model, TextModel, WeightUpdate
from unirl.core.types.inputs import Inputs
from unirl.core.types.request import Request, TextRequest
from unirl.core.types.sampling import TextSamplingConfig
from unirl.core.types.track import Conditions, Track
from unirl.engine_host import transfer
from unirl.engine_host.checkpoint_folder import diffusers_folder, transformers_folder
from unirl.engine_host.config import ExternalConfig
from unirl.engine_host.environment import EngineEnvironment
from unirl.engine_host.frames import Unchanged
from unirl.engine_host.process import Program
from unirl.engine_host.program import Product, dtype_of, log_path, program, refuse_extra
from unirl.engine_host.received import generated, read_weights, rows
from unirl.engine_host.text_config import ExternalTextConfig
from unirl.engine_host.text_engine import ExternalTexts
from unirl.engine_host.transfer import adapter_mismatch, files_of, full_mismatch, inventory

PRODUCT = Product(
    title="Acme",
    environment=EngineEnvironment(
        name="acme", package="unirl.transfer", locks={"cpu": "py.typed", "cuda": "py.typed"}, python="3.11", serve="a:b"
    ),
    tested=SpecifierSet(">=2,<3"),
    says_cut_log_probs=True,
)


def test_a_version_that_was_not_tried_is_refused_with_the_range() -> None:
    PRODUCT.check_version("2.9rc1")
    with pytest.raises(
        RunFailed, match=r"has Acme 3\.0; this engine was tested with <3,>=2.*engine-env acme --recreate"
    ):
        PRODUCT.check_version("3.0")


def test_the_checkpoint_is_that_of_the_model_unless_another_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").touch()
    module = torch.nn.Linear(1, 1, dtype=torch.bfloat16)
    model = cast("Model", SimpleNamespace(trainable=module, spec=SimpleNamespace(reads_media=lambda kind: False)))
    with pytest.raises(RecipeError, match=r"engine\.path"):
        transformers_folder(PRODUCT, ExternalTextConfig(), model)
    module.name_or_path = str(tmp_path)
    assert transformers_folder(PRODUCT, ExternalTextConfig(), model) == tmp_path.resolve()
    with pytest.raises(RecipeError, match=r"engine\.path"):
        transformers_folder(PRODUCT, ExternalTextConfig(path=str(tmp_path / "none")), model)


def test_images_of_an_architecture_that_engines_divide_otherwise_are_refused(tmp_path: Path) -> None:
    spec = SimpleNamespace(reads_media=lambda kind: kind == "text")
    model = cast("Model", SimpleNamespace(trainable=torch.nn.Linear(1, 1), spec=spec))
    config = ExternalTextConfig(path=str(tmp_path))
    (tmp_path / "config.json").write_text('{"architectures": ["Gemma3ForConditionalGeneration"]}')
    with pytest.raises(RecipeError, match=r"engine: Acme is not given images of Gemma3.*one of Qwen.*engine=trainside"):
        transformers_folder(PRODUCT, config, model)
    (tmp_path / "config.json").write_text('{"architectures": ["Qwen3VLForConditionalGeneration"]}')
    assert transformers_folder(PRODUCT, config, model) == tmp_path.resolve()


def test_a_checkpoint_in_the_diffusers_layout_is_that_of_the_models_pipeline(tmp_path: Path) -> None:
    module: Any = torch.nn.Linear(1, 1)
    model = cast("Model", SimpleNamespace(trainable=module, spec=SimpleNamespace(name="little")))
    index = tmp_path / "model_index.json"
    with pytest.raises(RecipeError, match=r"engine\.path: Acme loads .* Set engine\.path"):
        diffusers_folder(PRODUCT, ExternalConfig(), model, architecture="LittlePipeline")
    module.config = SimpleNamespace(_name_or_path=str(tmp_path / "transformer"))
    with pytest.raises(RecipeError, match=r"engine\.path: .* has no model_index\.json"):
        diffusers_folder(PRODUCT, ExternalConfig(), model, architecture="LittlePipeline")
    index.write_text('{"_class_name": "LittlePipeline"}', encoding="utf-8")
    assert diffusers_folder(PRODUCT, ExternalConfig(), model, architecture="LittlePipeline") == tmp_path.resolve()
    index.write_text('{"_class_name": "OtherPipeline"}', encoding="utf-8")
    with pytest.raises(
        RecipeError, match="a checkpoint of 'OtherPipeline'; model 'little' is 'LittlePipeline' in Acme"
    ):
        diffusers_folder(PRODUCT, ExternalConfig(path=str(tmp_path)), model, architecture="LittlePipeline")


def test_the_dtype_is_that_of_the_model_unless_another_is_named() -> None:
    model = cast("Model", SimpleNamespace(trainable=torch.nn.Linear(1, 1, dtype=torch.bfloat16)))
    assert dtype_of(ExternalTextConfig(), model) is torch.bfloat16
    assert dtype_of(ExternalTextConfig(dtype="float32"), model) is torch.float32
    with pytest.raises(RecipeError, match=r"engine\.dtype: 'fp8'"):
        dtype_of(ExternalTextConfig(dtype="fp8"), model)


def test_devices_become_what_the_process_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EngineEnvironment, "interpreter", lambda self, accel, within=None: Path("/python"))

    def made(device: str, **settings: Any) -> Program:
        config = ExternalTextConfig(**settings)
        return program(PRODUCT, config, torch.device(device), variables={"A": "1"}, cpu_variables={"B": "2"})

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
    assert made("cuda:1").variables["CUDA_VISIBLE_DEVICES"] == "6"
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert made("cuda:1").variables["CUDA_VISIBLE_DEVICES"] == "1"
    assert {"A", "B"} <= made("cpu").variables.keys()
    assert "B" not in made("cuda:1").variables
    with pytest.raises(RecipeError, match="Acme releases memory only on CUDA"):
        made("cpu", sleep_mode=True)
    config, device = ExternalTextConfig(sleep_mode=True), torch.device("cpu")
    apart = program(PRODUCT, config, device, variables={}, cpu_variables={}, modules=("unirl.x",), sleeps_on_cpu=True)
    assert apart.modules == (*PRODUCT.environment.modules, "unirl.x")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6,7")
    two = program(PRODUCT, ExternalTextConfig(), torch.device("cuda:1"), variables={}, cpu_variables={}, num_devices=2)
    assert two.variables["CUDA_VISIBLE_DEVICES"] == "6,7"
    assert made("cpu", environment={"VLLM_LOGGING_LEVEL": "DEBUG"}).variables["VLLM_LOGGING_LEVEL"] == "DEBUG"
    with pytest.raises(
        RecipeError, match=r"engine\.environment\.A: Acme is started with A='1', on which other settings"
    ):
        made("cpu", environment={"A": "2"})
    with pytest.raises(RecipeError, match=r"engine\.log_level: got 'LOUD'"):
        made("cpu", log_level="LOUD")


def test_the_log_goes_to_the_run_where_there_is_one() -> None:
    assert log_path(ExternalTextConfig(), PRODUCT) is None
    assert log_path(ExternalTextConfig(log_file=""), PRODUCT) is None
    placed = ExternalTextConfig(log_file="/runs/a/logs/{part}-{pid}.log")
    assert log_path(placed, PRODUCT) == Path(f"/runs/a/logs/acme-{os.getpid()}.log")


def test_further_arguments_have_no_key_of_their_own() -> None:
    @dataclass
    class Config(ExternalTextConfig):
        unsupported: ClassVar[Mapping[str, str]] = {"extra.tp": "one GPU alone", "environment.TP": "one GPU alone"}

    refuse_extra(Config(extra={"swap": 1}), {"model": "m"})
    for key in ("model", "tp"):
        with pytest.raises(RecipeError, match=rf"engine\.extra\.{key}: not allowed"):
            refuse_extra(Config(extra={key: 1}), {"model": "m"})
    reasons = Config(extra={"tp": 1}, environment={"TP": "1"}).problems(None, None)
    assert [str(reason.under("engine")) for reason in reasons] == [
        "engine.extra.tp: not allowed; one GPU alone. Remove it.",
        "engine.environment.TP: not allowed; one GPU alone. Remove it.",
    ]


def test_weights_pass_through_files_and_other_bits_are_refused(tmp_path: Path) -> None:
    from unirl.core.types.weights import checksum

    tensors = {"a": torch.arange(6.0).reshape(2, 3).T, "b": torch.ones(2, dtype=torch.bfloat16)}
    update = WeightUpdate(version=1, tensors=tensors, kind="full", checksum=checksum(tensors))
    with files_of(update, folder=str(tmp_path)) as paths:
        result = read_weights(paths, update.checksum)
        assert all(torch.equal(result[name], value) for name, value in tensors.items())
        with pytest.raises(Unchanged, match=f"got checksum {update.checksum}, expected {'0' * 32}"):
            read_weights(paths, "0" * 32)
    assert not list(tmp_path.iterdir())
    with (
        pytest.raises(RunFailed, match=r"engine\.transfer_dir"),
        files_of(update, folder=str(tmp_path / "none")),
    ):
        pass


def test_files_of_a_killed_process_are_removed_from_shared_memory_and_those_of_a_live_one_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Process 1 is alive: ids do not count, which may be another container's."""
    monkeypatch.setattr(transfer, "SHARED_MEMORY", tmp_path)
    update = WeightUpdate(version=1, tensors={"a": torch.ones(3)}, kind="full")
    left, other = tmp_path / "unirl-weights-1-killed", tmp_path / "unirl-weights-1-unlocked"
    for folder in (left, other):
        folder.mkdir()
        (folder / "0.safetensors").touch()
    (left / "lock").touch()
    with files_of(update, folder="") as first, files_of(update, folder="") as second:
        assert not left.exists()
        assert all(Path(path).is_relative_to(tmp_path) and Path(path).exists() for path in (*first, *second))
    assert [path for path in tmp_path.iterdir() if path.is_dir()] == [other]


def test_engines_that_are_sent_weights_together_wait_for_shared_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfer, "SHARED_MEMORY", tmp_path)

    def usage(_: Path) -> SimpleNamespace:
        """One update fits, and two do not."""
        return SimpleNamespace(free=1500 - sum(file.stat().st_size for file in tmp_path.rglob("*.safetensors")))

    monkeypatch.setattr(shutil, "disk_usage", usage)
    update = WeightUpdate(version=1, tensors={"a": torch.ones(250)}, kind="full")

    def written() -> Path:
        with files_of(update, folder="") as paths:
            return Path(paths[0])

    with ThreadPoolExecutor(1) as pool:
        with files_of(update, folder="") as first:
            second = pool.submit(written)
            with pytest.raises(TimeoutError):
                second.result(timeout=0.3)
            assert Path(first[0]).is_relative_to(tmp_path)
        assert second.result(timeout=30).is_relative_to(tmp_path)
    assert not list(tmp_path.rglob("*.safetensors"))


def test_weights_that_do_not_fit_into_shared_memory_go_to_the_temporary_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared, temporary = tmp_path / "shm", tmp_path / "tmp"
    shared.mkdir()
    temporary.mkdir()
    monkeypatch.setattr(transfer, "SHARED_MEMORY", shared)
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    monkeypatch.setattr(shutil, "disk_usage", lambda place: SimpleNamespace(free=900 if place == shared else 2000))
    with files_of(WeightUpdate(version=1, tensors={"a": torch.ones(250)}, kind="full"), folder="") as paths:
        assert Path(paths[0]).is_relative_to(temporary)
    assert not list(temporary.iterdir())


def test_a_text_whose_log_probs_are_of_other_tokens_is_refused() -> None:
    read: dict[str, Any] = {"prompts": [[7], [8, 9]], "media": ["", "k"], "temperatures": [0.5, 0.5]}
    answer, result = generated([[1, 2], [3]], [[-1.0, -2.0], [-3.0]], ["stop", "length"], **read)
    expected = {"finish_reasons": ["stop", "length"], "media": ["", "k"], "temperatures": [0.5, 0.5]}
    assert answer == {**expected, "options": {}, "version": None}
    assert [result[name].tolist() for name in ("prompts", "prompt_lengths")] == [[7, 8, 9], [1, 2]]
    assert [result[name].tolist() for name in ("tokens", "log_probs", "lengths")] == [[1, 2, 3], [-1, -2, -3], [2, 1]]
    assert "mask" not in result
    with pytest.raises(RuntimeError, match="2 tokens has 1 log-probs"):
        generated([[1, 2]], [[-1.0]], ["stop"], **read)


def test_tokens_that_were_not_sampled_are_sent_as_a_mask() -> None:
    read: dict[str, Any] = {"prompts": [[7], [8, 9]], "media": ["", "k"], "temperatures": [0.5, 0.5]}
    texts: Any = ([[1, 2], [3]], [[-1.0, 0.0], [-3.0]], ["stop", "length"])
    _, result = generated(*texts, mask=[[True, False], [True]], **read)
    assert result["mask"].tolist() == [True, False, True]
    assert result["mask"].dtype == torch.bool
    with pytest.raises(RuntimeError, match="2 tokens has 1 entries in its mask"):
        generated(*texts, mask=[[True], [True]], **read)


def test_texts_of_other_weights_rows_or_media_are_refused() -> None:
    """What the host compares of an answer: nothing else would show it."""
    inputs = Inputs.of_texts(["a", "b"])
    params = TextRequest(
        sampling=TextSamplingConfig(max_new_tokens=2),
        prompt_tokens=(torch.tensor([7]), torch.tensor([8, 9])),
        stop_tokens=(0,),
        seeds=(1, 2),
    )
    request = Request(
        track="text", sample_ids=("a", "b"), group_ids=("a", "b"), inputs=inputs, metadata=({}, {}), params=params,
        seed=0, rollout=0, policy_version=3,
    )  # fmt: skip
    asked: list[Any] = []
    kept = Conditions(values={"pixels": (torch.ones(1), torch.zeros(2))}, index=torch.tensor([0, 1]))
    texts = ExternalTexts(
        PRODUCT,
        model=cast("TextModel", SimpleNamespace(spec=SimpleNamespace(name="own", text_alone={}))),
        sampling=lambda wanted: {"temperature": wanted.sampling.temperature},
        conditions=lambda model, inputs, *, sampling: kept,
        track=lambda request, **made: cast("Track", made),
        limit="engine.longest",
    )
    texts.started({"max_model_len": 4})
    texts.check(params)
    texts.started({"max_model_len": 3})
    with pytest.raises(RecipeError, match=r"may reach 4 tokens; Acme takes 3 \(engine\.longest\)"):
        texts.check(params)

    def answers(change: Mapping[str, Any]) -> Any:
        def generate(arguments: Mapping[str, Any], tensors: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
            asked.append((arguments, tensors))
            answer, result = generated(
                [[1, 2], [0]], [[-1.0, -2.0], [-3.0]], ["length", "stop"],
                prompts=[[7], [8, 9]], media=arguments["media"], temperatures=[1.0, 1.0], version=3,
            )  # fmt: skip
            return {**answer, **change}, dict(result)

        return texts.track(request, generate=generate, version=3)

    result: Any = answers({})
    assert result["truncated"] == [True, False] and [row.tolist() for row in result["tokens"]] == [[1, 2], [0]]
    assert result["version"] == 3 and result["conditions"] is kept
    assert asked[0][0]["seeds"] == [1, 2] and len(set(asked[0][0]["media"])) == 2
    assert answers({"version": None})["version"] == 3
    assert result["options"] == {} and answers({"options": {"scale": 2.0}})["options"] == {"scale": 2.0}
    for change, message in (
        ({"version": 2}, r"by weights of version 2, expected version 3"),
        ({"media": asked[0][0]["media"][::-1]}, "row 0 was generated from other media"),
        ({"temperatures": [1.0, 0.5]}, r"several temperatures: \[0\.5, 1\.0\]"),
        ({"finish_reasons": ["abort", "stop"]}, r"finish reasons \['abort', 'stop'\]"),
    ):
        with pytest.raises(RunFailed, match=message):
            answers(change)


def test_rows_are_read_with_the_media_of_their_key() -> None:
    pixels = torch.arange(6.0)
    tensors = {"prompts": torch.tensor([1, 2, 3]), "prompt_lengths": torch.tensor([2, 1]), "k/pixel_values": pixels}
    first, second = rows({"media": ["", "k"]}, tensors)
    assert (first.prompt, first.key, dict(first.media)) == ([1, 2], "", {})
    assert (second.prompt, second.key, list(second.media)) == ([3], "k", ["pixel_values"])
    assert torch.equal(second.media["pixel_values"], pixels)


def test_weights_are_rounded_only_where_a_narrower_dtype_was_named() -> None:
    held = inventory([["a.weight", "bfloat16", [2, 3]]])

    def update(tensor: torch.Tensor) -> WeightUpdate:
        return WeightUpdate(version=1, tensors={"a.weight": tensor}, kind="full")

    sent = update(torch.zeros(2, 3))
    assert full_mismatch(sent, held, rounds=True) == ""
    assert "float32[2, 3]; bfloat16[2, 3] is held" in full_mismatch(sent, held, rounds=False)
    assert "float16[2, 3]" in full_mismatch(update(torch.zeros(2, 3, dtype=torch.float16)), held, rounds=True)
    assert "bfloat16[1, 2, 3]" in full_mismatch(update(torch.zeros(1, 2, 3)), held, rounds=True)


def test_an_adapter_must_fit_its_layers() -> None:
    held = inventory([["a.weight", "bfloat16", [5, 3]], ["norm.weight", "bfloat16", [3]]])

    def wrong(tensors: dict[str, torch.Tensor]) -> str:
        return adapter_mismatch(WeightUpdate(version=1, tensors=tensors, kind="lora"), held, most_rank=2)

    down, up = torch.zeros(2, 3), torch.zeros(5, 2)
    good = {"a.lora_A.weight": down, "a.lora_B.weight": up}
    assert wrong(good) == ""
    assert "but engine.lora_rank is 2; set it to 4" in wrong(
        {"a.lora_A.weight": torch.zeros(4, 3), "a.lora_B.weight": torch.zeros(5, 4)}
    )
    assert "needs [rank, 3] and [5, rank]" in wrong({**good, "a.lora_B.weight": up.T})
    assert "float32 or bfloat16" in wrong({**good, "a.lora_A.weight": down.half()})
    assert "only half" in wrong({"a.lora_A.weight": down})
    assert "no layer 'norm'" in wrong({"norm.lora_A.weight": down, "norm.lora_B.weight": up})
    assert "got 3 tensors for 1 layers" in wrong({**good, "a.lora_magnitude_vector.weight": down})
    assert wrong({}) == "the update has no tensors."
