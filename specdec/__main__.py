"""``python -m specdec``."""

from specdec.cli import main

if __name__ == "__main__":
    main()
