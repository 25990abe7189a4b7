"""`python -m ssfl`: the same as the command `ssfl`."""

from ssfl.cli import main

main()
