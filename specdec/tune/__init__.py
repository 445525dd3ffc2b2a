"""`specdec tune`: measures on this machine's GPU which tiles its products should take."""
