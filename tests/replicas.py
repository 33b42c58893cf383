"""Training of replicas on threads, and of one worker on the same samples."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import strategies as st

from orders import assert_close, digest, order_for, state_of
from sparsebp import nn, optim
from sparsebp.comm.threads import run_ranks
from sparsebp.data import epoch_order
from sparsebp.runtime import PlainExecutor
from sparsebp.runtime.actions import Stages
from sparsebp.runtime.replicas import ReplicaExecutor
from sparsebp.schedule import Schedule
from sparsebp.schedule.builders import data_parallel, place_updates, reverse_first_k

INPUTS = np.random.default_rng(2).standard_normal((23, 5))
CLASSES = np.random.default_rng(3).integers(3, size=23)


def mlp(dtype=np.float64):
    rng = np.random.default_rng(0)
    return nn.Sequential(
        nn.Linear(5, 7, dtype=dtype, rng=rng), nn.Tanh(), nn.Linear(7, 6, dtype=dtype, rng=rng), nn.ReLU(),
        nn.Linear(6, 4, dtype=dtype, rng=rng), nn.Sigmoid(), nn.Linear(4, 3, dtype=dtype, rng=rng),
    )  # fmt: skip


def shared(dtype=np.float64):
    rng = np.random.default_rng(0)
    linear = nn.Linear(5, 5, dtype=dtype, rng=rng)
    return nn.Sequential(linear, nn.Tanh(), linear, nn.Tanh(), nn.Linear(5, 3, dtype=dtype, rng=rng))


OPTIMIZERS = {
    "sgd": lambda p: optim.SGD(p, 0.1), "momentum": lambda p: optim.SGD(p, 0.1, 0.9),
    "adam": lambda p: optim.Adam(p, 0.01), "amsgrad": lambda p: optim.Adam(p, 0.01, amsgrad=True),
    "adamw": lambda p: optim.AdamW(p, 0.01), "adagrad": lambda p: optim.Adagrad(p, 0.05),
    "adadelta": lambda p: optim.Adadelta(p, 1.0), "nadam": lambda p: optim.NAdam(p, 0.01),
    "rmsprop": lambda p: optim.RMSprop(p, 0.01, momentum=0.5, centered=True),
}  # fmt: skip


def schedules(stages: Stages, microbatches: int = 1) -> dict[str, Schedule]:
    """Return the schedules of a replica by name; reverse first-k for one micro-batch alone."""
    size = {"stages": len(stages), "unweighted": stages.unweighted}
    many = size | {"microbatches": microbatches}
    found = {
        "waits": waiting(data_parallel(**many, fusion="none")), "first-ready": data_parallel(**many, fusion="none"),
        "first-stage": data_parallel(**many, fusion="backward", priority="first-stage"),
        "forward": data_parallel(**many),
    }  # fmt: skip
    if microbatches == 1:
        for k in {0, min(2, len(stages)), len(stages)}:
            found[f"reverse first-{k}"] = place_updates(reverse_first_k(**size, k=k), "none")
            found[f"reverse first-{k}, forward"] = place_updates(reverse_first_k(**size, k=k), "forward")
    return found


def waiting(schedule: Schedule) -> Schedule:
    """Return `schedule` with its S among what is computed: nothing goes on beside them."""
    (main, link) = schedule.lanes
    ends = [number for number, cell in enumerate(main.cells) if cell.kind == "W"][-1] + 1
    return replace(schedule, lanes=(replace(main, cells=main.cells[:ends] + link.cells + main.cells[ends:]),))


def batches_of(samples, batch_size, accumulate, epochs=1):
    """Yield the indices of every step's micro-batches, as a trainer makes them."""
    for epoch in range(epochs):
        order = epoch_order(samples, seed=3, epoch=epoch)
        for start in range(0, samples, batch_size):
            indices = order[start : start + batch_size]
            yield np.array_split(indices, min(accumulate, len(indices)))


