"""The recurrent benchmarks' workload, twice: sparsebp's classifier and its twin in PyTorch, with the same weights.

A recurrent layer reads a sequence, a linear layer reads its last hidden state, softmax cross-entropy, Adam (BPPSA §4.1,
§4.2). Both sides start from the same parameters and see the same batch, and their gradients are compared before
anything is timed.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from benchmarks.tools.peers import import_torch
from sparsebp import nn, optim
from sparsebp.core import backend
from sparsebp.core.errors import MissingDependencyError, OptionError

CELLS: dict[str, tuple[int, int]] = {"RNN": (1, 20), "GRU": (38, 20)}
"""Input and hidden size of the paper's two models (BPPSA §4.1, §4.2 with its S features)."""

SIZES = CELLS | {"LSTM": (38, 20)}
"""The same of all cells: an LSTM is as large as the GRU."""

CLASSES = 10
LEARNING_RATE = 1e-3


class SequenceWorkload:
    """One training step of a sequence classifier, ours and PyTorch's.

    Parameters
    ----------
    cell
        ``"RNN"``, ``"GRU"`` or ``"LSTM"``.
    length, batch
        T and B.
    dtype
        float32 or float64.
    device
        ``"cpu"`` or ``"cuda"``, for both sides.
    backward
        The algorithm of our recurrent layer.
    input_size, hidden
        Other sizes than the paper's.
    classes
        Number of classes.
    """

    def __init__(
        self, cell: str, length: int, batch: int, *, dtype: Any = np.float32, device: str = "cpu",
        backward: str = "auto", input_size: int | None = None, hidden: int | None = None, classes: int = CLASSES,
    ) -> None:  # fmt: skip
        if cell not in SIZES:
            raise OptionError(
                "Unknown cell", expected=" or ".join(map(repr, SIZES)), got=repr(cell), remedy="Choose one"
            )
        paper_input, paper_hidden = SIZES[cell]
        input_size = input_size or paper_input
        self.cell, self.length, self.batch, self.device = cell, length, batch, device
        self.classes = classes
        self.dtype, self.input_size, self.hidden = backend.float_dtype(dtype), input_size, hidden or paper_hidden
        rng = np.random.default_rng(0)
        layer: Any = getattr(nn, cell)
        self.model: Any = nn.SequenceClassifier(
            layer(input_size, self.hidden, backward=backward, dtype=dtype, rng=rng),
            nn.Linear(self.hidden, classes, dtype=dtype, rng=rng),
        )
        self.state = {name: backend.to_host(array).copy() for name, array in self.model.state_dict().items()}
        x = rng.standard_normal((length, batch, input_size)).astype(self.dtype)
        target = rng.integers(0, classes, batch)
        self.host_batch = (x, target)
        self.model.to(device)
        self.x, self.target = backend.to_device(x, device), backend.to_device(target, device)
        self.loss = nn.CrossEntropyLoss()
        self.optimizer = optim.Adam(self.model.parameters(), lr=LEARNING_RATE)

    # ---- ours --------------------------------------------------------------------------------------------------------

    def forward(self) -> tuple[Any, Any]:
        """Run our forward pass and loss; return what the backward pass needs."""
        logits, saved = self.model.forward(self.x)
        _, loss_saved = self.loss.forward(logits, self.target)
        return saved, loss_saved

    def backward(self, kept: tuple[Any, Any]) -> dict[str, Any]:
        """Run our backward pass: the gradients of all parameters."""
        saved, loss_saved = kept
        return self.model.weight_grad(self.loss.input_grad(loss_saved), saved)

    def step(self) -> None:
        """Run one whole training step of ours."""
        self.optimizer.step(self.backward(self.forward()))

    @property
    def flops(self) -> int:
        """Operations of the step's matrix products, but for those of the classes: forward, and back to all weights."""
        rows = {"RNN": 1, "GRU": 3, "LSTM": 4}[self.cell] * self.hidden
        return 2 * self.length * self.batch * rows * (2 * self.input_size + 3 * self.hidden)

    def choice(self) -> Any:
        """Return what the recurrent layer's ``auto`` chose for this workload, and why."""
        saved, _ = self.forward()
        return saved.rnn.backward_choice

    # ---- and others --------------------------------------------------------------------------------------------------

    def agreement(self, twin: TorchTwin) -> float:
        """Return `difference` from PyTorch's gradients, from the same weights."""
        return self.difference(twin.gradients(self.state))

    def difference(self, theirs: dict[str, np.ndarray]) -> float:
        """Return the largest ``‖ours − theirs‖ / ‖theirs‖`` over all parameters' gradients, at the first weights."""
        self.model.load_state_dict(self.state)
        ours = {name: backend.to_host(grad) for name, grad in self.backward(self.forward()).items()}
        return max(
            float(np.linalg.norm(ours[name] - grad) / max(np.linalg.norm(grad), np.finfo(self.dtype).tiny))
            for name, grad in theirs.items()
        )


class TorchTwin:
    """The workload in PyTorch: ``torch.nn`` (cuDNN on a GPU), ``torch.optim.Adam(fused=True)``, its fastest form."""

    def __init__(self, workload: SequenceWorkload) -> None:
        torch = self._torch = import_torch()
        device = torch.device(workload.device)
        if device.type == "cuda" and not torch.cuda.is_available():
            raise MissingDependencyError(
                "This PyTorch was built without CUDA, and the GPU benchmark compares with it",
                remedy="Install a CUDA build of PyTorch",
            )
        dtype = torch.float32 if workload.dtype == np.float32 else torch.float64
        layer = getattr(torch.nn, workload.cell)
        self.rnn = layer(workload.input_size, workload.hidden, device=device, dtype=dtype)
        self.head = torch.nn.Linear(workload.hidden, workload.classes, device=device, dtype=dtype)
        self.model = torch.nn.ModuleDict({"rnn": self.rnn, "head": self.head})
        self._load(workload.state)
        x, target = workload.host_batch
        self.x, self.target = torch.from_numpy(x).to(device), torch.from_numpy(target).to(device)
        self.loss = torch.nn.CrossEntropyLoss()
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=LEARNING_RATE, fused=True)

    def _load(self, state: dict[str, np.ndarray]) -> None:
        self.model.load_state_dict({name: self._torch.from_numpy(array.copy()) for name, array in state.items()})

    def forward(self) -> Any:
        """Run the forward pass and the loss, with the gradients of the last step dropped."""
        self.optimizer.zero_grad(set_to_none=True)
        _, last = self.rnn(self.x)
        h_n = last[0] if isinstance(last, tuple) else last  # an LSTM's (h_n, c_n)
        return self.loss(self.head(h_n[-1]), self.target)

    def step(self) -> None:
        """Run one whole training step."""
        self.backward(self.forward())
        self.optimizer.step()

    def backward(self, loss: Any) -> None:
        """Run the backward pass."""
        loss.backward()

    def gradients(self, state: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return all gradients at the parameters `state`."""
        self._load(state)
        self.backward(self.forward())
        return {name: parameter.grad.cpu().numpy() for name, parameter in self.model.named_parameters()}


def chunk_count(length: int) -> int:
    """Return the chunks that a recurrent layer takes when ``backward="chunked"`` is asked for: ``⌊√T⌋``."""
    return max(1, math.isqrt(length))
