"""The layers of a model by their order, whatever groups they are in: checkpoints of other groups of the same layers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from sparsebp.nn.layer import dotted
from sparsebp.nn.sequential import Sequential


def layers_in_order(model: Any) -> list[str]:
    """Return the names of a chain's layers; a `Sequential` or a `Stage` inside stands for its own."""
    return _layers("", model)


def _layers(name: str, layer: Any) -> list[str]:
    if not isinstance(layer, Sequential) or "stages" not in layer.valid_shortcuts:
        return [name]
    return [found for key, child in layer.children.items() for found in _layers(dotted(name, key), child)]


def renaming(state: Mapping[str, Any], layers: list[str]) -> Callable[[str], str] | None:
    """Return the function from names in a checkpoint's state to those in a model of `layers`; None: the same names."""
    saved = state.get("layers", layers)
    names = isinstance(saved, list) and all(isinstance(name, str) for name in saved)
    if not names or saved == layers or len(saved) != len(layers):
        return None
    new = dict(zip(saved, layers, strict=True))

    def rename(name: str) -> str:
        """Rename the longest beginning that is a layer's name."""
        words = name.split(".")
        for count in range(len(words), 0, -1):
            layer = ".".join(words[:count])
            if layer in new:
                return dotted(new[layer], ".".join(words[count:])) if words[count:] else new[layer]
        return name

    return rename


def renamed_state(state: Mapping[str, Any], rename: Callable[[str], str]) -> dict[str, Any]:
    """Return a checkpoint's state with the model's names of layers and parameters."""
    optimizer = {
        key: [rename(name) for name in value] if key.endswith(".params") else value
        for key, value in ((rename_entry(key, rename), value) for key, value in state["optimizer"].items())
    }
    options = dict(state.get("options", {}))
    groups = options.get("groups", {})
    firsts = {
        name: min(map(rename, names)) for key, names in state["optimizer"].items() if key.endswith(".params")
        for name in names
    }  # fmt: skip
    options = {
        _LAYER + rename(key.removeprefix(_LAYER)) if key.startswith(_LAYER) else key: value
        for key, value in without_groups(options, state["layers"]).items()
    } | {"groups": {firsts.get(name, name): value for name, value in groups.items()}}  # fmt: skip
    generators = {rename(name): value for name, value in state["generators"].items()}
    return {**state, "optimizer": optimizer, "options": options, "generators": generators}


_LAYER = "the layer "


def rename_entry(key: str, rename: Callable[[str], str]) -> str:
    """Rename the parameter in the name of an entry of an optimizer's state, as ``step.0.weight``."""
    kind, dot, name = key.partition(".")
    return f"{kind}{dot}{rename(name)}"


def renamed_tensor(name: str, rename: Callable[[str], str]) -> str:
    """Rename the layer in the name of a checkpoint's array."""
    kind, _, rest = name.partition(".")
    if kind == "model":
        return f"{kind}.{rename(rest)}"
    if kind == "optimizer":
        return f"{kind}.{rename_entry(rest, rename)}"
    callback, averages, rest = name.partition(".averages.")
    return f"{callback}{averages}{rename(rest)}" if kind == "callbacks" and averages else name


def without_groups(options: Mapping[str, Any], layers: list[str]) -> dict[str, Any]:
    """Return a run's options without those of groups of layers."""

    def of_group(key: str) -> bool:
        name = key.removeprefix(_LAYER)
        return key.startswith(_LAYER) and (
            name == "that is the model" or any(layer.startswith(f"{name}.") for layer in layers)
        )

    return {key: value for key, value in options.items() if not of_group(key)}
