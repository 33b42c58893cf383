"""`accelerate` inside other people's libraries: the same training, and their own ways of saving and loading."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import sparsebp.torch as st  # noqa: E402
from sparsebp.torch.dispatch import Dispatch, dispatch_of  # noqa: E402
from sparsebp.torch.rule import way_of  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # of the libraries about each other

LIGHTNING = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False, "enable_checkpointing": False,
             "enable_model_summary": False}  # fmt: skip


@pytest.fixture
def ways(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[list[bool]]:
    """Whether the kernels ran, for every call of an accelerated module; logs go to a folder of the test."""
    monkeypatch.chdir(tmp_path)
    noted: list[bool] = []
    call = Dispatch.__call__

    def noting(self: Dispatch, input: Any, hx: Any = None, **kwargs: Any) -> Any:
        noted.append(way_of(self.module, input, self.always).ours)
        return call(self, input, hx, **kwargs)

    monkeypatch.setattr(Dispatch, "__call__", noting)
    yield noted


def accelerated(model: Any) -> list[bool]:
    return [dispatch_of(module) is not None for module in model.modules() if isinstance(module, torch.nn.RNNBase)]


def assert_same_weights(ours: Any, theirs: Any, tolerance: float) -> None:
    expected = theirs.state_dict()
    assert list(ours.state_dict()) == list(expected)
    for name, value in ours.state_dict().items():
        torch.testing.assert_close(value, expected[name], rtol=tolerance, atol=tolerance, msg=name)


def assert_restores(model: Any, *, count: int) -> None:
    assert accelerated(model) == [True] * count
    assert accelerated(st.restore(model)) == [False] * count


@pytest.mark.parametrize("faster_only", [True, False])
def test_recurrent_ppo(faster_only: bool, ways: list[bool], tmp_path: Path) -> None:
    """Rollouts and updates run the LSTM a step per call, which `accelerate` leaves to PyTorch."""
    sb3 = pytest.importorskip("sb3_contrib")

    def trained(change: Callable[[Any], Any]) -> Any:
        model = sb3.RecurrentPPO("MlpLstmPolicy", "CartPole-v1", n_steps=32, batch_size=32, n_epochs=2, seed=0,
                                 device="cpu", policy_kwargs={"lstm_hidden_size": 8})  # fmt: skip
        change(model.policy)
        model.set_random_seed(0)
        return model.learn(64)

    theirs = trained(lambda policy: policy)
    ours = trained(lambda policy: st.accelerate(policy, faster_only=faster_only))
    assert ways and set(ways) == {not faster_only}
    assert_same_weights(ours.policy, theirs.policy, 1e-4)
    ours.save(tmp_path / "ppo")
    loaded = sb3.RecurrentPPO.load(tmp_path / "ppo", device="cpu")
    assert accelerated(loaded.policy) == [False, False]
    assert_same_weights(loaded.policy, ours.policy, 0)
    theirs.set_parameters(ours.get_parameters())
    assert_same_weights(theirs.policy, ours.policy, 0)
    assert_restores(ours.policy, count=2)


def accelerate_module(trainer: Any, module: Any) -> None:
    """For Lightning's ``on_fit_start``; a function of a module, so that darts can pickle it."""
    st.accelerate(module)


@pytest.mark.parametrize("cell", ["GRU", "LSTM"])
def test_darts(cell: str, ways: list[bool], tmp_path: Path) -> None:
    pytest.importorskip("darts")
    from darts import TimeSeries
    from darts.models import RNNModel
    from pytorch_lightning.callbacks import LambdaCallback

    series = TimeSeries.from_values(np.sin(np.arange(80) / 3))  # float64, and so is the model

    def trained(*callbacks: Any) -> Any:
        model = RNNModel(model=cell, hidden_dim=8, training_length=20, input_chunk_length=14, n_epochs=2,
                         random_state=0, pl_trainer_kwargs={**LIGHTNING, "callbacks": list(callbacks)})  # fmt: skip
        return model.fit(series)

    theirs, ours = trained(), trained(LambdaCallback(on_fit_start=accelerate_module))
    assert any(ways)
    assert_same_weights(ours.model, theirs.model, 1e-9)
    forecast = ours.predict(5).values()
    np.testing.assert_allclose(forecast, theirs.predict(5).values(), atol=1e-9)
    ours.save(str(tmp_path / "model.pt"), clean=True)  # without callbacks, which darts does not load unasked
    loaded = RNNModel.load(str(tmp_path / "model.pt"))
    np.testing.assert_array_equal(loaded.predict(5, series=series).values(), forecast)
    assert_same_weights(loaded.model, ours.model, 0)
    assert_restores(ours.model, count=1)


