"""Captured steps: conditions, order and numbers, with a recorder that replays on the host."""

from __future__ import annotations

import contextlib
import ctypes
import io
import re
from typing import ClassVar

import numpy as np
import pytest

import orders
from sparsebp import nn, optim
from sparsebp.core import backend, cublas, graphs
from sparsebp.core.cublas import Cublas, operand
from sparsebp.core.errors import DeviceError, NonFiniteError, OptionError
from sparsebp.core.graphs import GraphRecorder
from sparsebp.runtime import streams
from sparsebp.runtime.actions import Observer, Stages
from sparsebp.runtime.executor import PlainExecutor
from sparsebp.runtime.streams import Graphs, in_turn
from sparsebp.schedule.builders import out_of_order
from sparsebp.train import Callback, ProgressBar, Trainer
from sparsebp.train.setup import schedule_of
from strict_cupy.cublas import LIBRARY
from strict_cupy.device import DEVICE

BATCH = (orders.IMAGES, orders.CLASSES)


class HostRecorder:
    """Captures nothing: it takes back what a captured step has changed, and runs the step again to replay it."""

    model = optimizer = None
    made: ClassVar[list[HostRecorder]] = []

    def __init__(self, xp, count):
        self.streams, self.captured, self.log = graphs.streams(np, count), False, []
        self.again = None
        HostRecorder.made.append(self)

    @contextlib.contextmanager
    def running(self):
        self.log.append("run")
        yield

    @contextlib.contextmanager
    def capturing(self):
        arrays = [*self.model.state_dict().values(), *self.optimizer.params.values()]
        arrays += [array for _, layer in self.model.modules() for array in layer.buffers.values()]
        arrays += [array for buffers in self.optimizer.buffers.values() for array in buffers.values()]
        before = [array.copy() for array in arrays]
        yield
        for array, value in zip(arrays, before, strict=True):
            array[...] = value
        self.log.append("capture")
        self.captured = True

    def replay(self):
        self.log.append("replay")
        self.again()


@pytest.fixture
def host_recorder(monkeypatch):
    """`Graphs` on the host, with a `HostRecorder`."""
    capture, found, HostRecorder.made = Graphs._capture, Graphs._obstacles, []

    def captured(self, program, found):
        HostRecorder.model, HostRecorder.optimizer = self._stages.model, self._actions.optimizer
        capture(self, program, found)
        found.step.update._steps -= 1  # what is captured does not run

        def again():
            recorded = found.step
            recorded.update._open = set(self._actions.optimizer.params)
            step = self._new(found.inputs, None)
            step.update = recorded.update
            self._run(program, step, found.recorder)
            for out, new in zip(
                [recorded.packed, *recorded.predictions], [step.packed, *step.predictions], strict=True
            ):
                out[...] = new

        found.recorder.again = again

    monkeypatch.setattr(Graphs, "_capture", captured)
    monkeypatch.setattr(streams, "GraphRecorder", HostRecorder)
    monkeypatch.setattr(
        Graphs, "_obstacles", lambda self: (why for why in found(self) if why != "the model is on the host")
    )
    return HostRecorder


def schedules(model):
    made = {fusion: orders.order_for(model, fusion=fusion) for fusion in ("none", "forward", "backward")}
    return made | {
        "two": orders.order_for(model, streams=2, fusion="backward"),
        "ooo": orders.order_for(model, out_of_order, regions=2),
    }


def executor_of(model, loss=None, **options):
    """Return an executor of the conventional order with plain SGD."""
    opt = optim.SGD(model.parameters(), 0.1)
    return PlainExecutor(model, loss or nn.CrossEntropyLoss(), opt, orders.order_for(model), **options)


@pytest.mark.parametrize("order", ["none", "forward", "backward", "two", "ooo"])
@pytest.mark.parametrize("optimizer", ["nesterov", "adam"])
def test_a_captured_step_gives_the_same_numbers(order, optimizer, host_recorder):
    steps, states = [], []
    for graph in (False, True):
        model = orders.conv()
        opt = orders.OPTIMIZERS[optimizer](model.parameters())
        executor = PlainExecutor(model, nn.CrossEntropyLoss(), opt, schedules(model)[order], graph=graph)
        assert executor.uncaptured == (() if graph else ("graph=False",))
        done = []
        for number in range(8):
            opt.lr = 0.01 / (number + 1)
            part = slice(0, 7) if number == 5 else slice(number, number + 12)  # of another size, in between
            done += executor.step([(orders.IMAGES[part], orders.CLASSES[part])], number)
        done += executor.flush()
        executor.close()
        assert [step.tag for step in done] == list(range(8))
        steps.append([(step.loss, step.norm(executor.stages.names)) for step in done])
        states.append(orders.state_of(model, opt))
    assert steps[0] == steps[1]
    orders.assert_same(states[1], states[0])
    assert [recorder.log for recorder in host_recorder.made] == [["run", "capture", *["replay"] * 5]]


