"""Steps on a GPU: launches, transfers and reads, counted by the stand-in; captured equals launched."""

from __future__ import annotations

import numpy as np
import pytest

import orders
from sparsebp import nn, optim
from sparsebp.core import backend
from sparsebp.core.errors import NonFiniteError, OptionError
from sparsebp.runtime.executor import PlainExecutor
from sparsebp.runtime.streams import LENGTHS, MOST_GRAPHS
from sparsebp.schedule.builders import conventional
from sparsebp.train import Callback, Trainer
from train import test_graphs

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not backend.has_gpu(), reason="needs CuPy and a GPU")]
STEPS = 6


def classifier(rnn):
    return nn.SequenceClassifier(rnn, nn.Linear(rnn.directions * rnn.hidden_size, 3, rng=1))


def branches():
    convolutions = [nn.Conv2d(2, 1, 3, rng=seed) for seed in range(12)]
    return nn.Sequential(nn.Concat(*convolutions), nn.ReLU(), nn.Flatten(), nn.Linear(12 * 16, 3, rng=0))


def sequences(features=1):
    x = np.random.default_rng(0).standard_normal((STEPS, 9, 8, features)).astype(np.float32)
    return [(step, np.arange(8) % 3) for step in x]


def images(rows=None):
    """The fifth batch is a smaller one."""
    x = np.random.default_rng(0).standard_normal((STEPS, 6, 2, 6, 6)).astype(np.float32)
    steps = x if rows is None else [rows[:4] if step == 4 else rows[step : step + 6] for step in range(STEPS)]
    return [(step, np.arange(len(step)) % 3) for step in steps]


MODELS = {
    "rnn": (lambda: classifier(nn.RNN(1, 20, rng=0)), sequences()),
    "rnn, relu, chunked": (
        lambda: classifier(nn.RNN(1, 7, nonlinearity="relu", rng=0, backward="chunked", chunks=4)), sequences()
    ),
    "rnn, stacked both ways": (
        lambda: classifier(nn.RNN(3, 7, 2, rng=0, backward="bp", bidirectional=True)), sequences(3)
    ),
    "gru": (lambda: classifier(nn.GRU(1, 20, rng=0)), sequences()),
    "gru, chunked, wide": (
        lambda: classifier(nn.GRU(10, 33, rng=0, bias=False, backward="chunked", chunks=3)), sequences(10)
    ),
    "twelve branches": (branches, images()),
    "conv": (orders.conv, images(orders.IMAGES)),
    "transformer": (lambda: orders.transformer(dropout=0.0), images(orders.SEQUENCES)),
}  # fmt: skip


def stepping(make, *, optimizer="adam", order="none", clip_norm=None, graph=False):
    """Return a model on the GPU, its executor, and what takes one step and returns those known by then."""
    cp = backend.cupy()
    model = make().to("cuda")
    optimizer, order = orders.OPTIMIZERS[optimizer](model.parameters()), test_graphs.schedules(model)[order]
    executor = PlainExecutor(model, nn.CrossEntropyLoss(), optimizer, order, graph=graph, clip_norm=clip_norm)

    def step(batch, number):
        optimizer.lr = 0.01 if number < STEPS else 0.001
        return executor.step([tuple(map(cp.asarray, batch))], number)

    return model, executor, step