@pytest.mark.parametrize("cell", ["GRU", "LSTM"])
def test_neuralforecast(cell: str, ways: list[bool], tmp_path: Path) -> None:
    """Its GRU runs on the kernels at 24 steps; a float32 LSTM is left to PyTorch at that length."""
    pytest.importorskip("neuralforecast")
    import pandas
    from neuralforecast import NeuralForecast, models

    dates = pandas.date_range("2000-01-01", periods=80, freq="MS")
    data = pandas.DataFrame({"unique_id": 1.0, "ds": dates, "y": np.sin(np.arange(80) / 3)})

    def trained(change: Callable[[Any], Any]) -> Any:
        model = getattr(models, cell)(h=4, input_size=24, encoder_hidden_size=8, max_steps=2, random_seed=1,
                                      **LIGHTNING)  # fmt: skip
        forecast = NeuralForecast(models=[change(model)], freq="MS")
        forecast.fit(df=data)
        return forecast

    theirs, ours = trained(lambda model: model), trained(st.accelerate)
    assert ways and all(ways) is (cell == "GRU")
    assert_same_weights(ours.models[0], theirs.models[0], 1e-4)
    expected = ours.predict()[cell].to_numpy()
    np.testing.assert_allclose(expected, theirs.predict()[cell].to_numpy(), atol=1e-4)
    ours.save(str(tmp_path), overwrite=True)
    loaded = NeuralForecast.load(str(tmp_path))
    assert accelerated(loaded.models[0]) == [False]
    st.accelerate(loaded.models[0])
    np.testing.assert_array_equal(loaded.predict()[cell].to_numpy(), expected)
    assert_restores(ours.models[0], count=1)


def test_keras(ways: list[bool], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keras' own layers are none of torch.nn's, so nothing is replaced; a wrapped layer of torch.nn is."""
    monkeypatch.setenv("KERAS_BACKEND", "torch")
    keras = pytest.importorskip("keras")
    if keras.backend.backend() != "torch":
        pytest.skip("Keras was imported with another backend")
    for layer in (keras.layers.GRU(4), keras.layers.LSTM(4)):
        model = keras.Sequential([keras.Input((20, 3)), layer])
        assert st.explain(model) == st.explain(layer) == []
        assert st.accelerate(model) is model

    @keras.saving.register_keras_serializable("sparsebp")
    class Last(keras.layers.Layer):
        def call(self, found: Any) -> Any:
            return found[0][:, -1]

    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((16, 20, 3), np.float32), rng.standard_normal((16, 1), np.float32)

    def trained(change: Callable[[Any], Any]) -> tuple[Any, Any]:
        keras.utils.set_random_seed(0)
        gru = change(torch.nn.GRU(3, 4, batch_first=True))
        model = keras.Sequential(
            [keras.Input((20, 3)), keras.layers.TorchModuleWrapper(gru), Last(), keras.layers.Dense(1)]
        )
        model.compile("adam", "mse")
        model.fit(x, y, batch_size=8, epochs=2, verbose=0, shuffle=False)
        return model, gru

    (theirs, their_gru), (ours, gru) = trained(lambda layer: layer), trained(st.accelerate)
    assert ways and any(ways)
    assert_same_weights(gru, their_gru, 1e-4)
    np.testing.assert_allclose(ours.predict(x, verbose=0), theirs.predict(x, verbose=0), atol=1e-4)
    ours.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras", safe_mode=False)
    np.testing.assert_allclose(loaded.predict(x, verbose=0), ours.predict(x, verbose=0), atol=1e-6)
    ours.save_weights(tmp_path / "model.weights.h5")
    theirs.load_weights(tmp_path / "model.weights.h5")
    assert_same_weights(their_gru, gru, 0)
    assert_restores(gru, count=1)
