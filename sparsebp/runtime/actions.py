"""What an executor does for each action of a schedule."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

from sparsebp import kernels
from sparsebp.core.arguments import forward_of
from sparsebp.core.shortcuts import belongs
from sparsebp.core.types import Array, ProductFactors
from sparsebp.nn.gradients import Gradients, gradients_of
from sparsebp.nn.losses.loss import check_mean
from sparsebp.nn.norms import clamped
from sparsebp.optim.clip import clip_grad_norm, clip_on_device, square_sums, squared_norms
from sparsebp.runtime.stages import Stages, is_ours
from sparsebp.runtime.step import Step, Watch

Run: TypeAlias = Callable[[Step], None]


class _Ahead(NamedTuple):
    """What flows from a stage to the next one where both have run: the next one's output."""

    y: Array

    @property
    def shape(self) -> tuple[int, ...]:
        """That of the output of either."""
        return tuple(self.y.shape)

    @property
    def nbytes(self) -> int:
        """The same."""
        return int(self.y.nbytes)


class Actions:
    """Makes the functions that the actions of a schedule stand for.

    Parameters
    ----------
    stages, loss, optimizer
        What is trained, and by what.
    clip_norm
        Largest norm of all gradients together; only `gather` heeds it.
    watch
        Is told of losses and of gradients that are not finite.
    """

    def __init__(self, stages: Stages, loss: Any, optimizer: Any, clip_norm: float | None, watch: Watch) -> None:
        check_mean(loss)
        self.stages, self.loss, self.optimizer = stages, loss, optimizer
        self.clip_norm, self.watch = clip_norm, watch
        self.names: Sequence[str] = stages.names
        """The parameters whose gradients are computed here."""

    def forward(self, number: int, m: int, count: int) -> Run:
        """F. The last stage's computes the loss and its gradient, and the last micro-batch's opens the update."""
        layer, wanted = self.stages[number].layer, number >= self.stages.first
        scans, last = self.stages.scans, number == len(self.stages) - 1
        stages, behind = self.stages, self._behind(number)
        finish = self._loss(m, count) if last else None

        def run(step: Step) -> None:
            x, options = step.flow[m], step.options[m]
            found = None if behind is None else clamped.forward(layer, behind, x)
            if isinstance(x, _Ahead):
                y = saved = x.y
            elif found is not None:
                y, saved = _Ahead(found[0]), found[1]
            else:
                y, saved = forward_of(layer, x, **(options if options and number in stages.taking_lengths else {}))
            step.flow[m] = y
            if wanted:
                step.saved[m][number] = saved
                if scans:
                    step.shapes[m][number] = x.shape
            if finish is not None:
                del x, saved
                finish(step)

        return run

    def _behind(self, number: int) -> Any:
        """Return the layer of the next stage if it runs here, in one pass over memory with this one; else None."""
        if number + 1 >= len(self.stages):
            return None
        layer, behind = self.stages[number].layer, self.stages[number + 1].layer
        return behind if clamped.together(layer, behind) else None

    def _loss(self, m: int, count: int) -> Run:
        loss, place = self.loss, self._place

        def run(step: Step) -> None:
            prediction, step.flow[m] = step.flow[m], None
            step.predictions[m] = prediction
            if step.later is None:
                value, saved = loss.forward(prediction, step.batches[m][1])
                step.values[m] = float(value)  # synchronize!
                self.watch.loss(step, m, step.values[m])
            else:
                target = step.batches[m][1]
                step.later.losses[m], saved = loss.on_device(prediction, target)
                score = self.watch.score(prediction, target)
                if score is not None:
                    step.later.scores[m] = score
            gy = loss.input_grad(saved)
            if step.shares[m] != 1:  # the mean over the step's samples: that of micro-batches' means, by their sizes
                gy = gy * gy.dtype.type(step.shares[m])
            place(step, m, len(self.stages) - 1, gy)
            if m == count - 1 and step.update is None:
                step.update = self.optimizer.begin()

        return run

    def _place(self, step: Step, m: int, number: int, gy: Array) -> None:
        """Make the gradients of a stage from that at its output, where their readers look."""
        stage = self.stages[number]
        self._offer(step, m, number, gradients_of(stage.layer, gy, step.saved[m][number]))

    def _offer(self, step: Step, m: int, number: int, gradients: Gradients) -> None:
        step.saved[m][number] = None
        if number > self.stages.first:
            step.for_input[m][number] = gradients
        if self.stages[number].parameters:
            step.for_weights[m][number] = gradients

    def input_grad(self, number: int, m: int) -> Run:
        """I, of a stage behind the first one with parameters."""
        place, layer = self._place, self.stages[number - 1].layer
        behind = self._behind(number - 1)

        def run(step: Step) -> None:
            gradients = step.for_input[m][number]
            if gradients is None and step.resumed:  # done before an interruption
                return
            at = (gradients.gy, step.saved[m][number - 1], gradients.saved) if behind is not None else None
            through = None if at is None else clamped.gradients(layer, behind, *at)
            if through is None:
                place(step, m, number - 1, gradients.input_grad())
            else:
                self._offer(step, m, number - 1, through)
            _hold(step, gradients)
            step.for_input[m][number] = None

        return run

    def scan(self, m: int) -> Run:
        """All I of a micro-batch at once: a scan in their place."""
        stages, begin = self.stages, self.stages.first + 1

        def run(step: Step) -> None:
            last = step.for_input[m][-1]
            if last is None and step.resumed:  # done before an interruption
                return
            saved = [*step.saved[m][begin:-1], last.saved]
            gy, found = stages.model.stage_gradients(begin, saved, step.shapes[m][begin:], last)
            for number, gradients in enumerate(found[:-1], begin):
                self._offer(step, m, number, gradients)
            self._place(step, m, begin - 1, gy)
            step.for_input[m] = [None] * len(stages)

        return run

    def weight_grad(self, number: int, m: int) -> Run:
        """W: gradients of further micro-batches, and of further uses of a shared parameter, are added."""
        stage = self.stages[number]

        def run(step: Step) -> None:
            gradients = step.for_weights[m][number]
            if gradients is None and step.resumed:  # done before an interruption
                return
            grads = gradients.weight_grad()
            _hold(step, gradients)
            step.for_weights[m][number] = None
            for key, grad in grads.items():
                name = stage.parameters.get(key)
                if name is None:  # not trained
                    continue
                if name in step.own:
                    step.grads[name] += grad
                elif name in step.grads:  # what a layer returned may be part of something else
                    step.grads[name] = step.grads[name] + grad
                    step.own.add(name)
                else:
                    step.grads[name] = grad

        return run

    def are_products(self, number: int) -> bool:
        """Whether W of a stage is one matrix product a parameter, as far as its class says."""
        layer = self.stages[number].layer
        return is_ours(layer) and belongs(layer, "weight_grad_products")

    def weight_grads(self, step: Step, numbers: Sequence[int]) -> bool:
        """W of several stages of which `are_products` holds, in one call; False, and nothing done, where one differs.

        On the host, of one micro-batch, and of parameters that are no other stage's.
        """
        products: dict[str, tuple[ProductFactors, tuple[int, ...]]] = {}
        for number in numbers:
            stage, at = self.stages[number], step.for_weights[0][number]
            found = None
            if at is not None and belongs(stage.layer, "weight_grad_products"):  # methods may have been replaced since
                found = stage.layer.weight_grad_products(at.gy, at.saved)
            if found is None:
                return False
            for key, name in stage.parameters.items():
                products[name] = found[key], stage.layer.params[key].shape
        grads = kernels.on_host().matmul_many([factors for factors, _ in products.values()])
        if grads is None:
            return False
        for number in numbers:
            step.for_weights[0][number] = None
        for (name, (_, shape)), grad in zip(products.items(), grads, strict=True):
            step.grads[name] = grad.reshape(shape)
        return True

    def weight_grad_and_update(self, number: int, m: int, names: Sequence[str]) -> Run:
        """W and U of a stage that nothing comes between: large gradients are used as they are made, row by row."""
        stage, separately = self.stages[number], (self.weight_grad(number, m), self.update(names, gathered=False))
        name_of = stage.parameters
        refused: set[tuple[int, ...]] = set()  # shapes of gradients at the output for which the optimizer does not

        def run(step: Step) -> None:
            at = step.for_weights[m][number]
            if at is None or at.gy.shape in refused:
                for part in separately:
                    part(step)
                return
            takes: Any = getattr(step.update, "takes_product", None)  # an optimizer of the user's own may not know it
            factored = step.later is None and takes is not None and belongs(stage.layer, "weight_grad_factors")
            found = stage.layer.weight_grad_factors(at.gy, at.saved) if factored else None
            products = {} if found is None else {key: pair for key, pair in found[0].items() if key in name_of}
            if found is None or not all(takes(name_of[key], factors) for key, factors in products.items()):
                if found is not None:
                    refused.add(at.gy.shape)
                for part in separately:
                    part(step)
                return
            step.for_weights[m][number] = None
            for key, factors in products.items():
                name = name_of[key]
                step.squares[name] = step.update.apply_product(name, factors)
                if not math.isfinite(step.squares[name]):
                    self.watch.gradients(step, {name: factors[0] @ factors[1]})
            step.grads |= {name_of[key]: grad for key, grad in found[1].items() if key in name_of}
            self.use(step, [name for name in names if name in step.grads], gathered=False)

        return run

    def gather(self, step: Step) -> None:
        """Look at all gradients together, before any of them is used, and clip them."""
        later = step.later
        if step.resumed and (step.squares if later is None else later.sums):  # done before an interruption
            return
        grads = step.grads = {name: step.grads[name] for name in self.names}
        self._look(step, grads)
        if self.clip_norm is None:
            return
        if later is None:
            clip_grad_norm(grads, self.clip_norm, norm=step.norm(self.stages.names))
        else:
            clip_on_device(grads, self.clip_norm, [sums for _, sums in later.sums])

    def update(self, names: Sequence[str], *, gathered: bool) -> Run:
        """U: update some parameters, and give their gradients back. Without `gather` each is looked at here."""
        return lambda step: self.use(step, names, gathered=gathered)

    def finish(self, step: Step, *, gathered: bool) -> None:
        """Do the updates that a step has left over."""
        names = [name for name in step.update.remaining if name in step.grads]
        if names:
            self.use(step, names, gathered=gathered)

    def use(self, step: Step, names: Sequence[str], *, gathered: bool) -> None:
        """Update some parameters, and give their gradients back."""
        grads = {name: step.grads[name] for name in names}
        if not gathered:
            self._look(step, grads)
        step.update.apply(grads)
        _hold(step, *grads.values())
        for name in names:
            del step.grads[name]

    def _look(self, step: Step, grads: dict[str, Array]) -> None:
        if step.later is not None:
            step.later.sums += list(square_sums(grads))  # at once: the other stream may add its own
            return
        squares = squared_norms(grads)
        step.squares.update(squares)
        if not all(map(math.isfinite, squares.values())):
            self.watch.gradients(step, grads)


def _hold(step: Step, *arrays: Any) -> None:
    """Hold arrays until both streams are done with them, where the device is behind the host."""
    if step.held is not None:
        step.held.append(arrays)
