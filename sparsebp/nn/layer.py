"""The base class of layers: parameters with torch.nn's names, children, devices, and the parts of the action graph.

A layer keeps forward (F), input gradient (I), weight gradient (W) and transposed Jacobian apart, because schedules
reorder them: I and W of one layer need not run together, and a scan over transposed Jacobians can stand in for the
chain of I. Users call the interface on top: ``y, back = layer.vjp(x)``.
"""

from __future__ import annotations

import abc
from collections.abc import Iterable, Iterator, Mapping
from math import prod
from types import ModuleType
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np

from sparsebp.core import backend, parts
from sparsebp.core import masks as masking
from sparsebp.core.absent import held, is_absent, refuse
from sparsebp.core.check import Array, ProductFactors, check_flag, shown
from sparsebp.core.errors import FileFormatError, OptionError, ShapeError
from sparsebp.core.packed import unpacked
from sparsebp.core.reprs import call_text, nested
from sparsebp.core.shortcuts import LayerType, forward_of, only_described, say_own, says
from sparsebp.nn.gradients import Back, Gradients, undisturbed
from sparsebp.nn.modes import inference_mode
from sparsebp.nn.parameters import Named, NamedArrays, arrays_replaced, check_name, checked_like
from sparsebp.nn.work import Work


class Children(Named["Layer"]):
    """The layers inside another one, by name: the one record of a model's parts."""

    # `views`: the child that each attribute shows, whether it is there or not. None: a layer that is assigned to any
    # attribute becomes the child of that name; else to one that shows a child.

    __slots__ = ("views",)

    def __init__(
        self, layers: Mapping[str, Layer] | Iterable[tuple[str, Layer]] = (), owner: Layer | None = None,
        views: dict[str, str] | None = None,
    ) -> None:  # fmt: skip
        self.views = views
        super().__init__(layers, owner)

    def __setitem__(self, name: str, layer: Layer) -> None:
        owner = self.owner()
        if owner is not None and name not in self and owner.__dict__.get("children") is self:
            check_name(owner, "children", name)
        super().__setitem__(name, check_layer(f"The child {name!r}", layer))
        self._show(name, layer)

    def __delitem__(self, name: str) -> None:
        super().__delitem__(name)
        self._show(name, None)

    def _show(self, name: str, layer: Layer | None) -> None:
        """Let the attributes that show a child show this one, or nothing."""
        owner = self.owner()
        for attribute in (name, *(view for view, child in (self.views or {}).items() if child == name != view)):
            if owner is None or hasattr(type(owner), attribute):
                continue
            if layer is None:
                owner.__dict__.pop(attribute, None)
            else:
                owner.__dict__[attribute] = layer
        parts.changed()

    def pop(self, name: str, *default: Any) -> Any:
        """As `dict.pop`."""
        if name not in self and default:
            return default[0]
        layer = self[name]
        del self[name]
        return layer

    def popitem(self) -> tuple[str, Layer]:
        """As `dict.popitem`."""
        if not self:
            raise KeyError("popitem(): there are no children")
        name = next(reversed(self))
        return name, self.pop(name)

    def clear(self) -> None:
        """As `dict.clear`."""
        for name in list(self):
            del self[name]

    def view(self, attribute: str) -> str | None:
        """Return the name of the child that an attribute shows; None if it shows none."""
        if attribute in self:
            return attribute
        return self.views.get(attribute) if self.views else None

    def __reduce__(self) -> tuple[Any, ...]:
        return Children, (dict(self), None, self.views)


def _name_of(layer: Layer | None, children: Mapping[str, Layer]) -> str | None:
    return next((name for name, child in children.items() if child is layer), None)


def _followed(name: str, before: Mapping[str, Layer], after: Mapping[str, Layer]) -> str | None:
    """Return the name in a new record of the child that had that name: the same layer, or the one in its place."""
    child = _name_of(before.get(name), after)
    if child is None and name in after and _name_of(after[name], before) is None:
        return name
    return child


class _BatchAxes:
    """The default of `Layer.batch_axes`; an object or a class may have its own in its place."""

    def __get__(self, layer: Layer | None, kind: type | None = None) -> tuple[int, int]:
        for name, child in () if layer is None else layer.__dict__.get("children", {}).items():
            if child.batch_axes != (0, 0):
                raise OptionError(f"{type(layer).__name__} does not say where the batch is in its input and output",
                                  expected="batch_axes in the class, as (0, 0), (1, 1), or (1, 0) for a last step",
                                  got=f"none, and the child {name!r} has them on {child.batch_axes}")  # fmt: skip
        return 0, 0


