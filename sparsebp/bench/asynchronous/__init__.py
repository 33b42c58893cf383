"""What the benchmark of asynchronous pipelines runs: a schedule on one thread, and the networks in four stages."""
