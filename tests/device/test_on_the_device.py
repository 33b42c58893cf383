"""What the device alone can show: streams, launches and copies counted, arrays that do not mix."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import orders
import strict_cupy
from backends import make_backend, needs_numba
from benchmarks.workloads import SequenceWorkload
from gpu_runs import cases
from matrices import random_pattern
from sparsebp import kernels, models, nn, optim
from sparsebp.core import backend, cublas
from sparsebp.core.errors import DeviceError, LayoutError
from sparsebp.patterns import SparsityPattern
from sparsebp.products import plan_product
from sparsebp.runtime.executor import PlainExecutor
from sparsebp.runtime.search import all_schedules
from sparsebp.scan import plan_scan
from sparsebp.schedule.costs import Costs, StageBytes
from strict_cupy.device import DEVICE

# ---- plans and patterns cached on a device serve every stream at once, including later ones --------------------------


pytestmark = pytest.mark.gpu


@pytest.fixture
def cupy():
    return make_backend("gpu").xp


@pytest.fixture
def counted() -> Callable[[], Any]:
    if not strict_cupy.installed():
        pytest.skip("counts are the stand-in's")
    return strict_cupy.counted


def test_a_product_that_another_stream_has_used_first(cupy):
    needs_numba("products are planned with it, on the host")
    rng = np.random.default_rng(0)
    plan = plan_product(random_pattern(7, 9, 0.4), random_pattern(9, 8, 0.4, 1))
    a, b = rng.standard_normal((plan.a.nnz, 3)), rng.standard_normal((plan.b.nnz, 3))
    on_device = cupy.asarray(a), cupy.asarray(b)
    cupy.cuda.Device().synchronize()
    found = []
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(2)]
    for stream in streams:
        with stream:
            found.append(plan(*on_device))
    for stream, each in zip(reversed(streams), reversed(found), strict=True):
        stream.synchronize()
        np.testing.assert_allclose(each.get(), plan(a, b), rtol=1e-12)


@pytest.mark.parametrize("stacked", [True, False])
def test_a_scan_that_two_streams_run_at_once(stacked, cupy):
    """Each has buffers of its own: the second one's products do not come into the first one's."""
    rng, n, size, batch = np.random.default_rng(0), 8, 4, 2
    plan = plan_scan([SparsityPattern.dense(size, size)] * n, algorithm="blelloch", xp=cupy, batch=batch)
    calls = [(rng.standard_normal((size, batch)), rng.standard_normal((n, size * size, batch))) for _ in range(4)]
    sent = [(cupy.asarray(g), cupy.asarray(data)) for g, data in calls]
    cupy.cuda.Device().synchronize()
    streams, found = [cupy.cuda.Stream(non_blocking=True) for _ in range(2)], []
    for number, (g, data) in enumerate(sent):
        with streams[number % 2]:
            found.append(plan(g, data if stacked else list(data)))
    assert len({workspace.key for workspace in plan.workspaces}) == len(plan.workspaces) == 2
    for stream in reversed(streams):
        stream.synchronize()
    for (g, data), got in zip(calls, found, strict=True):
        y = g
        for i in range(n):
            y = np.einsum("ijb,jb->ib", data[i].reshape(size, size, batch), y)
            np.testing.assert_allclose(got[i].get(), y, rtol=1e-9)


# ---- every kernel through CuPy ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("kernel", cases.kernels())
def test_a_kernel_writes_the_hosts_results(kernel, cupy):
    needs_numba("results are compared with the host's")
    for case in cases.every(small=True):
        if case.kernel == kernel:
            there = cases.run(kernels.get(cupy), case, cupy.asarray)
            got = {name: backend.to_host(array) for name, array in there.items()}
            assert cases.differences(got, cases.run(kernels.get(np), case)) == [], case.key


# ---- a device other than the first; threads begin on the first ------------------------------------------------------


@pytest.fixture
def second(cupy, monkeypatch):
    if strict_cupy.installed():
        monkeypatch.setattr(DEVICE, "count", 2)
    elif cupy.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("needs two GPUs")
    with cupy.cuda.Device(1):
        yield 1


def test_two_streams_on_another_device_than_the_first(second):
    order = {"streams": 2, "fusion": "backward"}
    found = []
    for device in ("cpu", "cuda"):
        model = orders.conv().to(device)
        opt = optim.SGD(model.parameters(), 0.1)
        executor = PlainExecutor(model, nn.CrossEntropyLoss(), opt, orders.order_for(model, **order))
        batch = [tuple(backend.to_device(a, device) for a in (orders.IMAGES, orders.CLASSES))]
        for _ in range(2):
            executor.step(batch)
        executor.flush()
        executor.close()
        found.append({name: backend.to_host(array) for name, array in model.parameters().items()})
    assert {array.data.device_id for array in model.parameters().values()} == {second}
    for name, values in found[0].items():
        np.testing.assert_allclose(found[1][name], values, rtol=1e-4, atol=1e-5, err_msg=name)


def test_each_of_two_devices_in_turn_has_all_that_is_kept_to_itself(second, cupy):
    """Modules and kernels, handles of cuBLAS, copies of patterns, and the buffers of a scan."""
    rng, n, size, batch = np.random.default_rng(0), 8, 4, 2
    pattern = SparsityPattern.dense(size, size)
    plan = plan_scan([pattern] * n, algorithm="blelloch", xp=cupy, batch=batch)
    for number in (0, second, 0, second):
        g, data = rng.standard_normal((size, batch)), rng.standard_normal((n, size * size, batch))
        with cupy.cuda.Device(number):
            there = cupy.asarray(g), cupy.asarray(data)
            found = plan(*there)
            product = cublas.matmul(there[0], there[0].T)
            kept = [*found, product, *pattern.device_arrays(cupy)]
            assert {array.data.device_id for array in kept} == {number}
            np.testing.assert_allclose(product.get(), g @ g.T, rtol=1e-12)
            y = g
            for i in range(n):
                y = np.einsum("ijb,jb->ib", data[i].reshape(size, size, batch), y)
                np.testing.assert_allclose(found[i].get(), y, rtol=1e-9)
    assert len({workspace.key for workspace in plan.workspaces}) == len(plan.workspaces) == 2
    handles = cublas._own.handles
    assert handles[0]._handle.value != handles[second]._handle.value
    device = kernels.get(cupy)._run
    used = [{key[1:] for key in device._kernels if key[0] == number} for number in (0, second)]
    assert used[0] & used[1]
    for key in used[0] & used[1]:
        assert device._kernels[0, *key].run is not device._kernels[second, *key].run


def test_steps_that_are_captured_on_two_devices_in_turn(second, cupy):
    """A graph has the streams, the memory and the cuBLAS handle of its device."""
    steps, batch = 6, (orders.IMAGES, orders.CLASSES)

    def executor(device):
        model = orders.conv().to(device)
        sgd = optim.SGD(model.parameters(), 0.1, 0.9)
        order = orders.order_for(model)
        return PlainExecutor(model, nn.CrossEntropyLoss(), sgd, order, graph=device == "cuda"), model

    host, expected = executor("cpu")
    there = {}
    for number in (0, second):
        with cupy.cuda.Device(number):
            there[number] = *executor("cuda"), tuple(map(cupy.asarray, batch))
    for _ in range(steps):
        host.step([batch])
        for number, (each, _, sent) in there.items():
            with cupy.cuda.Device(number):
                each.step([sent])
    host.flush()
    for number, (each, model, _) in there.items():
        with cupy.cuda.Device(number):
            each.flush()
            each.close()
            assert each.uncaptured == ()
            assert {array.data.device_id for array in model.parameters().values()} == {number}
            for name, array in model.state_dict().items():
                np.testing.assert_allclose(
                    array.get(), expected.state_dict()[name], rtol=1e-3, atol=1e-4, err_msg=f"{name} on {number}"
                )


def test_a_stream_of_pytorchs_is_used_without_a_warning_and_outlives_its_use(second, cupy, monkeypatch):
    """CuPy 14 warns of ExternalStream, and destroys what a wrapper from `Stream.from_external` leaves behind."""
    if not strict_cupy.installed():
        pytest.skip("PyTorch's tensors on a device are tested with PyTorch")
    import torch

    from sparsebp.torch.ops import on_its_stream

    theirs = cupy.cuda.Stream(non_blocking=True)
    empty = torch.empty
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda number: theirs.ptr, raising=False)
    monkeypatch.setattr(torch, "empty", lambda size, dtype, device: empty(size, dtype=dtype))
    tensor = SimpleNamespace(is_cuda=True, device=torch.device("cuda", second))
    with cupy.cuda.Device(0), warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            with on_its_stream(tensor):
                assert (cupy.cuda.get_current_stream().ptr, cupy.cuda.Device().id) == (theirs.ptr, second)
                assert cupy.ones(3).tolist() == [1, 1, 1]
            gc.collect()
    with theirs:
        assert cupy.ones(3).tolist() == [1, 1, 1]


# ---- two streams, out of order ---------------------------------------------------------------------------------------


def densenet():
    return models.densenet(3, 3, depth=7, growth=2, blocks=2, width=0.5, rng=0)


def branches():
    body = nn.Sequential(nn.Conv2d(4, 4, 3, 2, 1, rng=0), nn.InstanceNorm2d(4, affine=True), nn.Hardswish())
    return nn.Sequential(
        nn.Conv2d(3, 4, 1, rng=1), nn.Residual(body, nn.AdaptiveMaxPool2d(4)), nn.ReLU(),
        nn.Upsample(scale_factor=1.5, mode="bilinear"), nn.Sum(nn.Identity(), nn.Conv2d(4, 4, 1, rng=2), nn.Tanh()),
        nn.AdaptiveMaxPool2d((4, 5)), nn.Unflatten(1, (2, 2)), nn.BatchNorm3d(2), nn.MaxPool3d(2), nn.Flatten(),
        nn.Linear(8, 3, rng=3),
    )  # fmt: skip


@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize(
    ("name", "make"), [("two", densenet), ("joint", densenet), ("list", densenet), ("joint", branches)]
)
def test_a_network_on_two_streams(name, make, graph, cupy):
    """Blocks whose outputs many later layers read: a gradient that comes too late would be seen in the numbers."""
    rng = np.random.default_rng(0)
    batch = rng.standard_normal((3, 3, 8, 8), np.float32), rng.integers(3, size=3)
    found = []
    for device in ("cpu", "cuda"):
        model = make().to(device)
        order = orders.order_for(model)
        if device == "cuda":
            size = {"stages": order.graph.stages, "unweighted": order.graph.unweighted}
            costs = Costs({"F": 1.0, "I": 1.0, "W": 1.0, "U": 0.1}, (StageBytes(),) * order.graph.stages)
            order = all_schedules(size, costs)[name]
        executor = PlainExecutor(
            model, nn.CrossEntropyLoss(), optim.SGD(model.parameters(), 0.1, 0.9), order, graph=graph
        )
        sent = tuple(backend.to_device(array, device) for array in batch)
        done = [step.loss for _ in range(5) for step in executor.step([sent])]
        done += [step.loss for step in executor.flush()]
        assert device == "cpu" or executor.uncaptured == (() if graph else ("graph=False",))
        executor.close()
        found.append((done, {key: backend.to_host(array) for key, array in model.state_dict().items()}))
    (losses, state), (losses_there, state_there) = found
    np.testing.assert_allclose(losses_there, losses, rtol=1e-3)
    for key, values in state.items():
        np.testing.assert_allclose(state_there[key], values, rtol=1e-3, atol=1e-4, err_msg=key)


# ---- launches of a layer; none of them transfers or reads anything ---------------------------------------------------


IMAGES, SEQUENCES = (4, 3, 8, 8), (5, 3, 20)
BUDGETS = {
    "Linear": (lambda: nn.Linear(20, 10), (16, 20), (1, 1, 1)),
    "ReLU": (nn.ReLU, (16, 20), (1, 1, 0)),
    "Tanh": (nn.Tanh, (16, 20), (1, 3, 0)),
    "Conv2d": (lambda: nn.Conv2d(3, 8, 3, padding=1), IMAGES, (1, 1, 3)),  # sums of parts, then of all
    "1×1": (lambda: nn.Conv2d(64, 64, 1), (4, 64, 8, 8), (2, 1, 3)),  # a product, then the bias
    "BatchNorm2d": (lambda: nn.BatchNorm2d(3), IMAGES, (6, 5, 3)),  # sums of pieces, then of channels
    "MaxPool2d": (lambda: nn.MaxPool2d(2), IMAGES, (1, 1, 0)),
    "AvgPool2d": (lambda: nn.AvgPool2d(2), IMAGES, (8, 10, 0)),
    "InstanceNorm2d": (lambda: nn.InstanceNorm2d(3), IMAGES, (6, 5, 0)),
    "Dropout": (lambda: nn.Dropout(0.5), (16, 20), (5, 1, 0)),
    "LayerNorm": (lambda: nn.LayerNorm(20), (16, 20), (10, 8, 3)),
    "GELU": (nn.GELU, (16, 20), (1, 1, 0)),
    "MultiheadAttention": (lambda: nn.MultiheadAttention(20, 4), SEQUENCES, (14, 16, 19)),
    "TransformerEncoderLayer": (lambda: nn.TransformerEncoderLayer(20, 4, 40, 0.0), SEQUENCES, (41, 37, 49)),
    "PositionalEmbedding": (lambda: nn.PositionalEmbedding(5, 20), SEQUENCES, (1, 0, 3)),
    "MeanOverSteps": (nn.MeanOverSteps, SEQUENCES, (1, 2, 0)),
    "Residual": (lambda: nn.Residual(nn.Linear(20, 20)), (16, 20), (2, 2, 1)),
    "Sum": (lambda: nn.Sum(nn.Linear(20, 20), nn.Identity(), nn.ReLU()), (16, 20), (4, 4, 1)),
}
"""Of each layer, the shape of its input and the launches at most: forward, gradient of the input, of the weights."""


@pytest.mark.parametrize("name", BUDGETS)
def test_launches_of_a_layer(name, cupy, counted):
    make, shape, budget = BUDGETS[name]
    layer = make().to("cuda")
    x = cupy.asarray(np.random.default_rng(0).standard_normal(shape).astype(np.float32))
    y, saved = layer.forward(x)  # what is kept is sent, what is compiled is compiled
    gy = cupy.ones(y.shape, y.dtype)
    layer.input_grad(gy, saved), layer.weight_grad(gy, saved)
    parts = [lambda: layer.forward(x), lambda: layer.input_grad(gy, saved), lambda: layer.weight_grad(gy, saved)]
    for part, most in zip(parts, budget, strict=True):
        with counted() as counts:
            part()
        assert counts.launches <= most, str(counts)
        assert counts.h2d == counts.host_reads == 0, str(counts)


# ---- launches, products and copies of recurrent layers ---------------------------------------------------------------


STEPS, BATCH, HIDDEN = 40, 16, 20


def run(make: Callable[..., Any], features: int) -> tuple[Any, Any]:
    """Return a layer on the GPU, whose kernels are compiled, and an input."""
    layer = make(features, HIDDEN, backward="bp", rng=0).to("cuda")
    values = np.random.default_rng(0).standard_normal((STEPS, BATCH, features)).astype(np.float32)
    x = backend.to_device(values, "cuda")
    y, saved = layer.forward(x)
    g = layer.gradients(y, saved)
    assert g.input.shape == x.shape and g.weights
    return layer, x


@pytest.mark.parametrize("make", [nn.RNN, nn.GRU])
def test_an_input_of_few_features_is_projected_by_the_kernel(make: Any, counted: Any) -> None:
    layer, x = run(make, 8)
    with counted() as counts:
        layer.forward(x)
    assert dict(counts.launched) == {f"{layer.cell.name}_forward": 1, "cupy.copy": 1}, str(counts)  # the last state's
    layer, x = run(make, 9)
    with counted() as counts:
        layer.forward(x)
    assert counts.products == 1, str(counts)


@pytest.mark.parametrize("make", [nn.RNN, nn.GRU])
def test_gradients_are_products_of_what_lies_there(make: Any, counted: Any) -> None:
    """Each weight's, and the input's: by cuBLAS, without a copy of a view over all steps; the biases' are sums."""
    layer, x = run(make, 3)
    y, saved = layer.forward(x)
    with counted() as counts:
        g = layer.gradients(y, saved)
        assert g.input.shape == x.shape and g.weights
    assert counts.products == 3 and counts.launched["sum_gates"] == 1, str(counts)
    assert "cupy.matmul" not in counts.launched
    large = [size for what, _, size in counts.log if what == "allocation" and size >= 4 * STEPS * BATCH * HIDDEN]
    assert large == [4 * STEPS * BATCH * layer.cell.columns * HIDDEN], str(counts)  # the gradients at the gates


