"""`python -m pykvgraph` is the command `pykvgraph`."""

from pykvgraph.cli import main

if __name__ == "__main__":
    main(prog_name="pykvgraph")
