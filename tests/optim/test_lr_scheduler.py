"""Learning-rate schedules against torch.optim.lr_scheduler, with one group and with two."""

from __future__ import annotations

import json

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
}


def optimizers(rates):
    ours = optim.SGD([{"params": {f"p{i}": np.ones(1)}, "lr": lr} for i, lr in enumerate(rates)])
    theirs = torch.optim.SGD([{"params": [torch.nn.Parameter(torch.ones(1))], "lr": lr} for lr in rates])
    return ours, theirs


def both(name, ours, theirs, options):
    extra = {"cycle_momentum": False} if name == "OneCycleLR" else {}
    return getattr(optim, name)(ours, **options), getattr(torch.optim.lr_scheduler, name)(theirs, **options, **extra)


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
        if (
            step == cut and min(rates(ours)) >= 0
        ):  # a run that is resumed: the optimizer's state, and then the schedules'
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
        lambda: optim.SequentialLR(ours, [linear, plateau], [3]),
        lambda: optim.SequentialLR(ours, [linear, linear, linear], [3, 3]),
    ):
        with pytest.raises(OptionError):
            make()
    with pytest.raises(FileFormatError):
        plateau.load_state_dict({"best": 0.0})


CHAINING = sorted(SCHEDULES.keys() - {"LambdaLR", "CosineAnnealingWarmRestarts", "OneCycleLR"})


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
    assert schedule.state_dict().keys() == {"base_lrs", "steps", "rates"}  # no functions
    for wrong in (None, [functions[0]], [functions[0], 3], lambda step: "a", lambda step: -1.0):
        with pytest.raises(OptionError):
            optim.LambdaLR(ours, wrong)
