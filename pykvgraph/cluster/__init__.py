"""Several engines behind one address: who starts them, who watches them, and who gets a request."""
