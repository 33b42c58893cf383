"""Processes of MPI: what is under way between them, how they wait, and how they begin and end together."""
