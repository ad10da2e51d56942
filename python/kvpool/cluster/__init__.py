"""Several processes that serve together: some compute prompts, others generate, and a router decides."""
