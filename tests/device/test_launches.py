"""Overhead of a launch: no transfers, no repeated driver calls, no more launches than needed."""

from __future__ import annotations

import contextlib
import sys
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest

from sparsebp import kernels, optim
from sparsebp.core import graphs
from sparsebp.core.errors import DeviceError, OptionError
from sparsebp.kernels.checks import UPDATE_BUFFERS, UPDATE_OPTIONS
from sparsebp.kernels.device import DeviceKernels
from sparsebp.kernels.device.launch import STATIC_SHARED_LIMIT
from sparsebp.patterns import SparsityPattern


class Placed:
    """An array in no memory: the little that launchers ask of one."""

    def __init__(self, shape, dtype=np.float32, device=0, address=4096):
        self.shape, self.dtype = (shape,) if isinstance(shape, int) else tuple(shape), np.dtype(dtype)
        self.ndim, self.size = len(self.shape), int(np.prod(self.shape))
        self.data = SimpleNamespace(ptr=address, device_id=device)
        self.flags = SimpleNamespace(c_contiguous=True)

    def __len__(self):
        return self.shape[0]

    def __getitem__(self, part):
        return Placed(np.empty(self.shape, np.bool_)[part].shape, self.dtype)


class Stream:
    """Notes what is done with it."""

    def __init__(self, name, device):
        self.name, self.ptr, self.device, self.before = name, hash(name), device, []

    def __enter__(self):
        self.before.append(self.device.current)
        self.device.current = self
        return self

    def __exit__(self, *_):
        self.device.current = self.before.pop()

    def synchronize(self):
        self.device.notes.append(f"synchronize {self.name}")


class Kernel:
    def __init__(self, name, device):
        self.name, self.device = name, device

    @property
    def max_dynamic_shared_size_bytes(self):
        raise AssertionError("asking takes a call of the driver, too")

    @max_dynamic_shared_size_bytes.setter
    def max_dynamic_shared_size_bytes(self, size):
        self.device.notes.append(f"allow {size}")

    def __call__(self, grid, block, args, shared_mem):
        self.device.notes.append(self.name)
        self.device.launches.append((self.name, grid, args))


class Cupy(ModuleType):
    """A CuPy that notes what is launched and sent, on as many devices as one likes."""

    ndarray = Placed

    def __init__(self):
        super().__init__("cupy")
        self.notes, self.launches, self.compiled, self.number = [], [], [], 0
        self.current, self.allocator = Stream("first", self), "the thread's memory"
        self.cuda = SimpleNamespace(
            using_allocator=self._using,
            Stream=SimpleNamespace(null=Stream("null", self)), get_current_stream=lambda: self.current,
            runtime=SimpleNamespace(getDevice=lambda: self.number),
            Device=lambda number=None: SimpleNamespace(
                id=self.number, attributes={"MaxSharedMemoryPerBlockOptin": 227 * 1024, "MultiProcessorCount": 132}
            ),
        )  # fmt: skip

    @contextlib.contextmanager
    def _using(self, allocator):
        before, self.allocator = self.allocator, allocator
        yield
        self.allocator = before

    def get_default_memory_pool(self):
        return SimpleNamespace(malloc="its own memory")

    def RawModule(self, **_):
        self.compiled.append(self.number)
        return SimpleNamespace(get_function=lambda name: Kernel(name, self))

    def asarray(self, array, dtype=None):
        self.notes.append(f"sent on {self.current.name} to {self.allocator}")
        return Placed(np.shape(array), dtype or np.asarray(array).dtype, self.number)

    def empty(self, shape, dtype):
        return Placed(shape, dtype, self.number)

    zeros_like = staticmethod(lambda array: Placed(array.shape, array.dtype))


@pytest.fixture
def cupy(monkeypatch):
    module = Cupy()
    monkeypatch.setitem(sys.modules, "cupy", module)
    yield module
    kernels.get.cache_clear()


# ---- optimizers ----------------------------------------------------------------------------------------------------


def arrays(count, device=0):
    return [Placed((3, 1 + 5000 * (i % 2)), device=device, address=1000 * (i + 1)) for i in range(count)]


def update(cupy, rule, count):
    options, steps = np.zeros((count, len(UPDATE_OPTIONS[rule]))), np.ones(count, np.int64)
    buffers = [arrays(count) for _ in UPDATE_BUFFERS[rule]]
    kernels.get(cupy).optimizer_update(rule, arrays(count), arrays(count), buffers, options, steps)


@pytest.mark.parametrize("rule", UPDATE_OPTIONS)
def test_an_update_is_one_launch_and_nothing_is_sent(rule, cupy):
    update(cupy, rule, 30)
    update(cupy, rule, 30)
    assert cupy.notes == [f"{rule}_update"] * 2


def test_many_arrays_take_launches_that_are_full(cupy):
    update(cupy, "adam", 100)
    blocks = [grid[0] for _, grid, _ in cupy.launches]
    assert cupy.notes == ["adam_update"] * 4
    assert sum(blocks) == 50 * 1 + 50 * 4  # chunks of 4096
    assert [int(args[-1]) for _, _, args in cupy.launches] == [33, 33, 33, 1]


