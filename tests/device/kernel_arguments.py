"""Valid arguments for every kernel of the protocol, small; the parity tests break them one at a time."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np

from cuda_on_cpu.memory import uninitialised
from sparsebp.core.check import UpdateRule
from sparsebp.kernels.checks import OPTIONAL_BUFFERS, UPDATE_BUFFERS
from sparsebp.kernels.operands import Blocks, Columns, Pairs, Places, Rows, RowShapes, Runs, Terms, WeightSums
from sparsebp.kernels.spec import Kernels
from update_options import options_of

Arguments = dict[str, Any]


def public(cls: type, *, kernels: bool = True) -> dict[str, Callable[..., Any]]:
    """Return the kernels of a class by name, or its questions about sizes: a kernel returns nothing."""
    members = inspect.getmembers(cls, inspect.isroutine)
    return {
        name: member
        for name, member in members
        if not name.startswith("_")
        and (inspect.get_annotations(inspect.unwrap(member)).get("return") == "None") == kernels
    }


KERNELS = public(Kernels)


VARIANTS: tuple[dict[str, Any], ...] = (
    {"batch": 3, "hidden": 5}, {"batch": 2, "hidden": 37}, {"batch": 1, "hidden": 20},
    {"batch": 3, "hidden": 5, "shared": True},
)  # fmt: skip
"""Calls that together launch every CUDA kernel in every form; the first two are enough to launch each of them."""


class Maker:
    """Makes the arguments of one call: a method for each kernel that needs more than random values.

    It returns the sizes that the kernel's row in `sparsebp.kernels.spec` names, by their capitals, and the arguments
    that are not random; `arguments` makes the other arrays from the row.

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
        self.steps, self.chunks, self.features = 7, chunks, {5: 3, 20: 1, 37: 8}.get(hidden, 2)
        self.number = np.result_type(self.dtype, np.complex64) if shared else self.dtype
        self.rng = np.random.default_rng(0)

    def arguments(self, kernel: str) -> Arguments:
        """Return the arguments of `kernel` in the protocol's order."""
        given: Arguments = getattr(self, kernel, dict)()
        arrays = getattr(KERNELS[kernel], "arrays", {})
        sizes = {"T": self.steps, "B": self.batch, "H": self.hidden} | given
        shared = next((name for name, array in arrays.items() if "B*" in array.dims), "")
        found = {}
        for name in list(inspect.signature(KERNELS[kernel]).parameters)[1:]:
            if name not in given:
                sizes["B*"] = self.values if name == shared else self.batch
                array = arrays[name]
                assert array.dtype in ("real", "number", "float64"), f"{kernel}: {name} is not given"
                shape = [sizes[dim] if dim in sizes else eval(dim, sizes) for dim in array.dims]
                own = {"real": self.dtype, "number": self.number}.get(array.dtype, np.float64)
                if array.written:
                    found[name] = uninitialised(tuple(shape), own)
                else:
                    found[name] = self.numbers(*shape) if array.dtype == "number" else self.read(name, *shape)
            else:
                found[name] = given.pop(name)
        assert all(name[0].isupper() for name in given), f"{kernel} has no {given.keys()}"
        return found

    def read(self, name: str, *shape: int) -> np.ndarray:
        """Return values that an argument of this name may have."""
        if name in ("gates", "var"):
            return self.gate(*shape)
        return self.real(*shape, scale=self.hidden**-0.5 if name == "w_hh" else 1.0)

    def numbers(self, *shape: int) -> np.ndarray:
        return self.real(*shape[:-1], shape[-1] * (1 + self.shared)).view(self.number)

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
        return {"indptr": indptr, "indices": indices, "Rows": 4, "Cols": 3, "Nnz": 5}

    def scale_rows(self) -> Arguments:
        return {"indptr": self.csr()[0], "Rows": 4, "Nnz": 5}

    def scale_columns(self) -> Arguments:
        return {"indices": self.csr()[1], "Cols": 3, "Nnz": 5}

    def scale_runs(self) -> Arguments:
        """Rows of the shapes 0 2, none, and 0 alone; the last but one begins in column 1."""
        shapes = RowShapes(
            indptr=self.csr()[0], shape=np.array([0, 1, 2, 3], np.int32), first=np.array([0, 0, 1, 0], np.int32),
            run_ptr=np.array([0, 2, 2, 3, 4], np.int64), whole=np.array([0, 2, 2, 3], np.int64),
            run_columns=np.array([0, 2, 0, 0], np.int32), run_ends=np.array([1, 2, 1, 2], np.int32), gap=0,
        )  # fmt: skip
        return self.scale_columns() | {"shapes": shapes}

    def gather(self) -> Arguments:
        return {"index": np.array([4, 0, 0], np.int32), "N": 5, "M": 3}

    def gather_multiply(self) -> Arguments:
        indices = {"a_index": np.array([4, 0, 0, 2], np.int32), "b_index": np.array([1, 2, 0, 0], np.int32)}
        return indices | {"NnzA": 5, "NnzB": 3, "NnzC": 4}

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
        places = Places(product_ptr, positions.astype(np.uint16), np.array([0, 1, 4], np.int64))
        sizes = {"NnzA": 5, "NnzB": 5, "NnzC": int(c_indptr[-1])}
        return {"rows": Rows(indptr, indices, b_indptr, c_indptr), "places": places} | sizes

    def spgemm_select_rows(self) -> Arguments:
        a_indptr, a_indices = np.array([0, 1, 1, 2, 3], np.int32), np.array([2, 0, 2], np.int32)
        b_indptr, c_indptr = np.array([0, 2, 3, 5], np.int32), np.array([0, 2, 2, 4, 6], np.int32)
        return {"rows": Rows(a_indptr, a_indices, b_indptr, c_indptr), "NnzA": 3, "NnzB": 5, "NnzC": 6}

    def spgemm_select_columns(self) -> Arguments:
        terms = Terms(
            product_ptr=np.array([0, 3, 3, 4], np.int32), a_index=np.array([0, 2, 3, 4], np.int32),
            b_index=np.array([1, 0, 1, 2], np.int32), c_indptr=np.array([0, 2, 2, 3], np.int32),
            positions=np.array([1, 0, 1, 0], np.uint16), row_cuts=np.array([0, 1, 3], np.int64),
        )  # fmt: skip
        return {"terms": terms, "NnzA": 5, "NnzB": 3, "NnzC": 3}

    def spgemm_runs(self) -> Arguments:
        """Rows of B: columns 0 1 3, the same again, and 1 2."""
        a_indptr, a_indices = np.array([0, 3, 3, 4], np.int32), np.array([0, 1, 2, 2], np.int32)
        runs = Runs(
            b_shape=np.array([0, 0, 1], np.int32), run_ptr=np.array([0, 2, 3], np.int32),
            run_lengths=np.array([2, 1, 2], np.int32), start_ptr=np.array([0, 3, 3, 4], np.int64),
            starts=np.array([0, 3, 1, 0], np.uint16), row_cuts=np.array([0, 1, 3], np.int64),
        )  # fmt: skip
        rows = Rows(a_indptr, a_indices, np.array([0, 3, 6, 8], np.int32), np.array([0, 4, 4, 6], np.int32))
        return {"rows": rows, "runs": runs, "NnzA": 4, "NnzB": 8, "NnzC": 6}

    def spgemm_blocks(self) -> Arguments:
        """Blocks (2, 2), (2, 3) at block columns 0 2, none, 1; blocks of B at 1, 0 1, 0."""
        a_indptr, a_indices = np.array([0, 4, 8, 8, 8, 10, 12], np.int32), [0, 1, 4, 5] * 2 + [2, 3] * 2
        b_indptr = np.array([0, 3, 6, 12, 18, 21, 24], np.int32)
        c_indptr = np.array([0, 6, 12, 12, 12, 18, 24], np.int32)
        blocks = Blocks(
            product_ptr=np.array([0, 2, 2, 4], np.int64), positions=np.array([1, 0, 0, 1], np.uint16), m=2, k=2, n=3,
            row_cuts=np.array([0, 1, 3], np.int64),
        )  # fmt: skip
        rows = Rows(a_indptr, np.array(a_indices, np.int32), b_indptr, c_indptr)
        return {"rows": rows, "blocks": blocks, "NnzA": 12, "NnzB": 24, "NnzC": 24}

    def spgemm_pairs(self) -> Arguments:
        """Two tiles: lists of 2 words and 1, and one of 9; three bits name an entry of A."""
        words = np.array([8 * 1 + 2, 8 * 0 + 1, 8 * 2 + 0, *(8 * (n % 3) + n % 2 for n in range(9))], np.uint32)
        tiles = np.zeros((3, 11), np.int64)
        tiles[:, :5] = [[0, 0, 0, 1, 1], [2, 3, 3, 0, 0], [3, 5, 12, 0, 0]]
        pairs = Pairs(
            words=words, order=np.array([1, 0, 0], np.uint16), starts=np.array([1, 0, 0], np.uint16),
            lengths=np.array([2, 1, 9], np.uint16), tiles=tiles, shift=3, tile_cuts=np.array([0, 1, 2], np.int64),
        )  # fmt: skip
        return {"pairs": pairs, "NnzA": 5, "NnzB": 3, "NnzC": 3}

    def spgemm_filled(self) -> Arguments:
        given, c_indices = self.spgemm_positions(), np.array([0, 2, 3, 1, 0, 1, 3], np.int32)
        columns = Columns(np.array([0, 3, 1, 2, 3], np.int32), c_indices, 4, given.pop("places").row_cuts)
        return given | {"columns": columns}

    def spgemm_accumulate(self) -> Arguments:
        """Without the product's columns 2 and 3 of the first row: C is a part of it, in a mask."""
        given = self.spgemm_filled()
        rows, columns = given["rows"], given["columns"]
        rows = rows._replace(c_indptr=np.maximum(rows.c_indptr - 2, 0).astype(np.int32))
        columns = columns._replace(c_indices=columns.c_indices[[0, *range(3, 7)]].copy())
        return given | {"rows": rows, "columns": columns, "NnzC": given["NnzC"] - 2}

    # ---- values of transposed Jacobians ----

    def pointwise_slopes(self) -> Arguments:
        functions = {1: "relu", 2: "tanh", 3: "sigmoid"}
        return {"function": "given" if self.shared else functions.get(self.batch, "given"), "N": 37}

    def winner(self, largest: int, *shape: int) -> np.ndarray:
        return self.rng.integers(0, largest, shape).astype(np.uint8 if self.hidden == 5 else np.int32)

    def max_pool_values(self) -> Arguments:
        window, offset = np.array([0, 0, 3, 3], np.int32), np.array([0, 2, 0, 2], np.int32)
        winner = self.winner(4, self.batch, 6)
        return {"winner": winner, "window": window, "offset": offset, "windows": 3, "taps": 2, "Lines": 4}

    # ---- sliding windows: two groups ----

    def correlate(self) -> Arguments:
        options = {"stride": (1, 2, 2), "before": (0, 1, 2), "dilation": (1, 1, 2), "groups": 2, "C": 4, "O": 6}
        return options | {"D": 1, "H": 5, "W": 6, "Kd": 1, "Kh": 2, "Kw": 3, "Od": 1, "Oh": 3, "Ow": 3}

    def convolve(self) -> Arguments:
        return self.correlate() | ({"bias": None, "limits": None} if self.shared else {"limits": (-0.5, 0.3)})

    convolve_t = convolve

    def max_pool(self) -> Arguments:
        rows = np.array([[-1, 1, 3], [1, 0, 3], [3, 0, 2]])
        columns = np.array([[-1, 1, 2], *([start, 0, 2] for start in range(4)), [4, 0, 1]])
        options = {"rows": rows, "columns": columns, "kernel": (3, 2), "dilation": (1, 2)}
        return options | {"winner": self.winner(6, self.batch, 3, 6), "N": self.batch, "H": 5, "W": 6, "Oh": 3, "Ow": 6}

    max_pool_grad = max_pool

    def band_product(self) -> Arguments:
        indptr, first = np.array([0, 2, 2, 3, 6]), np.array([0, 0, 4, 2])
        return {"indptr": indptr, "first": first, "N": self.batch, "L": 5, "M": self.hidden, "Rows": 4, "Nnz": 6}

    # ---- channels ----

    def channel_normalise(self) -> Arguments:
        plain = {"weight": None, "bias": None, "limits": None}
        return {"eps": 1e-3, "C": self.hidden, "N": 7} | (plain if self.shared else {"limits": (-0.5, 0.3)})

    def channel_scale(self) -> Arguments:
        return {"C": self.hidden, "N": 7} | (
            {"mean": None, "factor": None, "limits": None} if self.shared else {"limits": (-0.5, 0.3)}
        )

    def channel_products(self) -> Arguments:
        """With what cuts the gradient off, or without."""
        cut = {"y": None, "limits": None} if self.shared else {"limits": (-0.5, 0.3)}
        return {"C": self.hidden, "N": 7} | cut

    def channel_back(self) -> Arguments:
        return self.channel_products() | {"known": False} | ({"weight": None} if self.shared else {})

    def channel_track(self) -> Arguments:
        arrays = {name: self.gate(self.hidden) for name in ("mean", "running_mean", "running_var")}
        return arrays | {"momentum": 0.1, "correction": 1.25, "C": self.hidden}

    def channel_factors(self) -> Arguments:
        return {"eps": 1e-3, "C": self.hidden} | ({"weight": None} if self.shared else {})

    def row_normalise(self) -> Arguments:
        """With and without weights, which are those of two groups of channels."""
        sizes = {"R": 2 * self.batch, "C": self.hidden, "N": 7, "W": 2 * self.hidden}
        return sizes | {"eps": 1e-3, "centre": True} | ({"weight": None, "bias": None} if self.shared else {})

    def row_back(self) -> Arguments:
        sizes = {"R": 2 * self.batch, "C": self.hidden, "N": 7, "W": 2 * self.hidden}
        return sizes | {"centre": False} | ({"weight": None} if self.shared else {})

    def row_products(self) -> Arguments:
        return {"R": 2 * self.batch, "C": self.hidden, "N": 7, "W": 2 * self.hidden}

    def clamp(self) -> Arguments:
        return {"low": -0.5, "high": 0.3, "N": self.hidden * 7}

    clamp_grad = clamp

    def channel_slope(self) -> Arguments:
        return {"B": self.batch, "C": self.hidden, "N": 7}

    channel_slope_grad = channel_slope

    def pointwise(self) -> Arguments:
        return {"function": "softplus", "constants": (0.7, 9.0, 0.0), "N": self.hidden * 7}

    def pointwise_grad(self) -> Arguments:
        return {"function": "mish", "constants": (0.0, 0.0, 0.0), "N": self.hidden * 7}

    def softmax(self) -> Arguments:
        return {"O": self.batch, "N": self.hidden, "I": 1 if self.shared else 3, "log": self.batch == 2}

    def softmax_grad(self) -> Arguments:
        sizes = self.softmax()
        return sizes | {"y": -self.gate(sizes["O"], sizes["N"], sizes["I"])}  # as logarithms of probabilities

    def element_loss(self) -> Arguments:
        sizes = {"N": self.hidden * 7, "function": "smooth_l1", "constant": 0.7, "divisor": 3.0}
        return sizes | ({"weight": None, "counts": None, "losses": None} if self.shared else {})

    def softmax_cross_entropy(self) -> Arguments:
        mean = None if self.batch == 3 else uninitialised((), np.float64)
        return {"target": np.arange(self.batch) % 7, "N": self.batch, "C": 7, "mean": mean}

    # ---- linear layers ----

    def affine(self) -> Arguments:
        return {"N": self.batch, "I": self.hidden, "O": 4} | ({"bias": None} if self.shared else {})

    affine_grad = affine

    def add_bias(self) -> Arguments:
        return {"out": self.real(self.batch, self.hidden), "C": self.hidden}

    # ---- stacks of dense blocks ----

    def dense_matmul(self) -> Arguments:
        indices = {"a_index": np.array([2, 0]), "b_index": np.array([1, 1]), "out_index": np.array([3, 1])}
        return indices | {"out": self.real(4, 4, 5, self.batch), "Sa": 3, "Sb": 2, "M": 4, "K": 3, "N": 5}

    def dense_matvec(self) -> Arguments:
        indices = {"a_index": np.array([2, 0]), "x_index": np.array([1, 1]), "add_index": np.array([0, 2])}
        out = {"out": self.real(4, 4, self.batch), "out_index": np.array([3, 1])}
        return indices | out | {"Sa": 3, "Sx": 2, "Sd": 3, "M": 4, "K": 3}

    def dense_chain(self) -> Arguments:
        return {"chunk_ptr": np.array([0, 2, 5]), "S": 5, "C": 2, "N": 3}

    def dense_reduce(self) -> Arguments:
        return self.dense_chain() | {"out_matrix": self.out(2, 3, 3, self.values)}

    # ---- recurrent ----

    def inputs(self, gates: int) -> Arguments:
        """Return x and its weights; where values are shared, the product of both, and a state that begins at zero."""
        if self.shared:
            return {"I": gates * self.hidden, "w_ih": None, "fresh": True}
        return {"I": self.features, "fresh": False}

    def back(self, gates: int) -> Arguments:
        """Return states, the one before the first, and where the weight gradients are written."""
        h = np.tanh(self.real(self.steps, self.batch, self.hidden))
        before, rows = np.concatenate([self.real(1, *h.shape[1:]), h[:-1]]), gates * self.hidden
        outputs = self.out(rows, self.features), self.out(rows, self.hidden), self.out(rows), self.out(rows)
        sums = WeightSums(self.real(self.steps, self.batch, self.features), before, *outputs)
        return {"h": h, "h0": before[0].copy(), "chunks": self.chunks, "sums": sums}

    def states(self, *names: str) -> Arguments:
        """Return some of an RNN's or GRU's states, and the chunks that are reduced to maps."""
        return {name: value for name, value in self.back(1).items() if name in names} | {"C": 3}

    def rnn_forward(self) -> Arguments:
        return self.inputs(1) | {"nonlinearity": "tanh"}

    def rnn_backward(self) -> Arguments:
        given = self.back(1) | {"nonlinearity": "tanh"}
        return {name: value for name, value in given.items() if name != "h0"}

    def rnn_jacobians(self) -> Arguments:
        return self.states("h") | {"nonlinearity": "tanh"}

    rnn_maps = rnn_jacobians

    def gru_forward(self) -> Arguments:
        return self.inputs(3)

    def gru_backward(self) -> Arguments:
        return self.back(3)

    def gru_jacobians(self) -> Arguments:
        return self.states("h", "h0")

    gru_maps = gru_jacobians

    def sum_gates(self) -> Arguments:
        """Of a GRU, or of a cell whose columns belong to both inputs; with H = 37 as many rows as go in pieces."""
        rows, hidden = (2**16 + 5, 1) if self.hidden == 37 else (self.steps * self.batch, self.hidden)
        sizes = {"N": rows, "C": 4 * hidden, "I": self.features}
        return sizes | ({"first": 0, "product": None, "w_ih": None} if self.shared else {"first": hidden})

    def lstm_forward(self) -> Arguments:
        return self.inputs(4)

    def lstm_backward(self) -> Arguments:
        return {name: value for name, value in self.back(4).items() if name in ("chunks", "sums")}

    def lstm_maps(self) -> Arguments:
        return {"C": 3}

    # ---- linear recurrences: real ones, or complex ones with factors and resets that steps or samples share ----

    def linear_recurrence(self) -> Arguments:
        """With a length for each sample and shared factors, or without; in either direction; with H = 37 in chunks."""
        steps = 256 if self.hidden == 37 else self.steps
        lengths = None if self.hidden == 37 else np.arange(self.batch) * 3 % (steps + 1)
        factors = {"Ta": 1, "Ba": 1} if self.shared else {"Ta": steps, "Ba": self.batch}
        reset = None if self.hidden == 5 else self.rng.random((steps, 1 if self.shared else self.batch, 1)) < 0.1
        flags = {"lengths": lengths, "reset": reset, "reverse": self.batch == 2}
        return factors | flags | {"T": steps, "Ha": self.hidden}

    linear_recurrence_grad = linear_recurrence

    def min_gru_forward(self) -> Arguments:
        function = "positive" if self.shared else {5: "tanh", 37: "identity"}.get(self.hidden, "positive")
        given = self.linear_recurrence()
        parts = {"G": 3 if self.batch == 2 else 2}  # a minLSTM, or a minGRU
        return {name: given[name] for name in ("T", "lengths", "reverse")} | {"nonlinearity": function} | parts

    min_gru_backward = min_gru_forward

    def selective_scan(self) -> Arguments:
        """Over two chunks of steps; states for one, two or four lanes of a device's kernel, and for two passes."""
        steps, order = 37, 3 if self.batch == 3 else 35 if self.hidden == 37 else 11
        given = {"dt": self.gate(steps, self.batch, self.hidden), "a": -self.gate(order, self.hidden)}
        reset = None if self.shared else self.rng.random((steps, self.batch)) < 0.1
        return given | {"reset": reset, "T": steps, "E": self.hidden, "N": order, "Kept": 3}

    selective_scan_grad = selective_scan

    # ---- optimizers: an empty parameter among others, and one of several chunks ----

    def parameters(self, gate: bool = False) -> list[np.ndarray]:
        shapes = [(4, self.batch), (0, 2), (), (4101 if self.hidden == 37 else 70,)]
        return [np.asarray((self.gate if gate else self.real)(*shape), self.dtype) for shape in shapes]

    def optimizer_update(self) -> Arguments:
        rule: UpdateRule = {5: "adam", 20: "sgd", 37: "rmsprop"}[self.hidden] if not self.shared else "adagrad"
        return self.update(rule)

    def update(self, rule: UpdateRule, optional: bool = True) -> Arguments:
        """The arguments of one rule; all optional buffers are there, or none."""
        params, steps = self.parameters(), np.array([3, 1, 2, 1])
        buffers: list[Any] = []
        for name in UPDATE_BUFFERS[rule]:
            missing = not optional and name in OPTIONAL_BUFFERS
            scale, shift = (0.1, 0) if name == "grad_avg" else (1, rule == "rmsprop")  # a variance is not negative
            values = [np.asarray(scale * value + shift, self.dtype) for value in self.parameters(gate=True)]
            buffers.append([None] * len(params) if missing else values)
        return {
            "rule": rule, "params": params, "grads": self.parameters(), "buffers": buffers,
            "options": options_of(rule, len(params), decoupled=1.0), "steps": steps,
        }  # fmt: skip

    def scale_arrays(self) -> Arguments:
        return {"arrays": self.parameters(), "factor": 0.3}

    def clip_arrays(self) -> Arguments:
        """A norm of more than is allowed, or of less."""
        return {"arrays": self.parameters(), "squares": self.rng.random(40), "max_norm": 0.5 * self.batch**2}

    def clamp_arrays(self) -> Arguments:
        return {"arrays": self.parameters(), "limit": 0.5}

    def join_arrays(self) -> Arguments:
        arrays = self.parameters()
        return {"arrays": arrays, "out": self.out(sum(array.size for array in arrays))}

    def square_sums(self) -> Arguments:
        return {"arrays": self.parameters(), "out": uninitialised(4, np.float64)}


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


def copies(arguments: Arguments, place: Callable[[np.ndarray], Any] = np.ndarray.copy) -> Arguments:
    """Return the same arguments with arrays of their own, which `place` makes."""
    return {name: _copy(value, place) for name, value in arguments.items()}


def _copy(value: Any, place: Callable[[np.ndarray], Any]) -> Any:
    if isinstance(value, list):
        return [_copy(item, place) for item in value]
    if _is_operand(value):
        return value._make(_copy(item, place) for item in value)
    return place(value) if isinstance(value, np.ndarray) else value


def arrays_of(arguments: Arguments) -> Arguments:
    """Return all arrays, of whichever namespace, those in lists and operands included, by name."""
    found: Arguments = {}
    for name, value in flat(arguments).items():
        if isinstance(value, list):
            found |= arrays_of({f"{name}[{i}]": item for i, item in enumerate(value)})
        elif hasattr(value, "dtype") and hasattr(value, "shape"):
            found[name] = value
    return found
