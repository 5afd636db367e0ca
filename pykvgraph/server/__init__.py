"""`pykvgraph serve`: llama-server's wire, on our engine. Needs the extra `server`."""
