"""Learning-rate schedules against torch.optim.lr_scheduler, with one group and with two."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsebp import optim
from sparsebp.core.errors import FileFormatError, OptionError

SCHEDULES = {
    "StepLR": {"step_size": 3, "gamma": 0.5},
    "MultiStepLR": {"milestones": [7, 2, 2], "gamma": 0.3},
    "ExponentialLR": {"gamma": 0.9},
    "LinearLR": {"start_factor": 0.25, "end_factor": 0.8, "total_iters": 7},
    "CosineAnnealingLR": {"T_max": 11, "eta_min": 0.01},
    "ConstantLR": {"factor": 0.3, "total_iters": 4},
    "PolynomialLR": {"total_iters": 9, "power": 1.7},
    "LambdaLR": {"lr_lambda": lambda step: 0.95**step},
    "CosineAnnealingWarmRestarts": {"T_0": 3, "T_mult": 2, "eta_min": 0.01},
    "OneCycleLR": {"max_lr": 0.5, "total_steps": 12, "pct_start": 0.4},
    "CyclicLR": {"base_lr": 0.05, "max_lr": 0.4, "step_size_up": 3, "mode": "triangular2", "cycle_momentum": False},
}


def optimizers(rates):
    ours = optim.SGD([{"params": {f"p{i}": np.ones(1)}, "lr": lr} for i, lr in enumerate(rates)])
    theirs = torch.optim.SGD([{"params": [torch.nn.Parameter(torch.ones(1))], "lr": lr} for lr in rates])
    return ours, theirs


class CosineAnnealingLR(torch.optim.lr_scheduler.CosineAnnealingLR):
    """PyTorch's while it falls. Where it rises PyTorch multiplies the distance from eta_min: rates become negative."""

    def get_lr(self):
        before = self.eta_min + (np.array(self.base_lrs) - self.eta_min) * self.height(self.last_epoch - 1) / 2
        after = self.eta_min + (np.array(self.base_lrs) - self.eta_min) * self.height(self.last_epoch) / 2
        if self.last_epoch < 1 or (self.last_epoch - 1) % (2 * self.T_max) < self.T_max:
            return super().get_lr()
        return [group["lr"] * (b / a) for group, a, b in zip(self.optimizer.param_groups, before, after, strict=True)]

    def height(self, step):
        return 1 + np.cos(np.pi * step / self.T_max)


def both(name, ours, theirs, options):
    extra = {"cycle_momentum": False} if name == "OneCycleLR" else {}
    twin = CosineAnnealingLR if name == "CosineAnnealingLR" else getattr(torch.optim.lr_scheduler, name)
    pair = getattr(optim, name)(ours, **options), twin(theirs, **options, **extra)
    for group in theirs.param_groups if name == "CyclicLR" else ():
        group["lr"] = options["base_lr"]  # PyTorch's begins with the base of a schedule that was there before
    return pair


def rates(optimizer):
    return [group["lr"] for group in optimizer.param_groups]


def check_course(ours, theirs, schedule, twin, steps):
    for step in range(steps):
        assert rates(ours) == pytest.approx(rates(theirs), rel=1e-12), step
        theirs.step()
        twin.step()
        schedule.step()


@pytest.mark.parametrize("groups", [[0.2], [0.2, 0.03]])
@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules_are_torchs(name, groups):
    ours, theirs = optimizers(groups)
    schedule, twin = both(name, ours, theirs, SCHEDULES[name])
    check_course(ours, theirs, schedule, twin, 11)
    other, _ = optimizers([0.7] * len(groups))
    resumed = getattr(optim, name)(other, **SCHEDULES[name])
    resumed.load_state_dict(json.loads(json.dumps(schedule.state_dict())))
    assert rates(other) == rates(ours)
    for state in ({}, schedule.state_dict() | {"base_lrs": [0.1] * 3}):
        with pytest.raises(FileFormatError):
            resumed.load_state_dict(state)


