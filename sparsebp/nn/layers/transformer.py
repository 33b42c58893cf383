"""A layer of a Transformer's encoder: self-attention and two linear layers, each residual and normalised."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from sparsebp import backend
from sparsebp.core.arguments import check_choice, check_flag, check_generator, check_integer
from sparsebp.core.types import Array, Seed
from sparsebp.nn.arrays import parameter_dtype
from sparsebp.nn.gradients import Gradients, Shared, gradients_of
from sparsebp.nn.layer import Layer, check_gy, input_grad_work
from sparsebp.nn.layers.activations import GELU, ReLU
from sparsebp.nn.layers.attention import MultiheadAttention, own_generator
from sparsebp.nn.layers.identity import Dropout
from sparsebp.nn.layers.linear import Linear
from sparsebp.nn.norms.layer import LayerNorm
from sparsebp.nn.work import Work, total_work

_ATTENTION = ("self_attn", "dropout1")
_FEEDFORWARD = ("linear1", "activation", "dropout", "linear2", "dropout2")
_ACTIVATIONS: dict[str, type[Layer]] = {"relu": ReLU, "gelu": GELU}


class EncoderSaved(NamedTuple):
    """What every layer inside saved, by its name; the shape of the input; an empty array that is like it."""

    parts: dict[str, Any]
    shape: tuple[int, ...]
    like: Array


class TransformerEncoderLayer(Layer):
    """Self-attention, then two linear layers at each step, both residual, as `torch.nn.TransformerEncoderLayer`.

    Parameters
    ----------
    d_model
        Length of a step's vector.
    nhead
        Heads of the attention; `d_model` is a multiple of it.
    dim_feedforward
        Features between the two linear layers.
    dropout
        Probability of a zero in the attention, behind it, and in and behind the linear layers, while training.
    activation
        ``"relu"`` or ``"gelu"``, or torch.nn.functional's function of that name, between the linear layers.
    layer_norm_eps
        The ``eps`` of the normalisations.
    batch_first
        Whether sequences are (B, T, d_model) and not (T, B, d_model).
    norm_first
        Whether the normalisations come before the attention and the linear layers, and not behind the sums.
    bias
        Whether linear layers, attention and normalisations have biases.
    device
        None or ``"cpu"``: layers are built on the host, and moved by `to`.
    dtype
        float32 or float64.
    rng
        Generator or seed of the initial values; the generators of the dropout masks are seeded by draws from it.

    Raises
    ------
    OptionError
        A number is out of range, `d_model` no multiple of `nhead`, `activation` another one, or a flag no truth value.

    Notes
    -----
    Parameters as in torch.nn: ``self_attn.*``, ``linear1.*``, ``linear2.*``, ``norm1.*``, ``norm2.*``. Sources: Vaswani
    et al., "Attention Is All You Need", 2017, §3.1; with `norm_first` Xiong et al., "On Layer Normalization in the
    Transformer Architecture", 2020, Fig. 1b.
    """

    replayable = True
    sample_axes = 2

    def __init__(
        self, d_model: int, nhead: int, dim_feedforward: int = 2048, dropout: float = 0.1,
        activation: Literal["relu", "gelu"] | Callable[..., Any] = "relu", layer_norm_eps: float = 1e-5,
        batch_first: bool = False, norm_first: bool = False, bias: bool = True, device: Any = None,
        dtype: Any = np.float32, *, rng: Seed = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.norm_first = check_flag("norm_first", norm_first)
        if str(getattr(activation, "__module__", "")).startswith("torch."):
            activation = getattr(activation, "__name__", activation)
        make_activation = _ACTIVATIONS[str(check_choice("activation", activation, tuple(_ACTIVATIONS)))]
        rng, real = check_generator("rng", rng), parameter_dtype(dtype, device)
        d_model, between = check_integer("d_model", d_model, 1), check_integer("dim_feedforward", dim_feedforward, 1)
        options: dict[str, Any] = {"dtype": real, "rng": rng}
        norm: dict[str, Any] = {"eps": layer_norm_eps, "bias": bias, "dtype": real}
        self.children = {
            "self_attn": MultiheadAttention(d_model, nhead, dropout, bias, batch_first=batch_first, **options),
            "linear1": Linear(d_model, between, bias, **options),
            "activation": make_activation(),
            "dropout": Dropout(dropout, rng=own_generator(rng)),
            "linear2": Linear(between, d_model, bias, **options),
            "norm1": LayerNorm(d_model, **norm),
            "norm2": LayerNorm(d_model, **norm),
            "dropout1": Dropout(dropout, rng=own_generator(rng)),
            "dropout2": Dropout(dropout, rng=own_generator(rng)),
        }
        for layer in self.children.values():
            if isinstance(layer, Dropout):
                layer.batch_axes = self.batch_axes

    def forward(
        self, x: Array, src_mask: Array | None = None, src_key_padding_mask: Array | None = None,
        is_causal: bool = False, *, lengths: Any = None,
    ) -> tuple[Array, EncoderSaved]:  # fmt: skip
        """Run the layer.

        Parameters
        ----------
        x
            (T, B, d_model), or (B, T, d_model) with ``batch_first``; (T, d_model) is a lone sample.
        src_mask, src_key_padding_mask, is_causal
            ``attn_mask``, ``key_padding_mask`` and ``is_causal`` of the attention.
        lengths
            Valid steps of each sample (B integers in 1 … T), or None for all. No step looks at one behind them.

        Returns
        -------
        y
            Of the shape of x. What it holds behind a sample's end means nothing.
        saved
            An `EncoderSaved`.

        Raises
        ------
        ShapeError, DTypeError, DeviceError, OptionError
            An argument does not fit.
        """
        parts: dict[str, Any] = {}
        options = {
            "attn_mask": src_mask, "key_padding_mask": src_key_padding_mask, "is_causal": is_causal, "lengths": lengths,
        }  # fmt: skip

        def through(names: Sequence[str], at: Array) -> Array:
            for name in names:
                at, parts[name] = self.children[name].forward(at, **(options if name == "self_attn" else {}))
            return at

        if self.norm_first:
            y = x + through(("norm1", *_ATTENTION), x)
            y = y + through(("norm2", *_FEEDFORWARD), y)
        else:
            y = through(("norm1",), x + through(_ATTENTION, x))
            y = through(("norm2",), y + through(_FEEDFORWARD, y))
        return y, EncoderSaved(parts, x.shape, backend.namespace(x).empty(0, x.dtype))

    def gradients(self, gy: Array, saved: EncoderSaved) -> Gradients:
        """Return the gradients; those between the layers inside are computed once for I and W."""
        xp = check_gy(gy, saved.shape, saved.like.dtype, saved.like)
        first = "norm1" if self.norm_first else "self_attn"

        def of_parts() -> tuple[Array, dict[str, Gradients]]:
            """Return the gradient that goes past the first layer inside, and the layers' `Gradients`."""
            found: dict[str, Gradients] = {}

            def back(names: Sequence[str], at: Array) -> Array:
                for name in reversed(names):
                    found[name] = gradients_of(self.children[name], at, saved.parts[name])
                    if name == first:  # its input gradient is I's alone
                        break
                    at = found[name].input_grad()
                return at

            if self.norm_first:
                at = gy + back(("norm2", *_FEEDFORWARD), gy)
                back(("norm1", *_ATTENTION), at)
            else:
                at = back(("norm2",), gy)
                at = back(("norm1",), at + back(_FEEDFORWARD, at))
                back(_ATTENTION, at)
            return at, found

        parts = Shared(of_parts, xp)

        def at_input() -> Array:
            past, found = parts()
            return past + found[first].input_grad()

        def at_weights() -> dict[str, Gradients]:
            found = parts()[1]
            return {name: found[name] for name, layer in self.children.items() if layer.parameters()}

        return Gradients(self, gy, saved, at_input, at_weights)

    def lone(self, saved: EncoderSaved) -> bool:
        """Whether the forward had a lone sample."""
        return len(saved.shape) == 2

    def input_grad_work(self, shape: tuple[int, ...], saved: EncoderSaved) -> Work:
        """Return the sum of the costs of the layers inside, and of two sums."""
        between = (*shape[:-1], saved.parts["linear2"].shape[-1])
        wide = ("activation", "dropout", "linear2")
        works = [
            input_grad_work(layer, between if name in wide else shape, saved.parts[name])
            for name, layer in self.children.items()
        ]
        size = int(np.prod(shape))
        return total_work((*works, Work(2 * size, 6 * size, 2)))._replace(entries=0)

    @property
    def batch_axes(self) -> tuple[int, int]:  # type: ignore[override]
        """As the attention has it."""
        return self.children["self_attn"].batch_axes
