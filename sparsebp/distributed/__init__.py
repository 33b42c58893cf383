"""Schedules that span workers: what carries arrays between ranks, and what each rank runs."""
