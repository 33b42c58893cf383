"""A tiny model, loss and optimizer in plain NumPy, with the trainer's interfaces; also a script for the kill test.

As a script: ``python tiny.py FOLDER RESUME PAUSE`` trains 4 epochs of 8 steps with a checkpoint every 3 steps, sleeps
PAUSE seconds after each step, and prints the step numbers.
"""

import sys
import time

import numpy as np


class TinyModel:
    """Mean over time, then a linear layer; `noise` draws from a generator as dropout does."""

    def __init__(self, inputs=2, classes=3, rng=0, noise=0.0, dtype=np.float32):
        g = np.random.default_rng(rng)
        self.weight = g.normal(size=(classes, inputs)).astype(dtype)
        self.bias = np.zeros(classes, dtype)
        self.noise, self._generator = noise, np.random.default_rng(rng + 1)
        self.training = True

    def parameters(self):
        return {"head.weight": self.weight, "head.bias": self.bias}

    def state_dict(self):
        return {name: array.copy() for name, array in self.parameters().items()}

    def load_state_dict(self, state):
        for name, array in self.parameters().items():
            array[...] = state[name]

    def generators(self):
        return {"noise": self._generator}

    def train(self):
        self.training = True

    def eval(self):
        self.training = False

    def forward(self, x):
        mean = x.mean(axis=0)
        if self.training and self.noise:
            mean = mean + self.noise * self._generator.standard_normal(mean.shape).astype(mean.dtype)
        return mean @ self.weight.T + self.bias, mean

    def weight_grad(self, gy, saved):
        return {"head.weight": gy.T @ saved, "head.bias": gy.sum(axis=0)}


class TinyLoss:
    def forward(self, prediction, target):
        shifted = prediction - prediction.max(axis=1, keepdims=True)
        log_sum = np.log(np.exp(shifted).sum(axis=1, keepdims=True))
        log_p = shifted - log_sum
        rows = np.arange(len(target))
        return float(-log_p[rows, target].mean()), (np.exp(log_p), target)

    def input_grad(self, saved):
        p, target = saved
        grad = p.copy()
        grad[np.arange(len(target)), target] -= 1
        return grad / p.dtype.type(len(target))


class TinyUpdate:
    def __init__(self, optimizer, lr):
        self.optimizer, self.lr, self.remaining = optimizer, lr, tuple(optimizer.params)

    def apply(self, grads):
        for name, grad in grads.items():
            array, buffer = self.optimizer.params[name], self.optimizer.buffers[name]
            buffer *= array.dtype.type(0.9)
            buffer += grad
            array[...] -= array.dtype.type(self.lr) * buffer
        self.remaining = tuple(name for name in self.remaining if name not in grads)


class TinyMomentum:
    def __init__(self, params, lr=0.1):
        self.params, self.lr, self.count = params, lr, 0
        self.buffers = {name: np.zeros_like(array) for name, array in params.items()}

    def step(self, grads):
        self.begin().apply(grads)

    def begin(self):
        self.count += 1
        return TinyUpdate(self, self.lr)

    def state_dict(self):
        buffers = {f"buffer.{name}": array for name, array in self.buffers.items()}
        return buffers | {"lr": self.lr, "count": self.count}

    def load_state_dict(self, state):
        self.lr, self.count = state["lr"], state["count"]
        for name, array in self.buffers.items():
            array[...] = state[f"buffer.{name}"]


class TinyDecay:
    def __init__(self, optimizer):
        self.optimizer, self.count = optimizer, 0

    def step(self):
        self.count += 1
        self.optimizer.lr *= 0.99

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state):
        self.count = state["count"]


def dataset(samples=30, steps=5, seed=3):
    from sparsebp.data import ArrayDataset

    g = np.random.default_rng(seed)
    target = g.integers(3, size=samples)
    inputs = g.normal(size=(samples, steps, 2)).astype(np.float32) + target[:, None, None].astype(np.float32)
    return ArrayDataset(inputs, target)


def trainer(folder=None, *, callbacks=(), rng=7, noise=0.3, every=3, clip_norm=1.0, config=None, inputs=2):
    from sparsebp.train import Trainer

    model = TinyModel(noise=noise, inputs=inputs)
    optimizer = TinyMomentum(model.parameters())
    return Trainer(
        model,
        TinyLoss(),
        optimizer,
        lr_scheduler=TinyDecay(optimizer),
        clip_norm=clip_norm,
        callbacks=callbacks,
        checkpoint_dir=folder,
        checkpoint_every=every,
        rng=rng,
        config=config,
    )


def main():
    from sparsebp.train import Callback

    folder, resume, pause = sys.argv[1], sys.argv[2] == "True", float(sys.argv[3])

    class Say(Callback):
        def on_step(self, history):
            print(history.steps, flush=True)
            time.sleep(pause)

    trainer(folder, callbacks=[Say()]).fit(dataset(), epochs=4, batch_size=4, validation=dataset(7), resume=resume)


if __name__ == "__main__":
    main()
