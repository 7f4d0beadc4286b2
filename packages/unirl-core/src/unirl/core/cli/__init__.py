"""The command line. A command's module is imported when the command runs; plugins may add further commands."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any

import click

from ..errors import PluginBroken, PluginNotInstalled, UniRLError

__all__ = ["main"]

COMMANDS = {
    "compose": ("unirl.core.cli.compose", "Show the plan of a recipe, or why it is refused."),
    "recipes": ("unirl.core.cli.recipes", "List the recipes that are installed or in ./recipes."),
    "plugins": ("unirl.core.cli.plugins", "List installed parts, and plugins that did not load."),
}
"""Command -> the module that defines it as `command`, and its line in `--help`, so `--help` imports none of them."""


class Commands(click.Group):
    """Built-in commands by name; any other name is looked up in plugins that implement `unirl_commands`."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        self._add_plugin_commands()
        return [*COMMANDS, *sorted(self.commands)]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name in COMMANDS:
            return import_module(COMMANDS[cmd_name][0]).command
        self._add_plugin_commands()
        return self.commands.get(cmd_name)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:
            from ..names import did_you_mean
            from ..plugins.registry import known_parts

            known = known_parts()
            if known.part("command", args[0]) is not None:
                raise self._absent(args[0]) from error
            hint = did_you_mean(args[0], {*self.list_commands(ctx), *known.names("command")})
            raise click.UsageError(f"{error.message.rstrip('.')}{hint or '.'}", ctx=ctx) from error

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        self._add_plugin_commands()
        rows = [(name, text) for name, (_, text) in COMMANDS.items()]
        rows += [(name, command.get_short_help_str(80)) for name, command in sorted(self.commands.items())]
        with formatter.section("Commands"):
            formatter.write_dl(rows)

    def _absent(self, name: str) -> UniRLError:
        """Why a command of the registry is missing: its plugin is not installed, or did not load."""
        from ..plugins.registry import install_hint, known_parts
        from .discovery import discover

        part = known_parts().part("command", name)
        assert part is not None
        for record in discover().records:
            if record.dist == part.dist and record.status != "loaded":
                return PluginBroken(f"command {name!r}: plugin {record.label} is {record.status}: {record.error}")
        return PluginNotInstalled(f"command {name!r} is not installed. {install_hint('command', name)}")

    def _add_plugin_commands(self) -> None:
        if self.commands:
            return
        from .discovery import discover

        discover().add_commands(self)
        for name in COMMANDS.keys() & self.commands.keys():
            del self.commands[name]
            sys.stderr.write(f"note: ignored a plugin's command {name!r}; it is the name of a built-in one.\n")


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
@click.version_option(package_name="unirl-core", prog_name="unirl")
def cli(debug: bool) -> None:
    """UniRL: RL post-training of generative models.

    \b
    unirl train quickstart                                  two minutes on a laptop's CPU
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
    try:
        code: Any = cli.main(args=args, prog_name="unirl", standalone_mode=False)
    except UniRLError as error:
        if debug:
            raise
        print_error(error)
        return error.exit_code
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except (click.Abort, KeyboardInterrupt):
        sys.stderr.write("stopped\n")
        return 130
    except BrokenPipeError:
        # The reader of a pipe has closed it (`unirl compose ... | head`); Python would report it again at exit.
        sys.stdout = None
        return 0
    return code if isinstance(code, int) else 0
