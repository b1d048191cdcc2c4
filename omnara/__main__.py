"""`python -m omnara`: the same as the `omnara` program, for where scripts are not on the path."""

from omnara.cli import main

if __name__ == "__main__":
    main()
