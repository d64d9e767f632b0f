"""The operators against their peers: `osdn bench ops` as a script, with the same options."""

import sys

from osdn.cli import app

if __name__ == "__main__":
    app(["bench", "ops", *sys.argv[1:]])
