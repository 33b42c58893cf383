"""``python -m papers NAME``, see `papers.command`."""

from sparsebp.cli.main import main

if __name__ == "__main__":
    main(application="papers.command", program="python -m papers")