class IncompatibleKeys(NamedTuple):
    """Names that `Layer.load_state_dict` has found on one side only; both are empty if everything was loaded."""

    missing_keys: list[str]
    """Parameters and buffers of the layer that the state does not have: they are as before."""
    unexpected_keys: list[str]
    """Entries of the state that the layer does not have: they are ignored."""


class Fixed:
    """An option of a layer that is set once, when it is built."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, layer: Any, owner: type | None = None) -> Any:
        if layer is None:
            return self
        try:
            return vars(layer)[self._name]
        except KeyError:
            raise AttributeError(f"{type(layer).__name__} has no {self._name}") from None

    def __set__(self, layer: Any, value: Any) -> None:
        own = vars(layer)
        if self._name in own:
            raise OptionError(
                f"The {self._name} of a {type(layer).__name__} stays as it was built",
                expected=shown(own[self._name]),
                got=shown(value),
                remedy="Build another layer, load this one's state_dict, and put it in its place",
            )
        own[self._name] = value


class Layer(metaclass=LayerType):
    """Base class of layers and models.

    Attributes
    ----------
    params
        This layer's own parameters by name (torch.nn's names and shapes).
    buffers
        State that no optimizer updates (running statistics), by name; part of `state_dict`, not of `parameters`.
    children
        Layers inside this one by name; their parameters appear under dotted names. A layer that is assigned to an
        attribute becomes the child of that name, as in torch.nn: ``self.head = Linear(…)``. See the notes.
    training
        Whether dropout is active and batch statistics are used; set by `train` and `eval`.
    device
        ``"cpu"`` or ``"cuda"``: where the parameters live; set by `to`.
    generator
        The random generator that `forward` draws from, or None if the layer draws nothing.

    Notes
    -----
    `children` alone says which layers a model is made of, and an attribute that holds a child is a view of it:
    ``model.head = new``, ``model.children["head"] = new`` and ``del model.head`` do the same to forward, training,
    `state_dict` and `parameters`. An optimizer built on the old parameters refuses its next step.
    Where a class assigns ``self.children = {…}`` as a whole, this names all parts: an attribute that holds one of them
    shows it under its own name, and a layer in any other attribute is no part of the model.
    Parameters and buffers are attributes as well: ``layer.weight`` is ``layer.params["weight"]``, and assigning to
    it replaces that array by one of the same shape and dtype.
    """

    children: dict[str, Layer]
    generator: np.random.Generator | None = None
    valid_shortcuts: ClassVar[frozenset[str]]
    """Names of the shortcuts that hold, see `sparsebp.core.shortcuts`; set by the class's type."""
    replayable: ClassVar[bool] = False
    """Whether all batches of one shape are the same work for a GPU, of which the host reads and draws nothing."""
    batch_axes: tuple[int, int] = _BatchAxes()  # type: ignore[assignment]
    """Where the batch is among the axes of the input and of the output: (0, 0) unless the class says otherwise. A layer
    around layers that put it elsewhere must say."""
    sample_axes: int = 1
    """Number of axes of an unbatched sample, see `unbatched`."""
    finite_buffers: ClassVar[frozenset[str]] = frozenset()
    """Buffers that must be finite, as parameters: running statistics. Others, as masks with -inf, may hold anything."""
    optional: ClassVar[tuple[str, ...]] = ()
    """Parameters that a layer may have been built without (before "_l0"): no array can be assigned to them then."""
    joins_steps: bool | None = None
    """Of a layer that takes lengths: whether it makes one vector of all steps, or has an output for each."""
    state_axis: int | None = None
    """Where the batch is among the axes of a recurrent layer's state; None without one."""

    def __init__(self) -> None:
        self.params: dict[str, Array] = NamedArrays()
        self.buffers: dict[str, Array] = NamedArrays()
        given = {name: layer for name, layer in self.__dict__.items() if isinstance(layer, Layer)}
        self.__dict__["children"] = Children(given, self)
        self.training = True
        self.device = "cpu"

    def __setattr__(self, name: str, value: Any) -> None:
        own = self.__dict__
        if name in ("params", "buffers"):
            if not isinstance(value, Mapping):
                raise OptionError(f"{name} are not a mapping", expected="arrays by name", got=type(value).__name__)
            for key in value:
                check_name(self, name, key)
            before = own.get(name, NamedArrays())
            super().__setattr__(name, before.instead(self, value))
            if before:
                arrays_replaced()
        elif name == "children":
            self._set_children(value)
        elif name in own.get("params", ()) or name in own.get("buffers", ()):
            (self.params if name in self.params else self.buffers)[name] = value
            if not hasattr(type(self), name):
                own[name] = value
        elif isinstance(value, Layer) or ("children" in own and own["children"].view(name) is not None):
            self._set_part(name, value)
        elif name.partition("_l")[0] in self.optional and getattr(value, "ndim", 0) > 0:  # not bias_ih_l0 either
            raise OptionError(f"This {type(self).__name__} was built without {name}", got=f"an array for {name}",
                              expected=f"one of its parameters: {', '.join(own.get('params', ())) or 'none'}",
                              remedy="Build the layer with it: bias=True, say")  # fmt: skip
        else:
            super().__setattr__(name, value)
            say_own(self, name)

    def __delattr__(self, name: str) -> None:
        own = self.__dict__
        child = own["children"].view(name) if "children" in own else None
        if name in own.get("params", ()) or name in own.get("buffers", ()):
            del self.params[name]  # refused
        elif child is not None and own.get(name) is own["children"].get(child):
            del self.children[child]
        else:
            super().__delattr__(name)
            say_own(self, name)

    def __repr__(self) -> str:
        """Show the constructor's call, and the layers inside, each under its name."""
        own = self.__dict__
        if "children" not in own:  # super().__init__() has not run yet
            return f"{type(self).__name__}()"
        below = [*own["children"], *(own["children"].views or ())]
        if not self.params:
            below.append("bias")
        text = call_text(self, below, {"bias": any("bias" in name for name in self.params)})
        return nested(text, own["children"].items())

    def _set_part(self, name: str, layer: Any) -> None:
        """Let an attribute show a layer."""
        own, kind = self.__dict__, type(self)
        children: Any = own.get("children")
        child = None if children is None else children.view(name)
        if children is None:  # before super().__init__(), as a dataclass has its fields
            super().__setattr__(name, layer)
        elif child is not None:
            children[child] = layer
        elif hasattr(kind, name):
            if not hasattr(getattr(kind, name), "__set__"):
                raise OptionError(f"{kind.__name__} has an attribute {name}, which would hide the layer",
                                  expected="another name for the layer", got=name)  # fmt: skip
            super().__setattr__(name, layer)
        elif children.views is None:
            children[name] = layer
        else:
            self._show(name, layer)

    def _show(self, name: str, layer: Layer) -> None:
        """Let an attribute show a child that has another name, or hold a layer that is no part."""
        children: Any = self.children
        child = _name_of(layer, children)
        if child is not None:
            children.views[name] = child
        super().__setattr__(name, layer)

    def _set_children(self, value: Any) -> None:
        """Take a record of all parts, which attributes show from now on."""
        if not isinstance(value, Mapping):
            raise OptionError("children are not a mapping", expected="layers by name", got=type(value).__name__,
                              remedy="Write: self.children = {'name': layer}")  # fmt: skip
        for name, layer in value.items():
            check_name(self, "children", name)
            check_layer(f"The child {name!r}", layer)
        own = self.__dict__
        before: Any = own.get("children", Children())
        if value is before:  # after children |= …
            return
        views = {name: name for name in value}
        if before.views is not None:
            aliases = {name: _followed(child, before, value) for name, child in before.views.items() if name != child}
            views = {name: child for name, child in aliases.items() if child is not None} | views
        held = {name: layer for name, layer in own.items() if isinstance(layer, Layer)}
        own["children"] = children = Children(value, self, views)
        for name, layer in held.items():
            if before.views is not None and name in before.views and name not in views:
                del own[name]  # it showed a child that is gone
            elif name not in views and name not in children:
                self._show(name, layer)
        parts.changed()

    # ---- the action graph ----------------------------------------------------------------------------------------

    @abc.abstractmethod
    def forward(self, x: Array) -> tuple[Array, Any]:
        """F: return the output, and anything that the backward parts need.

        x and the output may be a part of that: neither may change before the gradients have been computed, which is not
        checked. `vjp` works on copies.

        Raises
        ------
        ShapeError, DTypeError, DeviceError
            An array does not fit the layer. `input_grad` and `weight_grad` raise the same for `gy`, constructors
            `OptionError` for arguments out of range; docstrings of layers name other errors only.
        """

    def vjp(self, x: Array, **options: Any) -> tuple[Array, Back]:
        """Run forward, and return the output and the way back from it.

        Parameters
        ----------
        x
            The input. It is copied: the caller may use its memory again at once.
        **options
            Passed to `forward`, for example ``lengths=``.

        Returns
        -------
        y
            The output, the caller's own array.
        back
            ``g = back(gy)`` with a gradient of y's shape and dtype; then ``g.input`` is the gradient with respect to x
            and ``g.weights`` those with respect to the parameters, a dict like `parameters`. Each is computed when it
            is asked for, once, and work that both need is done once.

        Raises
        ------
        ShapeError, DTypeError, DeviceError
            `x` does not fit the layer.

        Notes
        -----
        Ask for gradients before the parameters are updated; `back` refuses to mix them with new weights (StaleError).
        """
        backend.namespace(x)
        y, saved = forward_of(self, x.copy(), **options)
        return unpacked(y).copy(), Back(self, saved)

    def gradients(self, gy: Array, saved: Any) -> Gradients:
        """Return the gradients of one forward at one `gy`; nothing is computed before it is asked for.

        Layers whose I and W share work, or that contain other layers, override this; others override `input_grad` and
        `weight_grad`. Neither `gy` nor the parameters may change until the gradients have been computed.
        """
        return Gradients(self, gy, saved)

    def input_grad(self, gy: Array, saved: Any) -> Array:
        """I: return the gradient with respect to the input, from the gradient `gy` with respect to the output."""
        self._check_way_back("input_grad(gy, saved)")
        return self.gradients(gy, saved).input_grad()

    def weight_grad(self, gy: Array, saved: Any) -> dict[str, Array]:
        """W: return the gradients with respect to the parameters, keyed like `parameters`, in new arrays."""
        # Checked first: an override of `gradients` that calls the default would recurse.
        if not self.params and (not self.children or not self.parameters()):
            return {}
        self._check_way_back("weight_grad(gy, saved)")
        return self.gradients(gy, saved).weight_grad()

    def _check_way_back(self, missing: str) -> None:
        """Refuse to ask the default `gradients`, which would ask this layer again."""
        if getattr(self.gradients, "__func__", None) is Layer.gradients:
            raise OptionError(f"{type(self).__name__} has no way back", expected=f"{missing}, or gradients(gy, saved)",
                              got="neither",
                              remedy="Define one of them; see the how-to guide 'Write a layer'")  # fmt: skip

    def explain(self, x: Array, **options: Any) -> str:
        """Say how backward from `x` would run and why: the choices of ``backward="auto"``, a line each.

        Parameters
        ----------
        x, **options
            As for `forward`, which runs; random generators and running statistics are as before afterwards.
        """
        with undisturbed(self):
            _, saved = forward_of(self, x, **options)
            found = list(self.choices(saved))
        if not found:
            inside = [name for name, layer in self.modules() if layer is not self and says(layer, "choices")]
            if inside and not says(self, "choices"):
                return f"{type(self).__name__} does not say how {', '.join(inside)} goes back: it has no `choices`."
            return f"{type(self).__name__}: bp, plain back-propagation; nothing was left to choose."
        return "\n".join(f"{name or type(self).__name__}: {algorithm}. {reason}" for name, algorithm, reason in found)

    def choices(self, saved: Any, prefix: str = "") -> Iterator[tuple[str, str, str]]:
        """Yield ``(dotted name, algorithm, reason)`` for every part of the way back that had a choice."""
        return iter(())

    def backward_arrays(self) -> list[Array]:
        """Return the arrays that backward reads in addition to the saved ones: parameters and their masks."""
        return [array for _, layer in self.modules() for array in (*layer.params.values(), *layer.masks())]

    def masks(self) -> list[Array]:
        """Return the masks of this layer's own pruned parameters, merged over the layers that share a parameter."""
        found = map(masking.mask_of, self.params.values()) if masking.owners else ()
        return [mask for mask in found if mask is not None]

    def weight_grad_factors(self, gy: Array, saved: Any) -> tuple[dict[str, ProductFactors], dict[str, Array]] | None:
        """W, deferred: return the factors of gradients that are matrix products, and the other gradients; or None.

        An optimizer can then compute and apply a product a few rows at a time (`sparsebp.optim.Update`).
        """
        return None

    @only_described
    def jacobian_t(self, saved: Any) -> Any:
        """Return the transposed Jacobian of the forward that saved `saved`, the element that a scan multiplies.

        Layers with a known pattern override it. `sparsebp.jacobian_t` works for every layer: without an override, or
        with an inherited one and another `input_grad` or `gradients`, it computes a dense Jacobian column by column.

        Parameters
        ----------
        saved
            The second value that `forward` returned, for a batch of B samples.

        Returns
        -------
        TransposedJacobian
            Of shape (n_in, n_out), the sizes of one sample's input and output, flattened in C order: entry (i, j) is
            the derivative of output j with respect to input i. Its `pattern`, in CSR, depends on the layer's shapes
            (and masks of pruned weights) alone; its values, of the dtype of the input, are (nnz, B), or (nnz,) where
            all samples share them.

        Raises
        ------
        OptionError
            The layer has none of its own, or couples the samples (see `couples_samples`).

        Notes
        -----
        The transposed Jacobian of Wang, Bai and Pekhimenko, "BPPSA", MLSys 2020, §3.1 and §3.3.

        Examples
        --------
        >>> import numpy as np, sparsebp as sb
        >>> layer = sb.nn.ReLU()
        >>> y, saved = layer.forward(np.array([[-1.0, 2.0, 3.0]]))
        >>> layer.jacobian_t(saved)
        TransposedJacobian(SparsityPattern(3 x 3, nnz=3, diagonal), float64, batch=1)
        >>> layer.jacobian_t(saved).to_dense()
        array([[0., 0., 0.],
               [0., 1., 0.],
               [0., 0., 1.]])
        """
        raise OptionError(f"{type(self).__name__} has no sparse Jacobian of its own", expected="jacobian_t overridden",
                          got="the base class's", remedy="Call sparsebp.jacobian_t(layer, x)")  # fmt: skip

    def input_grad_work(self, shape: tuple[int, ...], saved: Any) -> Work:
        """Estimate the cost of `input_grad` for an input of `shape`; the default is a few elementwise passes.

        Of a layer around others, each of them adds a pass, and a product with its parameters.
        ``backward="auto"`` of `Sequential` compares the sum with scans.
        """
        inside = [layer for _, layer in self.modules()]
        weights = sum(array.size for layer in inside for array in layer.params.values())
        batch, size = (shape[0] if shape else 1), prod(shape) * len(inside)
        if len(inside) == 1:
            return Work(2 * size, 4 * size, 2)
        return Work(2 * (size + batch * weights), 4 * size + weights, 2 * len(inside))

    def couples_samples(self, saved: Any) -> bool:
        """Whether an output of that forward depends on more than one sample, so that no sample has a Jacobian.

        The default is right for a layer that maps each sample by itself. Of a layer around others it says whether one
        of them may couple samples in its present mode, as batch normalisation does while training.
        """
        return self.may_couple_samples()

    def may_couple_samples(self) -> bool:
        """Whether a forward in the present mode may couple samples, for some input."""
        if not inherits_coupling(self):
            return True  # it is only known of a saved value
        return any(map(may_couple, self.children.values()))

    def unbatched(self, saved: Any) -> bool:
        """Whether that forward had an unbatched sample, so that its first axis is not the batch."""
        return False

    def capture_obstacle(self) -> str | None:
        """Return why a captured CUDA graph cannot replay this layer itself, children aside; None if it can."""
        return None if self.replayable else "does not say that its work is the same for every batch (replayable)"

    def __call__(self, x: Array, /, *more: Any, **options: Any) -> Any:
        """Return the output alone and save nothing for backward; further arguments go to `forward`."""
        with inference_mode():
            return unpacked(forward_of(self, x, *more, **options)[0])

    # ---- parameters ----------------------------------------------------------------------------------------------

    def modules(self, prefix: str = "") -> Iterator[tuple[str, Layer]]:
        """Yield ``(dotted name, layer)`` for this layer (under the name `prefix`) and every layer inside it.

        Raises
        ------
        OptionError
            A layer is inside itself.
        """
        found = [(prefix, self)]
        if self.children:
            self._walk(prefix, (), found)
        return iter(found)

    def _walk(self, prefix: str, above: tuple[Layer, ...], found: list[tuple[str, Layer]]) -> None:
        """Append the layers inside this one."""
        above = (*above, self)
        for name, child in self.children.items():
            path = f"{prefix}.{name}" if prefix else name
            found.append((path, child))
            if not child.children:
                continue
            if any(child is layer for layer in above):
                raise OptionError("A layer is inside itself", expected="children that do not hold their parents",
                                  got=f"{type(child).__name__} again as {path!r}")  # fmt: skip
            child._walk(path, above, found)

    def stages(self, prefix: str = "") -> list[tuple[str, Layer]]:
        """Return ``(dotted name, layer)`` of the parts that run one after the other: of a `Sequential` its links.

        Any other layer is one stage, named `prefix`. Schedules of a training step are made of stages.
        """
        return [(prefix, self)]

    def parameters(self) -> dict[str, Array]:
        """Return the live parameter arrays by dotted name; an optimizer updates them in place.

        A parameter that is shared (a layer or an array that occurs more than once) has its first name.
        """
        live = self.live_parameters()
        parts.gives_out(self)
        return live

    def live_parameters(self) -> dict[str, Array]:
        """Return `parameters`, for a look at them: an optimizer is not built on these."""
        return {name: array for name, array, first in self._named_parameters() if name == first}

    def _named_parameters(self) -> Iterator[tuple[str, Array, str]]:
        """Yield all names of parameters, the array, and its first name."""
        first: dict[int, str] = {}
        for prefix, layer in self.modules():
            for key, array in layer.params.items():
                name = dotted(prefix, key)
                yield name, array, first.setdefault(id(array), name)

    def shared_names(self) -> dict[str, str]:
        """Return the name that `parameters` uses for every name of a parameter in `state_dict`."""
        return {name: first for name, _, first in self._named_parameters()}

    def summed(self, grads: Mapping[str, Array]) -> dict[str, Array]:
        """Return gradients in the order of `parameters`, summed over the uses of shared parameters.

        `grads` has an entry for each use, under its name there. The last use is added first, as in a backward pass.
        """
        counts, different, layers = 0, set[int](), [("", self)]
        self._walk("", (), layers)
        for _, layer in layers:
            counts += len(layer.params)
            different.update(map(id, layer.params.values()))
        if len(different) == counts == len(grads):  # nothing is shared, as nearly always
            return dict(grads)
        names = [(name, first) for name, _, first in self._named_parameters() if name in grads]
        total: dict[str, Array] = {}
        for name, first in reversed(names):
            total[first] = total[first] + grads[name] if first in total else grads[name]
        if len(total) != len(different) or len(names) != len(grads):
            raise OptionError(f"{type(self).__name__} does not give the gradients of its parameters",
                              expected=", ".join(self.parameters()), got=", ".join(grads) or "none", remedy="Let the "
                              "weights of gradients have the Gradients of every child by its name")  # fmt: skip
        return {first: total[first] for _, first in names}

    def generators(self) -> dict[str, np.random.Generator]:
        """Return the random generators that `forward` draws from, by dotted layer name.

        Save their ``bit_generator.state`` to resume a run with bitwise equal results.
        """
        return {name: layer.generator for name, layer in self.modules() if layer.generator is not None}

    def state_dict(self) -> dict[str, Array]:
        """Return copies of all parameters and buffers by dotted name, on the layer's device; pruned weights are 0."""
        state = self.live_state()
        if len(held(state)) < len(state):
            refuse("asked for")
        return {name: array.copy() for name, array in state.items()}

    def live_state(self) -> dict[str, Array]:
        """Return `state_dict` with the arrays themselves, for a look at them."""
        return {
            name: array if (mask := masking.mask_of(array)) is None else masking.kept(array, mask)
            for name, array in self._state().items()
        }

    def _state(self) -> dict[str, Array]:
        return {
            dotted(prefix, name): array
            for prefix, layer in self.modules()
            for name, array in (layer.params | layer.buffers).items()
        }

    def load_state_dict(self, state: Mapping[str, Any], strict: bool = True) -> IncompatibleKeys:
        """Copy `state` into the parameters, in place; nothing is written unless everything fits.

        As in torch.nn, a shared parameter appears under all of its names.

        Parameters
        ----------
        state
            Arrays by name, as `state_dict` returns them: NumPy, CuPy, or anything that ``numpy.asarray`` takes, so a
            PyTorch module's ``state_dict()`` as well. float16 and bfloat16 are converted to the parameter's dtype,
            which changes no value; nothing else is.
        strict
            Whether the names must be those of the layer. If not, the names that both have are loaded; shapes must
            still fit.

        Returns
        -------
        IncompatibleKeys
            The names that the layer (``missing_keys``) or the state (``unexpected_keys``) has alone; with `strict`
            there are none.

        Raises
        ------
        FileFormatError
            Names are missing or unexpected, or the names of a shared parameter have different values.
        ShapeError, DTypeError
            An array has another shape or dtype than its parameter.
        NonFiniteError
            A parameter holds NaN or infinity, or one of the `finite_buffers`.
        """
        if not isinstance(state, Mapping) or not all(isinstance(name, str) for name in state):
            raise FileFormatError("This is not the state of a layer", expected="arrays by name",
                                  got=type(state).__name__, remedy="Pass what state_dict() returned")  # fmt: skip
        new = self._new_buffers(state)
        params = self._state() | {name: array for name, (_, array) in new.items()}
        differ = IncompatibleKeys(sorted(params.keys() - state.keys()), sorted(state.keys() - params.keys()))
        if check_flag("strict", strict) and any(differ):
            raise FileFormatError(f"The state does not fit {type(self).__name__}",
                                  expected=f"the names {', '.join(params)}" if params else "no parameters",
                                  got=f"missing {differ.missing_keys}, unexpected {differ.unexpected_keys}",
                                  remedy="Build the model with the arguments that the state was made with, or pass "
                                  "strict=False to load the names that both have")  # fmt: skip
        finite = self.finite_arrays()
        loaded = {
            name: checked_like(name, state[name], param, finite=name in finite)
            for name, param in params.items()
            if name in state and not _both_absent(param, state[name])
        }
        uses: dict[str, str] = {}  # of a shared parameter the first name that is loaded
        for name, param, first in self._named_parameters():
            given = uses.setdefault(first, name) if name in loaded else name
            if name != given and not bool((loaded[name] == loaded[given]).all()):  # synchronize!
                raise FileFormatError(f"{name} and {given} are one parameter, but the state has different values for "
                                      "them", expected="equal arrays", got=f"arrays of shape {param.shape} that differ",
                                      remedy="Load the state of a model that shares it as well")  # fmt: skip
        for name, array in loaded.items():
            params[name][...] = array
        for name, (layer, array) in new.items():
            layer.buffers[name.rpartition(".")[2]] = array
        for _, layer in self.modules():
            layer._arrays_replaced()
        for param in self.parameters().values():
            masking.clear(param)
        return differ

    def finite_arrays(self) -> dict[str, Array]:
        """Return the parameters and `finite_buffers` by dotted name: what must be finite to be saved and loaded."""
        return {
            dotted(prefix, name): array
            for prefix, layer in self.modules()
            for name, array in (layer.params | layer.buffers).items()
            if name in layer.params or name in layer.finite_buffers
        }

    def _new_buffers(self, state: Mapping[str, Any]) -> dict[str, tuple[Layer, Array]]:
        """Return the layer and a new array for every buffer of `state` that the layer can take but lacks."""
        new = {}
        layers = dict(self.modules())
        for path in state.keys() - self._state().keys():
            prefix, _, name = path.rpartition(".")
            room = layers[prefix].buffer_for(name) if prefix in layers else None
            if room is not None:
                new[path] = (layers[prefix], room)
        return new

    def buffer_for(self, name: str) -> Array | None:
        """Return an array for an optional buffer of that name; None if the layer has no such buffer."""
        return None

    def train(self, mode: bool = True) -> Self:
        """Switch to training (``mode=False``: to evaluation) here, and every child by its own `train`; return self.

        A layer that overrides it can keep a part in evaluation: frozen batch normalisation, say.
        """
        self.modules()  # a layer inside itself is refused
        self.training = check_flag("mode", mode)
        for child in self.children.values():
            child.train(mode)
        return self

    def eval(self) -> Self:
        """Switch to evaluation (no dropout, running statistics) here and in all children; return self."""
        return self.train(False)

    def to(self, device: str | None = None, dtype: Any = None) -> Self:
        """Move the parameters to `device` (``"cpu"`` or ``"cuda"``) and convert them to `dtype`; return self.

        The arrays are replaced, so build the optimizer afterwards.

        Raises
        ------
        DeviceError
            The device is unknown or not available.
        DTypeError
            The dtype is neither float32 nor float64.
        """
        wanted = None if dtype is None else backend.float_dtype(dtype)
        if any(map(is_absent, self._state().values())):
            refuse("moved or converted")
        done: dict[int, tuple[Array, Array]] = {}  # shared arrays stay shared; holding the old array keeps its id valid
        for _, layer in self.modules():
            for arrays in (layer.params, layer.buffers):
                for name, array in arrays.items():
                    if id(array) not in done:
                        moved = array if device is None else backend.to_device(array, device)
                        floating = wanted is not None and moved.dtype.kind == "f"
                        done[id(array)] = array, moved.astype(wanted, copy=False) if floating else moved
                    arrays.replace(name, done[id(array)][1])  # type: ignore[attr-defined]
            if device is not None:
                layer.device = device
        for _, layer in self.modules():
            layer._arrays_replaced()
        parts.changed()
        return self

    def _arrays_replaced(self) -> None:
        """Called when parameters or buffers have been replaced."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        own, children = self.__dict__, state.get("children", {})
        own.update(state)
        for name in ("params", "buffers"):
            own[name] = NamedArrays(state.get(name, {}), self)
        own["children"] = Children(children, self, getattr(children, "views", {name: name for name in children}))
        if "valid_shortcuts" in own:
            own["valid_shortcuts"] = type(own["valid_shortcuts"])(self)
        self._arrays_replaced()
        parts.gives_out(self)  # an optimizer that is copied with it finds it

    @property
    def dtype(self) -> np.dtype | None:
        """The parameters' dtype, or None if there are none."""
        return next((array.dtype for array in self.parameters().values()), None)

    @property
    def input_dtype(self) -> np.dtype | None:
        """The dtype that `forward` takes: the parameters', or None for any; int64 where an `Embedding` comes first."""
        first = next(iter(self.children.values()), None)
        given = None if first is None else first.input_dtype
        return given if given is not None and given.kind == "i" else self.dtype


