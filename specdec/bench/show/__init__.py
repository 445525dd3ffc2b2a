"""What the benchmark shows of a finished measurement: tables, a legend, a figure.  Measures nothing."""
