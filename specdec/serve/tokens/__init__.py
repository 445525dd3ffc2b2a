"""The endpoints that turn texts into ids and back."""
