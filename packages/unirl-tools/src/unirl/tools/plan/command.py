"""`unirl plan`: the memory and the time that a recipe will take, before anything starts."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import click
from unirl.core.cli.discovery import allow_code_option, plugins_dir_option

if TYPE_CHECKING:
    from .prediction import MemoryPlan

__all__ = ["command", "plan_data"]

UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
PEAK_TFLOPS, UTILISATION = 989.0, 0.4
"""Dense bf16 of an H100 SXM, by its data sheet; and a share of it that training of large transformers reaches."""
PEAK_BANDWIDTH, BANDWIDTH_USED = 3.35, 0.6
"""TB/s of an H100 SXM's memory, by its data sheet; and a share of it that decoding reaches."""

PEAK_BUS, BUS_USED = 31.5, 0.8
"""GB/s of PCIe 4.0 x16 in one direction, by its specification, which cards of 2022 and 2023 for one machine have; and a
share of it that copies from pinned memory reach."""


_POSITIVE = click.FloatRange(min=0, min_open=True)


def _size(_ctx: click.Context, _param: click.Parameter, value: str | None) -> int | None:
    """A number of bytes, such as `80GiB`; None where the option is not given."""
    # A callback: the type arguments of `click.ParamType` are newer than the oldest click that pyproject.toml allows.
    if value is None:
        return None
    match = re.fullmatch(r"\s*([0-9.]+)\s*([A-Za-z]*)\s*", value)
    try:
        if match is not None:
            return int(float(match[1]) * UNITS[match[2].upper()])
    except (KeyError, ValueError, OverflowError):
        pass
    raise click.BadParameter(f"got {value!r}, expected a size such as 80GiB or 80GB.")


