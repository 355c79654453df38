"""`python -m autotp`: the command line."""

from .cli import main

main()
