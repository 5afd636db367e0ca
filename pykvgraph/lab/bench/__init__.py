"""What `pykvgraph bench` measures: one test on several engines, by turns."""
