"""The plugin's spec and config, and settings refused before anything is loaded."""

import math
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

from unirl.backends.fsdp2.config import AverageConfig, CriticConfig, Fsdp2Config, MeshConfig
from unirl.backends.fsdp2.plugin import SPEC
from unirl.core.limits import broken_limits
from unirl.core.specs.capability import Cap, Needs
from unirl.core.specs.config import EvalConfig, RunConfig
from unirl.core.specs.memory import Processes
from unirl.core.specs.part_config import LauncherConfig
from unirl.core.specs.spec import AlgorithmSpec, ModelSpec


class Started(LauncherConfig):
    def __init__(self, processes):
        super().__init__()
        self._processes = processes

    @property
    def processes(self):
        return self._processes


def plan(
    config,
    *,
    needs=None,
    when=None,
    kl_coef=0.0,
    wrap_blocks=("Block",),
    has_reference_workers=False,
    reads_weights=True,
    processes=None,
    evaluates="live",
    run=None,
    **of_model,
):
    """The parts of a plan and its stage that the check reads."""
    algorithm = AlgorithmSpec(name="a", summary="", build="", config="", needs=needs or Needs(), when=when or {})
    model = ModelSpec(name="m", summary="", build="", config="", tracks={}, trainable="net", wrap_blocks=wrap_blocks)
    stage = SimpleNamespace(
        backend=SimpleNamespace(name="fsdp2", config=config),
        algorithm=SimpleNamespace(name="a", spec=algorithm, config=SimpleNamespace(kl_coef=kl_coef)),
        model=SimpleNamespace(name="m", spec=model, config=SimpleNamespace(**of_model)),
        needs=algorithm.needs.merged(algorithm.when["kl_coef"]) if kl_coef else algorithm.needs,
        teachers=(),
        kind="text",
        engine=SimpleNamespace(name="e", spec=SimpleNamespace(reads_weights=reads_weights)),
    )
    launcher = None if processes is None else SimpleNamespace(name="l", config=Started(processes))
    return SimpleNamespace(
        only=stage,
        has_reference_workers=has_reference_workers,
        launcher=launcher,
        run=run or RunConfig(),
        eval=EvalConfig(policy=evaluates),
    )


def reasons(plan) -> list[str]:
    config = plan.only.backend.config
    result = list(broken_limits(config, key="backend"))
    return [str(reason) for reason in result or (one.under("backend") for one in config.problems(plan, plan.only))]


def test_listing_the_plugin_imports_no_torch():
    code = "import sys, unirl.backends.fsdp2.plugin; assert 'torch' not in sys.modules and 'peft' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_the_config_is_a_structured_config():
    from omegaconf import OmegaConf

    config = OmegaConf.structured(Fsdp2Config)
    assert config.lagged.every == "rollout" and config.ema.every == "step"


def test_the_defaults_are_accepted():
    assert list(Fsdp2Config().problems(None, None)) == []
    assert reasons(plan(Fsdp2Config())) == []
    assert Cap.THROUGH_SAMPLER in SPEC.capabilities


def test_a_reference_that_nobody_keeps_is_refused():
    when = {"kl_coef": Needs(reference="policy")}
    full = Fsdp2Config(trains="full")
    assert reasons(plan(full, when=when)) == []
    (reason,) = reasons(plan(full, when=when, kl_coef=0.1))
    assert reason.startswith("backend.reference_copy: algorithm 'a'")
    kept = Fsdp2Config(trains="full", reference_copy=True)
    assert reasons(plan(kept, when=when, kl_coef=0.1)) == []
    assert reasons(plan(full, when=when, kl_coef=0.1, has_reference_workers=True)) == []
    assert reasons(plan(Fsdp2Config(), when=when, kl_coef=0.1)) == []


