"""What speculation did, as data and as pictures: every round's tree, which branch was taken, and what it took."""
