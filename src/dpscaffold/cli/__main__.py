"""``python -m dpscaffold.cli``: the command line where no script is installed."""

from dpscaffold.cli import main

main()
