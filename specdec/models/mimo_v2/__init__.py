"""MiMo-V2-Flash: windowed and full layers with unlike heads, sinks, scaled values, and mixtures."""