@click.command("plan", short_help="Predict memory and time of a recipe, and what does not fit.")
@click.argument("recipe")
@click.argument("overrides", nargs=-1)
@click.option(
    "--device-memory",
    metavar="SIZE",
    callback=_size,
    help="Memory of each device, such as 80GiB. Exits with 1 if it is too little.",
)
@click.option("--tflops", type=_POSITIVE, default=PEAK_TFLOPS, show_default=True, help="Peak TFLOP/s of each device.")
@click.option(
    "--utilisation", type=_POSITIVE, default=UTILISATION, show_default=True, help="Share of the peak that is reached."
)
@click.option(
    "--bandwidth",
    type=_POSITIVE,
    default=PEAK_BANDWIDTH,
    show_default=True,
    help="Peak TB/s of each device's memory, for decoding.",
)
@click.option(
    "--bus",
    type=_POSITIVE,
    default=PEAK_BUS,
    show_default=True,
    help="Peak GB/s to each device, for frozen weights in CPU memory.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
@plugins_dir_option
@allow_code_option
@click.pass_context
def command(
    ctx: click.Context,
    recipe: str,
    overrides: tuple[str, ...],
    device_memory: int | None,
    tflops: float,
    utilisation: float,
    bandwidth: float,
    bus: float,
    as_json: bool,
) -> None:
    """Predict the memory of each process of RECIPE, with OVERRIDES as in `unirl compose`, the time of a step, and the
    size of a checkpoint.

    Nothing is loaded: the model is built without values and measured on shapes, which takes seconds for any size.
    `model.path` may be a folder of configs and tokenizers without weights.
    """
    from unirl.core.cli.discovery import discover
    from unirl.core.cli.output import print_json
    from unirl.core.errors import PlanRejected
    from unirl.core.match.match import match
    from unirl.core.recipe.compose import compose

    from .memory_plan import memory_plan

    catalog = discover()
    plan = compose(recipe, overrides, catalog=catalog)
    verdict = match(plan, catalog=catalog)
    if not verdict.accepted:
        raise PlanRejected("\n".join(map(str, verdict.reasons)))
    prediction = memory_plan(plan, catalog=catalog, device_bytes=device_memory or 0)
    overfull = prediction.overfull(device_memory) if device_memory is not None else []
    rates = {"speed": tflops * 1e12 * utilisation, "bandwidth": bandwidth * 1e12 * BANDWIDTH_USED}
    rates["bus"] = bus * 1e9 * BUS_USED
    data = {**plan_data(prediction, **rates), "problems": overfull}
    if as_json:
        print_json(data)
    else:
        _show(prediction, data, device_memory)
    ctx.exit(1 if overfull else 0)


def plan_data(
    prediction: MemoryPlan,
    *,
    speed: float,
    bandwidth: float = PEAK_BANDWIDTH * 1e12 * BANDWIDTH_USED,
    bus: float = PEAK_BUS * 1e9 * BUS_USED,
) -> dict[str, Any]:
    """The prediction as plain data. speed: floating-point operations per second of each device.  bandwidth: bytes per
    second that it reads while it decodes texts.  bus: bytes per second that are copied to it."""
    flops = prediction.flops
    seconds = {phase: each / speed for phase, each in prediction.device_flops.items()}
    seconds["generate"] = max(seconds["generate"], prediction.decode_bytes / bandwidth)
    copied = vars(prediction.bus_bytes) if prediction.bus_bytes is not None else {}
    for phase, size in copied.items():
        # Copies overlap with operations.
        seconds[phase] = max(seconds[phase], size / bus)
    return {
        "processes": [
            {
                "role": one.role,
                "count": one.count,
                "bytes": one.total,
                "items": dict(one.items),
                "estimates": dict(one.estimates),
                "engine_share": one.engine_share,
            }
            for one in prediction.processes
        ],
        "samples": prediction.samples,
        "sync_bytes": prediction.sync_bytes,
        "checkpoint_bytes": prediction.checkpoint_bytes,
        "num_checkpoints": prediction.num_checkpoints,
        "flops": {"forward": prediction.size.flops, **vars(flops), "total": flops.total},
        "decode_bytes": prediction.decode_bytes,
        "pinned_bytes": prediction.pinned_bytes,
        "bus_bytes": copied,
        "bus_seconds": {phase: size / bus for phase, size in copied.items()},
        "seconds": seconds,
        "not_counted": list(prediction.notes),
    }


def _show(prediction: MemoryPlan, data: dict[str, Any], device_memory: int | None) -> None:
    from rich.text import Text
    from unirl.core.cli.output import console, print_table

    from .prediction import shown_bytes

    out = console()
    rows: list[dict[str, str]] = []
    for one in prediction.processes:
        rows += [{"process": f"{one.count} x {one.role}", "what": "in all", "bytes": shown_bytes(one.total)}]
        rows += [{"what": name, "bytes": shown_bytes(size)} for name, size in one.items.items()]
        rows += [{"what": f"{name}, estimated", "bytes": shown_bytes(size)} for name, size in one.estimates.items()]
        if one.engine_share:
            rows += [{"what": "engine, weights and caches", "bytes": f"{one.engine_share:.0%} of the device"}]
    print_table(rows, columns=["process", "what", "bytes"])
    out.print()
    seconds = ", ".join(f"{phase.replace('_', ' ')} {each:.3g} s" for phase, each in data["seconds"].items() if each)
    out.print(f"{prediction.samples} samples a step, {prediction.flops.total:.3g} FLOP: {seconds}", soft_wrap=True)
    if prediction.bus_bytes is not None:
        copied, slow = prediction.bus_bytes.total, sum(data["bus_seconds"].values())
        text = f"blocks in CPU memory: {shown_bytes(prediction.pinned_bytes)} pinned by each train process; "
        out.print(f"{text}{shown_bytes(copied)} a step over the bus, {slow:.3g} s", soft_wrap=True)
    if prediction.sync_bytes:
        out.print(f"weight sync: {shown_bytes(prediction.sync_bytes)} before each rollout", soft_wrap=True)
    one, number = prediction.checkpoint_bytes, prediction.num_checkpoints
    out.print(f"checkpoint: {shown_bytes(one)}; {number} on disk at most: {shown_bytes(one * number)}", soft_wrap=True)
    for note in prediction.notes:
        out.print(Text(f"not counted: {note}", style="dim"), soft_wrap=True)
    for problem in data["problems"]:
        out.print(Text(f"does not fit: {problem}", style="red"), soft_wrap=True)
    if device_memory is not None and not data["problems"]:
        out.print(Text(f"fits into {shown_bytes(device_memory)}", style="green"))
