"""How a host kernel is made: SIMD in Numba, its own threads, and short compile times.

- `simd`: a vector type, pointers, loads and stores as Numba intrinsics. `device` functions are always inlined.
- `math`: tanh, sigmoid, exp and the normal distribution on vectors.
- `compile`: options of `numba.njit`. Python calls functions compiled with `JIT` or `SERIAL`, which are cached on disk;
  these call inner functions (`INNER_JIT`, …), which end as LLVM code and are compiled with their callers.
- `threads`: `in_parts` and `parallel` run the parts of a kernel on a team of sleeping helpers.
- `arguments`: addresses of many arrays in one compiled call.

Numba's cache does not see changes in inlined functions: `compile.drop_stale` drops every index older than the newest
source, once, when `sparsebp.kernels.host` is imported.
"""
