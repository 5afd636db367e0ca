"""Maps of the cells, without any other package: as plain text, in the colours of a terminal, and as HTML."""
