"""Thousands of workers that only pass the time: what the router does with them, step by measured step."""
