"""DeepSeek V2 and V3: configuration, modules, loading."""