def test_accumulation_is_captured(host_recorder):
    states = []
    for graph in (False, True):
        model = orders.conv()
        opt = optim.SGD(model.parameters(), 0.1, 0.9)
        order = schedule_of(Stages(model), "none", 2, "conventional")
        executor = PlainExecutor(model, nn.CrossEntropyLoss(), opt, order, graph=graph)
        for _ in range(4):
            executor.step([tuple(a[:8] for a in BATCH), tuple(a[8:13] for a in BATCH)])
        states.append(orders.state_of(model, opt))
    orders.assert_same(states[1], states[0])
    assert host_recorder.made[0].log == ["run", "capture", "replay", "replay"]


@pytest.mark.parametrize("order", ["none", "forward", "backward", "two", "ooo"])
def test_tasks_come_after_those_that_they_wait_for(order):
    model = orders.conv()
    executor = PlainExecutor(model, nn.CrossEntropyLoss(), optim.SGD(model.parameters(), 0.1), schedules(model)[order])
    program = executor._program(1)
    done, seen = set(), []
    for lane, task in in_turn(program):
        assert all(before or event in done for event, before in task.waits)
        done.add(task.signal)
        seen.append((lane, task))
    wanted = [task for lane in program.streams for task in lane if not (task.old and task.updates)]
    assert sorted(map(id, wanted)) == sorted(id(task) for _, task in seen)


def model_with(layer):
    return nn.Sequential(nn.Flatten(), nn.Linear(72, 3, rng=0), layer)


class Mystery(nn.Identity):
    replayable = False


@pytest.mark.parametrize(
    ("model", "why"),
    [
        (orders.mlp, r"3 \(Dropout\) draws the seed"),
        (orders.transformer, r"2.self_attn \(MultiheadAttention\) draws the seed"),
        (lambda: orders.transformer(5, True), r"0 \(Embedding\) sorts its input"),
        (lambda: orders.mlp("hybrid"), "a scan in place"),
        (lambda: orders.gru("linear"), r"rnn \(GRU\) plans its scan over stored Jacobians.*backward='linear'"),
        (lambda: nn.GRU(3, 4, 2, dropout=0.5), r"the model \(GRU\) draws the seeds of its masks between layers"),
        (lambda: model_with(Mystery()), r"2 \(Mystery\) does not say"),
        (lambda: nn.Sequential(nn.BatchNorm2d(2, momentum=None), orders.conv()), r"0 \(BatchNorm2d\) reads the n"),
    ],
)  # fmt: skip
def test_what_cannot_be_captured_is_named(model, why, host_recorder):
    reasons = executor_of(model(), graph=True).uncaptured
    assert len([reason for reason in reasons if re.search(why, reason)]) == 1


def test_dropout_that_drops_nothing_is_captured(host_recorder):
    model = model_with(nn.Dropout(0.5)).eval()
    assert not executor_of(model, nn.MSELoss(), graph=True).uncaptured


@pytest.mark.parametrize("error", [DeviceError, MemoryError, RuntimeError])
def test_what_fails_while_it_is_captured_is_said_and_runs_as_ever(error, host_recorder, monkeypatch):
    model, twin = orders.conv(), orders.conv()

    def fail(self, program, found):
        self._at = "stage '4'"
        raise error("Data of the host is sent")

    monkeypatch.setattr(Graphs, "_capture", fail)
    states = []
    for each, graph in ((model, True), (twin, False)):
        opt = optim.Adam(each.parameters(), 0.01)
        order = schedule_of(Stages(each), "none", 1, "conventional")
        executor = PlainExecutor(each, nn.CrossEntropyLoss(), opt, order, graph=graph)
        for number in range(4):
            with (
                pytest.warns(RuntimeWarning, match="at stage '4'")
                if graph and number == 2
                else contextlib.nullcontext()
            ):
                executor.step([BATCH])
        assert not graph or "Data of the host is sent" in executor.uncaptured[0]
        states.append(orders.state_of(each, opt))
    orders.assert_same(*states)


def test_other_arrays_of_a_model_are_captured_anew(host_recorder):
    model = orders.conv()
    executor = executor_of(model, graph=True)
    for _ in range(4):
        executor.step([BATCH])
    model[1].buffers["running_mean"] = model[1].buffers["running_mean"].copy()
    for _ in range(2):
        executor.step([BATCH])
    assert [recorder.log for recorder in host_recorder.made] == [
        ["run", "capture", "replay", "replay"], ["run", "capture", "replay"]
    ]  # fmt: skip


