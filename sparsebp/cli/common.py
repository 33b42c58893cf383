"""Shared by the commands: the application, errors and interruptions, options, consoles."""

from __future__ import annotations

import contextlib
import functools
import inspect
import shlex
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from typer.core import TyperCommand, TyperGroup

from sparsebp import __version__
from sparsebp.cli.main import status_of
from sparsebp.comm.launcher import launched, launching
from sparsebp.core import tables
from sparsebp.core.check import did_you_mean
from sparsebp.core.errors import OptionError, OutputError, SparseBPError
from sparsebp.core.files import check_path, json_line
from sparsebp.core.locks import forkable_event
from sparsebp.core.threads import set_threads

if TYPE_CHECKING:
    from sparsebp.train.config import Run


# Ctrl-C and SIGTERM: where the command was, and the command that goes on from there.


class Interrupted(KeyboardInterrupt):
    """Ctrl-C in a command that knows `where` it was, and whether it can `resume` from a checkpoint."""

    def __init__(self, where: str, *, resume: bool = False) -> None:
        super().__init__(where)
        self.where, self.resume = where, resume

    def describe(self, program: str, arguments: Sequence[str]) -> str:
        """Return the message, with the command line to go on with."""
        left = _resumed(arguments) if self.resume else arguments
        command = shlex.join([*launching(), *program.split(), *left])
        return f"Interrupted {self.where}. {'Go on from it' if self.resume else 'Begin again'}: {command}"


def _resumed(arguments: Sequence[str]) -> list[str]:
    """Return the arguments that resume a run: without those of its start, which its checkpoint has replaced."""
    left: list[str] = []
    values = iter(arguments)
    for argument in values:
        if argument == "--weights":
            next(values, None)
        elif not argument.startswith("--weights=") and argument not in ("--resume", "--overwrite"):
            left.append(argument)
    return [*left, "--resume"]


class Position:
    """Knows how far a training is, and the step of its last checkpoint, on any rank."""

    def __init__(self, *, resumed: bool) -> None:
        self._resumed = resumed
        self._runs: list[Run] = []

    def follow(self, run: Run) -> None:
        """Look at `run` from here on: the training, then the retraining."""
        self._runs.append(run)

    @contextlib.contextmanager
    def told(self) -> Iterator[None]:
        """Turn Ctrl-C inside the ``with`` block into `Interrupted`."""
        try:
            yield
        except KeyboardInterrupt as error:
            raise self._interrupted() from error

    def _interrupted(self) -> Interrupted:
        begun = [run for run in self._runs if run.trainer.saved is not None]
        if not begun:
            checkpoint = "the checkpoint is unchanged" if self._resumed else "no checkpoint was written yet"
            return Interrupted(f"before the first step; {checkpoint}", resume=self._resumed)
        run, name = begun[-1], "retraining" if len(begun) > 1 else "training"
        done, total = run.trainer.history.steps, run.steps
        where = f"at step {done + 1} of {total}" if done < total else f"after all {total} steps"
        return Interrupted(f"{where} of {name}; the last checkpoint is of step {run.trainer.saved}", resume=True)


_ARGUMENTS = "sparsebp.arguments"
LINE = 80
"""Letters in a line of a table or its legend, on a terminal and in a pipe."""
_SILENCE = 4.0  # seconds without a line, at most

JsonOption = Annotated[bool, typer.Option("--json", help="Write JSON lines on standard output, nothing else.")]
OverwriteOption = Annotated[
    bool, typer.Option("--overwrite", help="Replace what an earlier run has left there; else it is refused.")
]
ThreadsOption = Annotated[
    int | None, typer.Option("--threads", min=1, help="Threads of the kernels and of NumPy's BLAS.", show_default="all")
]