@pytest.mark.parametrize("make", [nn.RNNCell, nn.GRUCell])
def test_a_cells_products_are_cublass(make: Any, counted: Any) -> None:
    cell = make(9, HIDDEN, rng=0).to("cuda")
    x = backend.to_device(np.ones((BATCH, 9), np.float32), "cuda")
    with counted() as counts:
        h, saved = cell.forward(x)
        g = cell.gradients(h, saved)
        assert g.input.shape == x.shape and g.hidden.shape == h.shape and g.weights
    assert counts.products == 4 and counts.launched["sum_gates"] == 1, str(counts)
    assert "cupy.matmul" not in counts.launched


# ---- training steps --------------------------------------------------------------------------------------------------


TRAINING = {("RNN", "bp"): 10, ("RNN", "chunked"): 12, ("GRU", "bp"): 13, ("GRU", "chunked"): 15}
"""Cell and algorithm of the benchmarks' workload, and launches of a step, from the batch to the updated parameters.

No count hangs on the length, up to 65 536 rows T·B.
"""


@pytest.mark.parametrize(("cell", "backward"), TRAINING)
def test_a_training_step_asks_no_more_of_the_device(cell: str, backward: str, counted: Any) -> None:
    """Launched or captured, it sends nothing and reads its loss once; a captured one copies the batch to its place."""
    for graph in (False, True):
        workload = SequenceWorkload(cell, 24, 4, device="cuda", backward=backward)
        order = orders.order_for(workload.model)
        executor = PlainExecutor(workload.model, workload.loss, workload.optimizer, order, graph=graph)
        batch = [(workload.x, workload.target)]
        for number in range(4):
            executor.step(batch, number)
        with counted() as counts:
            executor.step(batch, 4)
        assert (counts.d2h, counts.h2d) == (1, 0), str(counts)
        if graph:
            assert (counts.graphs, counts.launches) == (1, 2), str(counts)
        else:
            assert counts.launches <= TRAINING[cell, backward], str(counts)


