"""Scans across ranks: of the time steps of a recurrent layer, and of chains of transposed Jacobians."""
