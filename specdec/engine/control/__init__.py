"""Which shape of tree the next round has: plain numbers from verified rounds, no tensor, no clock."""
