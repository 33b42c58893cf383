"""The options that describe a training run, derived from the fields of its configurations."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Annotated, Any, Literal, TypeAlias, get_args

import typer

from sparsebp.cli.commands.common import choice_option
from sparsebp.recipes.config import Option, kind_of
from sparsebp.recipes.image_config import ImageConfig, ImageModel, ImageTask
from sparsebp.recipes.instrument_config import InstrumentConfig, InstrumentTask
from sparsebp.recipes.recurrent_config import RecurrentConfig, SequenceModel, SequenceTask

Task: TypeAlias = Literal[SequenceTask, InstrumentTask, ImageTask]
Model: TypeAlias = Literal[SequenceModel, ImageModel]
_OPTIONS = RecurrentConfig.options() | ImageConfig.options() | InstrumentConfig.options()
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


def run_options(*names: str) -> Callable[..., dict[str, Any]]:
    """Return what takes the options `names` and returns them by name, None for those left out; for `taking`."""
    parameters = {name: _parameter(name) for name in names}

    def given(**values: Any) -> dict[str, Any]:
        return {name: values[parameter.name] for name, parameter in parameters.items()}

    given.__signature__ = inspect.Signature(list(parameters.values()))  # type: ignore[attr-defined]
    return given
