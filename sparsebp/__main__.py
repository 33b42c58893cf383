"""``python -m sparsebp``: the command line, also from a source tree without an install."""

from sparsebp.cli.main import main

if __name__ == "__main__":
    main()
