"""`python -m edgec` is `edgec`."""

from edgec.cli.main import main

main()
