"""Schedules of several workers turned into one program a rank, with what is sent and received in its place."""