@pytest.mark.parametrize("given", [
    {"epochs": 3, "steps_per_epoch": 7}, {"total_steps": 20, "three_phase": True}, {"total_steps": 1},
    {"total_steps": 20, "anneal_strategy": "linear"}, {"total_steps": 17, "pct_start": 0.7, "three_phase": True},
    {"total_steps": 9, "pct_start": 0.0, "anneal_strategy": "linear", "cycle_momentum": False},
])  # fmt: skip
def test_one_cycle_has_torchs_arguments(given):
    ours, theirs = optimizers([0.2, 0.03])
    schedule = optim.OneCycleLR(ours, 0.5, **given)
    twin = torch.optim.lr_scheduler.OneCycleLR(theirs, 0.5, **given | {"cycle_momentum": False})
    check_course(ours, theirs, schedule, twin, schedule.total_steps - 1)
    assert rates(ours) == pytest.approx(rates(theirs), rel=1e-12)
    for wrong in ({}, {"epochs": 3}, {"epochs": 3, "steps_per_epoch": 0}, given | {"cycle_momentum": True},
                  given | {"anneal_strategy": "exp"}, given | {"three_phase": 2}):  # fmt: skip
        with pytest.raises(OptionError):
            optim.OneCycleLR(ours, 0.5, **wrong)


@given(
    names=st.lists(st.sampled_from(sorted(SCHEDULES)), min_size=2, max_size=4), sequence=st.booleans(),
    jumps=st.dictionaries(st.integers(0, 25), st.floats(0.01, 1.0), max_size=2), cut=st.integers(0, 25),
)  # fmt: skip
@settings(max_examples=150, deadline=None)
def test_schedules_chain_as_torchs(names, sequence, jumps, cut):
    """Several on one optimizer, also after the rate has been set by hand, and resumed from their states."""

    def build(ours, theirs):
        pairs = [both(name, ours, theirs, SCHEDULES[name]) for name in names]
        if sequence:
            parts = [both(name, ours, theirs, SCHEDULES[name]) for name in ("LinearLR", "CosineAnnealingLR")]
            pairs.append((
                optim.SequentialLR(ours, [ours_ for ours_, _ in parts], [4]),
                torch.optim.lr_scheduler.SequentialLR(theirs, [theirs_ for _, theirs_ in parts], [4]),
            ))  # fmt: skip
        return pairs

    ours, theirs = optimizers([0.2, 0.03])
    pairs = build(ours, theirs)
    for step in range(26):
        assert rates(ours) == pytest.approx(rates(theirs), rel=1e-9), step
        if step in jumps:
            for optimizer in (ours, theirs):
                for group in optimizer.param_groups:
                    group["lr"] = jumps[step]
        assert min(rates(ours)) >= 0
        if step == cut:  # a run that is resumed: the optimizer's state, and then the schedules'
            kept = json.loads(json.dumps([ours.state_dict(), [schedule.state_dict() for schedule, _ in pairs]]))
            ours, fresh = optimizers([0.7, 0.6])
            pairs = [(new, twin) for (new, _), (_, twin) in zip(build(ours, fresh), pairs, strict=True)]
            ours.load_state_dict(kept[0])
            for (schedule, _), state in zip(pairs, kept[1], strict=True):
                schedule.load_state_dict(state)
        theirs.step()
        for schedule, twin in pairs:
            if step < 11 or not isinstance(schedule, optim.OneCycleLR):  # torch's own must not be stepped further
                schedule.step()
                twin.step()


def test_a_plateau_chains_with_a_schedule_by_steps():
    ours, theirs = optimizers([0.2])
    schedules = [both("CosineAnnealingLR", ours, theirs, {"T_max": 30})]
    schedules.append(both("ReduceLROnPlateau", ours, theirs, {"factor": 0.5, "patience": 0}))
    for step in range(12):
        theirs.step()
        for pair in schedules:
            for schedule in pair:
                schedule.step(*([1.0] if schedule in schedules[1] else []))
        assert rates(ours) == pytest.approx(rates(theirs), rel=1e-9), step


def test_states_without_rates_are_those_of_a_schedule_alone():
    ours, _ = optimizers([0.2])
    schedule = optim.ExponentialLR(ours, 0.9)
    for _ in range(3):
        schedule.step()
    state = {name: value for name, value in schedule.state_dict().items() if name != "rates"}
    other, _ = optimizers([0.7])
    resumed = optim.ExponentialLR(other, 0.9)
    other.load_state_dict(ours.state_dict())
    resumed.load_state_dict(state)
    schedule.step()
    resumed.step()
    assert rates(other) == rates(ours)


