"""``python -m benchmarks NAME``, see `benchmarks.command`."""

from sparsebp.cli.main import main

if __name__ == "__main__":
    main(application="benchmarks.command", program="python -m benchmarks")
