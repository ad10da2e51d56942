"""SGLang on kvpool."""
