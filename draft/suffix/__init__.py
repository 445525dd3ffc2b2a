"""Tables of other texts, a corpus of the user's or earlier answers: what followed a row's last tokens in them."""
