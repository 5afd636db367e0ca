"""The measurements of `pykvgraph bench`: each test runs on several engines, which alternate."""
