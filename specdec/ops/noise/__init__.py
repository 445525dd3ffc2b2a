"""The noise of sampling."""
