"""One patch a file, a folder an upstream. Ask the registry for a patch by id; never import one by path."""

if __name__ != "fsdp_sink_patches.patches":
    raise ImportError(
        f"patches was imported as {__name__!r}; it is only known as fsdp_sink_patches.patches, because a second copy "
        "would register every patch twice. Import fsdp_sink_patches and ask its registry by id."
    )
