"""Schedules as pictures, text and traces."""
