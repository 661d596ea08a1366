"""The shipped engines: vLLM in this process, vLLM servers, transformers, and a script."""