@given(
    names=st.lists(st.sampled_from(sorted(SCHEDULES)), min_size=1, max_size=4).filter(
        lambda names: names.count("OneCycleLR") < 2  # those of torch share what they keep in the groups
    ),
    gaps=st.lists(st.integers(1, 6), min_size=3, max_size=3),
)
@settings(max_examples=40)
def test_sequences_are_torchs(names, gaps):
    options = SCHEDULES | {"OneCycleLR": {"max_lr": 0.5, "total_steps": 30}}  # torch's must not go further
    milestones = np.cumsum(gaps)[: len(names) - 1].tolist()
    ours, theirs = optimizers([0.2, 0.05])
    pairs = [both(name, ours, theirs, options[name]) for name in names]
    schedule = optim.SequentialLR(ours, [pair[0] for pair in pairs], milestones)
    twin = torch.optim.lr_scheduler.SequentialLR(theirs, [pair[1] for pair in pairs], milestones)
    check_course(ours, theirs, schedule, twin, 20)
    other, _ = optimizers([0.9, 0.9])
    resumed = optim.SequentialLR(other, [getattr(optim, name)(other, **options[name]) for name in names], milestones)
    resumed.load_state_dict(json.loads(json.dumps(schedule.state_dict())))
    assert rates(other) == rates(ours)


@given(
    metrics=st.lists(st.integers(-5, 5), min_size=1, max_size=30), mode=st.sampled_from(["min", "max"]),
    threshold_mode=st.sampled_from(["rel", "abs"]), patience=st.integers(0, 3), cooldown=st.integers(0, 2),
    min_lr=st.sampled_from([0.0, [0.05, 0.001]]), cut=st.integers(0, 30),
)  # fmt: skip
def test_plateaus_are_torchs(metrics, mode, threshold_mode, patience, cooldown, min_lr, cut):
    ours, theirs = optimizers([0.2, 0.05])
    options = {
        "mode": mode, "factor": 0.5, "patience": patience, "threshold": 0.3, "threshold_mode": threshold_mode,
        "cooldown": cooldown, "min_lr": min_lr,
    }  # fmt: skip
    schedule, twin = both("ReduceLROnPlateau", ours, theirs, options)
    for step, metric in enumerate(metrics):
        if step == cut:  # a run that is resumed goes on alike
            state = json.loads(json.dumps(schedule.state_dict()))
            schedule = optim.ReduceLROnPlateau(ours, **options)
            schedule.load_state_dict(state)
        schedule.step(metric)
        twin.step(metric)
        assert rates(ours) == pytest.approx(rates(theirs), rel=1e-12)


def test_the_last_rate_of_a_cycle_stays():
    ours, _ = optimizers([0.2])
    schedule = optim.OneCycleLR(ours, max_lr=0.5, total_steps=4)
    seen = []
    for _ in range(6):
        schedule.step()
        seen.append(ours.lr)
    assert seen[2] == seen[3] == seen[5]


def test_bad_schedules_are_refused():
    ours, _ = optimizers([0.2])
    other, _ = optimizers([0.2])
    linear, elsewhere, plateau = optim.LinearLR(ours), optim.LinearLR(other), optim.ReduceLROnPlateau(ours)
    for make in (
        lambda: optim.OneCycleLR(ours, 0.1, 10, pct_start=2),
        lambda: optim.OneCycleLR(ours, [0.1, 0.2], 10),
        lambda: optim.LinearLR(ours, start_factor=0.0),
        lambda: optim.ConstantLR(ours, factor=0.0),
        lambda: optim.ReduceLROnPlateau(ours, factor=1.0),
        lambda: optim.ReduceLROnPlateau(ours, mode="least"),
        lambda: optim.SequentialLR(ours, [], []),
        lambda: optim.SequentialLR(ours, [linear], [3]),
        lambda: optim.SequentialLR(ours, [linear, elsewhere], [3]),
        lambda: optim.SequentialLR(ours, [linear, optim.ReduceLROnPlateau(other)], [3]),
        lambda: optim.SequentialLR(ours, [optim.LinearLR(ours), plateau], [1]).lr_at(1, 0.2),
        lambda: optim.SequentialLR(ours, [linear, linear, linear], [3, 3]),
    ):
        with pytest.raises(OptionError):
            make()
    with pytest.raises(FileFormatError):
        plateau.load_state_dict({"best": 0.0})


CHAINING = sorted(SCHEDULES.keys() - {"LambdaLR", "CosineAnnealingWarmRestarts", "OneCycleLR", "CyclicLR"})


