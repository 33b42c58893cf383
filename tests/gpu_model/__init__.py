"""What the recurrent kernels and a training step should cost on a GPU, told without one.

`kernels`
    Cycles and instructions of a time step from machine code (`sass`), with the budgets that a test holds them to.
`launches`
    The launches of a recurrent backward as the launchers choose them, and the time that the machine code gives them.
`step`
    What a training step asks of the device, counted on the stand-in for CuPy (`strict_cupy`).

`docs/make_gpu_expectations.py` makes the tables of a page of the documentation from these.
"""
