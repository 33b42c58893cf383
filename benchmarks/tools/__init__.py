"""What benchmarks share: clocks, peers, matrices, reports, and the tables in the documentation."""
