"""DFlash2 heads: DFlash heads with convolutions around their sublayers, and a choice among each row's likeliest tokens."""
