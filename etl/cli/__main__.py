"""``python -m etl.cli``: the same as the command ``etl``."""

from etl.cli.main import main

main()
