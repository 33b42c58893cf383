"""Schedules and costs as files: CSV, as torch.distributed.pipelining has it, and TOML."""
