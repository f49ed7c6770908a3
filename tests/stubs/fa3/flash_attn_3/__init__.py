"""Only there to be found: the compiled part of flash-attn 3."""