@given(
    names=st.lists(st.sampled_from(CHAINING), min_size=1, max_size=3), first=st.sampled_from([None, *SCHEDULES]),
    cut=st.integers(0, 11),
)  # fmt: skip
@settings(max_examples=60, deadline=None)
def test_chains_are_torchs(names, first, cut):
    """The first may set the rate whatever others have made of it; resumed from its state at `cut`."""

    def build(ours, theirs):
        pairs = [both(name, ours, theirs, SCHEDULES[name]) for name in ([first] if first else []) + names]
        chains = optim.ChainedScheduler, torch.optim.lr_scheduler.ChainedScheduler
        return [chain(list(parts)) for chain, parts in zip(chains, zip(*pairs, strict=True), strict=True)]

    ours, theirs = optimizers([0.2, 0.03])
    schedule, twin = build(ours, theirs)
    check_course(ours, theirs, schedule, twin, cut)
    state = json.loads(json.dumps([ours.state_dict(), schedule.state_dict()]))
    ours, other = optimizers([0.7, 0.6])
    schedule, _ = build(ours, other)
    ours.load_state_dict(state[0])
    schedule.load_state_dict(state[1])
    check_course(ours, theirs, schedule, twin, 12 - cut)


def test_what_would_undo_others_comes_first_in_a_chain():
    ours, other = optimizers([0.2])[0], optimizers([0.2])[0]
    step, cycle = optim.StepLR(ours, 3), optim.OneCycleLR(ours, 0.1, 10)
    optim.ChainedScheduler([cycle, step], optimizer=ours)
    plateau = optim.ReduceLROnPlateau(ours)
    optim.ChainedScheduler([step, plateau])
    for first in (cycle, optim.LambdaLR(ours, lambda step: 1.0), optim.SequentialLR(ours, [step, plateau], [3])):
        with pytest.raises(OptionError, match="undo the reductions of ReduceLROnPlateau"):
            optim.ChainedScheduler([first, plateau])
    for schedulers, optimizer, said in (
        ([step, cycle], None, "OneCycleLR behind StepLR"), ([], None, "none"), ([step, step], None, "twice"),
        ([step], other, "several optimizers"), ([step, optim.StepLR(other, 3)], None, "several optimizers"),
    ):  # fmt: skip
        with pytest.raises(OptionError, match=said):
            optim.ChainedScheduler(schedulers, optimizer)


def test_a_function_for_each_group():
    ours, theirs = optimizers([0.2, 0.05])
    functions = [lambda step: 1 / (1 + step), lambda step: 0.9**step]
    schedule, twin = both("LambdaLR", ours, theirs, {"lr_lambda": functions})
    check_course(ours, theirs, schedule, twin, 5)
    assert schedule.get_last_lr() == rates(ours) == pytest.approx(twin.get_last_lr())
    assert schedule.state_dict().keys() == {"base_lrs", "steps", "rates", "groups"}  # no functions
    for wrong in (None, [functions[0]], [functions[0], 3], lambda step: "a", lambda step: -1.0):
        with pytest.raises(OptionError):
            optim.LambdaLR(ours, wrong)


# ---- cycles --------------------------------------------------------------------------------------------------------


