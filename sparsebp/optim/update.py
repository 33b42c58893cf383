"""One update of all parameters, which may be applied piece by piece, in any order."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from sparsebp import backend
from sparsebp.core.errors import OptionError, SparseBPError
from sparsebp.core.locks import forkable_lock
from sparsebp.core.types import Array, ProductFactors
from sparsebp.optim.checks import check_is_array, check_named, check_parameter
from sparsebp.optim.groups import ParameterGroups


class Update:
    """An update that has begun: `Optimizer.begin` returns it. Every parameter is updated once at most.

    The result does not depend on the pieces: applying names one by one gives, bit for bit, what one call with all of
    them gives. Threads may apply different names at the same time.
    """

    def __init__(self, optimizer: ParameterGroups, options: Array) -> None:
        self._optimizer = optimizer
        self._options = options
        self._steps: Array | None = None
        self._open = set(optimizer.params)
        self._lock = forkable_lock()

    @property
    def remaining(self) -> tuple[str, ...]:
        """Names of the parameters that have not been updated yet, in the optimizer's order."""
        return tuple(name for name in self._optimizer.params if name in self._open)

    def apply(self, grads: Mapping[str, Array]) -> None:
        """Update the parameters that `grads` names, and no others.

        Parameters
        ----------
        grads
            Gradients with the shapes, dtypes and namespace of their parameters.

        Raises
        ------
        OptionError
            A name is not the optimizer's, or has been applied before.
        ShapeError, DTypeError, LayoutError, DeviceError
            A gradient does not fit. Nothing has been updated then.
        """
        check_named("The gradients", grads)
        if not grads:
            return
        with self._lock:  # a name is taken before it is worked on, so that no other thread can take it
            self._check_open(grads)
            self._open.difference_update(grads)
        try:
            launch(self._optimizer, grads, self._options, self._steps)
        except SparseBPError:
            with self._lock:
                self._open.update(grads)
            raise

    def takes_product(self, name: str, factors: ProductFactors) -> bool:
        """Say whether `apply_product` takes this gradient: on the host, a large product of thin factors."""
        return self._optimizer._takes_product(name, factors)

    def apply_product(self, name: str, factors: ProductFactors) -> float:
        """Update one parameter by a gradient that is a matrix product; the gradient is never there as a whole.

        Some of its rows are computed and used at a time, while the processor has them in its cache. The parameter is
        bit for bit what `apply` makes of it, unless some of those rows' squares are not finite: they are left out.

        Parameters
        ----------
        name
            The parameter's name.
        factors
            Two matrices; the gradient is their product. `takes_product` has been asked.

        Returns
        -------
        float
            The sum of the gradient's squares, as `squared_norms` returns it.

        Raises
        ------
        OptionError
            The name is not the optimizer's, or has been applied before.
        """
        with self._lock:
            self._check_open([name])
            self._open.remove(name)
        return self._optimizer._run_product(name, factors, self._options)

    def _check_open(self, names: Iterable[str]) -> None:
        if self._open.issuperset(names):
            return
        wrong = [name for name in names if name not in self._open]
        known = [name for name in wrong if name in self._optimizer.params]
        raise OptionError(
            "A parameter has been updated already" if known else "A gradient belongs to no parameter",
            expected=", ".join(self.remaining) or "no more names", got=", ".join(known or wrong),
            remedy="Apply each parameter's gradient once; begin() opens the next update",
        )  # fmt: skip


class DeviceUpdate(Update):
    """An update whose options and step numbers are read on the device when its kernels run, so that it can be replayed.

    `write` begins each replay; `apply` is called once, while the kernels are recorded: they count the steps on.
    """

    def __init__(self, optimizer: ParameterGroups, options: np.ndarray) -> None:
        self._xp, self._written = optimizer._kinds[0][0], options
        super().__init__(optimizer, self._xp.array(options))
        self._steps: Array = self._xp.array(optimizer._steps)
        self._counted = optimizer._steps.copy()

    def write(self) -> None:
        """Count one more update of every parameter; send options and numbers where the device has others.

        Raises
        ------
        OptionError
            As `Optimizer.begin`.
        """
        optimizer = self._optimizer
        options = optimizer._options_now()
        if not np.array_equal(self._counted, optimizer._steps):  # steps of another graph, or of none, or a loaded state
            self._steps[...] = self._xp.asarray(optimizer._steps)
        optimizer._steps += 1
        self._counted = optimizer._steps.copy()
        if options is not self._written:
            self._options[...] = self._xp.asarray(options)
            self._written = options

    def take_back(self) -> None:
        """Count the parameters that have not been updated as they were before `write`: the step was broken off."""
        rows = [self._optimizer._rows[name] for name in self._open]
        self._optimizer._steps[rows] -= 1


def launch(optimizer: ParameterGroups, grads: Mapping[str, Array], options: Array, steps: Array | None = None) -> None:
    """Update the parameters that `grads` names; `options` has a row for each of all parameters.

    So has `steps`, see `ParameterGroups._run`.

    Raises
    ------
    ShapeError, DTypeError, LayoutError, DeviceError
        A gradient does not fit; the message names it. Nothing has been updated then.
    """
    names, kinds = optimizer._names, optimizer._kinds
    whole = len(grads) == len(names)
    rows = range(len(names)) if whole else sorted(map(optimizer._rows.__getitem__, grads))
    if not optimizer._uniform:
        _check_arrays(optimizer, grads)  # all of them before the first launch
        for kind in dict.fromkeys(kinds[row] for row in rows):
            part = [row for row in rows if kinds[row] == kind]
            optimizer._run(part, [grads[names[row]] for row in part], options, steps)
        return
    chosen = names if whole else [names[row] for row in rows]
    try:
        optimizer._run(rows, list(map(grads.__getitem__, chosen)), options, steps)
    except (SparseBPError, AttributeError, TypeError):
        _check_arrays(optimizer, grads)  # knows the name of what the kernel has refused, or of what is no array
        raise


def _check_arrays(optimizer: ParameterGroups, grads: Mapping[str, Array]) -> None:
    for name, grad in grads.items():
        param = optimizer.params[name]
        check_parameter(name, param)  # it may have become read-only
        check_is_array(f"The gradient of {name}", grad)
        backend.namespace(param, grad)
        backend.check_array(f"gradient of {name}", grad, dtype=param.dtype, shape=param.shape)