# ---- host arrays or NumPy scalars among device arrays are an error, never a wrong pointer ----------------------------


@pytest.mark.parametrize("call", ["scale_arrays", "clamp_arrays"])
def test_lists_of_arrays(cupy, call):
    needs_numba("the host kernels are asked too")
    there, here = cupy.ones(3, np.float32), np.ones(3, np.float32)
    device, host = getattr(kernels.get(cupy), call), getattr(kernels.get(np), call)
    for run in (device, host):
        for arrays in ([there, here], [here, there]):
            with pytest.raises(DeviceError, match="mixed"):
                run(arrays, 0.5)
        with pytest.raises(LayoutError, match=r"arrays\[1\] is not an array"):
            run([there, np.float32(1)], 0.5)
    with pytest.raises(DeviceError, match="another namespace"):
        host([there], 0.5)
    with pytest.raises(DeviceError, match="these kernels' namespace"):
        device([here], 0.5)
    assert (backend.to_host(there) == 1).all() and (here == 1).all()


def test_sums_go_where_the_arrays_are(cupy):
    needs_numba("the host kernels are asked too")
    there, here = cupy.ones(3, np.float32), np.ones(3, np.float32)
    with pytest.raises(DeviceError):
        kernels.get(np).square_sums([there], np.zeros(1))
    with pytest.raises(DeviceError):
        kernels.get(cupy).square_sums([there], np.zeros(1))
    with pytest.raises(DeviceError):
        kernels.get(cupy).square_sums([here], np.zeros(1))
