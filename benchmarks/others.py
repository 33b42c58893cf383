"""Training in other people's libraries with and without `sparsebp.torch.accelerate`, on the same threads.

``python -m benchmarks others``. A step is what the library's users call: a rollout and its update of sb3-contrib's
RecurrentPPO, an ``fit`` of darts or neuralforecast with Lightning's trainer, an epoch of Keras. Libraries that are not
installed are left out, with a note.
"""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import logging
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from benchmarks import harness
from benchmarks.harness import Benchmark, Row, Run, columns, import_torch, refuse_difference
from sparsebp.core import timing
from sparsebp.core.errors import MissingDependencyError, OptionError

Settings = Mapping[str, Any]


class Side(NamedTuple):
    """A model of another library."""

    step: Callable[[], object]
    module: Callable[[], Any]  # its torch.nn.Module, which some libraries make in the first step


def recurrent_ppo(cell: str, hidden: int, length: int, accelerated: bool, settings: Settings) -> Side:
    """Return RecurrentPPO on CartPole; it runs its layer one step per call wherever an episode may begin."""
    from sb3_contrib import RecurrentPPO

    import sparsebp.torch as st

    model = RecurrentPPO("MlpLstmPolicy", "CartPole-v1", n_steps=settings["rollout"], batch_size=settings["rollout"],
                         n_epochs=settings["updates"], policy_kwargs={"lstm_hidden_size": hidden}, seed=0,
                         device="cpu")  # fmt: skip
    if accelerated:
        st.accelerate(model.policy)
    return Side(lambda: model.learn(settings["rollout"], reset_num_timesteps=False), lambda: model.policy)


def darts(cell: str, hidden: int, length: int, accelerated: bool, settings: Settings) -> Side:
    """Return darts' example: a year of monthly passengers and more per sample, in float64 as its series are."""
    from darts import TimeSeries
    from darts.models import RNNModel
    from pytorch_lightning.callbacks import LambdaCallback

    import sparsebp.torch as st

    callbacks = [LambdaCallback(on_fit_start=lambda trainer, module: st.accelerate(module))] if accelerated else []
    options = {**LIGHTNING, "callbacks": callbacks}
    model = RNNModel(model=cell, hidden_dim=hidden, training_length=length, input_chunk_length=length * 2 // 3,
                     batch_size=16, random_state=0, pl_trainer_kwargs=options)  # fmt: skip
    series = TimeSeries.from_values(monthly(144))
    return Side(lambda: model.fit(series, epochs=settings["epochs"]), lambda: model.model)


def neuralforecast(cell: str, hidden: int, length: int, accelerated: bool, settings: Settings) -> Side:
    """Return neuralforecast's example, on one monthly series."""
    import pandas
    from neuralforecast import NeuralForecast, models

    import sparsebp.torch as st

    model = getattr(models, cell)(h=12, input_size=length, encoder_hidden_size=hidden, max_steps=settings["steps"],
                                  random_seed=1, **LIGHTNING)  # fmt: skip
    if accelerated:
        st.accelerate(model)
    forecast = NeuralForecast(models=[model], freq="MS")
    dates = pandas.date_range("1949-01-01", periods=144, freq="MS")
    data = pandas.DataFrame({"unique_id": 1.0, "ds": dates, "y": monthly(144)})
    return Side(lambda: forecast.fit(df=data), lambda: forecast.models[0])


def keras(cell: str, hidden: int, length: int, accelerated: bool, settings: Settings) -> Side:
    """Return a Keras model with a layer of torch.nn, as Keras' own recurrent layers are none of torch.nn's."""
    os.environ.setdefault("KERAS_BACKEND", "torch")
    import keras
    import torch

    import sparsebp.torch as st

    if keras.backend.backend() != "torch":
        raise OptionError("Keras runs on another backend", expected="KERAS_BACKEND=torch", got=keras.backend.backend())

    class Last(keras.layers.Layer):
        def call(self, found: Any) -> Any:
            return found[0][:, -1]

    keras.utils.set_random_seed(0)
    layer = getattr(torch.nn, cell)(38, hidden, batch_first=True)
    model = keras.Sequential([keras.Input((length, 38)), keras.layers.TorchModuleWrapper(layer), Last(),
                              keras.layers.Dense(1)])  # fmt: skip
    model.compile("adam", "mse")
    if accelerated:
        st.accelerate(layer)  # Keras keeps its layers out of model.named_modules()
    rng = np.random.default_rng(0)
    x, y = (rng.standard_normal(shape, dtype=np.float32) for shape in ((128, length, 38), (128, 1)))
    return Side(lambda: model.fit(x, y, batch_size=16, shuffle=False, verbose=0), lambda: layer)


def monthly(count: int) -> np.ndarray:
    """Return a series with a trend and a period of a year, in float64."""
    t = np.arange(count)
    return np.asarray(1 + t / count + 0.3 * np.sin(2 * np.pi * t / 12))


