"""Runs `jaxpage serve` as a script: `python tools/serve.py --config configs/demo.yaml`."""

import sys

from jaxpage.cli import main

if __name__ == "__main__":
    sys.exit(main(["serve", *sys.argv[1:]]))
