"""Bad input through the command line: one clear error, the right exit code, no traceback, nothing started."""

from __future__ import annotations

from pathlib import Path

import pytest
from unirl.core.cli import main
from unirl.quickstart import checkpoint_path


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    with pytest.raises(SystemExit) as caught:
        main(["train", *words])
    message = capsys.readouterr().err
    assert message.count("error:") + message.count("Error:") == 1, message
    assert "Traceback" not in message
    code = caught.value.code
    assert isinstance(code, int)
    return code, message


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (["quikstart"], 2, "did you mean 'quickstart'"),
        (["quickstart", "engine=transide"], 2, "did you mean 'trainside'"),
        (["quickstart", "engine=composed"], 3, "'composed'"),
        (["quickstart", "algorithm.clip_rnge=1e-4"], 2, "did you mean algorithm.clip_range?"),
        (["quickstart", "algorithm.clip_range=wide"], 2, "algorithm.clip_range"),
        (["quickstart", "run.stepz=3"], 2, "did you mean run.steps?"),
        (["quickstart", "sampling.eta=0"], 1, "sampling.eta: algorithm 'flow-grpo' takes ratios of log-probs"),
        (["quickstart", "sampling.sde.mode=fixed", "sampling.sde.steps=[20]"], 1, "step 20 is past the last step 9"),
        (
            ["quickstart", "sampling.sde.mode=random", "sampling.sde.count=9"],
            1,
            "9 steps were asked for; the pool has 5",
        ),
        (["quickstart", "train.updates_per_step=1000"], 1, "1000 updates cannot be made of"),
        (["quickstart", "data.samples_per_prompt=1"], 1, "a group of 1 has no spread"),
        (["quickstart", "algorithm.clip_range=2"], 1, "algorithm.clip_range: 2.0 was asked for"),
        (["quickstart", "algorithm.kl_coef=0.1", "backend.trains=full"], 1, "backend.reference_copy"),
        (["quickstart", "backend.lr=-1"], 1, "backend.lr: -1.0 was asked for"),
        (["quickstart", "backend.trains=full", "model.dtype=bfloat16"], 1, "nothing would compute in that dtype"),
        (["quickstart", "model.autocast=half"], 1, "model.autocast: 'half' was asked for; it is one of float32"),
        (["quickstart", "model.decode_batch=-1"], 1, "model.decode_batch: -1 was asked for"),
        (["quickstart-text", "model.attention=flash"], 1, "model.attention: 'flash' was asked for; it is one of auto"),
        (["quickstart", "engine=sglang", "engine.dtype=fp8"], 1, "engine.dtype: 'fp8' was asked for"),
        (["quickstart-text", "engine=vllm", "engine.log_level=LOUD"], 1, "engine.log_level: 'LOUD' was asked for"),
        (["quickstart", "engine=vllm-omni", "engine.sync_timeout_s=0"], 1, "engine.sync_timeout_s: 0.0 was asked for"),
        (["quickstart-text", "engine=sglang-llm", "engine.release=0.4"], 1, "engine.release: '0.4' was asked for"),
        (["quickstart", "+eval.sampling.steps=few"], 2, "eval.sampling.steps: Value 'few'"),
        (["quickstart", "~reward.shapes"], 1, "no reward was chosen"),
        (["quickstart", "run.device=cuda:7"], 1, "run.device: 'cuda:7' was asked for"),
        (["quickstart", "data.prompts_per_step=4000"], 2, "data.prompts_per_step: 4000 were asked for"),
        (["quickstart", "model.path=nowhere"], 2, "nowhere"),
        (["quickstart", "backend.trains=lora", "backend.lora.targets=[attn.to_x]"], 2, "attn.to_x"),
        (["quickstart", "sampling.height=60"], 2, "60"),
        (["quickstart", "--resume", "nowhere"], 1, "nowhere"),
    ],
    ids=lambda value: " ".join(value[1:] or value) if isinstance(value, list) else "",
)
def test_a_mistake_gets_one_clear_error(
    capsys: pytest.CaptureFixture[str], words: list[str], code: int, says: str
) -> None:
    found, message = refused(capsys, *words)
    assert says in message
    assert found == code, message


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("empty.txt", "\n\n", "empty.txt"),
        ("wrong.jsonl", '{"prompt": "a"}\n{"prompt": \n', "wrong.jsonl:2"),
        (
            "media.jsonl",
            '{"prompt": "a", "media": [{"modality": "image", "role": "condition", "uri": "no.png"}]}\n',
            "no.png",
        ),
        ("legacy.jsonl", '{"prompt": "a", "prompt_embed_path": "x.pt"}\n', "prompt_embed_path"),
        ("plain.txt", "a red ring\n", "no metadata 'color', which reward.shapes reads"),
        ("twice.jsonl", '{"prompt": "a", "prompt_id": "p"}\n{"prompt": "b", "prompt_id": "p"}\n', "twice.jsonl:2"),
        ("table.csv", "prompt\na\n", "table.csv"),
    ],
)
def test_a_prompt_file_that_cannot_be_used_names_itself(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, name: str, text: str, says: str
) -> None:
    (tmp_path / name).write_text(text)
    code, message = refused(capsys, "quickstart", f"data.train={name}", "data.prompts_per_step=1")
    assert says in message
    assert code == 2


def test_a_missing_prompt_file_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    code, message = refused(capsys, "quickstart", "data.train=absent.jsonl")
    assert "absent.jsonl" in message
    assert code == 2


def test_a_model_folder_that_lacks_a_component_is_named(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    import shutil

    shutil.copytree(checkpoint_path(), tmp_path / "broken")
    shutil.rmtree(tmp_path / "broken" / "vae")
    code, message = refused(capsys, "quickstart", "model.path=broken")
    assert "vae" in message
    assert "model.path" in message
    assert code == 2


@pytest.mark.parametrize("mistake", ["sampling.eta=0", "model.path=nowhere", "data.train=absent.jsonl"])
def test_nothing_is_left_behind_by_a_refusal(capsys: pytest.CaptureFixture[str], tmp_path: Path, mistake: str) -> None:
    refused(capsys, "quickstart", mistake)
    assert list(tmp_path.iterdir()) == []
