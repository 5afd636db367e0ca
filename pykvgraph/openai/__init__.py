"""OpenAI's and Anthropic's forms of answers, for the server and for Llama."""