class _Ends:
    """Ends a command: a `SparseBPError` is one message without a traceback.

    The exit code is 2 for wrong usage (`OptionError`), 130 for Ctrl-C, 143 for SIGTERM, else 1.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Keep the command's arguments for the message of an interruption."""
        ctx.meta.setdefault(_ARGUMENTS, tuple(args))
        return super().parse_args(ctx, args)  # type: ignore[misc]

    def invoke(self, ctx: Any) -> Any:
        """Run the command."""
        try:
            return super().invoke(ctx)  # type: ignore[misc]
        except (SparseBPError, MemoryError) as error:
            raise _said(error) from error
        except KeyboardInterrupt as error:
            told = "Interrupted."
            if isinstance(error, Interrupted):
                told = error.describe(ctx.obj, ctx.meta[_ARGUMENTS])
            if _speaks(error):
                typer.echo(told, err=True)
            raise typer.Exit(status_of(error)) from error


def _speaks(error: BaseException) -> bool:
    """Return whether this process prints the error that ends it: one of several ranks does."""
    if launched() is None:
        return True
    from sparsebp.runtime.launch import reports_error

    return reports_error(error)


def one_of(names: Iterable[str]) -> dict[str, Any]:
    """Return the settings of an option or argument that takes one of some names."""
    known = list(names)

    def parse(text: str) -> str:
        if text in known:
            return text
        said = f"{text!r} is none of {', '.join(known)}.", did_you_mean(text, known)
        raise typer.BadParameter(" ".join(filter(None, said)))

    return {"parser": parse}


def choice_option(text: str, names: Iterable[str], *, show_default: bool | str = True) -> Any:
    """Return an option that takes one of some names, which its help lists."""
    return typer.Option(
        metavar="<name>", help=f"{text}: {', '.join(names)}.", show_default=show_default, **one_of(names)
    )


REPLACED = "A file that is there is replaced."
"""For the help of options that name a file to write."""


def out_option(text: str, *, show_default: bool | str = True) -> Any:
    """Return the option ``--out``; an empty path is refused."""
    return typer.Option(parser=_out_path, metavar="<path>", help=text, show_default=show_default)


def _out_path(text: str) -> Path:
    try:
        return check_path("--out", text)
    except OptionError as error:  # typer would take a ValueError for the parser's own and drop its message
        raise OutputError(error.problem, expected=error.expected, got=error.got, remedy=error.remedy) from error


