"""A fleet of machines on paper: `python benches/fleet --help`."""

from fleet_command import app

if __name__ == "__main__":
    app(prog_name="python benches/fleet")
