"""Recurrent layers: cells and their runs, layers of them and their gradients, streams, linear recurrences.

A layer (`layers`) takes its input through a run of a cell for each layer and direction (`runs.forward`), which asks the
cell's equations (`cells`) for the kernel and leaves a `saved.SavedRun`. `gradients` takes what arrives at the outputs
back through these, from the last to the first (`runs.backward`). Cells of one step, time-parallel runs and
`sparsebp.torch` call the same two functions.
"""