def taking(place: str, make: Callable[..., Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Replace a command's parameter `place` by the options of `make`; it then gets the result of `make`."""
    options = inspect.signature(make, eval_str=True).parameters

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        own = inspect.signature(command, eval_str=True).parameters
        parameters = [
            option.replace(kind=inspect.Parameter.KEYWORD_ONLY)
            for name, parameter in own.items()
            for option in (options.values() if name == place else (parameter,))
        ]

        @functools.wraps(command)
        def run(**values: Any) -> None:
            made = make(**{name: values.pop(name) for name in options})
            command(**values, **{place: made})

        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return run

    return decorate


class Group(_Ends, TyperGroup):
    """Commands, by name."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Find the command, or say where it has moved."""
        if args[0] in _MOVED:
            raise OptionError(f"sparsebp {args[0]} is no longer a command",
                              expected=f"{_MOVED[args[0]]}, in a clone of the repository", got=args[0])  # fmt: skip
        return super().resolve_command(ctx, args)


class Command(_Ends, TyperCommand):
    """A program with a single command."""

    def make_context(self, *arguments: Any, **options: Any) -> Any:
        """Read the arguments; for a command of a group, `invoke` does."""
        try:
            return super().make_context(*arguments, **options)
        except SparseBPError as error:
            raise _said(error) from error


def _said(error: Exception) -> typer.Exit:
    """Print an error and return the exit."""
    own = isinstance(error, SparseBPError)
    if _speaks(error):
        typer.secho("Error: ", fg="red", bold=True, nl=False, err=True)
        typer.echo(error if own else f"Out of memory: {error}. Use --backward bp or a smaller model.", err=True)
    return typer.Exit(2 if isinstance(error, OptionError) else 1)


_MOVED = {"bench": "python -m benchmarks", "reproduce": "python -m papers"}
_PLAIN: Any = {"add_completion": False, "rich_markup_mode": None, "pretty_exceptions_enable": False}


def _settings(program: str) -> dict[str, Any]:
    return {"help_option_names": ["-h", "--help"], "obj": program}


def make_program(command: Callable[..., None]) -> typer.Typer:
    """Return an application with a single command."""
    application = typer.Typer(**_PLAIN)
    settings = _settings(f"python -m {command.__module__.partition('.')[0]}")
    application.command(cls=Command, help=inspect.getdoc(command), context_settings=settings)(command)
    return application


def make_app(commands: Iterable[Callable[..., None]], groups: Mapping[str, typer.Typer]) -> typer.Typer:
    """Return the application with `commands` and `groups`. Examples in a docstring follow a line of ``\\b``."""
    application = typer.Typer(
        cls=Group,
        no_args_is_help=True,
        **_PLAIN,
        context_settings=_settings("sparsebp"),
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
    """Return a console on standard output without wrapping and guessed colours."""
    terminal = sys.stdout.isatty()
    return Console(file=sys.stdout, highlight=False, soft_wrap=True, no_color=None if terminal else True)


def print_line(label: str, text: str, margin: int) -> None:
    """Print a text after a label of `margin` letters, wrapped at spaces on a terminal."""
    line, width = f"{label:<{margin}}{text}", tables.letters()
    if width is not None:
        line = textwrap.fill(line, width, subsequent_indent=" " * margin, break_long_words=False,
                             break_on_hyphens=False)  # fmt: skip
    console().print(line, markup=False)


def print_table(columns: Sequence[tables.Column], rows: Iterable[Mapping[str, Any]], legend: str = "") -> None:
    """Print a table that fits the terminal, and its legend."""
    console().print(tables.text_table(columns, rows, tables.letters()), markup=False)
    if legend:
        console().print(textwrap.fill(legend, min(LINE, tables.letters() or LINE)), markup=False)


@contextlib.contextmanager
def progress_bar(what: str, left: str = "", *, lines: bool = False) -> Iterator[Callable[[str, int, int], None]]:
    """Draw a bar on standard error meanwhile; elsewhere than on a terminal print nothing, or `lines` now and then.

    Yields a function to call before each part with its name, its number from 0, and their count. Ctrl-C becomes
    `Interrupted` at that part (of kind `what`); `left` is added to the message.
    """
    from rich.markup import escape
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
    from rich.table import Column

    def speak() -> None:
        while not done.wait(_SILENCE):
            typer.echo(f"  {place}; {time.monotonic() - begin:.0f} s so far", err=True)

    begin, done = time.monotonic(), forkable_event()
    shown = Console(stderr=True)
    text = TextColumn("{task.description}", table_column=Column(ratio=1, no_wrap=True))
    place = f"before the first {what}"
    if lines and not shown.is_terminal:
        threading.Thread(target=speak, daemon=True).start()
    with Progress(text, BarColumn(16), MofNCompleteColumn(), TimeElapsedColumn(), console=shown, transient=True,
                  expand=True, disable=not shown.is_terminal) as bar:  # fmt: skip
        task = bar.add_task("", total=None)

        def told(name: str, number: int, count: int) -> None:
            nonlocal place
            place = f"at {what} {number + 1} of {count}, {name}" if number < count else f"after {count} {what}s, {name}"
            bar.update(task, description=escape(name), completed=number, total=count)

        try:
            yield told
        except KeyboardInterrupt as error:
            raise Interrupted(place + left) from error
        finally:
            done.set()


def write_json(entry: dict[str, Any]) -> None:
    """Write one JSON object as a line on standard output; see `json_line`."""
    sys.stdout.write(json_line(entry) + "\n")
    sys.stdout.flush()


def use_threads(threads: int | None) -> None:
    """Set the number of threads if one was asked for."""
    if threads is not None:
        set_threads(threads)