@given(
    up=st.integers(1, 7), down=st.sampled_from([None, 1, 4, 11]), wide=st.booleans(), momentum=st.booleans(),
    mode=st.sampled_from(["triangular", "triangular2", "exp_range"]), adam=st.booleans(),
    own=st.sampled_from([None, "cycle", "iterations"]), cut=st.integers(0, 30),
)  # fmt: skip
def test_cycles_are_torchs(up, down, wide, momentum, mode, adam, own, cut):
    """Rates and momenta, for two groups, with scales of one's own, and resumed at `cut`."""
    options = {
        "base_lr": [0.01, 0.002] if wide else 0.01, "max_lr": [0.1, 0.3] if wide else 0.2, "step_size_up": up,
        "step_size_down": down, "mode": mode, "gamma": 0.97, "cycle_momentum": momentum,
        "base_momentum": [0.7, 0.6] if wide else 0.75, "max_momentum": [0.9, 0.85] if wide else 0.95,
    }  # fmt: skip
    options |= {} if own is None else {"scale_fn": lambda x: 1 / (1 + 0.1 * x), "scale_mode": own}

    def make():
        groups = [{"params": {name: np.ones(1)}, "lr": 0.5} for name in "ab"]
        return optim.Adam(groups) if adam else optim.SGD(groups, momentum=0.5)

    ours, weights = make(), [{"params": [torch.nn.Parameter(torch.ones(1))], "lr": 0.5} for _ in "ab"]
    theirs = torch.optim.Adam(weights) if adam else torch.optim.SGD(weights, momentum=0.5)
    schedule, twin = optim.CyclicLR(ours, **options), torch.optim.lr_scheduler.CyclicLR(theirs, **options)
    for step in range(31):
        for group, other in zip(ours.param_groups, theirs.param_groups, strict=True):
            for name in ("lr", "betas" if adam else "momentum"):
                assert group[name] == pytest.approx(other[name], rel=1e-12), (step, name)
        if step == cut:
            kept = json.loads(json.dumps([ours.state_dict(), schedule.state_dict()], default=list))
            ours = make()
            schedule = optim.CyclicLR(ours, **options)
            ours.load_state_dict({k: np.array(v) if k.startswith(("exp", "mom")) else v for k, v in kept[0].items()})
            schedule.load_state_dict(kept[1])
        theirs.step()
        twin.step()
        schedule.step()


def test_bad_cycles_are_refused():
    ours, _ = optimizers([0.2])
    for wrong in (
        {"mode": "square"}, {"scale_mode": "step"}, {"scale_fn": 3}, {"step_size_up": 0}, {"step_size_down": 0},
        {"gamma": -1}, {"cycle_momentum": 1}, {"base_lr": [0.1, 0.2]}, {"max_lr": -1.0}, {"cycle_momentum": True},
    ):  # fmt: skip
        with pytest.raises(OptionError):
            optim.CyclicLR(ours, **{"base_lr": 0.1, "max_lr": 0.2, "cycle_momentum": False} | wrong)
    schedule = optim.CyclicLR(ours, 0.1, 0.2, cycle_momentum=False)
    with pytest.raises(OptionError, match="CyclicLR behind StepLR"):
        optim.ChainedScheduler([optim.StepLR(ours, 3), schedule])


# ---- a plateau among others ----------------------------------------------------------------------------------------

PLATEAU = {"factor": 0.5, "patience": 1, "cooldown": 1}


@given(
    metrics=st.lists(st.integers(0, 3), min_size=8, max_size=20), cut=st.integers(0, 20), behind=st.booleans(),
    first=st.sampled_from([name for name in SCHEDULES if name != "OneCycleLR"]),
)  # fmt: skip
def test_a_plateau_in_a_sequence(metrics, cut, behind, first):
    """It goes on from the rate that the schedule before reaches at the milestone; every step has a metric."""

    def build(rates):
        ours, _ = optimizers(rates)
        parts = [getattr(optim, first)(ours, **SCHEDULES[first]), optim.ReduceLROnPlateau(ours, **PLATEAU)]
        return ours, optim.SequentialLR(ours, parts + [optim.ExponentialLR(ours, 0.9)] * behind, [4, 14][: 1 + behind])

    ours, schedule = build([0.2, 0.03])
    twin, _ = optimizers([0.2, 0.03])
    before, plateau = getattr(optim, first)(twin, **SCHEDULES[first]), optim.ReduceLROnPlateau(twin, **PLATEAU)
    bases = [SCHEDULES[first].get("base_lr", rate) for rate in (0.2, 0.03)]  # CyclicLR has its own, as in PyTorch
    for step, metric in enumerate(metrics):
        assert rates(ours) == pytest.approx(rates(twin), rel=1e-12), step
        if step == cut:
            kept = json.loads(json.dumps([ours.state_dict(), schedule.state_dict()]))
            ours, schedule = build([0.7, 0.6])
            ours.load_state_dict(kept[0])
            schedule.load_state_dict(kept[1])
        schedule.step(metric)
        if step < 4:
            before.step()
        elif step < 14 or not behind:
            plateau.step(metric)
        for group, base in zip(twin.param_groups, bases, strict=True):
            if behind and step >= 13:
                group["lr"] = base * 0.9 ** (step - 13)


