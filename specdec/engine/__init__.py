"""Host side: holds the requests and decides what runs next, as plain data.  This folder knows no tensor."""
