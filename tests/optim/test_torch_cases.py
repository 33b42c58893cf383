"""PyTorch's own optimizer cases (``optim_db``), run with our optimizers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from sparsebp import optim
from sparsebp.core.errors import OptionError, SparseBPError
from torch_cases import lists_are_counted, load, scalars_in_float64

NAMES = ["SGD", "Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adagrad", "Adadelta", "RMSprop"]
PAGE = Path(__file__).parents[2] / "docs" / "reference" / "torch-parity.md"
SHAPES = {"weight": (3, 5), "bias": (3,), "scalar": ()}


@pytest.fixture(scope="module")
def cases():
    return load("common_optimizers")


def info_of(cases, name):
    return next(info for info in cases.optim_db if info.optim_cls.__name__ == name)


def inputs_of(cases, info):
    """All inputs, with and without foreach, fused and differentiable; capturable ones come with a GPU."""
    inputs = cases._get_optim_inputs_including_global_cliquey_kwargs("cpu", torch.float64, info)
    return [case.kwargs for case in (*inputs, *info.optim_inputs_func("cuda"))]


def course(name, options, steps=12):
    """Return the parameters after every step, ours and torch's."""
    rng = np.random.default_rng(0)
    params = {key: np.asarray(rng.standard_normal(shape)) for key, shape in SHAPES.items()}
    twins = {key: torch.nn.Parameter(torch.from_numpy(param.copy())) for key, param in params.items()}
    theirs = {key: value for key, value in options.items() if key not in ("capturable", "fused", "foreach")}
    ours, optimizer = getattr(optim, name)(params, **options), getattr(torch.optim, name)(twins.values(), **theirs)
    found = []
    for _ in range(steps):
        grads = {key: np.asarray(rng.standard_normal(shape)) for key, shape in SHAPES.items()}
        for key, twin in twins.items():
            twin.grad = torch.from_numpy(grads[key])
        ours.step(grads)
        with scalars_in_float64():
            optimizer.step()
        found.append([(param.copy(), twins[key].detach().numpy().copy()) for key, param in params.items()])
    return found


@pytest.mark.parametrize("name", NAMES)
def test_every_case_has_torchs_trajectory(cases, name):
    refused, run = set(), set()
    for options in inputs_of(cases, info_of(cases, name)):
        tensors = any(isinstance(v, torch.Tensor) or (isinstance(v, tuple) and isinstance(v[0], torch.Tensor))
                      for v in options.values())  # fmt: skip
        if tensors or options.get("differentiable"):  # what is lacking, and refused
            with pytest.raises(OptionError):
                course(name, options, 0)
            refused.add(repr(sorted(options.items())))
            continue
        if repr(sorted(options.items())) in run:
            continue
        run.add(repr(sorted(options.items())))
        for step, arrays in enumerate(course(name, options)):
            for ours, theirs in arrays:
                np.testing.assert_allclose(ours, theirs, rtol=1e-10, atol=1e-12, err_msg=f"{options}, step {step}")
    errors = info_of(cases, name).optim_error_inputs_func("cpu", torch.float64)
    row = f"| `{name}` | {len(run)} | {len(refused)} | {len(errors)} |"
    assert not lists_are_counted(PAGE) or row in PAGE.read_text(), f"{PAGE.name} lacks: {row}"


def given(params):
    """What torch's case has for parameters in our form: arrays by name, or groups of them; None: any."""
    if params is None:
        return {"weight": np.ones((2, 2))}
    if isinstance(params, torch.Tensor):
        return params.detach().numpy()
    if isinstance(params, list | tuple):
        return type(params)(map(given, params))
    if isinstance(params, dict):
        return {key: given(value) if key == "params" else value for key, value in params.items()}
    return params


@pytest.mark.parametrize("name", NAMES)
def test_every_error_case_is_refused(cases, name):
    info = info_of(cases, name)
    errors = info.optim_error_inputs_func("cpu", torch.float64)
    inputs = [(error.optimizer_error_input, error.error_regex) for error in errors]
    assert len(inputs) >= 7
    for case, said in inputs:
        for params in (given(case.params), case.params if case.params is not None else given(None)):
            with pytest.raises(SparseBPError) as caught:
                getattr(optim, name)(params, **case.kwargs)
            assert caught.value.expected, said