def _both_absent(param: Array, given: Any) -> bool:
    """Whether neither a parameter nor its part of a state is there; refuses to load one without the other."""
    if is_absent(param) and not is_absent(given):
        refuse("loaded")
    return is_absent(param)


batch_first_axes = property(
    lambda layer: (0, 0) if layer.batch_first else (1, 1),
    doc="Axes of the samples in x and y: the batch comes first, with ``batch_first``, or after the steps.",
)


def inherits_coupling(layer: Layer) -> bool:
    """Whether a layer says by the default of `Layer.couples_samples` whether it couples samples."""
    return getattr(layer.couples_samples, "__func__", None) is Layer.couples_samples


def may_couple(layer: Layer) -> bool:
    """Whether a forward of a layer in its present mode may couple samples: also if it does not say."""
    return "couples_samples" not in layer.valid_shortcuts or layer.may_couple_samples()


def input_grad_work(layer: Layer, shape: tuple[int, ...], saved: Any) -> Work:
    """Return the cost of a layer's `input_grad`: its own estimate if that still belongs to it, else the default."""
    own = "input_grad_work" in layer.valid_shortcuts
    return layer.input_grad_work(shape, saved) if own else Layer.input_grad_work(layer, shape, saved)


def dotted(prefix: str, name: str) -> str:
    """Return the dotted name of `name` inside the layer called `prefix`."""
    return f"{prefix}.{name}" if prefix else name


