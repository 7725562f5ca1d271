"""``python -m dpscaffold``."""

from dpscaffold.cli import main

main()
