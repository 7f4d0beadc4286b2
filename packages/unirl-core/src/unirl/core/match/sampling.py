"""Whether a stage's sampling settings fit its engine, its model and what its algorithm needs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, cast

from ..limits import Reason, broken_limits
from ..names import did_you_mean
from ..specs.capability import Cap
from ..specs.model_options import options_class
from ..specs.overrides import option_problems
from ..specs.plan import Stage
from ..types.sampling import LatentSamplingConfig, SdeStepsConfig, TextSamplingConfig
from .wording import lacks, lacks_token_rules, listed

if TYPE_CHECKING:
    from ..plugins.catalog import Catalog
    from ..specs.plan import Plan
    from ..specs.spec import EngineSpec

__all__ = ["DETERMINISTIC_KERNELS", "sampling_problems"]

DETERMINISTIC_KERNELS = ("euler", "dpm2")
"""Kernels without noise: they have no log-prob, so no algorithm that takes ratios can train on them."""
_NOISELESS_AT_THE_END = ("cps", "ddim-eta")
"""Kernels whose step to the clean latent adds no noise."""


def sampling_problems(plan: Plan, stage: Stage, *, key: str, catalog: Catalog | None) -> Iterator[Reason]:
    """Yields a reason for each setting that cannot be honoured.

    key: of its sampling section; that of evaluation is `eval.` before it.  catalog: of plugins that offer kernels and
    guidances.
    """
    yield from _options(stage, key=key)
    if isinstance(stage.sampling, TextSamplingConfig):
        yield from _text(key, stage.sampling, stage)
    else:
        yield from _latent(key, stage.sampling, stage, catalog=catalog)
        yield from _tree(stage.sampling.sde, plan.rows_compared(stage), stage)


def _options(stage: Stage, *, key: str) -> Iterator[Reason]:
    """Reasons against the model's own settings, of training and where evaluation has others.

    Raises PluginBroken when the model's spec names no dataclass for them.
    """
    model, engine, sections = stage.model.spec, stage.engine.spec, {f"{key}.options": stage.sampling.options}
    if "options" in stage.eval_sampling:
        sections[f"eval.{key}.options"] = stage.evaluation.options
    for where, given in sections.items():
        if given and stage.track not in model.options:
            got = f"got {', '.join(sorted(given))}"
            text = f"{got}; model {model.name!r} has no options of track {stage.track!r}. Remove them."
            yield Reason(key=where, text=text)
        elif given:
            kind = options_class(model, stage.track)
            reasons = option_problems(kind, given, key=where)
            yield from reasons or broken_limits(kind(**given), key=where)
            if engine.needs_bridge and engine.name not in model.bridged_options:
                text = (
                    f"engine {engine.name!r} has a pipeline of its own, which takes no options of model {model.name!r}."
                )
                yield Reason(key=where, text=f"{text} Remove them, or use an engine without a bridge.")


def _latent(key: str, sampling: LatentSamplingConfig, stage: Stage, *, catalog: Catalog | None) -> Iterator[Reason]:
    own = list(_rollouts(key, sampling, stage, catalog=catalog))
    yield from own
    reply = {reason.text for reason in own}
    evaluated = _rollouts(f"eval.{key}", cast(LatentSamplingConfig, stage.evaluation), stage, catalog=catalog)
    yield from (reason for reason in evaluated if reason.text not in reply)
    if sampling.sde.branch_steps and not sampling.same_initial_noise:
        text = "got false, but the samples of a tree (sde.branch_steps) start from one noise; set it to true."
        yield Reason(key=f"{key}.same_initial_noise", text=text)
    if stage.rewards and not sampling.decode:
        yield Reason(
            key=f"{key}.decode",
            text=f"got false, but rewards score the decoded {stage.medium} ({listed(stage.rewards)}). Set it to true.",
        )
    if sampling.sde.per_group:
        yield from lacks(stage.engine.key, stage.engine.spec, Cap.SDE_STEPS_PER_GROUP, asks=f"{key}.sde.per_group")
    if sampling.trajectory_dtype != "float32":
        yield from _rounded(key, sampling, stage)
    yield from (reason.under(f"{key}.sde") for reason in sampling.sde.problems(sampling.num_inference_steps))


def _rollouts(key: str, sampling: LatentSamplingConfig, stage: Stage, *, catalog: Catalog | None) -> Iterator[Reason]:
    """Whether the engine supports the latent sampling settings at `key`, of training or of evaluation."""
    engine, model = stage.engine.spec, stage.model.spec
    if sampling.frames > 1 and not (sampling.fps or model.fps):
        text = f"got 0 for videos, and model {model.name!r} states no rate of its own; set frames per second."
        yield Reason(key=f"{key}.fps", text=text)
    yield from _samplers(key, sampling, engine, catalog=catalog)
    yield from _noise(key, sampling, stage)
    if sampling.is_guided:
        asks = f"guidance_scale {sampling.guidance_scale}"
        asks = asks if sampling.guidance_scale != 1.0 else f"guidance_mode {sampling.guidance_mode!r}"
        yield from lacks(stage.engine.key, engine, Cap.GUIDANCE, asks=asks)
        yield from lacks(stage.model.key, model, Cap.GUIDANCE, asks=asks)


def _noise(key: str, sampling: LatentSamplingConfig, stage: Stage) -> Iterator[Reason]:
    """Reasons against an `eta` that the kernel of the settings at `key` cannot have, and steps without noise."""
    kernel, eta = sampling.kernel, sampling.eta
    # An engine of stored samples refuses stochastic steps itself.
    draws = not stage.engine.spec.samples
    if kernel == "cps" and eta > 1:
        yield Reason(key=f"{key}.eta", text=f"got {eta}, expected at most 1 with kernel 'cps', where 1 is all noise.")
    if stage.needs.stochastic and sampling is stage.sampling:
        yield from _stochastic(key, sampling, stage)
    elif eta and kernel in DETERMINISTIC_KERNELS:
        text = f"got {eta}, expected 0: kernel {kernel!r} is deterministic. Set it to 0, or use a stochastic kernel, "
        yield Reason(key=f"{key}.eta", text=text + "such as flow-sde.")
    elif draws and sampling.sde.mode != "none" and (kernel in DETERMINISTIC_KERNELS or (":" not in kernel and not eta)):
        yield Reason(
            key=f"{key}.sde.mode",
            text=f"got {sampling.sde.mode!r}, but kernel {kernel!r} with eta {eta} makes no step stochastic. Set it to "
            "none, or use kernel=flow-sde with an eta above 0, such as 0.7.",
        )


def _samplers(
    key: str, sampling: LatentSamplingConfig, engine: EngineSpec, *, catalog: Catalog | None
) -> Iterator[Reason]:
    """Reasons against `kernel` and `guidance_mode` of the settings at `key`."""
    kernels = (engine.kernels, catalog.offered("kernels") if catalog is not None else None)
    guidances = (engine.guidances, catalog.offered("guidances") if catalog is not None else None)
    for name, value, (short, offered) in (
        ("kernel", sampling.kernel, kernels),
        ("guidance_mode", sampling.guidance_mode, guidances),
    ):
        others = sorted(offered or ()) if Cap.PLUGIN_SAMPLERS in engine.capabilities else []
        available = ", ".join([*sorted(short), *others]) or "nothing"
        if ":" not in value and value not in short:
            text = f"got {value!r}; engine {engine.name!r} supports {available}{did_you_mean(value, short) or '.'}"
            yield Reason(key=f"{key}.{name}", text=text)
        elif ":" in value and Cap.PLUGIN_SAMPLERS not in engine.capabilities:
            text = f"got {value!r}; engine {engine.name!r} computes none of plugins. It supports {available}."
            yield Reason(key=f"{key}.{name}", text=text)
        elif ":" in value and offered is not None and value not in offered:
            text = f"got {value!r}, which no loaded plugin offers. Available: {available}"
            yield Reason(key=f"{key}.{name}", text=f"{text}{did_you_mean(value, offered) or '.'}")


def _rounded(key: str, sampling: LatentSamplingConfig, stage: Stage) -> Iterator[Reason]:
    """Reasons that latents cannot be stored in 16 bits."""
    text = f"got {sampling.trajectory_dtype!r}, expected 'float32': "
    if stage.engine.spec.samples:
        text += f"engine {stage.engine.name!r} reads stored samples and samples no trajectory."
        yield Reason(key=f"{key}.trajectory_dtype", text=text)
    elif stage.algorithm is not None and stage.needs.reward == "differentiable":
        text += (
            f"algorithm {stage.algorithm.name!r} computes the trajectory again, with gradients, which no rounding has."
        )
        yield Reason(key=f"{key}.trajectory_dtype", text=text)


def _stochastic(key: str, sampling: LatentSamplingConfig, stage: Stage) -> Iterator[Reason]:
    assert stage.algorithm is not None
    asks = f"algorithm {stage.algorithm.name!r} takes ratios of log-probs"
    if sampling.kernel in DETERMINISTIC_KERNELS:
        yield Reason(
            key=f"{key}.kernel",
            text=f"{asks}, and {sampling.kernel!r} is deterministic; use flow-sde, dance-sde or cps.",
        )
    elif sampling.eta <= 0:
        yield Reason(
            key=f"{key}.eta",
            text=f"{asks}, and with eta {sampling.eta} the steps are deterministic; use eta above 0, such as 0.7.",
        )
    sde, last = sampling.sde, sampling.num_inference_steps - 1
    if sde.mode == "none":
        yield Reason(key=f"{key}.sde.mode", text=f"{asks}, and mode 'none' makes no step stochastic.")
    elif sampling.kernel in _NOISELESS_AT_THE_END and last in sde.possible_steps(last + 1):
        fraction = f"last={last / (last + 1):.3g}"
        special = {"all": ("mode", f"use mode=fraction with {fraction}"), "fixed": ("steps", "leave it out")}
        name, advice = special.get(sde.mode, ("last", f"use {fraction}"))
        yield Reason(
            key=f"{key}.sde.{name}",
            text=f"got {getattr(sde, name)}, which makes the last step stochastic: {asks}, and kernel "
            f"{sampling.kernel!r} adds no noise there; {advice}.",
        )


def _tree(sde: SdeStepsConfig, compared: int, stage: Stage) -> Iterator[Reason]:
    """A reason against groups that do not fill the tree of `sde.branch_steps`. compared: samples of a group."""
    expected = sde.branch_factor ** len(sde.branch_steps)
    if sde.branch_steps and compared != expected:
        own = bool(stage.parent or stage.settings.samples)
        yield Reason(
            key=f"stages.{stage.name}.samples" if own else "data.samples_per_prompt",
            text=f"got groups of {compared} samples, expected {expected}, the leaves of the tree: branch_factor "
            f"{sde.branch_factor} at {len(sde.branch_steps)} branch_steps. Change one of the three.",
        )


def _text(key: str, sampling: TextSamplingConfig, stage: Stage) -> Iterator[Reason]:
    evaluated = cast(TextSamplingConfig, stage.evaluation)
    for where, settings in ((key, sampling), (f"eval.{key}", evaluated)):
        if "" in settings.stop and (where == key or settings.stop != sampling.stop):
            yield Reason(
                key=f"{where}.stop", text="got an empty string, which would stop every completion at once; remove it."
            )
    yield from lacks_token_rules(stage.engine.key, stage.engine.spec, stage.model.spec, [stage.track])
    if stage.algorithm is None or stage.needs.log_probs != "token":
        return
    asks = f"algorithm {stage.algorithm.name!r} takes ratios of log-probs"
    if sampling.temperature == 0:
        yield Reason(
            key=f"{key}.temperature",
            text=f"{asks}, and at temperature 0 decoding is greedy; use a temperature above 0, such as 1.",
        )
    for name, value, whole in (("top_p", sampling.top_p, 1.0), ("top_k", sampling.top_k, 0)):
        if value != whole:
            yield Reason(
                key=f"{key}.{name}",
                text=f"got {value}, expected {whole}: {asks} over the whole vocabulary, so training must sample from "
                f"all of it. eval.{key}.{name} may differ.",
            )
