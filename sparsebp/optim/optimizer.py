"""The base of optimizers: what users call. Groups, buffers and launches are in `sparsebp.optim.groups`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sparsebp.core.errors import OptionError
from sparsebp.core.types import Array
from sparsebp.optim.checks import check_named
from sparsebp.optim.groups import ParameterGroups
from sparsebp.optim.state import load_state, pack_state
from sparsebp.optim.update import DeviceUpdate, Update, launch


class Optimizer(ParameterGroups):
    """Updates parameters in place, all in one pass over memory, all of them in one kernel launch.

    Parameters
    ----------
    params
        ``model.parameters()``: live C-contiguous arrays by name. Or a list of groups as in torch.optim,
        ``[{"params": {name: array}, "lr": 0.1}, …]``: what a group leaves out has the value given to the optimizer.
        Move the model to its device first.
    defaults
        The options of every group, with the values they have unless the group says otherwise.

    Attributes
    ----------
    param_groups : list of dict
        Each group's ``"params"`` and options. Options may be set at any time; an update takes them as they are when
        it begins.

    Raises
    ------
    OptionError
        There are no parameters or they have no names, a name or an array comes twice, an option is unknown, of another
        type or out of range.
    DeviceError, DTypeError, LayoutError
        A parameter is no array, not of float32 or float64, not C-contiguous, or read-only.
    """

    # ---- updates ---------------------------------------------------------------------------------------------------

    def step(self, grads: Mapping[str, Array]) -> None:
        """Update every parameter from its gradient.

        Parameters
        ----------
        grads
            Gradients with exactly the keys, shapes, dtypes and namespace of the parameters.

        Raises
        ------
        OptionError
            Keys are missing or unexpected.
        ShapeError, DTypeError, LayoutError, DeviceError
            A gradient does not fit, or is no array. Nothing has been updated then.
        """
        check_named("The gradients", grads)
        if grads.keys() != self.params.keys():
            missing = sorted(self.params.keys() - grads.keys())
            unexpected = sorted(map(str, grads.keys() - self.params.keys()))
            raise OptionError(
                "The gradients do not belong to the parameters", expected=", ".join(self.params),
                got=f"missing {missing}, unexpected {unexpected}",
                remedy="Pass what weight_grad of the same model returned",
            )  # fmt: skip
        launch(self, grads, self._options_now())

    def begin(self) -> Update:
        """Open one update with the options as they are now: what is set later belongs to later updates.

        Raises
        ------
        OptionError
            An option has been set to a value out of range, or one that needs other buffers (momentum, say) was
            switched on or off.
        """
        return Update(self, self._options_now())

    def begin_on_device(self) -> DeviceUpdate:
        """Open one update that a captured CUDA graph can replay; see there.

        Raises
        ------
        OptionError
            As `begin`.
        """
        return DeviceUpdate(self, self._options_now())

    # ---- state -----------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return a flat dict of numbers and arrays, which a safetensors file with a header can hold.

        ``"Adam.version"`` (the class's name) says whose it is; ``"group0.lr"`` and so on are the options,
        ``"step.<parameter>"`` the number of updates, ``"<buffer>.<parameter>"`` a copy of each buffer.
        """
        return pack_state(self)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned, options included; nothing is written unless everything fits.

        Raises
        ------
        FileFormatError
            It is the state of another optimizer, or names are missing or unexpected.
        OptionError
            An option or a number of updates is out of range.
        ShapeError, DTypeError
            A buffer does not fit its parameter.
        """
        load_state(self, state)
