"""A model trained, evaluated, frozen, converted and interrupted in any order equals its twin in a plain loop."""

from __future__ import annotations

import threading

import numpy as np
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

import orders
from sparsebp import nn
from sparsebp.runtime.actions import Stages
from sparsebp.runtime.executor import PlainExecutor
from sparsebp.schedule import StepGraph
from sparsebp.train import Trainer
from within import within

SIZES = st.sampled_from([1, 2, 5, 6, 19, 30])
SAMPLES = st.sampled_from([1, 7, 13, 19, 22])
WAYS = st.tuples(
    st.sampled_from(["none", "forward", "backward", "F", "U", "I", "I"]), st.sampled_from([1, 2]), st.integers(1, 3),
    st.sampled_from([None, 0.4]), st.integers(0, 999),
)  # fmt: skip
"""Fusion, or with what a random schedule begins; streams, micro-batches, norm to clip by, seed of the schedule."""


class BrokenError(Exception):
    """What fails."""


class Loss(nn.CrossEntropyLoss):
    """Fails at a call."""

    left = -1

    def forward(self, prediction, target):
        if self.left == 0:
            self.left = -1
            raise BrokenError
        self.left -= 1
        return super().forward(prediction, target)


class Training(RuleBasedStateMachine):
    """The model and its twin."""

    @initialize(name=st.sampled_from(["mlp", "conv"]), optimizer=st.sampled_from(["nesterov", "adam", "sgd"]), way=WAYS)
    def build(self, name, optimizer, way):
        self.model, self.twin = orders.MODELS[name][0](), orders.MODELS[name][0]()
        self.make, self.way = orders.OPTIMIZERS[optimizer], way
        self.optimize(frozenset())

    def optimize(self, frozen):
        self.opt, self.twin_opt = (
            self.make({n: a for i, (n, a) in enumerate(net.parameters().items()) if i not in frozen})
            for net in (self.model, self.twin)
        )
        self.choose(self.way)

    def data(self, samples):
        return orders.Rows(orders.IMAGES[:samples].astype(self.model.dtype), orders.CLASSES[:samples])

    def order(self, kind, streams, accumulate, seed):
        """Return options of a trainer: a fusion, or a random schedule of the whole model."""
        if kind in ("none", "forward", "backward"):
            return {"fusion": kind}
        stages = Stages(self.model)
        graph = StepGraph(len(stages), accumulate, stages.unweighted, "step", first=kind)
        return {"schedule": orders.random_order(np.random.default_rng(seed), graph, streams, kind)}

    def choose(self, way):
        self.way = way
        kind, streams, accumulate, clip, seed = way
        clip = clip if kind in ("none", "forward") else None
        options = self.order(kind, streams, accumulate, seed)
        self.loss, self.accumulate, self.clip = Loss(), accumulate, clip
        self.trainer = Trainer(self.model, self.loss, self.opt, accumulate=accumulate, clip_norm=clip, rng=3, **options)

    @rule(way=WAYS)
    def train_otherwise(self, way):
        """Another trainer of the same model and optimizer."""
        self.choose(way)

    @rule(samples=SAMPLES, size=SIZES, epochs=st.integers(0, 2))
    def fit(self, samples, size, epochs):
        data = self.data(samples)
        history = within(lambda: self.trainer.fit(data, epochs=epochs, batch_size=size, validation=self.data(3)))
        self.plain(data, size, epochs, history)

    @rule(samples=SAMPLES, size=SIZES, at=st.integers(0, 6), where=st.sampled_from(["loss", "callback", "data"]))
    def break_off(self, samples, size, at, where):
        """Training that fails leaves what was done; then it is gone on with."""
        data, trainer = self.data(samples), self.trainer
        steps = -(-samples // size)
        if at >= steps or (where == "loss" and self.accumulate > 1):
            return
        kept = trainer.callbacks
        if where == "loss":
            self.loss.left = at
        elif where == "callback":
            trainer.callbacks = (orders.Stop(at + 1, BrokenError),)
        else:
            count, batch = [0], data.batch

            def failing(indices):
                count[0] += 1
                if count[0] > at * self.accumulate:
                    raise BrokenError
                return batch(indices)

            data.batch = failing
        try:
            within(lambda: trainer.fit(data, epochs=1, batch_size=size))
        except BrokenError:
            done = trainer.history.steps
        else:  # fewer micro-batches than thought
            done = None
        trainer.callbacks = kept
        late = trainer.current_schedule.graph.first == "I"
        if done is None:
            assert where == "data" and self.accumulate > 1
        elif where == "callback" and not late:
            assert done == at + 1
        limit = {"spoilt": where == "loss", "steps": done}
        # A late step is told of when the next one has begun, which closing brings to its end.
        self.plain(self.data(samples), size, 1, trainer.history, **limit)

    def plain(self, data, size, epochs, history, steps=None, spoilt=False):
        """Do the same with the twin; a step that was broken off at its loss had its forward."""
        training = self.twin.training
        modes = [(layer, layer.training) for _, layer in self.twin.modules()]
        if not training:
            self.twin.train()
        losses, norms = orders.plain(
            self.twin, data, self.twin_opt, epochs=epochs, batch_size=size, accumulate=self.accumulate,
            clip_norm=self.clip, steps=steps, spoilt=spoilt,
        )  # fmt: skip
        for layer, mode in modes:
            layer.training = mode
        assert (history.loss, history.grad_norm) == (losses, norms)

    @rule(samples=SAMPLES, size=SIZES)
    def evaluate(self, samples, size):
        data = self.data(samples)
        kept = [(layer, layer.training) for _, layer in self.twin.modules()]
        self.twin.eval()
        x, target = data.batch(np.arange(samples))
        wanted = [self.twin(x[i : i + size]) for i in range(0, samples, size)]
        for layer, mode in kept:
            layer.training = mode
        np.testing.assert_array_equal(self.trainer.predict(x, batch_size=size), np.concatenate(wanted))
        loss = nn.CrossEntropyLoss()
        values = [loss.forward(y, target[i * size : (i + 1) * size])[0] * len(y) for i, y in enumerate(wanted)]
        assert self.trainer.evaluate(data, batch_size=size)[0] == sum(values) / samples

    @rule(layer=st.integers(0, 7), mode=st.booleans())
    def switch(self, layer, mode):
        for net in (self.model, self.twin):
            list(net.modules())[layer % len(list(net.modules()))][1].training = mode

    @rule(dtype=st.sampled_from([np.float32, np.float64]), frozen=st.frozensets(st.integers(0, 3), max_size=2))
    def convert(self, dtype, frozen):
        """Convert the model, and train another part of it."""
        for net in (self.model, self.twin):
            net.to(dtype=dtype)
        self.optimize(frozen)

    @rule(lr=st.floats(0.001, 0.02))  # higher ones may end in statistics that are not finite
    def set_rate(self, lr):
        self.opt.lr = self.twin_opt.lr = lr

    @rule(
        kind=st.sampled_from(["F", "U", "I"]), streams=st.sampled_from([1, 2]), accumulate=st.integers(1, 2),
        seed=st.integers(0, 999), sizes=st.lists(st.sampled_from([1, 3, 6]), min_size=1, max_size=4),
        flushes=st.lists(st.booleans(), min_size=4, max_size=4),
    )  # fmt: skip
    def execute(self, kind, streams, accumulate, seed, sizes, flushes):
        """Run single steps, of any sizes, with flushes in between, by an executor."""
        schedule = self.order(kind, streams, accumulate, seed)["schedule"]
        executor = PlainExecutor(self.model, nn.CrossEntropyLoss(), self.opt, schedule)
        data = self.data(22)

        def run():
            for size, flush in zip(sizes, flushes, strict=False):
                executor.step([data.batch(part) for part in orders.parts_of(np.arange(size), accumulate)])
                if flush:
                    executor.flush()
            executor.flush()
            executor.close()

        within(run)
        for size in sizes:
            orders.plain(self.twin, self.data(size), self.twin_opt, epochs=1, batch_size=size, accumulate=accumulate,
                         shuffled=False)  # fmt: skip

    @invariant()
    def twins_are_equal(self):
        if not hasattr(self, "opt"):
            return
        orders.assert_same(orders.state_of(self.model, self.opt), orders.state_of(self.twin, self.twin_opt))
        nets = (self.model, self.twin)
        modes, drawn = ([f(net) for net in nets] for f in (_modes, _drawn))
        assert modes[0] == modes[1] and drawn[0] == drawn[1]
        assert not [t for t in threading.enumerate() if "sparsebp second" in t.name]


def _modes(net):
    return [layer.training for _, layer in net.modules()]


def _drawn(net):
    return [g.bit_generator.state for g in net.generators().values()]


Training.TestCase.settings = settings(
    max_examples=60, stateful_step_count=12, deadline=None, phases=(Phase.explicit, Phase.reuse, Phase.generate)
)
TestTraining = Training.TestCase