LIGHTNING = {"accelerator": "cpu", "enable_progress_bar": False, "logger": False, "enable_checkpointing": False,
             "enable_model_summary": False}  # fmt: skip
LIBRARIES: dict[str, Callable[[str, int, int, bool, Settings], Side]] = {
    "sb3_contrib": recurrent_ppo, "darts": darts, "neuralforecast": neuralforecast, "keras": keras,
}  # fmt: skip
CASES = (
    ("sb3_contrib", "LSTM", 256, 1), ("darts", "LSTM", 20, 20), ("darts", "GRU", 20, 20),
    ("neuralforecast", "GRU", 128, 24), ("neuralforecast", "LSTM", 128, 24), ("keras", "GRU", 20, 100),
)  # fmt: skip


def installed() -> set[str]:
    """Return the names of the libraries that are installed."""
    return {name for name in LIBRARIES if importlib.util.find_spec(name) is not None}


def measure_others(run: Run) -> Iterator[Row]:
    import_torch()
    there = installed()
    if not there:
        raise MissingDependencyError("None of the libraries of this benchmark is installed",
                                     remedy="Install one or more: " + ", ".join(LIBRARIES))  # fmt: skip
    for name in LIBRARIES.keys() - there:
        run.note(f"{name} is not installed: left out")
    for count in run.threads():
        for case in run.settings["cases"]:
            if case[0] in there:
                with quietly():
                    row = measure_others_row(run, *case)
                yield row | {"threads": count}


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """Hide Lightning's lines about every fit, and the libraries' warnings about each other."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def seeded(step: Callable[[], object]) -> Callable[[], None]:
    """Return a step that seeds itself by its number, so that both sides draw the same actions and episodes."""
    numbers = itertools.count()

    def run() -> None:
        number = next(numbers)
        import_torch().manual_seed(number)
        np.random.seed(number)  # noqa: NPY002 - sb3 draws its batches from it
        step()

    return run


def measure_others_row(run: Run, name: str, cell: str, hidden: int, length: int) -> Row:
    """Time both sides, after comparing all parameters behind a first step from the same seed."""
    import torch

    from sparsebp.torch.dispatch import dispatch_of
    from sparsebp.torch.rule import way_of

    sides = {key: LIBRARIES[name](cell, hidden, length, key == "ours", run.settings) for key in ("ours", "torch")}
    steps = {key: seeded(side.step) for key, side in sides.items()}
    weights = []
    for key, side in sides.items():
        steps[key]()
        weights.append(torch.cat([p.detach().double().ravel() for p in side.module().parameters()]))
    difference = float((weights[0] - weights[1]).norm() / weights[1].norm())
    refuse_difference(f"{name}, {cell}({hidden}): a parameter", "the plain model", difference)
    calls: list[bool] = []
    hooks = [module.register_forward_pre_hook(lambda module, args: calls.append(way_of(module, args[0]).ours))
             for module in sides["ours"].module().modules() if dispatch_of(module) is not None]  # fmt: skip
    steps["ours"]()
    for hook in hooks:
        hook.remove()
    steps["torch"]()
    timings = timing.measure(steps, **run.rounds)
    return {
        "library": name, "cell": cell, "hidden": hidden, "length": length, "difference": difference,
        "share": sum(calls) / len(calls) if calls else 0.0,
    } | timing.side_by_side(timings)  # fmt: skip


OTHERS = Benchmark(
    name="others",
    title="Training in other libraries on the CPU with and without accelerate",
    leaves_out="nothing; the library's own loop, environment and data loading count on both sides",
    sizes={"cases": CASES, "rollout": 256, "updates": 2, "epochs": 20, "steps": 50},
    quick={
        "cases": tuple((name, cell, 8, length) for name, cell, _, length in CASES), "rollout": 16, "updates": 1,
        "epochs": 1, "steps": 1,
    },
    rounds={"rounds": 7, "least_rounds": 3, "budget": 10.0, "warmup": 1},
    quick_rounds={"rounds": 1, "least_rounds": 1, "warmup": 1},
    measure=measure_others,
    columns=columns(
        words={"library": "library"},
        numbers={"hidden": "H"},
        seconds={"ours": "accelerated", "torch": "as it is"},
        times={"torch_ratio": "over the library as it is"},
        formats={"{:.0%}": {"share": "calls by the kernels"}, "{:.1e}": {"difference": "difference"}},
    ),
    short=("library", "cell", "hidden", "length", "threads", "share", "ours", "torch_ratio"),
    in_short=lambda row: row["threads"] == 1,
    picture=harness.bars("{library}: {cell}({hidden}), T = {length}", {"torch_ratio": "over the library as it is"},
                         harness.SPEED_UP, (harness.TORCH,), line=1.0),
)  # fmt: skip
