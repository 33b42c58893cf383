"""A recurrent layer in ONNX Runtime: the model, and a session that reads and writes arrays where they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

_ORDER = {"RNN": (0,), "GRU": (1, 0, 2), "LSTM": (0, 3, 1, 2)}
"""Where ONNX's gates are among torch's: z r h, and i o f c."""


def side(layer: Any, x: np.ndarray, threads: int) -> tuple[Callable[[], object], np.ndarray]:
    """Return what runs a layer of one run over x (T, B, I), and the array (T, B, H) that it writes."""
    import onnxruntime

    steps, batch, _ = x.shape
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    session = onnxruntime.InferenceSession(model(layer, x), options, providers=["CPUExecutionProvider"])
    y = np.empty((steps, 1, batch, layer.hidden_size), x.dtype)
    binding = session.io_binding()
    binding.bind_cpu_input("x", x)
    binding.bind_output("y", "cpu", 0, x.dtype.type, y.shape, y.ctypes.data)
    return lambda: session.run_with_iobinding(binding), y[:, 0]


def model(layer: Any, x: np.ndarray) -> bytes:
    """Return the layer as an ONNX model with one node, for inputs like x."""
    from onnx import TensorProto, helper, numpy_helper

    kind, hidden = type(layer).__name__, layer.hidden_size
    weights = {name: _ordered(kind, layer.params[f"{name}_l0"], hidden)
               for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")}  # fmt: skip
    given = {"W": weights["weight_ih"], "R": weights["weight_hh"],
             "B": np.concatenate((weights["bias_ih"], weights["bias_hh"]))}  # fmt: skip
    attributes = {"hidden_size": hidden} | ({"linear_before_reset": 1} if kind == "GRU" else {})
    real = TensorProto.FLOAT
    graph = helper.make_graph(
        [helper.make_node(kind, ["x", *given], ["y"], **attributes)], kind,
        [helper.make_tensor_value_info("x", real, x.shape)],
        [helper.make_tensor_value_info("y", real, (x.shape[0], 1, x.shape[1], hidden))],
        [numpy_helper.from_array(np.ascontiguousarray(array[None]), name) for name, array in given.items()],
    )  # fmt: skip
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])
    made.ir_version = 9
    content: bytes = made.SerializeToString()
    return content


def _ordered(kind: str, array: np.ndarray, hidden: int) -> np.ndarray:
    return np.concatenate([array[gate * hidden : (gate + 1) * hidden] for gate in _ORDER[kind]])