def test_a_reference_that_moves_is_kept_where_a_loss_compares_with_it():
    when, moving = {"kl_coef": Needs(reference="policy")}, AverageConfig(kind="constant", decay=0.0, period=100)
    for trains in ("lora", "full"):
        config = Fsdp2Config(trains=trains, moving_reference=moving)
        assert reasons(plan(config, when=when, kl_coef=0.1)) == []
        (reason,) = reasons(plan(config, when=when))
        assert reason.startswith("backend.moving_reference.kind: got 'constant', but algorithm 'a' uses no reference")
        (reason,) = reasons(plan(config, when=when, kl_coef=0.1, has_reference_workers=True))
        assert reason.startswith("backend.moving_reference.kind: got 'constant', but reference workers hold the")
    both = Fsdp2Config(trains="full", reference_copy=True, moving_reference=moving)
    (reason,) = reasons(plan(both, when=when, kl_coef=0.1))
    assert reason.startswith("backend.reference_copy: got true, but moving_reference keeps a reference policy that")
    (reason,) = reasons(plan(Fsdp2Config(moving_reference=AverageConfig(period=0)), when=when))
    assert reason.startswith("backend.moving_reference.period: got 0, expected 1 or more.")


def test_a_lagged_policy_that_nobody_keeps_is_refused():
    for sampler in ("lagged", "ema"):
        needs = Needs(sampler=sampler)
        (reason,) = reasons(plan(Fsdp2Config(), needs=needs))
        assert reason.startswith(f"backend.{sampler}.kind: got none, but algorithm 'a' trains on samples from the")
        kept = Fsdp2Config(**{sampler: AverageConfig(kind="constant")})
        assert reasons(plan(kept, needs=needs)) == []


def test_a_policy_to_evaluate_that_nobody_keeps_is_refused():
    constant, full = AverageConfig(kind="constant"), Fsdp2Config(trains="full")
    for policy in ("ema", "lagged"):
        (reason,) = reasons(plan(Fsdp2Config(), evaluates=policy))
        assert reason.startswith(f"eval.policy: got {policy!r}, which the backend does not keep. Set backend.{policy}.")
        assert reasons(plan(Fsdp2Config(**{policy: constant}), evaluates=policy)) == []
    for has_workers in (False, True):
        (reason,) = reasons(plan(full, evaluates="reference", has_reference_workers=has_workers))
        assert "Set backend.reference_copy=true" in reason, "workers answer for training alone"
    assert reasons(plan(Fsdp2Config(), evaluates="reference")) == [], "the model without its adapter"
    assert reasons(plan(Fsdp2Config(trains="full", reference_copy=True), evaluates="reference")) == []
    exports = {"evaluates": "reference", "run": RunConfig(export_every=5)}
    (reason,) = reasons(plan(Fsdp2Config(), **exports))
    assert reason.startswith("run.export_every: got 5 with eval.policy=reference, the model without its adapter: there")
    moving = Fsdp2Config(trains="full", moving_reference=constant)
    with_kl = {"when": {"kl_coef": Needs(reference="policy")}, "kl_coef": 0.1}
    assert reasons(plan(moving, evaluates="reference", **with_kl)) == []
    assert reasons(plan(Fsdp2Config(moving_reference=constant), **exports, **with_kl)) == []


def test_a_dtype_that_nothing_would_compute_in_is_refused():
    full = Fsdp2Config(trains="full")
    (reason,) = reasons(plan(full, dtype="bfloat16", autocast=None))
    assert reason.startswith("backend.mixed_precision: got none with model.dtype=bfloat16")
    assert reasons(plan(full, dtype="float32", autocast=None)) == []
    assert reasons(plan(full, dtype="bfloat16", autocast="bfloat16")) == []
    assert reasons(plan(Fsdp2Config(trains="full", mixed_precision="bf16"), dtype="bfloat16")) == []
    assert reasons(plan(Fsdp2Config(trains="lora"), dtype="bfloat16")) == []


def test_each_wrong_setting_is_named_once():
    config = Fsdp2Config(
        trains="some",
        lr=0.0,
        betas=[0.9],
        max_grad_norm=0.0,
        ema=AverageConfig(kind="slow", decay=2.0),
        mixed_precision="int8",
    )
    keys = {reason.split(":")[0] for reason in reasons(plan(config))}
    expected = {"trains", "lr", "betas", "max_grad_norm", "ema.kind", "ema.decay", "mixed_precision"}
    assert keys == {f"backend.{key}" for key in expected}
    (reason,) = reasons(plan(Fsdp2Config(activation_checkpointing=True), wrap_blocks=()))
    assert reason.startswith("backend.activation_checkpointing: model 'm' names no blocks")


