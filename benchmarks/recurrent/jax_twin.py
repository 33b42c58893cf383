"""The recurrent benchmarks' workload in JAX: one compiled step, `jax.lax.scan` over the projected input.

Everything is inside one `jax.jit`: the projection of all steps as one product, the scan, softmax cross-entropy on the
last hidden state, its gradients, and Adam, whose arguments are donated. How far the scan's loop is unrolled decides
much on a CPU, so there is a side for each of `UNROLLED`. It runs in a process of its own (`Apart`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

UNROLLED = (1, 8)
"""Steps of the scan that one turn of its loop does."""
_BETAS, _EPS = (0.9, 0.999), 1e-8

Params = dict[str, Any]


def sides(
    cell: str, state: dict[str, np.ndarray], x: np.ndarray, target: np.ndarray, rate: float
) -> tuple[dict[str, Callable[[], object]], dict[str, dict[str, np.ndarray]]]:
    """Return a step for each of `UNROLLED`, named ``"jax1"``, …, and the gradients that each has at `state`.

    Parameters
    ----------
    cell
        ``"RNN"``, ``"GRU"`` or ``"LSTM"``.
    state
        The parameters of a `sparsebp.nn.SequenceClassifier`.
    x, target
        The batch, (T, B, input size) and (B,).
    rate
        Adam's learning rate.
    """
    import jax
    import jax.numpy as jnp

    jax.config.update("jax_enable_x64", x.dtype == np.float64)
    batch = jnp.asarray(x), jnp.asarray(target)

    def fresh() -> Params:
        return {name: jnp.array(array) for name, array in state.items()}

    found: dict[str, Callable[[], object]] = {}
    gradients: dict[str, dict[str, np.ndarray]] = {}
    for unroll in UNROLLED:
        value_and_grad = jax.value_and_grad(partial(loss, cell, unroll))
        step = jax.jit(partial(_adam_step, value_and_grad, rate), donate_argnums=(0, 1, 2))
        found[f"jax{unroll}"] = training = _Training(step, fresh(), batch)
        training()
        gradients[f"jax{unroll}"] = training.first_gradients()
    return found, gradients


class _Training:
    """A training step that keeps parameters and moments."""

    def __init__(self, step: Callable[..., Any], params: Params, batch: tuple[Any, Any]) -> None:
        import jax
        import jax.numpy as jnp

        zeros = partial(jax.tree.map, jnp.zeros_like)
        self._step, self._batch = step, batch
        self._state = [params, zeros(params), zeros(params), jnp.zeros((), jnp.int32)]

    def __call__(self) -> None:
        """Run one whole training step, to its end."""
        import jax

        *self._state, value = self._step(*self._state, *self._batch)
        jax.block_until_ready((self._state, value))

    def first_gradients(self) -> dict[str, np.ndarray]:
        """Return the gradients of the first step, right after it: its first moments hold nothing else."""
        return {name: np.asarray(m) / np.asarray(1 - _BETAS[0], m.dtype) for name, m in self._state[1].items()}


def _adam_step(
    value_and_grad: Callable[..., Any], rate: float, params: Params, m: Params, v: Params, count: Any, x: Any, y: Any
) -> tuple[Any, ...]:
    import jax
    import jax.numpy as jnp

    value, grads = value_and_grad(params, x, y)
    count = count + 1
    m = jax.tree.map(lambda old, g: _BETAS[0] * old + (1 - _BETAS[0]) * g, m, grads)
    v = jax.tree.map(lambda old, g: _BETAS[1] * old + (1 - _BETAS[1]) * g * g, v, grads)
    first, second = (1 - beta ** count.astype(value.dtype) for beta in _BETAS)
    params = jax.tree.map(lambda p, a, b: p - rate * (a / first) / (jnp.sqrt(b / second) + _EPS), params, m, v)
    return params, m, v, count, value


def loss(cell: str, unroll: int, params: Params, x: Any, target: Any) -> Any:
    """Return the softmax cross-entropy of the classifier's logits on the last hidden state."""
    import jax
    import jax.numpy as jnp

    w_hh, b_ih, b_hh = (params[f"rnn.{name}_l0"] for name in ("weight_hh", "bias_ih", "bias_hh"))
    hidden = w_hh.shape[1]
    gates_of_both = b_hh if cell != "GRU" else jnp.concatenate((b_hh[: 2 * hidden], jnp.zeros_like(b_hh[:hidden])))
    projected = x @ params["rnn.weight_ih_l0"].T + (b_ih + gates_of_both)
    zeros = jnp.zeros((x.shape[1], hidden), x.dtype)
    start = (zeros, zeros) if cell == "LSTM" else zeros
    step = partial(_CELLS[cell], w_hh.T, b_hh[2 * hidden :])
    last, _ = jax.lax.scan(step, start, projected, unroll=unroll)
    h = last[0] if cell == "LSTM" else last
    logits = h @ params["head.weight"].T + params["head.bias"]
    return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), target[:, None], 1))


def _rnn(w: Any, _: Any, h: Any, gx: Any) -> tuple[Any, None]:
    import jax.numpy as jnp

    return jnp.tanh(gx + h @ w), None


def _gru(w: Any, b_hn: Any, h: Any, gx: Any) -> tuple[Any, None]:
    import jax
    import jax.numpy as jnp

    (x_r, x_z, x_n), (h_r, h_z, h_n) = jnp.split(gx, 3, 1), jnp.split(h @ w, 3, 1)
    r, z = jax.nn.sigmoid(x_r + h_r), jax.nn.sigmoid(x_z + h_z)
    n = jnp.tanh(x_n + r * (h_n + b_hn))
    return (1 - z) * n + z * h, None


def _lstm(w: Any, _: Any, state: Any, gx: Any) -> tuple[Any, None]:
    import jax
    import jax.numpy as jnp

    h, c = state
    i, f, g, o = jnp.split(gx + h @ w, 4, 1)
    c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
    return (jax.nn.sigmoid(o) * jnp.tanh(c), c), None


_CELLS: dict[str, Callable[..., Any]] = {"RNN": _rnn, "GRU": _gru, "LSTM": _lstm}
