"""PyTorch's modules as layers of ours, with a copy of their weights: for what needs a layer's sparse Jacobian."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.utils.parametrize import type_before_parametrizations

from sparsebp import nn
from sparsebp.core.errors import OptionError
from sparsebp.interop.torch import from_torch
from sparsebp.torch import layers
from sparsebp.torch.dispatch import dispatch_of

_CONV = "in_channels out_channels kernel_size stride padding"
_RECURRENT = "input_size hidden_size num_layers bias batch_first dropout bidirectional dtype"
_NORM = "num_features eps momentum affine track_running_stats dtype"
_ARGUMENTS = {
    "Linear": "in_features out_features bias dtype",
    **dict.fromkeys(("Conv1d", "Conv2d", "Conv3d"), f"{_CONV} dilation groups bias padding_mode dtype"),
    **dict.fromkeys(("ConvTranspose1d", "ConvTranspose2d", "ConvTranspose3d"),
                    f"{_CONV} output_padding groups bias dilation padding_mode dtype"),
    **dict.fromkeys(("ReLU", "ReLU6", "Tanh", "Sigmoid", "SiLU", "SELU", "Mish", "Identity"), ""),
    "LeakyReLU": "negative_slope",
    "ELU": "alpha",
    "GELU": "approximate",
    "Hardtanh": "min_val max_val",
    "Softplus": "beta threshold",
    **dict.fromkeys(("Softmax", "LogSoftmax"), "dim"),
    "PReLU": "num_parameters dtype",
    **dict.fromkeys(("MaxPool1d", "MaxPool2d"), "kernel_size stride padding dilation ceil_mode"),
    "AvgPool1d": "kernel_size stride padding ceil_mode count_include_pad",
    "AvgPool2d": "kernel_size stride padding ceil_mode count_include_pad divisor_override",
    **dict.fromkeys(("AdaptiveAvgPool1d", "AdaptiveAvgPool2d"), "output_size"),
    **dict.fromkeys(("BatchNorm1d", "BatchNorm2d"), _NORM),
    "GroupNorm": "num_groups num_channels eps affine dtype",
    "RMSNorm": "normalized_shape eps elementwise_affine dtype",
    "LayerNorm": "normalized_shape eps elementwise_affine bias dtype",
    **dict.fromkeys(("Dropout", "Dropout2d"), "p"),
    "Flatten": "start_dim end_dim",
    "Unflatten": "dim unflattened_size",
    "ZeroPad2d": "padding",
    "RNN": f"{_RECURRENT} nonlinearity",
    "GRU": _RECURRENT,
    "LSTM": f"{_RECURRENT} proj_size",
}  # fmt: skip
"""Of every module that has a layer of its name, the arguments that both take, by PyTorch's names."""
_RECURRENTS = ("RNN", "GRU", "LSTM")


def layer_of(module: Any) -> nn.Layer:
    """Return a layer that computes what `module` does, with a copy of its weights; a layer of ours as it is.

    Parameters
    ----------
    module
        A module of `torch.nn`, or a recurrent one of `sparsebp.torch`, that sparsebp has a layer for, also with
        parametrizations, or a `torch.nn.Sequential` of them; mode (training or not), dtype and device are the module's.

    Raises
    ------
    OptionError
        There is no such layer: the module is of another class (a subclass may compute anything), has hooks or a
        forward of its own, or draws a mask of its own (dropout while training).
    NonFiniteError
        A weight is NaN or infinite.
    """
    if isinstance(module, nn.Layer):
        return module
    if not isinstance(module, torch.nn.Module):
        raise _no_layer(type(module).__name__, "a module of torch.nn, or a layer of sparsebp.nn")
    kind = type_before_parametrizations(module)
    if module._forward_hooks or module._forward_pre_hooks:
        raise _no_layer(f"{kind.__name__} with forward hooks", "a module without hooks, which may change what it does")
    if "forward" in module.__dict__ and dispatch_of(module) is None:
        raise _no_layer(f"{kind.__name__} whose forward was replaced", "a module with the forward of its class")
    if kind is torch.nn.Sequential:
        return nn.Sequential(*(layer_of(child) for child in module.children())).train(module.training)
    name = kind.__name__
    if name not in _ARGUMENTS or kind not in (getattr(torch.nn, name, None), getattr(layers, name, None)):
        raise _no_layer(name, "torch.nn's " + ", ".join(sorted({*_ARGUMENTS, "Sequential"})))
    if module.training and getattr(module, "dropout" if name in _RECURRENTS else "p", 0) > 0:
        raise _no_layer(f"{name} that drops elements while training", "a module in evaluation: module.eval()")
    if getattr(module, "return_indices", False):
        raise _no_layer(f"{name}(return_indices=True)", "a module that returns the maxima alone")
    return _with_weights(getattr(nn, name)(**_arguments(module, name)), module)


def _arguments(module: Any, name: str) -> dict[str, Any]:
    """Return the arguments of the layer."""
    found: dict[str, Any] = {}
    for argument in _ARGUMENTS[name].split():
        if argument == "dtype":
            weights = (*module.parameters(), *module.buffers())  # statistics without weights have a dtype, too
            if weights:
                found["dtype"] = str(weights[0].dtype).removeprefix("torch.")
        elif argument == "bias":
            found["bias"] = module.bias if isinstance(module.bias, bool) else module.bias is not None
        else:
            found[argument] = getattr(module, argument)
    return found


def _with_weights(layer: nn.Layer, module: Any) -> nn.Layer:
    """Give the layer the module's parameters and buffers, its mode and its device."""
    names = [*layer.params, *layer.buffers]
    tensors = {name: getattr(module, name).detach() for name in names}
    if any(tensor.is_cuda for tensor in tensors.values()):
        layer.to("cuda")
    layer.load_state_dict({name: from_torch(tensor) for name, tensor in tensors.items()})
    return layer.train(module.training)


def _no_layer(got: str, expected: str) -> OptionError:
    return OptionError(
        "There is no layer of sparsebp for this module", expected=expected, got=got,
        remedy="Use torch.func.jacrev, or take the module apart",
    )  # fmt: skip