def test_a_number_of_a_layer_that_changes_is_captured_anew(host_recorder):
    states = []
    for graph in (False, True):
        model = orders.conv()
        executor = executor_of(model, graph=graph)
        for number in range(8):
            model[1].momentum = 0.1 if number < 4 else 0.5
            executor.step([BATCH])
        executor.flush()
        states.append(model.state_dict())
    orders.assert_same(*states)
    assert [recorder.log for recorder in host_recorder.made] == [
        ["run", "capture", "replay", "replay"], ["run", "capture", "replay", "replay", "replay"]
    ]  # fmt: skip


def test_what_is_not_finite_or_wrong_is_said_after_the_step(host_recorder):
    class Spy(Observer):
        def loss(self, step, m, value):
            if not np.isfinite(value):
                raise NonFiniteError("The loss")

    model = orders.conv()
    executor = executor_of(model, graph=True, observer=Spy())
    done = [executor.step([BATCH], number) for number in range(3)]
    assert [[step.tag for step in steps] for steps in done] == [[0], [], [1]]  # the first one was not recorded
    assert [step.tag for step in executor.step([(orders.IMAGES, np.full_like(orders.CLASSES, 7))], 3)] == [2]
    with pytest.raises(OptionError, match="a class that is not there"):
        executor.step([BATCH], 4)
    assert not executor.pending and executor.flush() == []  # what came after it is not told
    executor.step([(np.full_like(orders.IMAGES, np.nan), orders.CLASSES)], 5)
    with pytest.raises(NonFiniteError):
        executor.flush()


def test_a_run_says_whether_it_captures():
    Console = pytest.importorskip("rich.console", exc_type=ImportError).Console

    class Heard(Callback):
        def on_start(self, info):
            self.info = info

    heard = Heard()
    model = orders.conv()
    printed = io.StringIO()  # no terminal: what was asked for and is not done is said all the same
    callbacks = [heard, ProgressBar(Console(file=printed, width=200))]
    Trainer(model, nn.CrossEntropyLoss(), optim.SGD(model.parameters(), 0.1), graph=True, callbacks=callbacks).fit(
        orders.images(), epochs=1, batch_size=11
    )
    assert heard.info.graph == "Steps are not captured into a CUDA graph: the model is on the host"
    assert printed.getvalue() == heard.info.graph + "\n"


@pytest.mark.parametrize("loss", [nn.CrossEntropyLoss(), nn.MSELoss()])
def test_losses_on_the_device_are_those_of_forward(loss):
    prediction = np.random.default_rng(0).standard_normal((5, 3)).astype(np.float32)
    target = np.array([0, 2, 1, 1, 0]) if isinstance(loss, nn.CrossEntropyLoss) else prediction[::-1].copy()
    value, saved = loss.on_device(prediction, target)
    assert value.shape == () and value.dtype == np.float64
    want, want_saved = loss.forward(prediction, target)
    assert float(value) == want
    np.testing.assert_array_equal(saved, want_saved)


# ---- matrix products past CuPy -------------------------------------------------------------------------------------


class Pointed(np.ndarray):
    """An array that says where it is as CuPy's do."""

    @property
    def data(self):
        return type("Memory", (), {"ptr": self.ctypes.data})


SHAPES = [
    ((3, 4), (4, 5)), ((1, 4), (4, 1)), ((3, 1), (1, 5)), ((4,), (4, 5)), ((3, 4), (4,)), ((2, 3, 4), (2, 4, 5)),
    ((1, 3, 4), (1, 4, 5)), ((2, 3, 4), (4, 5)), ((0, 4), (4, 5)), ((3, 0), (0, 5)), ((2, 1, 4), (2, 4, 1)),
]  # fmt: skip


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize(("left", "right"), SHAPES)
@pytest.mark.parametrize("layout", ["plain", "transposed", "strided", "padded"])
def test_products_are_read_as_they_lie(left, right, layout, dtype):
    rng = np.random.default_rng(0)

    def array(shape):
        if layout == "transposed" and len(shape) > 1:
            return rng.standard_normal((*shape[:-2], *shape[:-3:-1])).astype(dtype).swapaxes(-1, -2).view(Pointed)
        if layout == "strided":
            return rng.standard_normal((*shape[:-1], 2 * shape[-1])).astype(dtype)[..., ::2].view(Pointed)
        if layout == "padded":
            return rng.standard_normal((*shape[:-1], shape[-1] + 3)).astype(dtype)[..., : shape[-1]].view(Pointed)
        return rng.standard_normal(shape).astype(dtype).view(Pointed)

    blas = Cublas.__new__(Cublas)
    blas._library, blas._handle, blas._use_stream = LIBRARY, ctypes.c_void_p(), lambda: None
    LIBRARY.cublasCreate_v2(ctypes.byref(blas._handle))

    copies = []  # held until the work is done, as a pool in the order of the stream does for CuPy's arrays

    class Space:
        empty = staticmethod(lambda shape, dtype: np.full(shape, np.nan, dtype).view(Pointed))

        @staticmethod
        def ascontiguousarray(array):
            copies.append(np.ascontiguousarray(array).view(Pointed))
            return copies[-1]

    blas._xp = Space
    a, b = array(left), array(right)
    found = blas.matmul(a, b)
    DEVICE.synchronize()
    np.testing.assert_allclose(found, np.asarray(a) @ np.asarray(b), rtol=1e-5, atol=1e-6)
    out = np.full(found.shape, np.nan, dtype).view(Pointed)
    blas.matmul(a, b, out)
    DEVICE.synchronize()
    np.testing.assert_array_equal(out, found)


