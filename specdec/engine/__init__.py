"""Host side: requests and what runs next, as plain data.  Knows no tensor."""