# The attention's keys' bias has no gradient but rounding, of which Adam makes whole steps.
@pytest.mark.parametrize(("name", "optimizer", "order", "clip_norm"), [
    *((name, "adam", "none", None) for name in MODELS if name != "transformer"),
    ("rnn", "adam", "none", 0.05), ("conv", "adam", "none", 0.05), ("conv", "nesterov", "two", None),
    *(("conv", "adam", order, None) for order in ("forward", "backward", "two", "ooo")),
    ("transformer", "nesterov", "ooo", None),
])  # fmt: skip
def test_a_replayed_step_is_one_that_was_launched(name, optimizer, order, clip_norm):
    make, batches = MODELS[name]
    told, states = [], []
    for graph in (False, True):
        model, executor, step = stepping(make, optimizer=optimizer, order=order, clip_norm=clip_norm, graph=graph)
        done = [known for number, batch in enumerate(batches * 2) for known in step(batch, number)]
        done += executor.flush()
        assert not executor.pending and [each.tag for each in done] == list(range(2 * STEPS))
        assert executor.uncaptured == (() if graph else ("graph=False",))
        assert not graph or any(found.recorder.captured for found in executor._graphs._recorded.values())
        told.append([(each.loss, each.norm(executor.stages.names)) for each in done])
        states.append({key: backend.to_host(array) for key, array in model.state_dict().items()})
    np.testing.assert_allclose(told[1], told[0], rtol=1e-4)
    assert clip_norm is None or min(norm for _, norm in told[0]) > clip_norm  # so it was clipped
    for key, value in states[0].items():
        np.testing.assert_allclose(states[1][key], value, rtol=1e-3, atol=1e-5, err_msg=key)


# ---- read one step late --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("graph", [False, None])
@pytest.mark.parametrize("wrong", ["class", "input"])
def test_what_is_wrong_is_said_a_step_later_and_what_came_before_is_kept(graph, wrong):
    class Heard(Callback):
        reads_model = False
        losses = 0

        def on_step(self, history):
            self.losses = history.steps

    x, target = np.ones((5, 4, 9, 1), np.float32), np.zeros((5, 4), np.int64)
    if wrong == "class":
        target[3, 1] = 7
    else:
        x[3, 1, 4] = np.nan

    class Data:
        def __len__(self):
            return 20

        def batch(self, indices):
            number, self.number = self.number, self.number + 1
            return x[number].copy(), target[number].copy()

    model = classifier(nn.GRU(1, 5, batch_first=True, rng=0)).to("cuda")
    heard, data = Heard(), Data()
    data.number = 0
    trainer = Trainer(
        model, nn.CrossEntropyLoss(), optim.SGD(model.parameters(), 0.1), graph=graph, callbacks=[heard], rng=0
    )
    error, match = (OptionError, "a class that is not there") if wrong == "class" else (
        NonFiniteError, r"not finite at step 4 \(epoch 1\).*in the batch's input"
    )  # fmt: skip
    with pytest.raises(error, match=match):
        trainer.fit(data, epochs=1, batch_size=4)
    assert trainer.history.steps == heard.losses == 3 and data.number == 5
    assert np.isfinite(trainer.history.loss).all() and np.isfinite(trainer.history.grad_norm).all()


def test_the_history_is_whole_and_that_of_one_who_looks_after_every_step():
    class Looks(Callback):
        def on_step(self, history):
            self.known = [*getattr(self, "known", ()), history.steps]

    histories = []
    for callbacks in ((), (Looks(),)):
        model = classifier(nn.RNN(1, 5, batch_first=True, rng=0)).to("cuda")
        trainer = Trainer(model, nn.CrossEntropyLoss(), optim.Adam(model.parameters()), rng=0, callbacks=callbacks)
        x = np.random.default_rng(0).standard_normal((20, 6, 1)).astype(np.float32)
        history = trainer.fit((x, np.arange(20) % 3), epochs=2, batch_size=4)
        assert history.steps == 10 and [record.step for record in history.epochs] == [5, 10]
        histories.append(history)
    assert callbacks[0].known == list(range(1, 11))
    np.testing.assert_allclose(histories[0].loss, histories[1].loss, rtol=1e-5)
    np.testing.assert_allclose(histories[0].accuracy, histories[1].accuracy)
    assert all(0 <= share <= 1 for share in histories[0].accuracy)


