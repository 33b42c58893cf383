"""The way back through runs of a cell: by any algorithm, when it is asked for, and its Jacobians."""
