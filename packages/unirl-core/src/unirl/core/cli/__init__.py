"""The command line. Every command is an entry point of the group `unirl.commands`, those of the core as well."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any

import click

from ..errors import PluginBroken, UniRLError
from .commands import CommandPoints, load_command, missing_command, named_commands

__all__ = ["main"]

POINTS = "unirl.commands"
"""Key of the entry points of commands in a context's `meta`."""


class Commands(click.Group):
    """The commands of the installed dists. A command is imported when it runs, and all of them for `--help`."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self._points(ctx))

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        points = self._points(ctx).get(cmd_name)
        return load_command(points) if points else None

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args[0] != "doctor":  # which tells of every problem
            from ..plugins.installed_files import check_namespaces

            check_namespaces()
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:
            from ..names import did_you_mean
            from ..plugins.registry import known_parts

            if missing := missing_command(args[0]):
                raise missing from error
            hint = did_you_mean(args[0], {*self.list_commands(ctx), *known_parts().names("command")})
            raise click.UsageError(f"{error.message.rstrip('.')}{hint or '.'}", ctx=ctx) from error

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        rows: list[tuple[str, str]] = []
        for name, points in self._points(ctx).items():
            try:
                rows.append((name, load_command(points).get_short_help_str(80)))
            except UniRLError as error:
                rows.append((name, str(error)))
        with formatter.section("Commands"):
            formatter.write_dl(rows)

    def _points(self, ctx: click.Context) -> CommandPoints:
        if POINTS not in ctx.meta:
            ctx.meta[POINTS] = named_commands()
        return ctx.meta[POINTS]


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
@click.version_option(package_name="unirl-core", prog_name="unirl")
def cli(debug: bool) -> None:
    """UniRL: RL post-training of generative models.

    \b
    unirl train quickstart                                  three minutes on a laptop's CPU
    unirl train sd3/flow-grpo algorithm.clip_range=1e-4     a recipe, overridden
    unirl compose sd3/flow-grpo                             the plan, and where its values come from
    """


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line and exit: 0 success, 1 refused or failed, 2 wrong use, 3 a plugin is missing or broken."""
    args = list(sys.argv[1:] if argv is None else argv)
    sys.exit(_run(args))


def _run(args: list[str]) -> int:
    from .output import print_error

    debug = "--debug" in args[:1]
    # transformers announces at import that torchvision is absent, which nothing here uses. The user's setting wins.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    try:
        code: Any = cli.main(args=args, prog_name="unirl", standalone_mode=False)
    except UniRLError as error:
        if debug:
            raise
        if damage := _damage(error):
            error.add_note(damage)
        print_error(error)
        _print_as_json(args, str(error))
        return error.exit_code
    except ImportError as error:
        if debug or not (damage := _damage(error)):
            raise
        print_error(PluginBroken(f"{error}. {damage}"))
        _print_as_json(args, f"{error}. {damage}")
        return PluginBroken.exit_code
    except click.ClickException as error:
        error.show()
        _print_as_json(args, error.format_message())
        return error.exit_code
    except (click.Abort, KeyboardInterrupt):
        sys.stderr.write("stopped\n")
        return 130
    except BrokenPipeError:
        # The reader of a pipe has closed it (`unirl compose ... | head`); Python would report it again at exit.
        sys.stdout = None
        return 0
    return code if isinstance(code, int) else 0


def _damage(error: BaseException) -> str:
    """Files of installed dists that are missing or changed, after a plugin or a module of ours could not be imported;
    else empty."""
    link: BaseException | None = error
    while link is not None and type(link) is not PluginBroken:
        if isinstance(link, ImportError) and f"{link.name}.".startswith("unirl."):
            break
        link = link.__cause__ or link.__context__
    if link is None:
        return ""
    from ..plugins.installed_files import damaged_dists

    return damaged_dists()


def _print_as_json(args: Sequence[str], error: str) -> None:
    """The error as JSON on stdout too, for a program that asked for JSON."""
    if "--json" in args:
        from .output import print_json

        print_json({"error": error})