def test_lengths_are_not_captured_and_named():
    cp = backend.cupy()
    make, batches = MODELS["gru"]
    _, executor, step = stepping(make, graph=None)
    assert executor.uncaptured == ()
    for number, (x, target) in enumerate(batches[:4]):
        executor.step([(cp.asarray(x), cp.asarray(target), np.arange(8) % 9 + 1)], number)
    assert executor.uncaptured == (LENGTHS,)
    assert executor._graphs._recorded == {}
    done = [known.tag for number, batch in enumerate(batches) for known in step(batch, number)]
    assert done == [3, 0, 1, 2, 3, 4] and executor.flush(wait=False) == []
    assert [known.tag for known in executor.flush()] == [5] and not executor.pending
    assert len(executor._graphs._recorded) == 1  # batches without are


def test_so_many_shapes_are_captured_and_no_more():
    make, batches = MODELS["rnn"]
    _, executor, step = stepping(make, graph=True)
    (x, target), steps = batches[0], range(1, MOST_GRAPHS + 3)
    for number in steps:
        for _ in range(3):
            step((x[:2, :number], target[:number]), number)
    executor.flush()
    assert len(executor._graphs._recorded) == MOST_GRAPHS


# ---- counted -------------------------------------------------------------------------------------------------------


@pytest.fixture
def counted():
    strict_cupy = pytest.importorskip("strict_cupy")
    if not strict_cupy.installed():
        pytest.skip("counts are the stand-in's")
    return strict_cupy.counted


def test_a_replayed_step_is_one_graph_its_inputs_and_a_late_read(counted):
    make, batches = MODELS["rnn"]
    _, executor, step = stepping(make, graph=None)
    cp = backend.cupy()
    for number, batch in enumerate(batches[:4]):
        step(batch, number)
    batch = tuple(map(cp.asarray, batches[4]))
    with counted() as counts:
        assert [known.tag for known in executor.step([batch], 4)] == [3]
    assert (counts.graphs, counts.launches, counts.copies) == (1, 2, 2), str(counts)  # input and target
    assert counts.h2d == 0 and (counts.d2h, counts.synchronized) == (1, 1)  # begun, and waited for: the step before's
    order = [what for what, _, _ in counts.log]
    assert order.index("d2h") < order.index("synchronized") and order.index("graphs") < order.index("d2h")


@pytest.mark.parametrize(("clip_norm", "most"), [(None, 11), (0.05, 12)])
def test_a_launched_step_reads_nothing_before_it_is_launched(counted, clip_norm, most):
    make, batches = MODELS["rnn"]
    _, executor, step = stepping(make, clip_norm=clip_norm, graph=False)
    cp = backend.cupy()
    for number, batch in enumerate(batches[:2]):
        step(batch, number)
    batch = tuple(map(cp.asarray, batches[2]))
    with counted() as counts:
        executor.step([batch], 2)
    assert (counts.d2h, counts.synchronized) == (1, 1)
    what = [what for what, _, _ in counts.log]
    assert what[-2:] == ["d2h", "synchronized"]  # all else came before
    assert "cupy.matmul" not in counts.launched
    assert counts.launches <= most and counts.h2d == 0, str(counts)


@pytest.mark.parametrize("options", [{"ignore_index": 2}, {"weight": np.array([1, 2, 0.5], np.float32)}])
def test_how_much_counts_is_read_with_the_other_numbers(counted, options):
    (make, batches), cp = MODELS["rnn"], backend.cupy()
    model = make().to("cuda")
    order = conventional(stages=len(model.stages()), microbatches=2)
    executor = PlainExecutor(model, nn.CrossEntropyLoss(**options), optim.SGD(model.parameters(), 0.1), order)
    parts = [[tuple(map(cp.asarray, batch)) for batch in batches[at : at + 2]] for at in (0, 2, 4)]
    executor.step(parts[0], 0)
    executor.step(parts[1], 1)
    with counted() as counts:
        (known,) = executor.step(parts[2], 2)
    assert [what for what, _, _ in counts.log][-2:] == ["d2h", "synchronized"]
    assert (counts.d2h, counts.synchronized, counts.h2d) == (1, 1, 0), str(counts)
    targets = np.concatenate([batches[2][1], batches[3][1]])
    weights = options.get("weight", np.array([1, 1, 0]))
    assert known.counted == pytest.approx(weights[targets].sum()) and np.isfinite(known.loss)
