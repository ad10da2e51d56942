"""A fleet of machines on paper: `python benches/fleet --help`."""

import sys

from fleet_command import main

if __name__ == "__main__":
    sys.exit(main())
