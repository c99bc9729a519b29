"""Says in one line which packages a tool lacks."""

from __future__ import annotations

import sys
from importlib.util import find_spec


def need(*modules: str, extra: str) -> None:
    """Ends the program with exit status 2 if a module cannot be imported.

    Args:
        modules: The names of the modules.
        extra: The extra of jaxpage that has them.
    """
    if lacking := [name for name in modules if find_spec(name) is None]:
        print(f"{', '.join(lacking)}: not installed. pip install '.[{extra}]'", file=sys.stderr)
        sys.exit(2)
