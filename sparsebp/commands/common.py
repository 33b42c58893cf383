"""What the commands share: the application, how errors end it, options, consoles."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Any

import typer
from rich.console import Console
from typer.core import TyperGroup

from sparsebp import __version__
from sparsebp.errors import OptionError, SparseBPError
from sparsebp.files import json_line

JsonOption = Annotated[bool, typer.Option("--json", help="Write JSON lines on standard output, nothing else.")]
ThreadsOption = Annotated[
    int | None, typer.Option("--threads", min=1, help="Threads of the kernels and of NumPy's BLAS.", show_default="all")
]


class Group(TyperGroup):
    """A group of commands in which an error of sparsebp's own is one message, without a traceback.

    The exit code is 2 for an option that cannot be had (wrong usage), and 1 for everything else.
    """

    def invoke(self, ctx: Any) -> Any:
        """Run the command that was asked for."""
        try:
            return super().invoke(ctx)
        except (SparseBPError, MemoryError) as error:
            own = isinstance(error, SparseBPError)
            typer.secho("Error: ", fg="red", bold=True, nl=False, err=True)
            typer.echo(error if own else f"Out of memory: {error}. Use --backward bp or a smaller model.", err=True)
            raise typer.Exit(2 if isinstance(error, OptionError) else 1) from error
        except KeyboardInterrupt as error:
            typer.echo("Interrupted.", err=True)
            raise typer.Exit(130) from error


def make_app(commands: Iterable[Callable[..., None]], groups: Mapping[str, typer.Typer]) -> typer.Typer:
    """Return the application with `commands` and `groups` of further ones by name.

    A command's examples stand in its docstring after a line of ``\\b``.
    """
    application = typer.Typer(
        cls=Group,
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
        help="Back-propagation as sparse linear algebra: train networks by scanning transposed Jacobians.",
        epilog="Each command has examples: sparsebp train --help",
    )
    for command in commands:
        application.command(command.__name__.replace("_", "-"), help=inspect.getdoc(command))(command)
    for name, group in groups.items():
        application.add_typer(group, name=name)
    application.callback()(_root)
    return application


def _show_version(value: bool) -> None:
    if value:
        typer.echo(f"sparsebp {__version__}")
        raise typer.Exit


def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    pass


def console() -> Console:
    """Return a console on standard output that leaves text as it is: no wrapping, no guessed colours."""
    terminal = sys.stdout.isatty()
    return Console(file=sys.stdout, highlight=False, soft_wrap=True, no_color=None if terminal else True)


def write_json(entry: dict[str, Any]) -> None:
    """Write one JSON object as a line on standard output; see `json_line`."""
    sys.stdout.write(json_line(entry) + "\n")
    sys.stdout.flush()


def use_threads(threads: int | None) -> None:
    """Set the number of threads if one was asked for."""
    if threads is not None:
        from sparsebp.threads import set_threads

        set_threads(threads)
