"""The plugin's spec and config, settings refused before anything is loaded, and training on one rank."""

import subprocess
import sys
from types import SimpleNamespace

import pytest
from unirl.backends.veomni import library
from unirl.backends.veomni.config import MeshConfig, VeomniConfig
from unirl.backends.veomni.plugin import SPEC
from unirl.core.errors import RecipeError
from unirl.core.limits import broken_limits
from unirl.core.specs.capability import Cap, Needs
from unirl.core.specs.config import EvalConfig, RunConfig
from unirl.core.specs.memory import Processes
from unirl.core.specs.part_config import LauncherConfig
from unirl.core.specs.spec import AlgorithmSpec, ModelSpec


class Ranks(LauncherConfig):
    @property
    def processes(self):
        return Processes(train=4)


def reasons(config, **of_model) -> list[str]:
    """Why a stage of some model with these settings is refused, on four ranks."""
    spec = ModelSpec(name="m", summary="", build="", config="", tracks={}, trainable="net", wrap_blocks=("Block",))
    algorithm = AlgorithmSpec(name="a", summary="", build="", config="", needs=Needs())
    stage = SimpleNamespace(
        backend=SimpleNamespace(name="veomni", config=config),
        algorithm=SimpleNamespace(name="a", spec=algorithm, config=SimpleNamespace()),
        model=SimpleNamespace(name="m", spec=spec, config=SimpleNamespace(**of_model)),
        needs=Needs(),
        teachers=(),
    )
    launcher = SimpleNamespace(name="l", config=Ranks())
    plan = SimpleNamespace(
        only=stage, has_reference_workers=False, launcher=launcher, run=RunConfig(), eval=EvalConfig()
    )
    result = list(broken_limits(config, key="backend"))
    return [str(reason) for reason in result or (one.under("backend") for one in config.problems(plan, stage))]


def run_alone(code: str) -> str:
    """Output of code in a separate process: VeOmni patches transformers in the one that imports it."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_importing_the_backend_imports_no_veomni_and_listing_it_no_torch():
    print(run_alone("import sys, unirl.backends.veomni.plugin; assert 'torch' not in sys.modules"))
    print(run_alone("import sys, unirl.backends.veomni.backend; assert 'veomni' not in sys.modules"))


def test_the_defaults_are_accepted():
    assert list(VeomniConfig().problems(None, None)) == [] and reasons(VeomniConfig()) == []
    assert Cap.LAZY_BUILD in SPEC.capabilities
    assert VeomniConfig(mesh=MeshConfig(sequence=2)).copies == 2
    # Ranks that share experts have different samples.
    assert VeomniConfig(mesh=MeshConfig(expert=2)).copies == 1


def test_a_sequence_that_the_model_cannot_split_is_refused():
    (reason,) = reasons(VeomniConfig(mesh=MeshConfig(sequence=2)))
    assert reason.startswith("backend.mesh.sequence: got 2, but model 'm' cannot split its sequence; use 1")
    both = reasons(VeomniConfig(mesh=MeshConfig(sequence=2, expert=2)))
    assert any("got 2 with mesh.expert=2; one of them must be 1" in reason for reason in both)
    (reason,) = reasons(VeomniConfig(mesh=MeshConfig(shard=3)))
    assert reason == "backend.mesh.shard: got 3, expected a divisor of 4, the train ranks; 0 takes all."


def test_precisions_that_veomni_has_not_are_refused():
    (reason,) = reasons(VeomniConfig(mixed_precision="fp16"))
    assert reason.startswith("backend.mixed_precision: got fp16; VeOmni is run with bf16 or none")
    (reason,) = reasons(VeomniConfig(mixed_precision="bf16"), dtype="bfloat16")
    assert "would keep the frozen weights in float32" in reason
    assert reasons(VeomniConfig(trains="full", mixed_precision="bf16"), dtype="bfloat16") == []


def test_compiled_blocks_are_left_to_fsdp2():
    (reason,) = reasons(VeomniConfig(compile="blocks"))
    assert reason.startswith("backend.compile: got blocks, expected none with VeOmni.")


def test_an_optimizer_that_is_not_offered_is_refused_with_those_that_are():
    (reason,) = reasons(VeomniConfig(optimizer="muon"))
    assert reason.startswith("backend.optimizer: got 'muon'") and "anyprecision_adamw" in reason


def test_without_veomni_the_error_says_what_to_install(monkeypatch):
    # None is what Python itself puts there for a module that must not be imported.
    monkeypatch.setitem(sys.modules, "veomni", None)
    with pytest.raises(RecipeError, match=r"backend: veomni cannot be imported .*pip install veomni==0\.1\.12"):
        library.veomni("optim")


ONE_RANK = """
import logging
from toy_denoiser import Clipped, ToyModel, make_track
from unirl.backends.veomni.backend import build
from unirl.backends.veomni.config import VeomniConfig
from unirl.core.errors import RecipeError
from unirl.core.roles import Job
from unirl.core.specs.config import TrainConfig
backend = build(VeomniConfig(), model=ToyModel(), train=TrainConfig(), steps=10)
backend.train([Job(track=make_track(ToyModel()), algorithm=Clipped())], progress=0.0)
print(backend.version, type(backend._module).__name__, logging.root.manager.disable)
try:
    build(VeomniConfig(mixed_precision="bf16"), model=ToyModel(), train=TrainConfig(), steps=10)
