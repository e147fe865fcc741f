"""``python -m layerwise`` is the command `layerwise`."""

import sys

from layerwise.cli.main import main

if __name__ == "__main__":  # not when a spawned worker imports it
    sys.exit(main())