def check_layer(name: str, value: Any) -> Layer:
    """Return an argument that is a layer."""
    if not isinstance(value, Layer):
        several = isinstance(value, list | tuple)
        raise OptionError(f"{name} is not a layer", expected="a layer of sparsebp.nn", got=type(value).__name__,
                          remedy="Pass the layers one by one: Sequential(*layers)" if several else
                          "Pass an instance: ReLU(), not ReLU")  # fmt: skip
    return value


def check_input(
    array: Array, *, name: str = "x", dtype: Any = None, shape: tuple[int | None, ...] | None = None, like: Array = None
) -> ModuleType:
    """Check a layer's array argument and return its namespace. Strides are free: layers copy where they must."""
    # array: The argument.
    # name: Its name in messages.
    # dtype: The dtype it must have; None: float32 or float64.
    # shape: Lengths it must have, None for any length; None: any shape.
    # like: An array whose namespace it must share, or None.
    if type(array) is np.ndarray and (like is None or type(like) is np.ndarray):  # nearly always
        fits = array.dtype in backend.FLOAT_DTYPES if dtype is None else array.dtype == dtype
        if shape is not None and array.shape != shape:
            fits = fits and array.ndim == len(shape)
            for length, wanted in zip(array.shape, shape, strict=False):
                fits = fits and (wanted is None or length == wanted)
        if fits:
            return np
        xp: ModuleType = np
    else:
        xp = backend.namespace(**{name: array}, **backend.given(like=like))
    if dtype is None:
        backend.float_dtype(array.dtype)
    backend.check_array(name, array, dtype=dtype, shape=shape, contiguous=False)
    return xp


def check_sequence_input(x: Array, features: int, like: Array) -> ModuleType:
    """Check x (T, B, features), or batch first, which must not be empty; return its namespace."""
    xp = check_input(x, dtype=like.dtype, shape=(None, None, features), like=like)
    if x.size == 0:
        raise ShapeError("x is empty", expected="at least one step and one sample", got=x.shape,
                         remedy="Skip empty batches and sequences")  # fmt: skip
    return xp


def swap_batch_time(array: Array, batch_first: bool) -> Array:
    """Return (T, B, n) from an array in a layer's order of axes, or the other way round; C-contiguous."""
    return backend.namespace(array).ascontiguousarray(array.transpose(1, 0, 2) if batch_first else array)


def check_gy(gy: Array, shape: tuple[int, ...], dtype: Any, like: Array = None) -> ModuleType:
    """Check the gradient with respect to an output of `shape` and return its namespace."""
    if type(gy) is type(like) is np.ndarray and gy.shape == shape and gy.dtype == dtype:  # nearly always
        return np
    return check_input(gy, name="gy", dtype=dtype, shape=shape, like=like)