@pytest.mark.parametrize("chained", [False, True])
def test_metrics_come_with_steps_or_after_several(chained):
    """As in a loop over epochs, and as in the trainer, where an epoch has steps without a metric."""

    def build():
        ours, _ = optimizers([0.2])
        parts = [optim.LinearLR(ours, 0.5, total_iters=2), optim.ReduceLROnPlateau(ours, factor=0.5, patience=0)]
        return ours, optim.ChainedScheduler(parts) if chained else optim.SequentialLR(ours, parts, [2])

    ours, schedule = build()
    found = []
    for _ in range(5):
        schedule.step(1.0)
        found.append(ours.lr)
    # The metric of a step goes to the schedule that was current in it: in a sequence the plateau's first is the third.
    assert found == pytest.approx([0.15, 0.1, 0.05, 0.025, 0.0125] if chained else [0.15, 0.2, 0.2, 0.1, 0.05])
    ours, schedule = build()
    found = []
    for _ in range(4):
        schedule.step()
        schedule.step()
        schedule.step(1.0)
        found.append(ours.lr)
    assert found == pytest.approx([0.2, 0.1, 0.05, 0.025])


@pytest.mark.parametrize("chained", [False, True])
def test_the_metric_of_an_epoch_is_no_step_for_a_state_that_was_kept_before_it(chained):
    def build():
        ours, _ = optimizers([0.2])
        parts = [optim.ExponentialLR(ours, 0.5), optim.ReduceLROnPlateau(ours)]
        return ours, optim.ChainedScheduler(parts) if chained else optim.SequentialLR(ours, parts, [9])

    ours, schedule = build()
    schedule.step()
    schedule.step()
    kept = json.loads(json.dumps([ours.state_dict(), schedule.state_dict()]))
    ours, schedule = build()
    ours.load_state_dict(kept[0])
    schedule.load_state_dict(kept[1])
    schedule.step(1.0)
    assert ours.lr == pytest.approx(0.05)


# ---- groups: by their parameters' names, and added later -----------------------------------------------------------


@pytest.mark.parametrize("name", [*SCHEDULES, "SequentialLR", "ChainedScheduler"])
def test_rates_belong_to_names(name):
    """A state loads into groups in another order; what cannot be told apart is refused."""

    def make(*groups):
        given = [{"params": {key: np.ones(1) for key in names}, "lr": lr} for names, lr in groups]
        ours = optim.SGD(given)
        if name == "SequentialLR":
            parts = [optim.StepLR(ours, 2), optim.CosineAnnealingLR(ours, 9)]
            return ours, optim.SequentialLR(ours, parts, [3])
        if name == "ChainedScheduler":
            return ours, optim.ChainedScheduler([optim.StepLR(ours, 2), optim.CosineAnnealingLR(ours, 9)])
        if name in ("CyclicLR", "OneCycleLR"):
            ends = {"base_lr": [lr for _, lr in groups], "cycle_momentum": False} if name == "CyclicLR" else {}
            size = {"step_size_up": 3} if ends else {"total_steps": 12}
            return ours, getattr(optim, name)(ours, max_lr=[lr * 2 for _, lr in groups], **ends, **size)
        return ours, getattr(optim, name)(ours, **SCHEDULES[name])

    ours, schedule = make(("ab", 0.2), ("c", 0.03))
    for _ in range(4):
        schedule.step()
    state = json.loads(json.dumps(schedule.state_dict()))
    other, resumed = make(("c", 0.03), ("ba", 0.2))
    resumed.load_state_dict(state)
    assert rates(other) == rates(ours)[::-1]
    schedule.step()
    resumed.step()
    assert rates(other) == pytest.approx(rates(ours)[::-1], rel=1e-12)
    for groups in ((("bc", 0.2), ("a", 0.03)), (("abc", 0.2),)):
        with pytest.raises(FileFormatError, match="different rates"):
            make(*groups)[1].load_state_dict(state)
    with pytest.raises(FileFormatError, match="other parameters"):
        make(("ab", 0.2), ("d", 0.03))[1].load_state_dict(state)


def test_states_of_several_groups_of_version_0_2_0_are_refused_unless_named():
    ours, _ = optimizers([0.2, 0.03])
    schedule = optim.StepLR(ours, 2)
    state = {"base_lrs": [0.03, 0.2], "steps": 1, "rates": [0.03, 0.2]}
    with pytest.raises(FileFormatError, match=r'state\["groups"\]'):
        schedule.load_state_dict(state)
    schedule.load_state_dict(state | {"groups": [["p1"], ["p0"]]})
    assert rates(ours) == schedule.base_lrs == [0.2, 0.03]
    schedule.load_state_dict({"base_lrs": [0.4], "steps": 1, "rates": [0.4]})  # of one group: all parameters had it
    assert rates(ours) == [0.4, 0.4]


