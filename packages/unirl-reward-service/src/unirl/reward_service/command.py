"""`unirl reward-service` and `unirl score`."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict, cast

import click
from unirl.core.cli.discovery import discover, plugins_dir_option
from unirl.core.cli.output import print_json, print_table
from unirl.core.errors import DataError, RecipeError, RunFailed

if TYPE_CHECKING:
    from unirl.core.roles import ScoreInput

__all__ = ["reward_service", "score"]

IMAGES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff")
VIDEOS = (".mp4", ".webm", ".mkv", ".mov", ".avi")


class _Scorers(TypedDict):
    """Reply to `GET /v1/scorers`."""

    scorers: list[dict[str, Any]]


@click.group("reward-service")
def reward_service() -> None:
    """Serve rewards to many runs, or check a service."""


@reward_service.command("serve")
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False, exists=True))
@click.option("--host", default=None, help="Address to listen on, in place of the file's.")
@click.option("--port", type=int, default=None, help="Port to listen on, in place of the file's; 0 takes a free one.")
@click.option("--end-with-stdin", is_flag=True, help="Also end when stdin is closed: with the program that started it.")
@plugins_dir_option
def serve_command(file: Path, host: str | None, port: int | None, end_with_stdin: bool) -> None:
    """Serve the scorers of FILE until SIGTERM, which lets requests in progress finish.

    Prints one line of JSON with the URL when all scorers are up; logs are lines of JSON on stderr.
    Exit codes: 0 stopped, 1 a scorer or the port cannot be had, 2 wrong settings.
    """
    from .config import read_config
    from .logs import set_up_logs
    from .server import serve

    replaced = {name: value for name, value in (("host", host), ("port", port)) if value is not None}
    config = read_config(file, **replaced)
    set_up_logs()
    serve(config, with_stdin=end_with_stdin)


@reward_service.command("check")
@click.argument("url")
@click.option("--key-env", default="", metavar="NAME", help="Environment variable with the API key.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def check_command(url: str, key_env: str, as_json: bool) -> None:
    """Show the scorers of a service: whether they are up, and their versions.

    Exit codes: 0 all are up, 1 one is down or the service does not answer.
    """
    import httpx
    import msgspec

    from .remote.replicas import error_of

    key = os.environ.get(key_env, "") if key_env else ""
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    try:
        reply = httpx.get(f"{url.rstrip('/')}/v1/scorers", headers=headers, timeout=30, trust_env=False)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise RunFailed(f"{url}: {type(error).__name__}: {error}. Is it the URL of a reward service?") from error
    if reply.status_code != 200:
        raise RunFailed(f"{url}: {reply.status_code} {': '.join(error_of(reply))}")
    try:
        # Strictly, so that all of it can be printed.
        scorers = msgspec.json.decode(reply.content, type=_Scorers)["scorers"]
        down = [scorer["name"] for scorer in scorers if not scorer["is_up"]]
    except (msgspec.MsgspecError, ValueError, RecursionError, KeyError) as error:
        raise RunFailed(f"{url}: {type(error).__name__}: {error}. Is it the URL of a reward service?") from error
    if as_json:
        print_json(scorers)
    else:
        rows = [{**s, "state": "up" if s["is_up"] else "down", "parts": ", ".join(s.get("parts", ()))} for s in scorers]
        print_table(rows, columns=("name", "state", "use", "media", "parts", "scale", "version"))
    if down:
        raise RunFailed(f"{url}: scorers are down: {', '.join(down)}.")


@click.command("score")
@click.option("--reward", required=True, metavar="NAME", help="An installed reward.")
@click.option("--set", "settings", multiple=True, metavar="KEY=VALUE", help="A setting of the reward.")
@click.option("--prompt", default="", metavar="TEXT", help="What the samples were made from.")
@click.option("--metadata", default="{}", metavar="JSON", help="Metadata of the prompt: an object.")
@click.option("--device", default="cpu", show_default=True, help="Device of the reward.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.argument("files", nargs=-1, required=True, type=click.Path(path_type=Path, dir_okay=False, exists=True))
@plugins_dir_option
def score(
    reward: str,
    settings: Sequence[str],
    prompt: str,
    metadata: str,
    device: str,
    as_json: bool,
    files: Sequence[Path],
) -> None:
    """Score FILES by hand: images, videos, or texts, all of one kind. Prints each score and its components.

    Exit codes: 0 scored, 1 the reward failed, 2 a file or a setting is wrong.
    """
    from .loading import load_reward

    samples = _samples(files, prompt=prompt, metadata=_metadata(metadata))
    loaded = load_reward(reward, _settings(settings), device=device, catalog=discover(), key=f"reward.{reward}")
    try:
        scores = loaded.reward.score(samples)
    finally:
        loaded.reward.close()
    columns = {"score": scores.values, **scores.parts}
    rows: list[dict[str, Any]] = []
    for row, file in enumerate(files):
        is_scored = scores.scored is None or bool(scores.scored[row])
        values = {name: float(column[row]) if is_scored else None for name, column in columns.items()}
        rows.append({"file": str(file), **values})
    if as_json:
        print_json({"reward": reward, "scale": loaded.spec.scale, "version": loaded.version, "samples": rows})
        return
    shown = [{n: v if n == "file" else "no score" if v is None else f"{v:.6g}" for n, v in r.items()} for r in rows]
    print_table(shown, columns=("file", *columns))
    click.echo(f"\n{reward}: {loaded.spec.scale}")


def _settings(words: Sequence[str]) -> dict[str, Any]:
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    if wrong := [word for word in words if "=" not in word]:
        raise RecipeError(f"--set: got {wrong[0]!r}, expected KEY=VALUE.")
    try:
        return cast("dict[str, Any]", OmegaConf.to_container(OmegaConf.from_dotlist(list(words))))
    except (OmegaConfBaseException, YAMLError) as error:
        raise RecipeError(f"--set: {' '.join(str(error).split())}") from error


def _metadata(text: str) -> Mapping[str, Any]:
    try:
        result = json.loads(text)
    except ValueError as error:
        raise RecipeError(f"--metadata: got {text!r}, expected a JSON object: {error}.") from error
    if not isinstance(result, dict):
        raise RecipeError(f"--metadata: got {text!r}, expected a JSON object.")
    return cast("dict[str, Any]", result)


def _samples(files: Sequence[Path], *, prompt: str, metadata: Mapping[str, Any]) -> ScoreInput:
    from unirl.core.roles import ScoreInput
    from unirl.core.types.data import MediaRef
    from unirl.core.types.inputs import Inputs
    from unirl.core.types.media import Media
    from unirl.core.types.track import Status
    from unirl.numerics.media import load_image, load_video

    kinds = [_kind(file) for file in files]
    if len(set(kinds)) > 1:
        other = next(index for index, kind in enumerate(kinds) if kind != kinds[0])
        raise DataError(f"{files[other]}: got {kinds[other]}, expected {kinds[0]} like {files[0]}; score them apart.")
    refs = [MediaRef(modality=kind, role="sample", uri=str(file)) for kind, file in zip(kinds, files, strict=True)]
    status = None
    if kinds[0] == "image":
        media = Media(kind="image", values=tuple(load_image(ref) for ref in refs))
    elif kinds[0] == "video":
        videos = [load_video(ref) for ref in refs]
        rates = {rate for _, rate in videos}
        if len(rates) > 1:
            raise DataError(f"{files[0]}: got videos of {sorted(rates)} frames per second, expected one rate.")
        media = Media(kind="video", values=tuple(frames for frames, _ in videos), rate=videos[0][1])
    else:
        media = Media(kind="text", values=tuple(_text(file) for file in files))
        status = (Status.COMPLETED,) * len(files)
    names = tuple(f"{row}:{file}" for row, file in enumerate(files))
    return ScoreInput(
        sample_ids=names,
        group_ids=("files",) * len(files),
        inputs=Inputs.of_texts([prompt] * len(files)),
        metadata=(metadata,) * len(files),
        media=media,
        status=status,
    )


def _kind(file: Path) -> str:
    suffix = file.suffix.lower()
    return "image" if suffix in IMAGES else "video" if suffix in VIDEOS else "text"


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"{file}: not an image or a video by its name, and not UTF-8 text: {error}.") from error