except RecipeError as error:
    print(error)
"""


@pytest.mark.slow
def test_one_rank_trains_unwrapped_prints_nothing_and_refuses_mixed_precision():
    code = f"import sys; sys.path[:0] = {sys.path!r}\n{ONE_RANK}"
    first, second = run_alone(code).splitlines()
    assert first == "1 ToyNet 0"
    assert second.startswith("backend.mixed_precision: got bf16 on one rank, which VeOmni does not wrap.")


RATES = r"""
import torch
from toy_denoiser import Clipped, ToyModel, gradients, make_track
from unirl.backends.veomni.backend import build
from unirl.backends.veomni.config import VeomniConfig
from unirl.backends.veomni.library import veomni
from unirl.core.errors import RecipeError
from unirl.core.specs.config import TrainConfig
AnyPrecisionAdamW = veomni("optim.optimizer").AnyPrecisionAdamW
scales = {r"blocks\.0": 0.25, "^leave": 0.0}
optimizers = {
    "adamw": lambda groups: torch.optim.AdamW(groups, weight_decay=0.1, fused=True),
    "anyprecision_adamw": lambda groups: AnyPrecisionAdamW(groups, betas=(0.9, 0.999), weight_decay=0.1),
}
for kind, optimizer in optimizers.items():
    settings = {"trains": "full", "lr": 1e-2, "weight_decay": 0.1, "max_grad_norm": None}
    config = VeomniConfig(optimizer=kind, lr_scales=scales, **settings)
    backend = build(config, model=ToyModel(), train=TrainConfig(), steps=10)
    params = {name: torch.nn.Parameter(param.detach().clone()) for name, param in backend._held.items()}
    slow = [param for name, param in params.items() if name.startswith("blocks.0.")]
    others = [param for name, param in params.items() if not name.startswith(("blocks.0.", "leave."))]
    plain = optimizer([{"params": slow, "lr": 0.25e-2}, {"params": others, "lr": 1e-2}])
    for seed in (1, 2):
        caught = gradients(backend, make_track(ToyModel(), seed=seed), Clipped())
        for name, param in params.items():
            param.grad = caught.get(name)
        plain.step()
    tensors = backend.export_weights(kind="full").tensors
    print(kind, len(slow), len(others), [name for name in params if not torch.equal(tensors[name], params[name])])
try:
    build(VeomniConfig(lr_scales={"blokcs": 0.1}), model=ToyModel(), train=TrainConfig(), steps=10)
except RecipeError as error:
    print(error)
"""


@pytest.mark.slow
def test_rates_by_part_are_those_of_veomnis_optimizers_with_groups_bit_for_bit():
    first, second, third = run_alone(f"import sys; sys.path[:0] = {sys.path!r}\n{RATES}").splitlines()
    # Two layers with a bias each in a block, and as many in the other one with the first layer; the last is frozen.
    assert first == "adamw 4 6 []" and second == "anyprecision_adamw 4 6 []"
    assert third.startswith("backend.lr_scales.blokcs: got a pattern that matches no trainable parameter of ToyNet")