def test_rates_by_part_that_cannot_be_are_refused():
    assert reasons(plan(Fsdp2Config(lr_scales={"^blocks": 0.0, r"expert\.": 2.0}))) == []
    numbers = {"^blocks": -1.0, "text": math.nan, "image": math.inf, "both": 0.1}
    first, second, third = reasons(plan(Fsdp2Config(lr_scales=numbers)))
    assert first == "backend.lr_scales.^blocks: got -1.0, expected 0 or more. It is a factor of `lr`; 0 freezes."
    assert second.startswith("backend.lr_scales.text: got nan, expected a finite number, 0 or more.")
    assert third.startswith("backend.lr_scales.image: got inf, expected a finite number, 0 or more.")
    (reason,) = reasons(plan(Fsdp2Config(lr_scales={"blocks.[0": 0.5, "text": 0.1})))
    assert reason.startswith(
        "backend.lr_scales.blocks.[0: got 'blocks.[0', expected a regular expression; Python reports: unterminated "
    )


def test_a_sequence_that_the_model_cannot_split_is_refused():
    ranks = Processes(train=4)
    (reason,) = reasons(plan(Fsdp2Config(mesh=MeshConfig(sequence=2)), processes=ranks))
    assert reason.startswith("backend.mesh.sequence: got 2, but model 'm' cannot split its sequence; use 1")
    both = Fsdp2Config(mesh=MeshConfig(sequence=2, tensor=2))
    assert any("got 2 with mesh.tensor=2; one of them must be 1" in reason for reason in reasons(plan(both)))
    assert both.copies == 4


def test_a_mesh_that_the_ranks_do_not_fill_is_refused():
    (reason,) = reasons(plan(Fsdp2Config(mesh=MeshConfig(shard=2))))
    assert reason.startswith("backend.mesh.shard: got 2, but one process trains. Use 1, or several, such as launcher")
    for processes, mesh, says in (
        (Processes(train=6), MeshConfig(shard=4), "got 4, expected a divisor of 6, the train ranks; 0"),
        (
            Processes(train=8),
            MeshConfig(shard=8, tensor=2),
            "got 8, expected a divisor of 4, the train ranks / mesh.te",
        ),
    ):
        result = reasons(plan(Fsdp2Config(mesh=mesh), processes=processes))
        assert any(reason.startswith(f"backend.mesh.shard: {says}") for reason in result), result
    for mesh in (MeshConfig(), MeshConfig(shard=1), MeshConfig(shard=2)):
        assert reasons(plan(Fsdp2Config(mesh=mesh), processes=Processes(train=4))) == []


def test_blocks_are_not_compiled_where_that_breaks_a_promise_or_has_not_been_run():
    one = plan(Fsdp2Config(compile="blocks"))
    assert reasons(one) == []
    one.run = RunConfig(batch_invariant=True)
    (reason,) = reasons(one)
    assert reason.startswith("backend.compile: got blocks with run.batch_invariant=true")
    for axis in ("tensor", "sequence"):
        shared = reasons(plan(Fsdp2Config(compile="blocks", mesh=MeshConfig(**{axis: 2}))))
        assert any(reason.startswith(f"backend.compile: got blocks with mesh.{axis}=2") for reason in shared)
    (reason,) = reasons(plan(Fsdp2Config(compile="blocks"), wrap_blocks=()))
    assert reason.startswith("backend.compile: model 'm' names no blocks")