def test_clipping_sends_nothing(cupy):
    k, out = kernels.get(cupy), Placed(130, np.float64)
    k.square_sums(arrays(130), out)
    k.scale_arrays(arrays(124), 0.5)
    k.clamp_arrays(arrays(1), 0.5)
    k.clip_arrays(arrays(3), out, 0.5)
    assert cupy.notes == [*["chunk_squares", "sum_chunks"] * 2, "scale_arrays", "clamp_arrays", "clip_arrays"]


def test_the_squares_of_small_arrays_are_summed_in_one_launch(cupy):
    kernels.get(cupy).square_sums(arrays(1) * 3, Placed(3, np.float64))
    assert cupy.notes == ["chunk_squares"]


def test_an_optimizers_step_is_one_launch(cupy):
    params = {str(i): array for i, array in enumerate(arrays(6))}
    optimizer = optim.Adam(params)
    for lr in (0.1, 0.1, 0.2):
        optimizer.lr = lr
        optimizer.step({name: Placed(array.shape) for name, array in params.items()})
    assert cupy.notes == ["adam_update"] * 3


def test_arrays_of_an_update_are_on_the_current_device(cupy):
    for wrong in ("params", "grads", "buffers"):
        given = {name: arrays(3, device=int(name == wrong)) for name in ("params", "grads", "buffers")}
        with pytest.raises(DeviceError, match="current device"):
            kernels.get(cupy).optimizer_update(
                "sgd", given["params"], given["grads"], [given["buffers"]], np.zeros((3, 6)), np.ones(3, np.int64)
            )
    assert not cupy.notes


# ---- any launch ----------------------------------------------------------------------------------------------------


def clamp(cupy, device=0):
    one, other = Placed(7, device=device), Placed(7, device=device)
    kernels.get(cupy).clamp(one, -1.0, 1.0, other)


def test_kernels_belong_to_a_device(cupy):
    clamp(cupy)
    clamp(cupy)
    cupy.number = 1
    clamp(cupy, 1)
    cupy.number = 0
    clamp(cupy)
    assert cupy.compiled == [0, 1]
    with pytest.raises(DeviceError, match="device 0"):
        clamp(cupy, 1)


def test_shared_memory_is_asked_for_once(cupy):
    k = DeviceKernels(cupy, kernels.get(cupy)._run.loader)
    large = STATIC_SHARED_LIMIT + 4096
    for shared in (1024, STATIC_SHARED_LIMIT, large, large, large - 1024, large + 1024, 2048):
        k._launch("pointwise.cu", "clamp", {"REAL": "float"}, 1, (1,), (), shared)
    assert [note for note in cupy.notes if note != "clamp"] == [f"allow {large}", f"allow {large + 1024}"]
    for grid, shared in ((1, 228 * 1024), (2**31, 0)):
        with pytest.raises(OptionError, match="too large"):
            k._launch("pointwise.cu", "clamp", {"REAL": "float"}, grid, (1,), (), shared)
    k._launch("pointwise.cu", "clamp", {"REAL": "float"}, 0, (1,), ())
    assert len(cupy.launches) == 7


def test_defines_of_one_value_are_told_apart(cupy):
    k = DeviceKernels(cupy, kernels.get(cupy)._run.loader)
    for defines in ({"HIDDEN": 1}, {"KEPT": 1}, {"HIDDEN": 1}):
        k._launch("rnn.cu", "rnn_forward", defines, 1, (1,), ())
    assert len(cupy.compiled) == 2


def test_what_is_counted_in_32_bits_fits(cupy):
    k, channel = kernels.get(cupy), Placed(1)
    with pytest.raises(OptionError, match="elements of a channel"):
        x = Placed((2**16, 1, 2**15))
        k.channel_products(x, x, channel, channel, channel)
    options = (1, 1, 1), (0, 0, 0), (1, 1, 1), 1
    for shape, what in (((2**16, 1, 1, 1, 2**15), "windows"), ((1, 2**11, 1, 2**10, 2**10), "padded sample")):
        x, weight = Placed(shape), Placed((1, shape[1], 1, 1, 1))
        with pytest.raises(OptionError, match=what):
            k.convolve(weight, x, *options, Placed((shape[0], 1, *shape[2:])))
    assert not cupy.launches


# ---- arrays that are kept ------------------------------------------------------------------------------------------


def test_what_is_kept_is_there_before_anyone_uses_it(cupy):
    """Any stream may read it at once: the host has waited, on the stream that other streams' work is in order with."""
    pattern = SparsityPattern.diagonal(5)
    indptr, indices = pattern.device_arrays(cupy)
    assert cupy.notes == ["sent on null to its own memory", "synchronize null"] * 2 and cupy.current.name == "first"
    assert pattern.device_arrays(cupy)[1] is indices and len(cupy.notes) == 4
    cupy.number = 1
    assert {array.data.device_id for array in pattern.device_arrays(cupy)} == {1}
    cupy.number = 0
    assert pattern.device_arrays(cupy)[0] is indptr and len(cupy.notes) == 8


def test_while_work_is_recorded_the_recorder_sends(cupy):
    asked = []

    class Recorder:
        def constant(self, host):
            asked.append(host)
            return Placed(host.shape, host.dtype)

    host = np.arange(3)
    assert graphs.kept(np, host) is host
    with graphs.recording(Recorder()):
        assert graphs.is_recorded()
        assert graphs.kept(cupy, host).shape == (3,)
    assert asked == [host] and not cupy.notes and not graphs.is_recorded()
