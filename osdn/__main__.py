"""`python -m osdn`, the same as `osdn`."""

from osdn.cli import app

app()