def test_a_quantized_base_is_refused_where_it_cannot_be_the_policy(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    small = {"quantize": "int8", "activation_checkpointing": True}
    assert reasons(plan(Fsdp2Config(**small), processes=Processes())) == []
    assert reasons(plan(Fsdp2Config(quantize="nf4"))) == []
    (reason,) = reasons(plan(Fsdp2Config(quantize="int8")))
    assert reason.startswith("backend.quantize: got int8 without activation_checkpointing: autograd would keep")
    for case, says in {
        "full": "but quantized weights cannot be trained. Use backend.trains=lora.",
        "bf16": "with mixed_precision=bf16, which wraps the module",
        "always": "with shard=always, which wraps the module",
        "compiled": "with compile=blocks, which has not been tried",
        "ranks": "with 2 train ranks; quantized weights cannot be sharded",
        "engine": "but engine 'e' samples with weights that are not quantized",
        "rollout": "but other processes of launcher 'l' hold weights that are not quantized",
        "reference": "but other processes of launcher 'l' hold weights that are not quantized",
        "blocks": "but model 'm' names no blocks to quantize",
    }.items():
        of_config = {"full": {"trains": "full"}, "bf16": {"mixed_precision": "bf16"}, "always": {"shard": "always"}}
        of_config["compiled"] = {"compile": "blocks"}
        of_plan = {
            "ranks": {"processes": Processes(train=2)},
            "engine": {"reads_weights": False, "processes": Processes(rollout=1)},
            "rollout": {"processes": Processes(rollout=1)},
            "reference": {"processes": Processes(reference=1)},
            "blocks": {"wrap_blocks": ()},
        }
        config = Fsdp2Config(quantize="nf4", **of_config.get(case, {}))
        (reason,) = reasons(plan(config, **of_plan.get(case, {})))
        assert reason.startswith("backend.quantize: got nf4") and says in reason, case
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for config, start in (
        (Fsdp2Config(quantize="nf4"), "quantize: got nf4"),
        (Fsdp2Config(optimizer="adamw_8bit"), "optimizer: got adamw_8bit"),
    ):
        (reason,) = reasons(plan(config))
        assert reason == (
            f"backend.{start}, which needs torchao. Install it: `pip install 'unirl-train-host[quantize]'`."
        )


def test_offloaded_blocks_are_refused_where_the_weights_train_or_are_sharded():
    low = {"dtype": "bfloat16", "autocast": "bfloat16"}
    for settings, of_plan in (
        ({}, {}),
        ({}, low),
        ({"mixed_precision": "bf16"}, {"dtype": "bfloat16"}),
        ({"activation_checkpointing": True}, {"dtype": "float32", "autocast": "bfloat16"}),
        ({"mesh": MeshConfig(shard=1)}, {"processes": Processes(train=2)}),
        # An engine or a worker of its own has its own weights.
        ({}, {"reads_weights": False, "processes": Processes(rollout=1, reference=1)}),
    ):
        config = Fsdp2Config(trains="lora", offload_frozen="blocks", **settings)
        assert reasons(plan(config, **of_plan)) == []
    for says, (settings, of_plan) in {
        "but all weights train. Use backend.trains=lora": ({"trains": "full"}, {}),
        "with shard=always, which gathers weights": ({"shard": "always"}, {}),
        "but model 'm' names no blocks to offload": ({}, {"wrap_blocks": ()}),
        "with 2 train ranks, which share the weights": ({}, {"processes": Processes(train=2)}),
        "with mixed_precision=bf16 and model.dtype=float32, which wraps the module": (
            {"mixed_precision": "bf16"},
            {"dtype": "float32"},
        ),
        "autograd would keep the weights of every layer": ({}, {"dtype": "float32", "autocast": "bfloat16"}),
        "with a critic and mixed_precision=bf16, which wraps the module": (
            {"mixed_precision": "bf16", "critic": CriticConfig(lr=1e-3)},
            {"dtype": "bfloat16", "needs": Needs(critic=True)},
        ),
    }.items():
        config = Fsdp2Config(offload_frozen="blocks", **settings)
        (reason,) = reasons(plan(config, **of_plan))
        assert reason.startswith("backend.offload_frozen: got blocks") and says in reason, says


def test_the_example_of_the_readme_runs(capsys):
    text = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
    exec(compile(text.split("```python")[1].split("```")[0], "README.md", "exec"), {"__name__": "readme"})
    output = capsys.readouterr().out
    # Rank 16 on 9 -> 32 and 32 -> 8.
    assert f"2 layers adapted, {16 * (9 + 32) + 16 * (32 + 8)} weights train" in output
    assert "lora weights of version 0" in output
