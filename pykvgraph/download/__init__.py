"""Files from the web, and where they are kept."""
