"""The CPU executor itself: seeded bugs are caught, with file and line, in every order; right kernels pass."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cuda_on_cpu import compiler
from cuda_on_cpu.executor import ORDERS, KernelFault, LaunchError, Module
from cuda_on_cpu.memory import CheckedNumpy, uninitialised

SOURCE = Path(__file__).with_name("seeded_bugs.cu").read_text(encoding="utf-8")
LINES = SOURCE.splitlines()
F4, I4 = np.float32, np.int32


@cache
def module(order: str = "forward", mode: str = "check", real: str = "float", seed: int = 0) -> Module:
    return Module(f'#line 1 "seeded_bugs.cu"\n{SOURCE}', (f"-DREAL={real}",), order, seed, mode)


def bug_lines(kernel: str) -> list[int]:
    start = next(i for i, line in enumerate(LINES) if re.search(rf"\b{kernel}\(", line))
    end = LINES.index("}", start)
    return [i + 1 for i in range(start, end) if LINES[i].endswith("// BUG")]


def floats(n: int = 64) -> np.ndarray:
    return np.arange(1, n + 1, dtype=F4)


READ_ONLY = floats(32)
READ_ONLY.flags.writeable = False

# kernel: (block, arguments, what the message says) and, where they matter, the grid and dynamic shared memory
BUGS: dict[str, tuple[int, Any, str, int, int]] = {
    "missing_barrier": (64, lambda: (floats(),), "race", 1, 0),
    "missing_second_barrier": (64, lambda: (floats(), I4(3)), "race", 1, 0),
    "shared_race": (64, lambda: (floats(),), "race", 1, 0),
    "global_race": (32, lambda: (floats(),), "race", 1, 0),
    "race_between_blocks": (32, lambda: (floats(),), "race.*another block", 2, 0),
    "race_of_a_late_writer": (64, lambda: (floats(), floats(128)), "race.*another block", 2, 0),
    "out_of_bounds_global": (128, lambda: (floats(), I4(64)), "out of bounds.*byte 256 of argument 0 .x.", 1, 0),
    "out_of_bounds_read": (32, lambda: (floats(32), floats(32)), "out of bounds.*byte -4 of argument 0 .x.", 1, 0),
    "far_out_of_bounds": (32, lambda: (floats(),), "out of bounds.*outside every array", 1, 0),
    "null_pointer": (32, lambda: (floats(), np.uint64(0)), "out of bounds.*outside every array", 1, 0),
    "out_of_bounds_dynamic_shared": (32, lambda: (floats(),), "out of bounds.*dynamic shared memory", 1, 128),
    "out_of_bounds_static_shared": (32, lambda: (floats(),), "out of bounds.*index 32", 1, 0),
    "out_of_bounds_static_shared_inner": (32, lambda: (floats(),), "out of bounds.*index 32", 1, 0),
    "out_of_bounds_static_shared_pointer": (32, lambda: (floats(),), "out of bounds.*byte 128 of shared s", 1, 0),
    "out_of_bounds_local": (1, lambda: (floats(), I4(5)), "out of bounds.*index 4", 1, 0),
    "uninitialised_shared": (64, lambda: (floats(),), "uninitialised read.*shared s", 1, 0),
    "shared_of_the_last_block": (32, lambda: (floats(),), "uninitialised read.*dynamic shared", 2, 128),
    "uninitialised_global": (32, lambda: (uninitialised(32, F4), floats()), "uninitialised read.*scratch", 1, 0),
    "divergent_barrier": (32, lambda: (floats(),), "divergent barrier", 1, 0),
    "deadlock": (32, lambda: (floats(),), "deadlock", 1, 0),
    "misaligned_vector": (8, lambda: (floats(),), "misaligned", 1, 0),
    "misaligned_vector_write": (8, lambda: (floats(),), "misaligned", 1, 0),
    "misaligned_vector_in_shared": (8, lambda: (floats(), I4(3)), "misaligned", 1, 128),
    "misaligned_scalar": (8, lambda: (np.zeros(64, np.int8),), "misaligned", 1, 0),
    "warp_sync_too_narrow": (64, lambda: (floats(),), "race", 1, 0),
    "warp_sync_partial": (32, lambda: (floats(),), "race", 1, 0),
    "shuffle_is_no_fence": (32, lambda: (floats(),), "race", 1, 0),
    "shuffle_mask_without_caller": (32, lambda: (floats(),), "without its caller", 1, 0),
    "shuffle_masks_differ": (32, lambda: (floats(),), "lanes of one warp disagree", 1, 0),
    "shuffle_from_absent_lane": (24, lambda: (floats(),), "absent lane", 1, 0),
    "lanes_at_two_places": (32, lambda: (floats(),), "lanes of one warp disagree", 1, 0),
    "integer_overflow": (1, lambda: (floats(), I4(70000)), "signed integer overflow", 1, 0),
    "writes_a_global_variable": (32, lambda: (floats(),), "writes to a global variable", 1, 0),
    "writes_read_only": (32, lambda: (READ_ONLY,), "read-only", 1, 0),
}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("kernel", BUGS)
def test_seeded_bug_is_caught_with_its_line(kernel: str, order: str) -> None:
    block, make, what, grid, shared = BUGS[kernel]
    with pytest.raises(KernelFault, match=what) as caught:
        module(order).get_function(kernel)((grid,), (block,), make(), shared_mem=shared)
    places = [f"seeded_bugs.cu:{line}: " for line in bug_lines(kernel)] or ["seeded_bugs.cu:"]
    assert str(caught.value).startswith(tuple(places)), str(caught.value)


def test_waiting_for_another_block_ends() -> None:
    with pytest.raises(KernelFault, match="no end in sight"):
        module().get_function("waits_for_another_block")((2,), (1,), (np.zeros(1, I4), floats()))


def test_every_seeded_kernel_is_tested() -> None:
    kernels = set(module().library.parameters)
    assert kernels == {*BUGS, "waits_for_another_block"} | {name for name in kernels if name.startswith("right_")}


def test_a_race_names_threads_array_and_both_lines() -> None:
    write, read = bug_lines("missing_barrier")
    want = (
        f"seeded_bugs.cu:{write}: race: thread (32, 0, 0) of block (0, 0, 0) writes item 32 of shared s, "
        f"which thread (31, 0, 0) read at seeded_bugs.cu:{read}, with no barrier between"
    )
    with pytest.raises(KernelFault) as caught:
        module().get_function("missing_barrier")((1,), (64,), (floats(),))
    assert str(caught.value).startswith(want), str(caught.value)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_scratch_from_the_emulated_namespace_is_known_as_unwritten(dtype: type) -> None:
    kernel = module(real="float" if dtype is np.float32 else "double").get_function("uninitialised_global")
    scratch, out = CheckedNumpy().empty(32, dtype), np.zeros(32, dtype)
    with pytest.raises(KernelFault, match="uninitialised read"):
        kernel((1,), (32,), (scratch, out))
    scratch[:] = 3  # written by the host: known, though no kernel wrote it
    kernel((1,), (32,), (scratch, out))
    np.testing.assert_array_equal(out, [1] * 31 + [3])


@pytest.mark.parametrize("mode", ["check", "fast"])
@pytest.mark.parametrize(("order", "seed"), [("forward", 0), ("reverse", 0), ("random", 0), ("random", 7)])
class TestRightKernels:
    def test_reverse(self, order: str, seed: int, mode: str) -> None:
        x = floats(192)
        module(order, mode, seed=seed).get_function("right_reverse")((3,), (64,), (x,), shared_mem=256)
        np.testing.assert_array_equal(x, floats(192).reshape(3, 64)[:, ::-1].reshape(-1))

    @pytest.mark.parametrize("real", ["float", "double"])
    def test_matmul(self, order: str, seed: int, mode: str, real: str) -> None:
        for n in (1, 5, 8, 19):
            a, b = np.random.default_rng(n).standard_normal((2, n, n)).astype({"float": "f4", "double": "f8"}[real])
            c = uninitialised((n, n), a.dtype)
            grid = -(-n // 8)
            module(order, mode, real, seed).get_function("right_matmul")((grid, grid), (8, 8), (a, b, c, I4(n)))
            np.testing.assert_allclose(c, a @ b, rtol=1e-4, atol=1e-4)

    def test_row_sum(self, order: str, seed: int, mode: str) -> None:
        x = np.random.default_rng(0).integers(-9, 9, (7, 300)).astype(F4)  # sums are exact
        out, total = uninitialised(7, F4), np.zeros(1, F4)
        module(order, mode, seed=seed).get_function("right_row_sum")((7,), (96,), (x, out, total, I4(300)))
        np.testing.assert_array_equal(out, x.sum(axis=1))
        assert total[0] == x.sum()

    def test_warp_sync(self, order: str, seed: int, mode: str) -> None:
        x = floats()
        module(order, mode, seed=seed).get_function("right_warp_sync")((1,), (64,), (x,))
        np.testing.assert_array_equal(x, floats().reshape(2, 32)[:, ::-1].reshape(-1) + 3)

    def test_half_warps(self, order: str, seed: int, mode: str) -> None:
        x, votes = floats(32), np.zeros(32, np.uint32)
        module(order, mode, seed=seed).get_function("right_half_warps")((1,), (32,), (x, votes))
        want = np.concatenate([floats(16).reshape(8, 2)[:, ::-1].reshape(-1), floats(32)[16:] + 1])
        np.testing.assert_array_equal(x, want)
        low = sum(1 << lane for lane in range(16) if want[lane] > 3)
        np.testing.assert_array_equal(votes, [low] * 16 + [0xFFFF0000] * 16)

    def test_constants(self, order: str, seed: int, mode: str) -> None:
        x = floats(8)
        module(order, mode, seed=seed).get_function("right_constants")((1,), (8,), (x,))
        np.testing.assert_array_equal(x, [1, 2, 3, 4] * 2)

    def test_vectors(self, order: str, seed: int, mode: str) -> None:
        x, y, z = floats(), uninitialised(64, np.float64), uninitialised(16, np.uint16)
        module(order, mode, seed=seed).get_function("right_vectors")((1,), (16,), (x, y, z))
        np.testing.assert_array_equal(y, x)
        np.testing.assert_array_equal(z, np.arange(16))


# kernel, arguments, what the message says, and where it matters grid, block and dynamic shared memory
REFUSED: list[tuple[str, tuple[Any, ...], str, Any, Any, int]] = [
    ("out_of_bounds_global", (floats(), 3), "4 bytes wide, got int64", (1,), (32,), 0),
    ("out_of_bounds_global", (floats(), F4(3)), "kind 'i', got float32", (1,), (32,), 0),
    ("missing_barrier", (np.zeros(64),), "points to f4, got an array of float64", (1,), (32,), 0),
    ("out_of_bounds_global", (floats(), floats()), "is a scalar", (1,), (32,), 0),
    ("missing_barrier", (np.uint64(8),), "is a pointer", (1,), (32,), 0),
    ("missing_barrier", (floats(128)[::2],), "kernels ignore strides", (1,), (32,), 0),
    ("missing_barrier", (floats(), floats()), "takes 1 arguments, got 2", (1,), (32,), 0),
    ("nothing", (), "no kernel 'nothing'", (1,), (32,), 0),
    *(("missing_barrier", (floats(),), "grid", grid, (32,), 0) for grid in ((0,), (1, 0), (1, 70000))),
    *(
        ("missing_barrier", (floats(),), "launch bounds", (1,), block, 0)
        for block in ((0,), (1025,), (1, 1, 65), (32, 33))
    ),
    ("right_reverse", (floats(96),), "96 threads; it may have 1 to 64", (1,), (96,), 400),
]


@pytest.mark.parametrize(("kernel", "args", "says", "grid", "block", "shared"), REFUSED)
def test_refused_launch(kernel: str, args: tuple[Any, ...], says: str, grid: Any, block: Any, shared: int) -> None:
    """What CuPy takes without a word, or the driver refuses; Python's numbers have CuPy's widths."""
    with pytest.raises(LaunchError, match=says):
        module().get_function(kernel)(grid, block, args, shared_mem=shared)


def test_shared_memory_that_was_not_asked_for() -> None:
    kernel = module().get_function("right_reverse")
    with pytest.raises(LaunchError, match="max_dynamic_shared_size_bytes"):
        kernel((1,), (64,), (floats(),), shared_mem=49 * 1024)
    kernel.max_dynamic_shared_size_bytes = 49 * 1024
    kernel((1,), (64,), (floats(),), shared_mem=49 * 1024)


def test_views_of_one_array_go_on_sharing_memory() -> None:
    x = floats(96)
    out = x[64:]  # what the kernel writes through one pointer it sees through the other
    module().get_function("race_of_a_late_writer")((1,), (32,), (x, out))
    np.testing.assert_array_equal(out, np.ones(32, F4))
    with pytest.raises(KernelFault, match="race"):
        module().get_function("right_vectors")((1,), (8,), (x[:32], x.view(np.float64)[8:24], np.zeros(8, np.uint16)))


def test_a_view_keeps_its_misalignment() -> None:
    x = np.zeros(65, F4)[1:]
    with pytest.raises(KernelFault, match="misaligned"):
        module().get_function("right_vectors")((1,), (16,), (x, np.zeros(64), np.zeros(16, np.uint16)))


def test_a_source_that_does_not_compile_says_so() -> None:
    with pytest.raises(compiler.CompilerError, match=r"wrong\.cu:2"):
        Module('#line 1 "wrong.cu"\nextern "C" __global__ void f(float* x) {\n  x[0] = nothing;\n}')


def test_no_compiler_is_an_error_and_no_skip(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    compiler.compiler.cache_clear()
    try:
        with pytest.raises(compiler.CompilerError, match=r"g\+\+ is not installed"):
            compiler.compiler()
    finally:
        compiler.compiler.cache_clear()
