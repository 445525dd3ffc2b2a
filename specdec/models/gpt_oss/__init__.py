"""gpt-oss, whose experts are stored in mxfp4 or unquantised."""
