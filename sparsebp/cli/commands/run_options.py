"""The options that describe a training run, derived from the fields of its configurations."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Annotated, Any, Literal, TypeAlias, get_args

import typer

from sparsebp.cli.commands.common import choice_option
from sparsebp.recipes.config import Option, kind_of
from sparsebp.recipes.image_config import ImageConfig, ImageModel, ImageTask
from sparsebp.recipes.recurrent_config import RecurrentConfig, SequenceModel, SequenceTask

Task: TypeAlias = Literal[SequenceTask, ImageTask]
Model: TypeAlias = Literal[SequenceModel, ImageModel]
_OPTIONS = RecurrentConfig.options() | ImageConfig.options()
_OPTIONS["model"] = (
    Model,
    Option(
        f"{', '.join(get_args(SequenceModel))} for sequences; {', '.join(get_args(ImageModel))} for images.",
        shown="gru; bitstream rnn; images lenet5; cifar10 vgg11",
    ),
)


def _parameter(name: str) -> inspect.Parameter:
    """Return the parameter of a command that typer makes an option of."""
    hint, about = _OPTIONS[name]
    kind = kind_of(hint)
    called = about.called or name
    more: dict[str, Any] = {"min": about.least} if kind is int else {}
    if len(get_args(kind)) > 2 and name != "model":
        declared = choice_option(about.text, get_args(kind), show_default=about.shown)
    else:
        flag = f"--{called.replace('_', '-')}"
        metavar = {"model": "<name>", "data": "<path>"}.get(name)
        declared = typer.Option(f"{flag}/--no-{called}" if kind is bool else flag, help=about.text, metavar=metavar,
                                show_default=about.shown, **more)  # fmt: skip
    annotation = Annotated[kind | None, declared]  # type: ignore[valid-type]
    return inspect.Parameter(called, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def with_run_options(*names: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the options `names` of a run, in the place of its parameter `given`; None if they are left out."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        own = inspect.signature(command, eval_str=True).parameters
        derived = {_parameter(name).name: name for name in names}
        parameters = [
            parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
            for place in own.values()
            for parameter in (map(_parameter, names) if place.name == "given" else [place])
        ]

        @functools.wraps(command)
        def run(**values: Any) -> None:
            command(given={name: values.pop(called) for called, name in derived.items()}, **values)

        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return run

    return decorate
