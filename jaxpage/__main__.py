"""Runs the command `jaxpage`, for `python -m jaxpage`."""

import sys

from jaxpage.cli import main

sys.exit(main())