def run(one, steps, inputs, own=lambda indices: indices):
    """Run `steps` by an executor, and return losses and norms in the order of the steps."""
    done = []
    for number, parts in enumerate(steps):
        mine = [own(part) for part in parts]
        done += one.step([(inputs[part], CLASSES[part]) for part in mine], number)
    done += one.flush()
    one.close()
    names = one.stages.names
    assert [step.tag for step in done] == list(range(len(done)))
    return [step.loss for step in done], [step.norm(names) for step in done]


def alone(make, optimizer, *, trained=None, inputs=INPUTS, accumulate=1, batch_size=6, epochs=2, clip_norm=None):
    """Train on one worker; return the state of model and optimizer, losses and norms."""
    model = make()
    opt = optimizer(_trained(model, trained))
    schedule = order_for(model, microbatches=accumulate)
    one = PlainExecutor(model, nn.CrossEntropyLoss(), opt, schedule, clip_norm=clip_norm)
    steps = batches_of(len(inputs), batch_size, accumulate, epochs)
    losses, norms = run(one, steps, inputs)
    return state_of(model, opt), losses, norms


def executor(
    transport, model, name, optimizer="sgd", *, accumulate=1, bucket_bytes=None, kind=ReplicaExecutor, **options
):
    """Return the executor of one rank; `name` is that of a schedule, or a function that returns one of the stages."""
    if isinstance(optimizer, str):
        optimizer = OPTIMIZERS[optimizer](model.parameters())
    stages = Stages(model, optimizer.params)
    schedule = name(stages) if callable(name) else schedules(stages, accumulate)[name]
    if bucket_bytes is not None:
        kind = type("Replica", (kind,), {"bucket_bytes": bucket_bytes})
    return kind(model, nn.CrossEntropyLoss(), optimizer, schedule, transport=transport, **options)


def replica(
    transport, make, optimizer, name, *, trained=None, inputs=INPUTS, accumulate=1, batch_size=6, epochs=2,
    clip_norm=None, bucket_bytes=150, **options,
):  # fmt: skip
    """Train one rank, with small buckets; return the state of its model and optimizer, losses and norms."""
    model = make()
    opt = optimizer(_trained(model, trained))
    options |= {"accumulate": accumulate, "bucket_bytes": bucket_bytes, "clip_norm": clip_norm}
    own = executor(transport, model, name, opt, **options)
    steps = batches_of(len(inputs), batch_size, accumulate, epochs)
    losses, norms = run(own, steps, inputs, own.own)
    own.gather_state(everywhere=True)
    return state_of(model, opt), losses, norms


def replicas(size, *args, **options):
    """Train on `size` ranks of this process; return what `replica` returns of each."""
    return run_ranks(size, lambda transport: replica(transport, *args, **options))


def random_settings(draw, optimizers, most=3):
    """Draw a model, an optimizer, the name of a schedule, a number of ranks and further options of a training."""
    make = draw(st.sampled_from([mlp, shared]))
    accumulate, size = draw(st.integers(1, most)), draw(st.integers(1, 5))
    names = list(schedules(Stages(make()), accumulate))
    name = draw(st.sampled_from(names if make is mlp else [n for n in names if "reverse" not in n]))
    options = {
        "accumulate": accumulate, "batch_size": draw(st.integers(1, 8)), "epochs": 1,
        "clip_norm": draw(st.sampled_from([None, 0.05])),
        "trained": draw(st.none() | st.lists(st.sampled_from(list(make().parameters())), min_size=1, unique=True)),
        "inputs": INPUTS[: draw(st.integers(1, 13))],
    }  # fmt: skip
    return make, OPTIMIZERS[draw(st.sampled_from(optimizers))], name, size, options


def assert_like_one_worker(found, wanted, rtol=1e-8):
    """Compare what `replica` returned on every rank with what `alone` did."""
    # The default is for Adam's first steps, whose rounding is compared with eps.
    for state, losses, norms, *_ in found:
        assert_close(state, wanted[0], rtol)
        np.testing.assert_allclose(losses, wanted[1], rtol / 100)
        np.testing.assert_allclose(norms, wanted[2], rtol)
    assert len({digest(state) for state, *_ in found}) == 1


def _trained(model, names):
    return {name: array for name, array in model.parameters().items() if names is None or name in names}
