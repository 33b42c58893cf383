"""Models, optimizers and a plain training loop, for the tests of orders: every order must give what the loop gives.

States of models and optimizers, and their comparison, are here for the tests on several ranks, too.
"""

from __future__ import annotations

import hashlib

import numpy as np
import pytest

from sparsebp import models, nn, optim
from sparsebp.core.errors import OptionError, SparseBPError
from sparsebp.data import ArrayDataset, epoch_order
from sparsebp.optim import clip_grad_norm, global_norm
from sparsebp.runtime.actions import Stages
from sparsebp.schedule import Action, Schedule
from sparsebp.schedule.builders import conventional
from sparsebp.train import Callback

IMAGES = np.random.default_rng(5).standard_normal((22, 2, 6, 6)).astype(np.float32)
SEQUENCES = np.random.default_rng(6).standard_normal((22, 5, 3)).astype(np.float32)
WORDS = np.random.default_rng(8).integers(5, size=(22, 4)).astype(np.uint8)
CLASSES = np.random.default_rng(7).integers(3, size=22)


class Stop(Callback):
    """Fails after a step."""

    reads_model = False

    def __init__(self, step, error=KeyboardInterrupt):
        self.step, self.error = step, error

    def on_step(self, history):
        if history.steps == self.step:
            raise self.error


class Rows:
    """Samples along the first axis."""

    reads_model = False

    def __init__(self, x, target):
        self.x, self.target = x, target

    def __len__(self):
        return len(self.x)

    def batch(self, indices):
        return self.x[indices], self.target[indices]


def images(size=22):
    return Rows(IMAGES[:size], CLASSES[:size])


def sequences(size=22):
    return ArrayDataset(SEQUENCES[:size], CLASSES[:size])


def mlp(backward="bp"):
    rng = np.random.default_rng(0)
    return nn.Sequential(
        nn.Flatten(), nn.Linear(72, 9, rng=rng), nn.Tanh(), nn.Dropout(0.3, rng=1),
        nn.Sequential(nn.Linear(9, 8, rng=rng), nn.ReLU()), nn.Linear(8, 3, rng=rng), backward=backward,
    )  # fmt: skip


def conv(backward="bp"):
    rng = np.random.default_rng(0)
    body = nn.Sequential(nn.Conv2d(3, 3, 3, padding=1, rng=rng), nn.BatchNorm2d(3), nn.ReLU())
    return nn.Sequential(
        nn.Conv2d(2, 3, 3, rng=rng), nn.BatchNorm2d(3), nn.ReLU(), nn.Residual(body), nn.MaxPool2d(2),
        nn.Concat(nn.Conv2d(3, 2, 1, rng=rng), nn.Identity()), nn.Flatten(), nn.Linear(20, 3, rng=rng),
        backward=backward,
    )  # fmt: skip


def grouped(backward="bp"):
    rng = np.random.default_rng(0)
    linear = nn.Linear(8, 8, rng=rng)
    return nn.Sequential(
        nn.Sequential(nn.Stage(nn.Conv2d(2, 2, 3, rng=rng), nn.BatchNorm2d(2), nn.ReLU()), nn.Flatten()),
        nn.Stage(nn.Linear(32, 8, rng=rng), nn.Tanh(), nn.Dropout(0.3, rng=1), linear, nn.ReLU(), linear), nn.Tanh(),
        nn.Stage(nn.Linear(8, 3, rng=rng)), backward=backward,
    )  # fmt: skip


def shared(backward="bp"):
    rng = np.random.default_rng(0)
    linear = nn.Linear(6, 6, rng=rng)
    return nn.Sequential(
        nn.Flatten(), nn.Linear(72, 6, rng=rng), nn.Tanh(), linear, nn.Tanh(), linear, nn.Sigmoid(), linear,
        nn.Linear(6, 3, rng=rng), backward=backward,
    )  # fmt: skip


def wide(backward="bp"):
    """Its second weight's gradient is large enough to be used row by row."""
    rng = np.random.default_rng(0)
    return nn.Sequential(
        nn.Flatten(), nn.Linear(72, 600, rng=rng), nn.ReLU(), nn.Linear(600, 480, rng=rng), nn.Tanh(),
        nn.Linear(480, 3, rng=rng), backward=backward,
    )  # fmt: skip


def gru(backward="auto"):
    return nn.SequenceClassifier(nn.GRU(3, 4, 2, rng=0, backward=backward), nn.Linear(4, 3, rng=1))


def transformer(inputs=3, tokens=False, dropout=0.2):
    sizes = {"steps": 5, "width": 6, "heads": 2, "layers": 2}
    return models.transformer_classifier(inputs, 3, tokens=tokens, dropout=dropout, rng=0, **sizes)


MODELS = {
    "mlp": (mlp, images), "wide": (wide, images),
    "mlp, hybrid": (lambda: mlp("hybrid"), images), "conv": (conv, images),
    "conv, blelloch": (lambda: conv("blelloch"), images), "shared": (shared, images),
    "grouped": (grouped, images), "grouped, blelloch": (lambda: grouped("blelloch"), images),
    "shared, linear": (lambda: shared("linear"), images), "gru": (gru, sequences),
    "transformer": (transformer, lambda: Rows(SEQUENCES, CLASSES)),
    "transformer, words": (lambda: transformer(5, True), lambda: ArrayDataset(WORDS, CLASSES, dtype=np.int64)),
}  # fmt: skip

