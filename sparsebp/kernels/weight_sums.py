"""The weight gradients of a recurrence as products over all steps: for sizes that no kernel sums as it goes."""

from __future__ import annotations

from sparsebp import backend
from sparsebp.core.types import Array
from sparsebp.kernels.operands import WeightSums


def multiply_sums(ga: Array, sums: WeightSums) -> None:
    """Write `sums` from ga (T, B, columns·H), the gradient at everything that a weight feeds."""
    xp = backend.namespace(ga)
    rows, hidden = sums.weight_hh.shape
    flat = ga.reshape(-1, ga.shape[-1])
    of_input, of_state = flat[:, :rows].T, flat[:, flat.shape[1] - rows :].T

    def in_torch_order(gates: Array) -> Array:  # a GRU's input part is n, r, z
        return gates if rows == flat.shape[1] else xp.roll(gates, -hidden, axis=0)

    sums.weight_ih[...] = in_torch_order(backend.matmul(of_input, sums.x.reshape(len(flat), sums.x.shape[2])))
    sums.weight_hh[...] = backend.matmul(of_state, sums.before.reshape(len(flat), hidden))
    if sums.bias_ih is not None:
        sums.bias_ih[...] = in_torch_order(of_input.sum(axis=1))
    if sums.bias_hh is not None:
        sums.bias_hh[...] = of_state.sum(axis=1)
