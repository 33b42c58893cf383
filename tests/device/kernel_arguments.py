"""Valid arguments for every kernel of the protocol, small; the parity tests break them one at a time."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np

from cuda_on_cpu.memory import uninitialised
from sparsebp.core.check import UpdateRule
from sparsebp.kernels.operands import Blocks, Columns, Pairs, Places, Rows, RowShapes, Runs, Terms, WeightSums
from sparsebp.kernels.spec import OPTIONAL_BUFFERS, UPDATE_BUFFERS, UPDATE_OPTIONS, Kernels

Arguments = dict[str, Any]


def public(cls: type, *, kernels: bool = True) -> dict[str, Callable[..., Any]]:
    """Return the kernels of a class by name, or its questions about sizes: a kernel returns nothing."""
    members = inspect.getmembers(cls, inspect.isroutine)
    return {
        name: member
        for name, member in members
        if not name.startswith("_") and (member.__annotations__.get("return") == "None") == kernels
    }


KERNELS = public(Kernels)


class Maker:
    """Makes the arguments of one call.

    Parameters
    ----------
    dtype, batch, hidden
        The real dtype, B and H of the call.
    shared
        Whether values that may be shared by the batch are.
    chunks
        Into how many chunks of time a recurrence is cut on the way back.
    """

    def __init__(self, dtype: Any, batch: int = 3, hidden: int = 5, shared: bool = False, chunks: int = 4) -> None:
        self.dtype, self.batch, self.hidden = np.dtype(dtype), batch, hidden
        self.shared, self.values = shared, 1 if shared else batch
        self.steps, self.chunks = 7, chunks
        self.rng = np.random.default_rng(0)

    def real(self, *shape: int, scale: float = 1.0) -> np.ndarray:
        return (scale * self.rng.standard_normal(shape)).astype(self.dtype)

    def gate(self, *shape: int) -> np.ndarray:
        return self.rng.random(shape).astype(self.dtype)

    def out(self, *shape: int) -> np.ndarray:
        return uninitialised(shape, self.dtype)

    # ---- CSR: A is 4 x 3 with an empty row, B is 3 x 4 ----

    def csr(self) -> tuple[np.ndarray, np.ndarray]:
        return np.array([0, 2, 2, 3, 5], np.int32), np.array([0, 2, 1, 0, 1], np.int32)

    def csr_matvec(self) -> Arguments:
        indptr, indices = self.csr()
        return {
            "indptr": indptr, "indices": indices, "data": self.real(5, self.values), "x": self.real(3, self.batch),
            "out": self.out(4, self.batch), "add": self.real(4, self.batch),
        }  # fmt: skip

    def scale_rows(self) -> Arguments:
        data, scale = self.real(5, self.values), self.real(4, self.batch)
        return {"indptr": self.csr()[0], "data": data, "scale": scale, "out": self.out(5, self.batch)}

    def scale_columns(self) -> Arguments:
        data, scale = self.real(5, self.values), self.real(3, self.batch)
        return {"indices": self.csr()[1], "data": data, "scale": scale, "out": self.out(5, self.batch)}

    def scale_runs(self) -> Arguments:
        """Rows of the shapes 0 2, none, and 0 alone; the last but one begins in column 1."""
        shapes = RowShapes(
            indptr=self.csr()[0], shape=np.array([0, 1, 2, 3], np.int32), first=np.array([0, 0, 1, 0], np.int32),
            run_ptr=np.array([0, 2, 2, 3, 4], np.int64), whole=np.array([0, 2, 2, 3], np.int64),
            run_columns=np.array([0, 2, 0, 0], np.int32), run_ends=np.array([1, 2, 1, 2], np.int32), gap=0,
        )  # fmt: skip
        return {"indices": self.csr()[1], "shapes": shapes} | {
            name: array for name, array in self.scale_columns().items() if name != "indices"
        }

    def gather(self) -> Arguments:
        index = np.array([4, 0, 0], np.int32)
        return {"data": self.real(5, self.batch), "index": index, "out": self.out(3, self.batch)}

    def gather_multiply(self) -> Arguments:
        return {
            "a_data": self.real(5, self.values), "a_index": np.array([4, 0, 0, 2], np.int32),
            "b_data": self.real(3, self.batch), "b_index": np.array([1, 2, 0, 0], np.int32),
            "out": self.out(4, self.batch),
        }  # fmt: skip

    def spgemm_positions(self) -> Arguments:
        indptr, indices = self.csr()
        b_indptr, b_indices = np.array([0, 2, 3, 5], np.int32), np.array([0, 3, 1, 2, 3])
        rows = [
            [b_indices[b_indptr[k] : b_indptr[k + 1]] for k in indices[indptr[r] : indptr[r + 1]]] for r in range(4)
        ]
        products = [np.concatenate(row) if row else np.array([], int) for row in rows]
        columns = [np.unique(p) for p in products]
        positions = np.concatenate([np.searchsorted(c, p) for c, p in zip(columns, products, strict=True)])
        c_indptr = np.concatenate([[0], np.cumsum([len(c) for c in columns])]).astype(np.int32)
        product_ptr = np.concatenate([[0], np.cumsum([len(p) for p in products])]).astype(np.int64)
        return {
            "rows": Rows(indptr, indices, b_indptr, c_indptr),
            "places": Places(product_ptr, positions.astype(np.uint16), np.array([0, 1, 4], np.int64)),
            "a_data": self.real(5, self.values), "b_data": self.real(5, self.batch),
            "out": self.out(int(c_indptr[-1]), self.batch),
        }  # fmt: skip

    # ---- values of transposed Jacobians ----

    def pointwise_slopes(self) -> Arguments:
        functions = {1: "relu", 2: "tanh", 3: "sigmoid"}
        function = functions.get(self.batch, "given") if self.values == self.batch else "given"
        return {"kept": self.real(self.batch, 37), "function": function, "out": self.out(37, self.batch)}

    def max_pool_values(self) -> Arguments:
        winner = self.rng.integers(0, 4, (self.batch, 6)).astype(np.uint8 if self.hidden == 5 else np.int32)
        return {
            "winner": winner, "window": np.array([0, 0, 3, 3], np.int32), "offset": np.array([0, 2, 0, 2], np.int32),
            "windows": 3, "taps": 2, "out": self.out(24, self.batch),
        }  # fmt: skip

    def spgemm_select_rows(self) -> Arguments:
        a_indptr, a_indices = np.array([0, 1, 1, 2, 3], np.int32), np.array([2, 0, 2], np.int32)
        b_indptr, c_indptr = np.array([0, 2, 3, 5], np.int32), np.array([0, 2, 2, 4, 6], np.int32)
        return {
            "rows": Rows(a_indptr, a_indices, b_indptr, c_indptr), "a_data": self.real(3, self.values),
            "b_data": self.real(5, self.batch), "out": self.out(6, self.batch),
        }  # fmt: skip

    def spgemm_select_columns(self) -> Arguments:
        terms = Terms(
            product_ptr=np.array([0, 3, 3, 4], np.int32), a_index=np.array([0, 2, 3, 4], np.int32),
            b_index=np.array([1, 0, 1, 2], np.int32), c_indptr=np.array([0, 2, 2, 3], np.int32),
            positions=np.array([1, 0, 1, 0], np.uint16), row_cuts=np.array([0, 1, 3], np.int64),
        )  # fmt: skip
        return {
            "terms": terms, "a_data": self.real(5, self.values), "b_data": self.real(3, self.batch),
            "out": self.out(3, self.batch),
        }  # fmt: skip

    def spgemm_runs(self) -> Arguments:
        """Rows of B: columns 0 1 3, the same again, and 1 2."""
        a_indptr, a_indices = np.array([0, 3, 3, 4], np.int32), np.array([0, 1, 2, 2], np.int32)
        runs = Runs(
            b_shape=np.array([0, 0, 1], np.int32), run_ptr=np.array([0, 2, 3], np.int32),
            run_lengths=np.array([2, 1, 2], np.int32), start_ptr=np.array([0, 3, 3, 4], np.int64),
            starts=np.array([0, 3, 1, 0], np.uint16), row_cuts=np.array([0, 1, 3], np.int64),
        )  # fmt: skip
        return {
            "rows": Rows(a_indptr, a_indices, np.array([0, 3, 6, 8], np.int32), np.array([0, 4, 4, 6], np.int32)),
            "runs": runs, "a_data": self.real(4, self.values), "b_data": self.real(8, self.batch),
            "out": self.out(6, self.batch),
        }  # fmt: skip

    def spgemm_blocks(self) -> Arguments:
        """Blocks (2, 2), (2, 3) at block columns 0 2, none, 1; blocks of B at 1, 0 1, 0."""
        a_indptr, a_indices = np.array([0, 4, 8, 8, 8, 10, 12], np.int32), [0, 1, 4, 5] * 2 + [2, 3] * 2
        b_indptr, c_indptr = (
            np.array([0, 3, 6, 12, 18, 21, 24], np.int32),
            np.array([0, 6, 12, 12, 12, 18, 24], np.int32),
        )
        blocks = Blocks(
            product_ptr=np.array([0, 2, 2, 4], np.int64), positions=np.array([1, 0, 0, 1], np.uint16), m=2, k=2, n=3,
            row_cuts=np.array([0, 1, 3], np.int64),
        )  # fmt: skip
        return {
            "rows": Rows(a_indptr, np.array(a_indices, np.int32), b_indptr, c_indptr), "blocks": blocks,
            "a_data": self.real(12, self.values), "b_data": self.real(24, self.batch), "out": self.out(24, self.batch),
        }  # fmt: skip

    def spgemm_pairs(self) -> Arguments:
        """Two tiles: lists of 2 words and 1, and one of 9; three bits name an entry of A."""
        words = np.array([8 * 1 + 2, 8 * 0 + 1, 8 * 2 + 0, *(8 * (n % 3) + n % 2 for n in range(9))], np.uint32)
        tiles = np.zeros((3, 11), np.int64)
        tiles[:, :5] = [[0, 0, 0, 1, 1], [2, 3, 3, 0, 0], [3, 5, 12, 0, 0]]
        pairs = Pairs(
            words=words, order=np.array([1, 0, 0], np.uint16), starts=np.array([1, 0, 0], np.uint16),
            lengths=np.array([2, 1, 9], np.uint16), tiles=tiles, shift=3, tile_cuts=np.array([0, 1, 2], np.int64),
        )  # fmt: skip
        return {
            "pairs": pairs, "a_data": self.real(5, self.values), "b_data": self.real(3, self.batch),
            "out": self.out(3, self.batch),
        }  # fmt: skip

    def spgemm_accumulate(self) -> Arguments:
        given, c_indices = self.spgemm_positions(), np.array([0, 2, 3, 1, 0, 1, 3], np.int32)
        columns = Columns(np.array([0, 3, 1, 2, 3], np.int32), c_indices, 4, given.pop("places").row_cuts)
        return {"rows": given.pop("rows"), "columns": columns} | given

    def spgemm_filled(self) -> Arguments:
        return self.spgemm_accumulate()

    # ---- sliding windows ----

    def _convolution(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]:
        """Return weight, x, y and the options, of two groups."""
        options = {"stride": (1, 2, 2), "before": (0, 1, 2), "dilation": (1, 1, 2), "groups": 2}
        return self.real(6, 2, 1, 2, 3), self.real(self.batch, 4, 1, 5, 6), self.real(self.batch, 6, 1, 3, 3), options

    def convolve(self) -> Arguments:
        weight, x, y, options = self._convolution()
        return {"weight": weight, "x": x} | options | {"out": self.out(*y.shape)}

    def convolve_t(self) -> Arguments:
        weight, x, y, options = self._convolution()
        return {"weight": weight, "y": y} | options | {"out": self.out(*x.shape)}

    def correlate(self) -> Arguments:
        weight, x, y, options = self._convolution()
        return {"y": y, "x": x} | options | {"out": self.out(*weight.shape)}

    def max_pool(self) -> Arguments:
        options = {"kernel": (3, 2), "stride": (2, 1), "before": (1, 1), "dilation": (1, 2)}
        winner = np.full((self.batch, 3, 6), 77, np.uint8 if self.hidden == 5 else np.int32)
        return {"x": self.real(self.batch, 5, 6)} | options | {"y": self.out(self.batch, 3, 6), "winner": winner}

    def max_pool_grad(self) -> Arguments:
        options = {"kernel": (3, 2), "stride": (2, 1), "before": (1, 1), "dilation": (1, 2)}
        winner = self.rng.integers(0, 6, (self.batch, 3, 6)).astype(np.uint8 if self.hidden == 5 else np.int32)
        arrays = {"gy": self.real(self.batch, 3, 6), "winner": winner}
        return arrays | options | {"out": self.out(self.batch, 5, 6)}

    # ---- channels ----

    def channel_normalise(self) -> Arguments:
        shape, weighted = (self.batch, self.hidden, 7), not self.shared
        numbers = {name: self.real(self.hidden) if weighted else None for name in ("weight", "bias")}
        written = {name: self.out(self.hidden) for name in ("mean", "var", "scale")}
        out = {"out": self.out(*shape), "limits": (-0.5, 0.3) if weighted else None}
        return {"x": self.real(*shape)} | numbers | {"eps": 1e-3} | written | out

    def _cut(self) -> Arguments:
        """What cuts a gradient off, or does not."""
        if self.shared:
            return {"y": None, "limits": None}
        return {"y": self.real(self.batch, self.hidden, 7), "limits": (-0.5, 0.3)}

    def channel_scale(self) -> Arguments:
        numbers = {name: self.real(self.hidden) for name in ("mean", "factor", "offset")}
        shape = self.batch, self.hidden, 7
        return {"x": self.real(*shape)} | numbers | {"out": self.out(*shape)}

    def channel_products(self) -> Arguments:
        arrays = {name: self.real(self.batch, self.hidden, 7) for name in ("gy", "x")}
        return arrays | {
            "mean": self.real(self.hidden),
            "sums": self.out(self.hidden),
            "products": self.out(self.hidden),
            **self._cut(),
        }

    def channel_back(self) -> Arguments:
        shape = self.batch, self.hidden, 7
        numbers = {name: self.real(self.hidden) for name in ("mean", "scale")}
        weight = None if self.shared else self.real(self.hidden)
        sums = {name: self.out(self.hidden) for name in ("sums", "products")}
        arrays = {name: self.real(*shape) for name in ("gy", "x")}
        return arrays | numbers | {"weight": weight} | sums | {"out": self.out(*shape), "known": False} | self._cut()

    def channel_track(self) -> Arguments:
        arrays = {name: self.gate(self.hidden) for name in ("mean", "var")}
        running = {name: self.gate(self.hidden) for name in ("running_mean", "running_var")}
        return arrays | {"momentum": 0.1, "correction": 1.25} | running

    def channel_factors(self) -> Arguments:
        weight = None if self.shared else self.real(self.hidden)
        written = {"scale": self.out(self.hidden), "factor": self.out(self.hidden)}
        return {"var": self.gate(self.hidden), "eps": 1e-3, "weight": weight} | written

    # ---- cutting off ----

    def clamp(self) -> Arguments:
        return {"x": self.real(self.hidden * 7), "low": -0.5, "high": 0.3, "out": self.out(self.hidden * 7)}

    def clamp_grad(self) -> Arguments:
        arrays = {name: self.real(self.hidden * 7) for name in ("gy", "y")}
        return arrays | {"low": -0.5, "high": 0.3, "out": self.out(self.hidden * 7)}

    def gelu(self) -> Arguments:
        return {"x": self.real(self.hidden * 7), "approximate": False, "out": self.out(self.hidden * 7)}

    def gelu_grad(self) -> Arguments:
        arrays = {name: self.real(self.hidden * 7) for name in ("gy", "x")}
        return arrays | {"approximate": True, "out": self.out(self.hidden * 7)}

    # ---- stacks of dense blocks ----

    def dense_matmul(self) -> Arguments:
        return {
            "a": self.real(3, 4, 3, self.values), "a_index": np.array([2, 0]), "b": self.real(2, 3, 5, self.batch),
            "b_index": np.array([1, 1]), "out": self.real(4, 4, 5, self.batch), "out_index": np.array([3, 1]),
        }  # fmt: skip

    def dense_matvec(self) -> Arguments:
        return {
            "a": self.real(3, 4, 3, self.values), "a_index": np.array([2, 0]), "x": self.real(2, 3, self.batch),
            "x_index": np.array([1, 1]), "add": self.real(3, 4, self.batch), "add_index": np.array([0, 2]),
            "out": self.real(4, 4, self.batch), "out_index": np.array([3, 1]),
        }  # fmt: skip

    def dense_chain(self) -> Arguments:
        return {
            "a": self.real(5, 3, 3, self.values), "chunk_ptr": np.array([0, 2, 5]), "x": self.real(2, 3, self.batch),
            "add": self.real(5, 3, self.batch), "out": self.out(5, 3, self.batch),
        }  # fmt: skip

    def dense_reduce(self) -> Arguments:
        return {
            "a": self.real(5, 3, 3, self.batch), "chunk_ptr": np.array([0, 2, 5]), "add": self.real(5, 3, self.batch),
            "out_matrix": self.out(2, 3, 3, self.batch), "out_vector": self.out(2, 3, self.batch),
        }  # fmt: skip

    # ---- recurrent ----

    def sequence(self, parts: int = 1) -> tuple[int, int, int]:
        return self.steps, self.batch, parts * self.hidden

    def weights(self, gates: int) -> np.ndarray:
        return self.real(gates * self.hidden, self.hidden, scale=self.hidden**-0.5)

    def inputs(self, gates: int) -> tuple[np.ndarray, Arguments]:
        """Return x and what projects it; where values are shared, the projected input and nothing."""
        if self.shared:
            return self.real(*self.sequence(gates)), dict.fromkeys(("w_ih", "b_ih", "b_hh"))
        features, rows = {5: 3, 20: 1, 37: 8}.get(self.hidden, 2), gates * self.hidden
        biases = {name: self.real(rows) for name in ("b_ih", "b_hh")}
        return self.real(self.steps, self.batch, features), {"w_ih": self.real(rows, features)} | biases

    def rnn_forward(self) -> Arguments:
        x, projection = self.inputs(1)
        return {
            "x": x, "w_hh": self.weights(1), "h0": self.real(self.batch, self.hidden), "nonlinearity": "tanh",
            "h": self.out(*self.sequence()),
        } | projection  # fmt: skip

    def weight_sums(self, h: np.ndarray, gates: int, features: int = 3) -> WeightSums:
        before = np.concatenate([self.real(1, self.batch, self.hidden), h[:-1]])
        rows = gates * self.hidden
        outputs = self.out(rows, features), self.out(rows, self.hidden), self.out(rows), self.out(rows)
        return WeightSums(self.real(self.steps, self.batch, features), before, *outputs)

    def rnn_backward(self) -> Arguments:
        h = np.tanh(self.real(*self.sequence()))
        return {
            "h": h, "w_hh": self.weights(1), "gy": self.real(*self.sequence()),
            "grad_h_n": self.real(self.batch, self.hidden), "nonlinearity": "tanh", "gz": self.out(*self.sequence()),
            "gh0": self.out(self.batch, self.hidden), "chunks": self.chunks, "sums": self.weight_sums(h, 1),
        }  # fmt: skip

    def rnn_jacobians(self) -> Arguments:
        h = np.tanh(self.real(*self.sequence()))
        out = self.out(self.steps, self.hidden, self.hidden, self.batch)
        return {"h": h, "w_hh": self.weights(1), "nonlinearity": "tanh", "out": out}

    def maps(self) -> np.ndarray:
        return self.out(3, self.batch, self.hidden + 1, self.hidden)

    def rnn_maps(self) -> Arguments:
        h, gy = np.tanh(self.real(*self.sequence())), self.real(*self.sequence())
        return {"h": h, "w_hh": self.weights(1), "gy": gy, "nonlinearity": "tanh", "maps": self.maps()}

    def gru_forward(self) -> Arguments:
        x, projection = self.inputs(3)
        return {
            "x": x, "w_hh": self.weights(3), "b_hn": self.real(self.hidden),
            "h0": self.real(self.batch, self.hidden), "h": self.out(*self.sequence()),
            "gates": self.out(*self.sequence(4)),
        } | projection  # fmt: skip

    def gru_backward(self) -> Arguments:
        h = np.tanh(self.real(*self.sequence()))
        sums = self.weight_sums(h, 3)
        return {
            "h": h, "h0": sums.before[0].copy(),
            "gates": self.gate(*self.sequence(4)), "w_hh": self.weights(3), "gy": self.real(*self.sequence()),
            "grad_h_n": self.real(self.batch, self.hidden), "ga": self.out(*self.sequence(4)),
            "gh0": self.out(self.batch, self.hidden), "chunks": self.chunks, "sums": sums,
        }  # fmt: skip

    def gru_jacobians(self) -> Arguments:
        kept = {name: self.gru_backward()[name] for name in ("h", "h0", "gates", "w_hh")}
        return kept | {"out": self.out(self.steps, self.hidden, self.hidden, self.batch)}

    def gru_maps(self) -> Arguments:
        kept = {name: self.gru_backward()[name] for name in ("h", "h0", "gates", "w_hh", "gy")}
        return kept | {"maps": self.maps()}

    def lstm_forward(self) -> Arguments:
        x, projection = self.inputs(4)
        start, written = {name: self.real(self.batch, self.hidden) for name in ("h0", "c0")}, self.sequence()
        return {
            "x": x, "w_hh": self.weights(4), **start, "h": self.out(*written), "c": self.out(*written),
            "gates": self.out(*self.sequence(4)),
        } | projection  # fmt: skip

    def lstm_backward(self) -> Arguments:
        incoming = {name: self.real(self.batch, self.hidden) for name in ("grad_h_n", "grad_c_n")}
        return {
            "c": self.real(*self.sequence()), "c0": self.real(self.batch, self.hidden),
            "gates": self.gate(*self.sequence(4)), "w_hh": self.weights(4), "gy": self.real(*self.sequence()),
            **incoming, "ga": self.out(*self.sequence(4)), "gh0": self.out(self.batch, self.hidden),
            "gc0": self.out(self.batch, self.hidden), "chunks": self.chunks,
            "sums": self.weight_sums(np.tanh(self.real(*self.sequence())), 4),
        }  # fmt: skip

    def lstm_jacobians(self) -> Arguments:
        kept = {name: self.lstm_backward()[name] for name in ("c", "c0", "gates", "w_hh")}
        return kept | {"out": self.out(self.steps, 2 * self.hidden * (self.hidden + 1), self.batch)}

    def lstm_maps(self) -> Arguments:
        kept = {name: self.lstm_backward()[name] for name in ("c", "c0", "gates", "w_hh", "gy")}
        return kept | {"maps": self.out(3, self.batch, 2 * self.hidden + 1, 2 * self.hidden)}

    # ---- training ----

    def softmax_cross_entropy(self) -> Arguments:
        return {
            "logits": self.real(self.batch, 7), "target": np.arange(self.batch) % 7, "losses": self.out(self.batch),
            "grad": self.out(self.batch, 7),
        }  # fmt: skip

    # ---- optimizers: an empty parameter among others, and one of several chunks ----

    def parameters(self, gate: bool = False) -> list[np.ndarray]:
        shapes = [(4, self.batch), (0, 2), (), (4101 if self.hidden == 37 else 70,)]
        return [np.asarray((self.gate if gate else self.real)(*shape), self.dtype) for shape in shapes]

    def optimizer_update(self) -> Arguments:
        rule: UpdateRule = {5: "adam", 20: "sgd", 37: "rmsprop"}[self.hidden] if not self.shared else "adagrad"
        return self.update(rule)

    def update(self, rule: UpdateRule, optional: bool = True) -> Arguments:
        """The arguments of one rule; all optional buffers are there, or none."""
        options = {
            "lr": 0.1, "momentum": 0.9, "dampening": 0.1, "weight_decay": 0.01, "nesterov": 0.0, "maximize": 0.0,
            "beta1": 0.9, "beta2": 0.99, "eps": 1e-3, "decoupled": 1.0, "lr_decay": 0.1, "rho": 0.8, "alpha": 0.7,
            "momentum_decay": 0.3,
        }  # fmt: skip
        params, steps = self.parameters(), np.array([3, 1, 2, 1])
        row = [options[name] for name in UPDATE_OPTIONS[rule]]
        buffers: list[Any] = []
        for name in UPDATE_BUFFERS[rule]:
            missing = not optional and name in OPTIONAL_BUFFERS
            scale, shift = (0.1, 0) if name == "grad_avg" else (1, rule == "rmsprop")  # a variance is not negative
            values = [np.asarray(scale * value + shift, self.dtype) for value in self.parameters(gate=True)]
            buffers.append([None] * len(params) if missing else values)
        return {
            "rule": rule, "params": params, "grads": self.parameters(), "buffers": buffers,
            "options": np.array([row] * len(params)), "steps": steps,
        }  # fmt: skip

    def scale_arrays(self) -> Arguments:
        return {"arrays": self.parameters(), "factor": 0.3}

    def clamp_arrays(self) -> Arguments:
        return {"arrays": self.parameters(), "limit": 0.5}

    def square_sums(self) -> Arguments:
        return {"arrays": self.parameters(), "out": uninitialised(4, np.float64)}

    def arguments(self, kernel: str) -> Arguments:
        """Return the arguments of `kernel` in the protocol's order."""
        make: Callable[[], Arguments] = getattr(self, kernel)
        return make()


