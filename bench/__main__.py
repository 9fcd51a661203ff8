"""`python -m bench --help`."""

from bench.cli import main

main()