def test_what_only_a_copy_can_read():
    assert operand((3, 4), (64, 8), 4) is None
    assert operand((3, 4), (16, 4), 4) == (0, 4, 0)
    assert operand((3, 4), (4, 12), 4) == (1, 3, 0)


# ---- on a GPU ------------------------------------------------------------------------------------------------------

needs_gpu = [pytest.mark.gpu, pytest.mark.skipif(not backend.has_gpu(), reason="needs CuPy and a GPU")]


class TestOnAGpu:
    pytestmark = needs_gpu

    def test_dropout_that_begins_later_ends_the_capture(self):
        cp = backend.cupy()
        dropout = nn.Dropout(0.0, rng=0)
        model = nn.Sequential(nn.Flatten(), nn.Linear(5, 64, rng=0), dropout, nn.Linear(64, 3, rng=1)).to("cuda")
        executor = PlainExecutor(
            model, nn.CrossEntropyLoss(), optim.SGD(model.parameters(), 0.0), schedules(model)["none"], graph=True
        )
        batch = cp.asarray(np.ones((4, 5), np.float32)), cp.asarray(np.arange(4) % 3)
        done = [step for _ in range(4) for step in executor.step([batch])]
        assert executor.uncaptured == ()
        dropout.p = np.float64(0.5)  # NumPy's number is compared by value, too
        done += [step for _ in range(4) for step in executor.step([batch])] + executor.flush()
        assert "mask" in str(executor.uncaptured)
        assert len({step.loss for step in done[:4]}) == 1
        assert len({step.loss for step in done[4:]}) == 4, "every step draws a mask of its own"
        executor.close()

    def test_a_layer_whose_number_always_changes_is_not_captured(self):
        cp = backend.cupy()
        dropout = nn.Dropout(0.0, rng=0)
        model = nn.Sequential(nn.Flatten(), nn.Linear(5, 3, rng=0), dropout).to("cuda")
        executor = executor_of(model, graph=True)
        batch = cp.asarray(np.ones((4, 5), np.float32)), cp.asarray(np.arange(4) % 3)
        for number in range(14):
            dropout.counted = number
            executor.step([batch])
        assert "change from step to step" in str(executor.uncaptured)
        executor.flush()
        executor.close()

    def test_two_replays_are_the_same_bit_for_bit(self):
        states = []
        for _ in range(2):
            model = orders.conv().to("cuda")
            trainer = Trainer(model, nn.CrossEntropyLoss(), optim.Adam(model.parameters(), 0.01), graph=True, rng=0)
            trainer.fit(orders.images(), epochs=3, batch_size=5)
            assert trainer.history.steps == 15
            states.append({name: backend.to_host(array) for name, array in model.state_dict().items()})
        orders.assert_same(*states)

    def test_a_transfer_from_the_host_ends_the_capture_with_its_place(self):
        class Sends(nn.Identity):
            def forward(self, x):
                return x + backend.namespace(x).asarray(np.zeros(x.shape[-1], x.dtype)), x

        cp = backend.cupy()
        model = model_with(Sends()).to("cuda")
        executor = executor_of(model, graph=True)
        with pytest.warns(RuntimeWarning, match="at stage '2'.*sent while work is captured"):
            done = [step for _ in range(5) for step in executor.step([tuple(map(cp.asarray, BATCH))])]
        steps = [step.loss for step in done + executor.flush()]
        assert len(steps) == 5 and steps == sorted(steps, reverse=True)

    @pytest.mark.parametrize(("left", "right"), SHAPES)
    def test_products(self, left, right):
        cp = backend.cupy()
        a, b = (cp.random.default_rng(0).random(shape, dtype=np.float32) for shape in (left, right))
        recorder = GraphRecorder(cp, 1)
        with recorder.running():
            got = cublas.matmul(a, b)
        cp.testing.assert_allclose(got, a @ b, rtol=1e-5)
        with recorder.capturing():
            got = cublas.matmul(a, b)
        recorder.replay()
        cp.testing.assert_allclose(got, a @ b, rtol=1e-5)
