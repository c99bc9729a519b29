"""`python -m jaxpage` is the command `jaxpage`."""

import sys

from jaxpage.cli import main

sys.exit(main())
