"""Drafts: where they come from, and when they pay."""