OPTIMIZERS = {
    "sgd": lambda p: optim.SGD(p, 0.05), "nesterov": lambda p: optim.SGD(p, 0.05, 0.9, nesterov=True),
    "adam": lambda p: optim.Adam(p, 0.01), "adamw": lambda p: optim.AdamW(p, 0.01),
    "amsgrad": lambda p: optim.Adam(p, 0.01, amsgrad=True), "adagrad": lambda p: optim.Adagrad(p, 0.05),
    "adadelta": lambda p: optim.Adadelta(p, 1.0), "rmsprop": lambda p: optim.RMSprop(p, 0.01, momentum=0.5),
    "nadam": lambda p: optim.NAdam(p, 0.01), "radam": lambda p: optim.RAdam(p, 0.01, betas=(0.8, 0.9)),
}  # fmt: skip


def order_for(model, build=conventional, **options):
    """Return the schedule of a builder for a model, by default the conventional one."""
    stages = Stages(model)
    return build(stages=len(stages), unweighted=stages.unweighted, **options)


def random_order(rng, graph, streams, first):
    """Return a random schedule of one worker: a topological order, micro-batches ascending, split over two streams."""
    waiting = list(graph.required())
    done, order = set(), []
    while waiting:
        ready = [a for a in waiting if all(need in done or need not in waiting for need in graph.predecessors(a))
                 and not (a.microbatch and Action(a.stage, a.kind, a.microbatch - 1) in waiting)]  # fmt: skip
        action = ready[rng.integers(len(ready))]
        waiting.remove(action)
        done.add(action)
        order.append(action)
    # W of a stage goes to one stream with all its micro-batches, I and U go anywhere.
    share = {"F": 0.0, "I": rng.choice([0.0, 0.3]), "W": 0.5, "U": 0.5}
    sub = set()
    if streams == 2:
        weights = {stage for stage in range(graph.stages) if rng.random() < share["W"]}
        sub = {a for a in order if (a.stage in weights if a.kind == "W" else rng.random() < share[a.kind])}
    lanes = {"main": [a for a in order if a not in sub], "sub": [a for a in order if a in sub]}
    return Schedule.of(graph, [{name: lane for name, lane in lanes.items() if lane}])


def parts_of(indices, accumulate):
    return np.array_split(indices, min(accumulate, len(indices)))


def plain(model, data, optimizer, *, epochs, batch_size, accumulate=1, clip_norm=None, scheduler=None, steps=None,
          spoilt=False, shuffled=True):  # fmt: skip
    """Train what the optimizer has without executor; return losses and norms.

    Stop after `steps` steps; `spoilt`: after the next one's first forward.
    """
    loss, losses, norms = nn.CrossEntropyLoss(), [], []
    for epoch in range(epochs):
        order = epoch_order(len(data), seed=3, epoch=epoch) if shuffled else np.arange(len(data))
        for start in range(0, len(data), batch_size):
            if len(losses) == steps and not spoilt:
                return losses, norms
            indices = order[start : start + batch_size]
            total, value = {}, 0.0
            for part in parts_of(indices, accumulate):
                x, target = data.batch(part)
                y, saved = model.forward(x)
                if len(losses) == steps:
                    return losses, norms
                mean, loss_saved = loss.forward(y, target)
                gy, share = loss.input_grad(loss_saved), len(part) / len(indices)
                if len(part) < len(indices):
                    mean, gy = share * mean, gy * gy.dtype.type(share)
                value += mean
                for name, grad in model.weight_grad(gy, saved).items():
                    if name in optimizer.params:
                        total[name] = total[name] + grad if name in total else grad
            losses.append(value)
            norms.append(global_norm(total))
            if clip_norm is not None:
                clip_grad_norm(total, clip_norm)
            optimizer.step(total)
            if scheduler is not None:
                scheduler.step()
    return losses, norms


def state_of(model, optimizer):
    state = {f"model.{name}": array for name, array in model.state_dict().items()}
    return state | {f"optimizer.{name}": value for name, value in optimizer.state_dict().items()}


def assert_same(got, want):
    assert got.keys() == want.keys()
    for name, value in want.items():
        np.testing.assert_array_equal(got[name], value, err_msg=name)


def refused(call, *said, error=OptionError):
    """Check that the call raises exactly this error, with what was expected and given, and these texts."""
    with pytest.raises(SparseBPError) as caught:
        call()
    assert type(caught.value) is error
    assert caught.value.expected is not None and caught.value.got is not None
    assert all(text in str(caught.value) for text in said)


def assert_close(got, want, rtol, atol=None):
    """Compare states; whatever is no array must be equal."""
    assert got.keys() == want.keys()
    for name, value in want.items():
        if isinstance(value, np.ndarray):
            np.testing.assert_allclose(got[name], value, rtol, rtol if atol is None else atol, err_msg=name)
        else:
            assert got[name] == value, name


def digest(state, running=True):
    """Return a digest of all names and values of a state, with or without running statistics."""
    found = hashlib.sha256()
    for name, value in sorted(state.items()):
        if running or not ("running" in name or "tracked" in name):
            found.update(f"{name} {value if np.ndim(value) == 0 else ''}".encode())
            found.update(np.asarray(value).tobytes())
    return found.hexdigest()
