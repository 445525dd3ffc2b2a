"""What tests of several ranks share."""