def test_schedules_in_another_order_are_refused():
    ours, _ = optimizers([0.2])
    step, decay = optim.StepLR(ours, 2), optim.ExponentialLR(ours, 0.9)
    for make in (optim.ChainedScheduler, lambda parts: optim.SequentialLR(ours, parts, [3])):
        state = make([step, decay]).state_dict()
        with pytest.raises(FileFormatError, match="another order"):
            make([decay, step]).load_state_dict(state)
        make([step, decay]).load_state_dict({key: value for key, value in state.items() if key != "kinds"})


@given(name=st.sampled_from([name for name in CHAINING if name != "CosineAnnealingLR"] + ["plateau"]),
       before=st.integers(0, 8))  # fmt: skip
def test_a_group_that_is_added_goes_on_as_torchs(name, before):
    ours, theirs = optimizers([0.2])
    pair = both(*(("ReduceLROnPlateau", ours, theirs, {"factor": 0.5, "patience": 0}) if name == "plateau" else
                  (name, ours, theirs, SCHEDULES[name])))  # fmt: skip
    for step in range(12):
        if step == before:
            ours.add_param_group({"params": {"new": np.ones(1)}, "lr": 0.05})
            theirs.add_param_group({"params": [torch.nn.Parameter(torch.ones(1))], "lr": 0.05})
        theirs.step()
        for schedule in pair:
            schedule.step(*[1.0] * (name == "plateau"))
        assert rates(ours) == pytest.approx(rates(theirs), rel=1e-12), step
    if name != "plateau":
        assert pair[0].base_lrs == [0.2, 0.05]
        other, _ = optimizers([0.7])
        other.add_param_group({"params": {"new": np.ones(1)}})
        getattr(optim, name)(other, **SCHEDULES[name]).load_state_dict(pair[0].state_dict())
        assert rates(other) == rates(ours)


def test_options_of_an_added_group():
    """One value for all serves it as well; a list, or a function for each group, does not."""
    for make, fits in (
        (lambda o: optim.OneCycleLR(o, 0.5, 10), True), (lambda o: optim.OneCycleLR(o, [0.5], 10), False),
        (lambda o: optim.LambdaLR(o, lambda step: 0.5), True), (lambda o: optim.LambdaLR(o, [lambda s: 0.5]), False),
        (lambda o: optim.CyclicLR(o, 0.1, 0.5, cycle_momentum=False), True),
        (lambda o: optim.CyclicLR(o, 0.1, [0.5], cycle_momentum=False), False),
        (lambda o: optim.CosineAnnealingWarmRestarts(o, 3), True), (lambda o: optim.CosineAnnealingLR(o, 3), True),
        (lambda o: optim.SequentialLR(o, [optim.StepLR(o, 1), optim.StepLR(o, 2)], [1]), True),
    ):  # fmt: skip
        ours, _ = optimizers([0.2])
        schedule = make(ours)
        ours.add_param_group({"params": {"new": np.ones(1)}, "lr": 0.2})
        if not fits:
            with pytest.raises(OptionError, match="has been added"):
                schedule.step()
            continue
        schedule.step()
        assert len(schedule.base_lrs) == len(schedule.get_last_lr()) == 2 and min(rates(ours)) >= 0
        ours.step({"p0": np.ones(1), "new": np.ones(1)})


def test_a_polynomial_before_a_cosine_stays_above_zero():
    """PyTorch's product of distances from eta_min comes to -2.53 at step 16."""
    ours, _ = optimizers([1.0])
    chain = optim.ChainedScheduler([
        optim.PolynomialLR(ours, total_iters=10), optim.CosineAnnealingLR(ours, T_max=8, eta_min=0.1)
    ])  # fmt: skip
    found = []
    for _ in range(40):
        chain.step()
        found.append(ours.lr)
    assert min(found) >= 0 and max(found) <= 1
    assert found[7] == 0.1  # the minimum; then it rises as by itself, times 1/2 of the polynomial
    assert found[8] == pytest.approx((0.1 + 0.9 * (1 - math.cos(math.pi / 8)) / 2) / 2)