def flat(arguments: Arguments) -> Arguments:
    """Return the arguments with the fields of operands in their operands' places, by name."""
    found: Arguments = {}
    for name, value in arguments.items():
        found |= value._asdict() if _is_operand(value) else {name: value}
    return found


def replaced(arguments: Arguments, changes: Arguments) -> Arguments:
    """Return the arguments with others in the places of those, or of the fields of operands, that have these names."""
    return {
        name: value._replace(**{field: changes[field] for field in value._fields if field in changes})
        if _is_operand(value)
        else changes.get(name, value)
        for name, value in arguments.items()
    }


def _is_operand(value: Any) -> bool:
    return isinstance(value, tuple) and hasattr(value, "_fields")


def copies(arguments: Arguments) -> Arguments:
    """Return the same arguments with arrays of their own."""
    return {name: _copy(value) for name, value in arguments.items()}


def _copy(value: Any) -> Any:
    if isinstance(value, list):
        return [_copy(item) for item in value]
    if _is_operand(value):
        return value._make(map(_copy, value))
    return value.copy() if isinstance(value, np.ndarray) else value


def arrays_of(arguments: Arguments) -> dict[str, np.ndarray]:
    """Return all arrays, those in lists and operands included, by name."""
    found: dict[str, np.ndarray] = {}
    for name, value in flat(arguments).items():
        if isinstance(value, np.ndarray):
            found[name] = value
        elif isinstance(value, list):
            found |= arrays_of({f"{name}[{i}]": item for i, item in enumerate(value)})
    return found
