"""`python -m netmoments`."""

from netmoments.cli import main

main()
